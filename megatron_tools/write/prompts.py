"""Prompts of tools/generate.py: flags that give prompts, reading of prompts, and their encoding for the model."""

import argparse
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from data_utils.chat_encoder import missing_chatml_tokens
from data_utils.chat_messages import parse_messages, refuse_unrendered
from data_utils.chat_templates import (
    Template,
    has_unrecorded_date,
    load_template,
    template_from,
    template_of_corpus,
    tokenizer_template,
)
from data_utils.chats import refuse_unread_keys
from data_utils.sidecars import chat_corpora
from megatron.config import Config
from megatron.config.fields import problems_where, raise_first_problem
from megatron.json_text import JsonBoundError, format_value, parse_json, read_lines
from megatron.ranks.objects import broadcast_from_rank_0
from megatron.ranks.rank_0 import is_rank_0
from megatron.tokenizer import Tokenizer

from .questions import Conversation, FIMTokens, Infill, Prompt, PromptEncoder


def check_prompt_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that contradict each other."""
    sources = sum(map(bool, (args.prompt, args.input, args.interactive)))
    has_suffix = args.suffix is not None
    adds_tokens = args.special_tokens or has_suffix or args.fim_tokens
    problems = problems_where(
        (sources > 1, "give one of --prompt, --input and --interactive"),
        (args.chat_template and not args.chat, "--chat-template needs --chat"),
        (
            args.chat and adds_tokens,
            "--chat adds special tokens itself; omit --special-tokens, --suffix and --fim-tokens",
        ),
        (
            has_suffix and (args.interactive or args.input),
            '--suffix needs --prompt; in a file for --input, write {"prompt": ..., "suffix": ...}',
        ),
        (args.fim_tokens and not (has_suffix or args.input), "--fim-tokens needs --suffix or --input"),
    )
    raise_first_problem(problems)


def prompt_encoder(args: argparse.Namespace, config: Config, tokenizer: Tokenizer, vocab_file: str) -> PromptEncoder:
    """Return the encoder of prompts for this model. Raises ValueError for flags that the model does not support."""
    if config.is_t5:
        for name in ("special_tokens", "chat", "suffix", "fim_tokens"):
            if getattr(args, name) not in (None, False):  # the defaults of these flags
                raise ValueError(f"--{name.replace('_', '-')} is not supported for a T5; omit it")
        return PromptEncoder(tokenizer, continues_text=config.objective == "prefix-lm")
    template = _chat_template(args.chat_template, config, tokenizer, vocab_file) if args.chat else None
    fim_marks = _fim_marks(args.fim_tokens, config, tokenizer)
    return PromptEncoder(tokenizer, template, fim_marks, args.special_tokens)


def _chat_template(name: str | None, config: Config, tokenizer: Tokenizer, vocab_file: str) -> Template:
    """Return the template that --chat-template names, else the one known for the model; print notes."""
    if name is None:
        template, source = _known_template(config, tokenizer, vocab_file)
        print(f"note: using the chat template of {source}", file=sys.stderr)
    else:
        template = load_template(name, tokenizer, vocab_file)
    missing = missing_chatml_tokens(template, tokenizer)
    if missing:
        print(
            f"note: the tokenizer has no special token {' or '.join(missing)}, which is encoded as text",
            file=sys.stderr,
        )
    return template


def _known_template(config: Config, tokenizer: Tokenizer, vocab_file: str) -> tuple[Template, str]:
    """Return (chat template, words for its origin): that of the training data, else the tokenizer's, else ChatML."""
    sidecars = chat_corpora(config)
    if sidecars:
        prefix, sidecar = sidecars[0]
        date_text = ""
        date = sidecar.get("chat_date")
        if date:
            date_text = f", of {date}"
        elif has_unrecorded_date(sidecar):
            date_text = ", without a date"
        return template_of_corpus(sidecar, tokenizer, vocab_file), f"the corpus {prefix}{date_text}"
    template_source = tokenizer_template(vocab_file)
    if template_source:
        return template_from(template_source, tokenizer, vocab_file), "the tokenizer"
    return load_template("chatml", tokenizer, vocab_file), "the default, chatml"


def _fim_marks(names: list[str] | None, config: Config, tokenizer: Tokenizer) -> FIMTokens | None:
    """Return the fill-in-the-middle tokens of --fim-tokens, else those of the run, or None."""
    # In this project's training with --fim-rate, bos begins the prefix, so it follows one of these tokens, and with
    # --fim-spm-rate 1 the suffix always comes before the prefix. Other models, such as Hugging Face's, do neither.
    is_own_format = bool(config.data.fim_rate)
    names = names or list(config.data.fim_tokens or ())
    if not names:
        return None
    missing = []
    for name in names:
        if name not in tokenizer.marks:
            missing.append(name)
    if missing:
        known = ", ".join(tokenizer.marks)
        raise ValueError(
            f"--fim-tokens: {' and '.join(missing)} is not a special token of the tokenizer, which has {known}"
        )
    prefix, middle, suffix = map(tokenizer.marks.__getitem__, names)
    return FIMTokens(
        prefix, middle, suffix, bos_inside=is_own_format, suffix_first=is_own_format and config.data.fim_spm_rate == 1
    )


def read_prompts(args: argparse.Namespace) -> Iterator[Prompt]:
    """Yield the prompts one after another. All ranks get the same prompts."""
    if args.input:
        for line_number, line in enumerate(_shared_lines(args.input), 1):
            if args.chat and not line.strip():
                continue  # --interactive skips empty lines, too
            yield _parse_input_line(line, args.chat, f"{args.input}, line {line_number}")
    elif args.interactive:
        while line := _read_line():
            text = line.rstrip("\n")
            # An empty line is no message of a chat, but a GPT-2 can begin a text with nothing.
            if text or not args.chat:
                yield _as_prompt(text, args.chat)
    elif args.suffix is not None:
        yield Infill(args.prompt, args.suffix)
    else:
        yield _as_prompt(args.prompt, args.chat)


def _shared_lines(path: str) -> Iterator[str]:
    """Yield the lines of a file on all ranks. Rank 0 alone reads the file, which may be a pipe."""
    lines = iter(read_lines(path) if is_rank_0() else ())

    def next_line() -> str | None:
        return broadcast_from_rank_0(next(lines, None))

    yield from iter(next_line, None)


def _read_line() -> str:
    """Read a line from the terminal of rank 0; return it on all ranks, "" at the end of the input."""
    message: list[Any] = [None]
    if is_rank_0():
        print("> ", end="", flush=True, file=sys.stderr)
        message[0] = sys.stdin.readline()
    if dist.is_initialized():
        dist.broadcast_object_list(message)
    return str(message[0])


def _as_prompt(text: str, chat: bool) -> Prompt:
    return Conversation(parse_messages([{"role": "user", "content": text}])) if chat else text


def _parse_input_line(line: str, chat: bool, where: str) -> Prompt:
    """Return the prompt in a line of --input: text, or JSON with "prompt", "text" or, with --chat, "messages"."""
    # A line that begins like a JSON object, with { and then " or }, must be one. Any other line is text, also "{a, b}".
    if not re.match(r'\s*{\s*["}]', line):
        text = line.rstrip("\n")
        return _conversation(text, {}, where) if chat else text
    # The first of these keys that the line has gives the prompt.
    keys = ["prompt", "text"]
    wanted_keys = '"prompt"'
    if chat:
        keys.insert(0, "messages")
        wanted_keys = '"messages" or a "prompt"'
    try:
        content = parse_json(line, where, dict)
    except JsonBoundError:
        raise  # valid JSON that is too deep or repeats a key; the error says which
    except ValueError:
        content = {}  # not JSON; the error below says what a line must be
    values = [content[key] for key in keys if key in content]
    if not values:
        raise ValueError(f"{where} is not a JSON object with a {wanted_keys}")
    value = values[0]
    if chat:
        return _conversation(value, content, where)
    if not isinstance(value, str):
        raise ValueError(f"{where}: the prompt must be text, not {format_value(value)}")
    suffix = content.get("suffix")
    if suffix is None:
        return value
    if not isinstance(suffix, str):
        raise ValueError(f"{where}: the suffix must be text, not {format_value(suffix)}")
    return Infill(value, suffix)


def _conversation(messages: object, record: dict[str, Any], where: str) -> Prompt:
    """Return a conversation that ends with a message to answer. Raises ValueError for any other.

    messages: a list, or the text of a user message. record: the JSON object that has them.
    """
    try:
        # These keys would be ignored, so they are refused. No template names `suffix`, so it is checked against "".
        refuse_unread_keys(record)
        refuse_unrendered({"suffix": record.get("suffix")}, "")
        if isinstance(messages, str):
            return _as_prompt(messages, chat=True)
        parsed = parse_messages(messages)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not parsed or parsed[-1].role == "assistant":
        raise ValueError(f"{where}: the conversation must end with a message to answer")
    return Conversation(parsed)


def as_json(prompt: Prompt) -> dict[str, Any]:
    """Return the prompt as fields of the JSON line that is printed for each text with --input and --json."""
    if isinstance(prompt, Conversation):
        return {"messages": [message.as_dict() for message in prompt.messages]}
    if isinstance(prompt, Infill):
        return {"prompt": prompt.prefix, "suffix": prompt.suffix}
    return {"prompt": prompt}
