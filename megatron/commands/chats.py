"""What tools/preprocess_data.py does with conversations (--objective sft), besides what it does with any text."""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.tokenizer import Tokenizer
from megatron.tokenizer.chat import ChatEncoder, Piece, Template, load_template, missing_marks


def template_of(args: argparse.Namespace, tokenizer: Tokenizer) -> Template:
    """The template that the flags name. Raises TokenizerError."""
    return load_template(args.chat_template, tokenizer, args.vocab_file)


def about(args: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    """What there is to know of a corpus of conversations; {} of another."""
    if args.objective != "sft":
        return {}
    return {"objective": "sft", "chat_template": template_of(args, tokenizer).source}


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that do not go together."""
    if args.objective == "sft" and (args.split_sentences or args.keys != ["text"]):
        raise ValueError("--objective sft reads whole conversations: leave --split-sentences and --keys out")
    if args.objective != "sft" and args.chat_template != "chatml":
        raise ValueError("--chat-template is for --objective sft")


def tell(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """Say which marks of the template the tokenizer does not know."""
    missing = missing_marks(template_of(args, tokenizer), tokenizer) if args.objective == "sft" else []
    if missing:
        print(
            f"note: the tokenizer has no special token {' or '.join(missing)}: each is written as text, of several tokens "
            f"(tools/train_tokenizer.py --special-tokens makes tokenizers that have them)"
        )


def encoded(
    encoder: ChatEncoder, found: Sequence[tuple[Piece, ...]]
) -> tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.int32]]:
    """(all ids, of each whether it counts, tokens of each conversation)."""
    ids: list[int] = []
    counts: list[int] = []
    lengths: list[int] = []
    for pieces in found:
        mine, learned = encoder.encode(pieces)
        ids += mine
        counts += learned
        lengths.append(len(mine))
    return np.array(ids, np.int32), np.array(counts, np.uint8), np.array(lengths, np.int32)
