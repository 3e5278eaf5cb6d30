"""Preprocessing of conversations (--objective sft) for tools/preprocess_data.py."""

import argparse
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from data_utils.chat_encoder import ignores_generation_prompt, missing_chatml_tokens
from data_utils.chat_messages import Message, parse_messages, refuse_unrendered
from data_utils.chat_templates import JinjaTemplate, Template, load_template
from megatron.tokenizer import Tokenizer

# Keys of a record, besides its messages, that other programs render
UNREAD_KEYS = ("system", "history", "tools", "documents", "chat_template_kwargs")


def template_of(args: argparse.Namespace, tokenizer: Tokenizer) -> Template:
    """Return the chat template of --chat-template. Raises TokenizerError for a missing or invalid template."""
    return load_template(args.chat_template, tokenizer, args.vocab_file, args.chat_date)


def sidecar_entries(args: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the entries for the sidecar PREFIX.json of a corpus of conversations; {} for other corpora."""
    if args.objective != "sft":
        return {}
    template = template_of(args, tokenizer)
    entries = {"objective": "sft", "chat_template": template.source}
    if template.date:
        entries["chat_date"] = template.date
    return entries


def set_chat_date(args: argparse.Namespace, state: Mapping[str, Any]) -> None:
    """Without --chat-date, set it to the date of the resumed run, else to the current time."""
    if args.objective == "sft":
        args.chat_date = args.chat_date or state.get("chat_date") or datetime.now().isoformat(timespec="seconds")


def check_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that contradict each other and for an invalid --chat-date."""
    is_sft = args.objective == "sft"
    if is_sft and (args.split_sentences or args.keys != ["text"]):
        raise ValueError("--objective sft reads whole conversations; remove --split-sentences and --keys")
    if not is_sft and (args.chat_template != "chatml" or args.chat_date is not None):
        raise ValueError("--chat-template and --chat-date require --objective sft")
    if args.chat_date is None:
        return
    try:
        datetime.fromisoformat(args.chat_date)
    except ValueError:
        raise ValueError(
            f"--chat-date {args.chat_date} is not a date; use the form 2024-07-26 or 2024-07-26T15:30:00"
        ) from None


def print_notes(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """Print a note if the chat template renders a date, ignores add_generation_prompt or needs missing tokens.

    Raises ValueError for a --chat-date that the template does not use.
    """
    if args.objective != "sft":
        return
    template = template_of(args, tokenizer)
    if args.chat_date and not template.date:
        raise ValueError("--chat-date has no effect, as the chat template does not call strftime_now; remove the flag")
    if template.date and not args.chat_date:
        print(
            "note: the chat template renders today's date, which the sidecar records as chat_date; "
            "pass --chat-date to render another date"
        )
    if isinstance(template, JinjaTemplate):
        note = (
            "the chat template has no {% generation %} blocks, so the assistant's text and the tokens that end its "
            "turns count in the loss"
        )
        if template.has_blocks:
            note = "the {% generation %} blocks of the chat template decide what counts in the loss"
        print(f"note: {note}")
    if ignores_generation_prompt(template):
        print(
            "note: the chat template ignores add_generation_prompt, so prompts end before the assistant header, "
            "and the model must generate this header"
        )
    missing = missing_chatml_tokens(template, tokenizer)
    if missing:
        print(
            f"note: the tokenizer has no special token {' or '.join(missing)}, so each is encoded as several text "
            f"tokens; tools/train_tokenizer.py --special-tokens trains a tokenizer that has them"
        )


def messages_of(record: object) -> tuple[Message, ...]:
    """Return the messages of a record.

    A record is `{"messages": [{"role", "content"}, ...]}` or `{"instruction", "input", "output"}`, and has an assistant
    message. Raises ValueError for any other record.
    """
    if not isinstance(record, dict):
        raise ValueError("the record is not a JSON object")
    refuse_unread_keys(record)
    if "messages" in record:
        turns = record["messages"]
    elif "instruction" in record and "output" in record:
        turns = _turns_of_instruction(record)
    else:
        raise ValueError("the record has neither 'messages' nor 'instruction' and 'output'")
    messages = parse_messages(turns)
    if not any(message.role == "assistant" for message in messages):
        raise ValueError("there is no assistant message to train on")
    return messages


def refuse_unread_keys(record: Mapping[str, Any]) -> None:
    """Raise ValueError if a record has one of UNREAD_KEYS, unless its value is null or empty."""
    refuse_unrendered({key: record.get(key) for key in UNREAD_KEYS}, "")


def _turns_of_instruction(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an instruction, with its input below it, and the output as two turns."""
    parts = [record["instruction"], record.get("input") or ""]
    if not all(isinstance(text, str) for text in parts):
        raise ValueError("'instruction' or 'input' is not a string")
    question = "\n\n".join(filter(None, parts))
    return [{"role": "user", "content": question}, {"role": "assistant", "content": record["output"]}]
