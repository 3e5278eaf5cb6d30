"""Commands of tools/inspect_data.py that write .bin/.idx pairs: merge, split and drop."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.config.data import corpus_prefixes
from megatron.data.corpus_paths import whole_of
from megatron.data.indexed_dataset import LOSS_SUFFIX, IndexedDataset
from megatron.data.splits import PARTS, parse_split, split_documents
from megatron.storage import is_url

from .chat_templates import has_unrecorded_date
from .cli import write_json
from .indexed_writer import IndexedDatasetBuilder
from .merge_split import ranges_without, write_pair
from .sidecars import KEPT_ENTRIES, check_output, pair_prefixes, read_sidecar


def merge_pairs(args: argparse.Namespace) -> None:
    """Run the command `merge`: concatenate several .bin/.idx pairs into one."""
    given = list(corpus_prefixes(args.prefixes))
    # A pattern such as data/* also matches loss masks, which are merged with their corpora. whole_of() returns the
    # corpus of a loss mask or of one of the three pairs of a CPM corpus for T5, and None for a whole corpus.
    prefixes = [prefix for prefix in given if whole_of(prefix) not in given]
    # The ending of such a pair, for example _target, or "" for a whole corpus.
    endings = {prefix.removeprefix(whole_of(prefix) or prefix) for prefix in prefixes}
    if len(endings) > 1:
        raise ValueError(f"{', '.join(prefixes)} include parts of corpora: merge the pairs of each ending separately")
    sidecars = list(map(read_sidecar, prefixes))
    present = list(filter(None, sidecars))  # without the {} of pairs that have no sidecar
    pairs = list(map(pair_prefixes, prefixes))
    _check_mergeable(", ".join(prefixes), present, pairs)
    metadata = {}
    if len(present) == len(sidecars):
        metadata = dict(present[0])
    elif present:
        present = []  # no sidecar will be written, so the dates below do not matter, either
        print("note: some of these pairs have no sidecar, so the new one does not record the tokenizer")
    dates = sorted({each["chat_date"] for each in present if each.get("chat_date")})
    if dates:
        metadata["chat_date"] = dates[-1]
    if len(dates) > 1:
        print(
            f"note: the chat template rendered {len(dates)} different dates in these pairs; "
            f"the new sidecar records the latest, {dates[-1]}"
        )
    if dates and any(map(has_unrecorded_date, sidecars)):
        print(f"note: some pairs record no date of the chat template; the new sidecar records the date {dates[-1]}")
    check_output(args.output, prefixes)
    builders = []
    # For pairs [[a, a_loss], [b, b_loss]], merge a and b, then a_loss and b_loss.
    for sources in zip(*pairs, strict=True):
        suffix = sources[0].removeprefix(prefixes[0])  # "" for the tokens, LOSS_SUFFIX for the loss mask
        builders.append(write_pair(sources, f"{args.output}{suffix}"))
    _finish_corpus(builders, metadata)


def _check_mergeable(names: str, sidecars: Sequence[dict[str, Any]], pairs: Sequence[Sequence[str]]) -> None:
    """Raise ValueError if corpora cannot be merged.

    names: their prefixes, for messages. sidecars: their sidecars. pairs: the prefixes of each corpus's pairs.
    """
    tokenizers = {metadata["fingerprint"] for metadata in sidecars}
    templates = {metadata.get("chat_template") for metadata in sidecars}
    # The token that ends documents, or "none". Sidecars of older corpora record no `eod`, so nothing is known of them.
    # Without an entry `append_eod`, the token ends every document.
    endings = set()
    for metadata in sidecars:
        if "eod" in metadata:
            endings.add(str(metadata["eod"]) if metadata.get("append_eod", True) else "none")
    if len(tokenizers) > 1:
        raise ValueError(f"{names} were made with different tokenizers; preprocess them again with the same tokenizer")
    if len(endings) > 1:
        raise ValueError(
            f"{names} end their documents with different tokens ({', '.join(sorted(endings))}); "
            f"preprocess them again with the same tokenizer, all with --append-eod or all with --no-append-eod"
        )
    if len(set(map(len, pairs))) > 1:
        raise ValueError(
            f"only some of {names} have a loss mask (PREFIX{LOSS_SUFFIX}); merge pairs of the same --objective"
        )
    if len(templates) > 1:
        raise ValueError(
            f"{names} were made with different chat templates; preprocess them again with the same chat template"
        )


def split_pair(args: argparse.Namespace) -> None:
    """Run the command `split`: divide a .bin/.idx pair into three, for training, validation and test."""
    if not args.output and is_url(args.prefix):
        raise ValueError(f"{args.prefix} is in object storage; give --output, a path on this machine")
    indexed = IndexedDataset(args.prefix)
    documents_of = {}  # output -> its documents; filled and checked before the first output is written
    parts = split_documents(parse_split(args.split), indexed.num_documents)
    for documents, name in zip(parts, PARTS, strict=True):
        output = f"{args.output or args.prefix}_{name}"
        if len(documents):
            check_output(output, [args.prefix])
            documents_of[output] = documents
        elif Path(f"{output}.idx").exists():
            raise ValueError(f"--split {args.split} gives no documents to {output}, which exists; delete it first")
    for output, documents in documents_of.items():
        _extract_corpus(args.prefix, [documents], output)


def drop_documents(args: argparse.Namespace) -> None:
    """Run the command `drop`: write a .bin/.idx pair without some documents, and its loss mask if there is one."""
    check_output(args.output, [args.prefix])
    _extract_corpus(args.prefix, ranges_without(args.prefix, args.documents), args.output)


def _extract_corpus(prefix: str, ranges: Sequence[range], output: str) -> None:
    """Write a corpus with some ranges of the documents of the corpus `prefix`, and its loss mask if there is one."""
    metadata = read_sidecar(prefix)
    builders = []
    for source in pair_prefixes(prefix):
        suffix = source.removeprefix(prefix)  # "" for the tokens, LOSS_SUFFIX for the loss mask
        builders.append(write_pair([source], output + suffix, ranges))
    _finish_corpus(builders, metadata)


def _finish_corpus(builders: Sequence[IndexedDatasetBuilder], metadata: dict[str, Any]) -> None:
    """Write one sidecar for all .bin/.idx pairs of a corpus, such as the tokens and their loss mask; report them."""
    builder = builders[0]
    # Entries such as the tokenizer remain valid; counts and checksums are new. If the sources have no sidecar, the
    # output gets none, either.
    content = {key: metadata[key] for key in KEPT_ENTRIES if key in metadata}  # {} if the sources have no sidecar
    path = f"{builder.prefix}.json"
    if content:
        content |= {
            "documents": builder.documents,
            "sequences": builder.sequences,
            "tokens": builder.num_tokens,
            "sha256": {Path(each.prefix).name: each.checksums for each in builders},
        }
        write_json(path, content)
    else:
        Path(path).unlink(missing_ok=True)  # a sidecar of the corpus that was overwritten
    print(f"{builder.documents} documents, {builder.num_tokens} tokens -> {builder.prefix}.bin")
