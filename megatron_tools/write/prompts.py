"""Prompts of tools/generate.py: flags that give prompts, reading of prompts, and their encoding for the model."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from data_utils.chat_encoder import missing_marks
from data_utils.chat_templates import (
    Message,
    Template,
    is_undated,
    load_template,
    own_template,
    template_from,
    template_of_corpus,
    turns_of,
)
from data_utils.cli import local_path
from data_utils.sidecars import of_conversations
from megatron.config import Config
from megatron.config.fields import refuse, problems_where
from megatron.json_text import JsonBoundError, parse_json
from megatron.ranks.rank_0 import is_rank_0
from megatron.tokenizer import Tokenizer

from .questions import Conversation, Infill, Marks, Prompt, Reader


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that give prompts and determine how they are encoded."""
    add = parser.add_argument
    add("--prompt", default="", help="text to continue; for a T5, text with masked spans such as <extra_id_0> or <s_0>")
    add(
        "--input",
        type=local_path,
        help='file with one prompt per line, or JSON lines with a "prompt"; each text is printed on one line',
    )
    add("--interactive", action="store_true", help="ask for prompts one by one")
    add(
        "--special-tokens",
        action="store_true",
        help="encode names of special tokens in prompts, such as <|im_start|>, as these tokens (default: as text)",
    )
    add(
        "--chat",
        action="store_true",
        help='treat prompts as user messages to an assistant; lines of --input may have "messages"; with '
        "--interactive, each prompt continues the conversation",
    )
    add(
        "--chat-template",
        type=local_path,
        help="template of --chat: chatml, tokenizer (the tokenizer's Jinja template) or a Jinja file (default: the "
        "template of the training data, else the tokenizer's, else chatml)",
    )
    add("--suffix", help='fill in the middle between --prompt and this text; lines of --input may have a "suffix"')
    add(
        "--fim-tokens",
        nargs=3,
        metavar=("PREFIX", "MIDDLE", "SUFFIX"),
        help="fill-in-the-middle tokens for --suffix (default: the tokens of the training run)",
    )


def check(args: argparse.Namespace) -> None:
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
    )
    refuse(problems)


def reader_of(args: argparse.Namespace, config: Config, tokenizer: Tokenizer, vocab_file: str) -> Reader:
    """Return the encoder of prompts for this model. Raises ValueError for flags that the model does not support."""
    if not config.is_t5:
        template = _template(args.chat_template, config, tokenizer, vocab_file) if args.chat else None
        return Reader(tokenizer, template, _marks(args.fim_tokens, config, tokenizer), args.special_tokens)
    for name in ("special_tokens", "chat", "suffix", "fim_tokens"):
        if getattr(args, name) not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')} is not supported for a T5; omit it")
    return Reader(tokenizer, continues_text=config.objective == "prefix-lm")


def _template(name: str | None, config: Config, tokenizer: Tokenizer, vocab_file: str) -> Template:
    """Return the template that --chat-template names, else the one known for the model; print notes."""
    if name is None:
        found, source = _known_template(config, tokenizer, vocab_file)
        print(f"note: using the chat template of {source}", file=sys.stderr)
    else:
        found = load_template(name, tokenizer, vocab_file)
    if missing := missing_marks(found, tokenizer):
        print(
            f"note: the tokenizer has no special token {' or '.join(missing)}, which is encoded as text",
            file=sys.stderr,
        )
    return found


def _known_template(config: Config, tokenizer: Tokenizer, vocab_file: str) -> tuple[Template, str]:
    """Return (chat template, words for its origin): that of the training data, else the tokenizer's, else ChatML."""
    abouts = of_conversations(config)
    if abouts:
        prefix, about = abouts[0]
        when = ""
        if date := about.get("chat_date"):
            when = f", of {date}"
        elif is_undated(about):
            when = ", without a date"
        return template_of_corpus(about, tokenizer, vocab_file), f"the corpus {prefix}{when}"
    if source := own_template(vocab_file):
        return template_from(source, tokenizer, vocab_file), "the tokenizer"
    return load_template("chatml", tokenizer, vocab_file), "the default, chatml"


def _marks(names: list[str] | None, config: Config, tokenizer: Tokenizer) -> Marks | None:
    """Return the fill-in-the-middle tokens of --fim-tokens, else those of the run, or None."""
    trained = bool(config.data.fim_rate)
    names = names or list(config.data.fim_tokens or ())
    if not names:
        return None
    ids = []
    missing = []
    for name in names:
        if name in tokenizer.marks:
            ids.append(tokenizer.marks[name])
        else:
            missing.append(name)
    if missing:
        known = ", ".join(tokenizer.marks)
        raise ValueError(
            f"--fim-tokens: {' and '.join(missing)} is not a special token of the tokenizer, which has {known}"
        )
    prefix, middle, suffix = ids
    return Marks(prefix, middle, suffix, inside=trained, spm=trained and config.data.fim_spm_rate == 1)


def prompts(args: argparse.Namespace) -> Iterator[Prompt]:
    """Yield the prompts one after another. All ranks get the same prompts."""
    if args.input:
        with open(args.input, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                yield _prompt_of(line, args.chat, f"{args.input}, line {number}")
    elif args.interactive:
        while line := _read_line():
            text = line.rstrip("\n")
            if text or not args.chat:
                yield _prompt(text, args.chat)
    elif args.suffix is not None:
        yield Infill(args.prompt, args.suffix)
    else:
        yield _prompt(args.prompt, args.chat)


def _read_line() -> str:
    """Read a line from the terminal of rank 0; return it on all ranks, "" at the end of the input."""
    line: list[Any] = [None]
    if is_rank_0():
        print("> ", end="", flush=True, file=sys.stderr)
        line[0] = sys.stdin.readline()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(line)
    return str(line[0])


def _prompt(text: str, chat: bool) -> Prompt:
    return Conversation(turns_of([{"role": "user", "content": text}])) if chat else text


def _prompt_of(line: str, chat: bool, where: str) -> Prompt:
    """Return the prompt in a line of --input: text, or JSON with "prompt", "text" or, with --chat, "messages"."""
    if not line.startswith("{"):
        return _prompt(line.rstrip("\n"), chat)
    keys = ["prompt", "text"]
    wanted = '"prompt"'
    if chat:
        keys.insert(0, "messages")
        wanted = '"messages" or a "prompt"'
    try:
        content = parse_json(line, where, dict)
    except JsonBoundError:
        raise
    except ValueError:
        content = {}
    found = [content[key] for key in keys if key in content]
    if not found:
        raise ValueError(f"{where} is not a JSON object with a {wanted}")
    asked = found[0]
    if chat and not isinstance(asked, str):
        return _conversation(asked, where)
    if isinstance(content.get("suffix"), str) and not chat:
        return Infill(str(asked), str(content["suffix"]))
    return _prompt(str(asked), chat)


def _conversation(turns: object, where: str) -> Conversation:
    """Return a conversation that ends with a message to answer. Raises ValueError for any other."""
    try:
        found = turns_of(turns)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not found or found[-1].role == "assistant":
        raise ValueError(f"{where}: the conversation must end with a message to answer")
    return Conversation(found)


def as_json(asked: Prompt) -> dict[str, Any]:
    """Return the prompt as fields of the JSON line that is printed for each text with --input and --json."""
    if isinstance(asked, Conversation):
        return {"messages": [message._asdict() for message in asked.messages]}
    return {"prompt": asked.prefix, "suffix": asked.suffix} if isinstance(asked, Infill) else {"prompt": asked}


def with_answer(asked: Conversation, text: str) -> tuple[Message, ...]:
    """Return the conversation with the assistant's answer appended."""
    return (*asked.messages, Message("assistant", text))
