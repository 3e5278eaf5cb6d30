"""Commands of tools/inspect_data.py that write .bin/.idx pairs: merge, split and drop."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.config.data import prefixes_of
from megatron.data.indexed_dataset import LOSS, IndexedDataset
from megatron.data.splits import PARTS, parse_split, split_documents
from megatron.storage import is_url, to_path

from .chat_templates import is_undated
from .cli import write_json
from .indexed_writer import IndexedDatasetBuilder
from .merge_split import drop, merge, split
from .sidecars import ABOUT_TOKENS, sidecar, with_loss


def merge_pairs(args: argparse.Namespace) -> None:
    """Run the command `merge`: concatenate several .bin/.idx pairs into one."""
    prefixes = [*prefixes_of(args.prefixes)]
    abouts = list(map(sidecar, prefixes))
    known = list(filter(None, abouts))
    pairs = list(map(with_loss, prefixes))
    _refuse_unlike(", ".join(prefixes), known, pairs)
    about = dict(known[0]) if known else {}
    dates = sorted({each["chat_date"] for each in known if each.get("chat_date")})
    if dates:
        about["chat_date"] = dates[-1]
    if len(dates) > 1:
        print(
            f"note: the chat template rendered {len(dates)} different dates in these pairs; "
            f"the new sidecar records the latest, {dates[-1]}"
        )
    if dates and any(map(is_undated, abouts)):
        print(f"note: some pairs record no date of the chat template; the new sidecar records the date {dates[-1]}")
    builders = []
    for column, end in zip(zip(*pairs, strict=True), ("", LOSS), strict=False):
        builders.append(merge(column, f"{args.output}{end}"))
    _complete(builders, about)


def _refuse_unlike(names: str, abouts: Sequence[dict[str, Any]], pairs: Sequence[Sequence[str]]) -> None:
    """Raise ValueError if corpora cannot be merged.

    names: their prefixes, for messages. abouts: their sidecars. pairs: the prefixes of each corpus's pairs.
    """
    tokenizers = set()
    ends = set()
    templates = set()
    for about in abouts:
        tokenizers.add(about["fingerprint"])
        templates.add(about.get("chat_template"))
        if "eod" in about and about.get("append_eod", True):
            ends.add(about["eod"])
    if len(tokenizers) > 1:
        raise ValueError(f"{names} were made with different tokenizers; preprocess them again with the same tokenizer")
    if len(ends) > 1:
        raise ValueError(
            f"{names} end their documents with different tokens ({', '.join(map(str, sorted(ends)))}); "
            f"preprocess them again with the same tokenizer"
        )
    if len(set(map(len, pairs))) > 1:
        raise ValueError(f"only some of {names} have a loss mask (PREFIX{LOSS}); merge pairs of the same --objective")
    if len(templates) > 1:
        raise ValueError(
            f"{names} were made with different chat templates; preprocess them again with the same chat template"
        )


def split_pair(args: argparse.Namespace) -> None:
    """Run the command `split`: divide a .bin/.idx pair into three, for training, validation and test."""
    if not args.output and is_url(args.prefix):
        raise ValueError(f"{args.prefix} is in object storage; give --output, a path on this machine")
    indexed = IndexedDataset(args.prefix)
    ranges = []
    outputs = []
    for documents, name in zip(split_documents(parse_split(args.split), indexed.num_documents), PARTS, strict=True):
        if len(documents):
            ranges.append(documents)
            outputs.append(f"{args.output or args.prefix}_{name}")
    made = []
    for prefix, end in zip(with_loss(args.prefix), ("", LOSS), strict=False):
        made.append(split(prefix, ranges, [output + end for output in outputs]))
    for builders in zip(*made, strict=True):
        _complete(builders, sidecar(args.prefix))


def drop_documents(args: argparse.Namespace) -> None:
    """Run the command `drop`: write a .bin/.idx pair without some documents, and its loss mask if there is one."""
    if Path(args.output).resolve() == to_path(args.prefix).resolve():
        raise ValueError(f"--output {args.output} is the given pair; choose another name")
    sources = with_loss(args.prefix)
    builders = [drop(source, args.documents, args.output + source.removeprefix(args.prefix)) for source in sources]
    _complete(builders, sidecar(args.prefix))


def _complete(builders: Sequence[IndexedDatasetBuilder], about: dict[str, Any]) -> None:
    """Write one sidecar for all .bin/.idx pairs of a corpus, such as the tokens and their loss mask; report them."""
    builder = builders[0]
    content = {key: about[key] for key in ABOUT_TOKENS if key in about}
    if content:
        content |= {"documents": builder.documents, "sequences": builder.sequences, "tokens": builder.num_tokens}
        content["sha256"] = {Path(each.prefix).name: each.checksums for each in builders}
        write_json(f"{builder.prefix}.json", content)
    print(f"{builder.documents} documents, {builder.num_tokens} tokens -> {builder.prefix}.bin")
