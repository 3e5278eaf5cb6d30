"""The work of tools/demo.py, whose flags are in demo_flags.py."""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from megatron.config.fields import ConfigError
from megatron.packages import pip_install
from megatron.tokenizer import Tokenizer

from . import generate
from .generation import Stepper
from .poem import PoemStepper, form_of, title_question
from .questions import Question
from .writer import Writer

MAX_BARS = 20  # next tokens that the page shows


class PageContent(NamedTuple):
    """Content of the page after a step.

    texts: (prompt, continuation) of each sample so far; the continuation of a T5 is the whole prompt with filled spans.
    bars: (token, probability) of the likeliest next tokens of the first sample, likeliest first.
    """

    texts: list[tuple[str, str]]
    bars: list[tuple[str, float]]


def likeliest(tokenizer: Tokenizer, logits: Tensor) -> list[tuple[str, float]]:
    """Return (token, probability) of the MAX_BARS likeliest tokens, likeliest first. logits: [v]."""
    probabilities = logits.double().softmax(-1)
    best = probabilities.topk(min(MAX_BARS, len(logits)))
    likeliest_tokens = []
    for token, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        if probability > 0:
            likeliest_tokens.append((_display_name(tokenizer, token), probability))
    return likeliest_tokens


def _display_name(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token to show, with visible spaces and line breaks; the name of a special token."""
    for name, special_id in tokenizer.specials.items():
        if special_id == token:
            return name
    return tokenizer.decode([token]).replace("\n", "\u21b5").replace(" ", "\u2423")


def page_contents(
    writer: Writer, question: Question, args: argparse.Namespace, stepper: Stepper
) -> Iterator[PageContent]:
    """Yield what the page shows before each new token, and at last with all tokens.

    The probabilities are the model's own: neither the flags of sampling nor the form of a poem change them.
    """
    # Each step yields logits and the tokens drawn from them. The page shows the logits first, so showing the complete
    # texts takes one more step, whose tokens are never shown.
    extended_args = _with_values(args, max_new_tokens=args.max_new_tokens + 1)
    rows: list[list[int]] = [[] for _ in range(args.num_samples)]  # tokens of each sample so far
    bars: list[tuple[str, float]] = []
    for new_tokens, logits in writer.steps([question], extended_args, stepper):
        # The bars show the first sample; after its end they stay.
        if question.end_id not in rows[0]:
            model_logits = stepper.model_logits if isinstance(stepper, PoemStepper) else logits
            bars = likeliest(writer.tokenizer, model_logits[0])
        texts = [_split_text(writer, question, row) for row in rows]
        yield PageContent(texts, bars)
        for row, token in zip(rows, new_tokens.tolist(), strict=True):
            if question.end_id not in row:
                row.append(token)


def _split_text(writer: Writer, question: Question, ids: list[int]) -> tuple[str, str]:
    """Return (prompt, continuation) of the tokens `ids`; ("", text) of a T5, which fills spans in its prompt."""
    text = writer.text(question, ids)
    length = len(question.text_before)
    return text[:length], text[length:]


def _with_values(args: argparse.Namespace, **values: Any) -> argparse.Namespace:
    """Return the flags with other values of some of them."""
    return argparse.Namespace(**{**vars(args), **values})


def with_settings(args: argparse.Namespace, settings: Mapping[str, Any]) -> argparse.Namespace:
    """Return the flags with the page's settings in their place. Raises ValueError for one that is out of range."""
    merged = _with_values(args, **settings)
    generate.check_sampling_flags(merged)
    return merged


def stream_text(writer: Writer, prompt: str, args: argparse.Namespace) -> Iterator[PageContent]:
    """Yield what the page shows while the model continues `prompt`, or fills the masked spans in it if it is a T5."""
    question = writer.question(prompt)
    return page_contents(writer, question, args, writer.stepper([question.tokens]))


def stream_poem(
    writer: Writer, title: str, lines: int, characters: int, args: argparse.Namespace
) -> Iterator[PageContent]:
    """Yield what the page shows while the model writes a poem of so many lines of so many characters.

    Raises ValueError if the title is empty.
    """
    question = title_question(writer, title)
    form = form_of(lines, characters)
    text_stepper = writer.stepper([question.tokens])
    stepper = PoemStepper(text_stepper, writer.tokenizer, form)
    poem_args = _with_values(args, max_new_tokens=len(form))
    return page_contents(writer, question, poem_args, stepper)


def main(args: argparse.Namespace) -> None:
    """Load the model and serve the page until Ctrl-C."""
    generate.check_sampling_flags(args)
    try:
        from . import demo_page
    except ImportError as error:
        raise ValueError(f"tools/demo.py needs the package gradio ({error}): {pip_install('gradio>=6,<7')}") from None
    writer = generate.load_writer(args)
    if args.poem and writer.config.is_t5:
        raise ConfigError(f"--poem needs a GPT-2 or Llama, but {args.load} is a T5")
    demo_page.serve(writer, args)
