"""Inspect, verify, decode, merge, split and filter .bin/.idx pairs; show one sample as a training run reads it."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.corpus_paths import TRIPLE_PARTS, whole_of
from megatron.data.damage import find_damage, find_holes, sidecar_sums
from megatron.data.indexed_dataset import LOSS_SUFFIX, DatasetError, IndexedDataset
from megatron.data.splits import PARTS
from megatron.storage import to_path
from megatron.tokenizer import load_tokenizer
from megatron.tokenizer.base import eod_mismatch

from .cli import Parser, any_path, any_prefix, local_path, natural_int, output_file, output_prefix, positive_int, run
from .document_uses import print_iteration, print_uses
from .iterations import Iterations
from .merge_commands import drop_documents, merge_pairs, split_pair
from .run_data import load_config, load_datasets
from .sidecars import KEPT_ENTRIES, pair_prefixes, read_sidecar

EXAMPLES = """\
  python tools/inspect_data.py info data/corpus_text_document
  python tools/inspect_data.py verify data/corpus_text_document --vocab-file tokenizer.model
  python tools/inspect_data.py decode data/corpus_text_document 17 --vocab-file tokenizer.model
  python tools/inspect_data.py merge data/a_text_document data/b_text_document --output data/both
  python tools/inspect_data.py split data/corpus_text_document --split 98,1,1
  python tools/inspect_data.py drop data/corpus_text_document 17 20-31 --output data/corpus_without
  python tools/inspect_data.py sample 3 --run-dir runs/gpt2 --png sample.png
      sample 3, counted from 0, as the run reads it: tokens, targets, documents, masks
  python tools/inspect_data.py stages --run-dir runs/gpt2 --png stages.png
  python tools/inspect_data.py when --document 17 --path data/corpus_text_document --run-dir runs/gpt2
      the iterations and samples in which the run trains on document 17
  python tools/inspect_data.py which --iteration 100 --run-dir runs/gpt2
      the documents on which iteration 100 trains
  python tools/inspect_data.py stages -- --data-stages "0: 0.8 a 0.2 b; 1M: b" --vocab-file tokenizer.model"""
TOKENS_AT_ONCE = 1 << 22  # tokens checked per block


def info(args: argparse.Namespace) -> None:
    """Run the command `info`: print a summary of a .bin/.idx pair."""
    indexed = IndexedDataset(args.prefix)
    sizes = indexed.document_sizes(range(indexed.num_documents))
    facts: dict[str, Any] = {
        "documents": f"{indexed.num_documents:,}",
        "sequences": f"{len(indexed):,}",
        "tokens": f"{indexed.num_tokens:,}",
        "dtype": indexed.dtype,
        "bytes": f"{to_path(args.prefix + '.bin').stat().st_size:,}",
    }
    if len(sizes):
        shares = np.percentile(sizes, [0, 50, 90, 100]).astype(int)
        facts["tokens per document"] = "minimum {:,}, median {:,}, 90 % below {:,}, maximum {:,}".format(*shares)
        facts["empty documents"] = f"{int((np.asarray(sizes) == 0).sum()):,}"
    facts |= {key: value for key, value in read_sidecar(args.prefix).items() if key in KEPT_ENTRIES}
    width = max(map(len, facts))
    for key, value in facts.items():
        print(f"{key.ljust(width)}  {value}")


def verify(args: argparse.Namespace) -> None:
    """Run the command `verify`: check all .bin/.idx pairs of a corpus.

    A corpus of conversations has two pairs (tokens and loss mask), a CPM corpus for T5 has three, any other corpus one.
    Raises DatasetError with a list of all problems.
    """
    # The pairs of a CPM corpus are PREFIX_context, PREFIX_target and PREFIX_target_offset, without a pair PREFIX.
    prefixes = [f"{args.prefix}_{part}" for part in TRIPLE_PARTS]
    is_triple = to_path(f"{prefixes[0]}.idx").is_file() and not to_path(f"{args.prefix}.idx").is_file()
    # PREFIX, perhaps with PREFIX_loss. A PREFIX without any file also comes here: the error then names PREFIX.
    if not is_triple:
        prefixes = pair_prefixes(args.prefix)
    problems = []
    for prefix in prefixes:
        problems += _verify_pair(prefix, args)
    if problems:
        raise DatasetError("; ".join(problems))


def _verify_pair(prefix: str, args: argparse.Namespace) -> list[str]:
    """Return the problems found in a pair; print a confirmation if there are none."""
    indexed = IndexedDataset(prefix)
    metadata = read_sidecar(prefix)
    is_part = whole_of(prefix) is not None  # a loss mask, or one of the three pairs of a CPM corpus for T5
    is_loss = is_part and prefix.endswith(LOSS_SUFFIX)
    vocab_size = metadata.get("vocab_size")  # None if unknown: then ids have no upper limit
    problems: list[str] = []
    checked = ["lengths", "boundaries"]
    checksum_note = "; there is no sidecar with checksums"
    checksums = sidecar_sums(prefix, metadata)
    if checksums:
        problems += find_damage(prefix, checksums)
        checked.append("checksums")
        checksum_note = ""
        # The count of a sidecar that several pairs share need not be that of this pair.
        if len(metadata["sha256"]) == 1 and metadata["tokens"] != indexed.num_tokens:
            problems.append(f"{prefix}.json records {metadata['tokens']} tokens, but the pair has {indexed.num_tokens}")
    if args.vocab_file:
        tokenizer = load_tokenizer(args.vocab_file, args.tokenizer_type)
        vocab_size = tokenizer.vocab_size
        if metadata and metadata["fingerprint"] != tokenizer.fingerprint:
            problems.append(f"{prefix}.bin was made with another tokenizer than --vocab-file {args.vocab_file}")
        elif mismatch := eod_mismatch(metadata, tokenizer, args.vocab_file):
            problems.append(f"{prefix}.bin {mismatch}")
        if metadata:
            checked.append("tokenizer")
    if is_part and not is_loss:
        vocab_size = None  # such a corpus has sentinels, whose ids follow the vocabulary, in any number
    limit = 2 if is_loss else vocab_size  # a loss mask holds 0 and 1
    problems += _find_bad_ids(indexed, limit)
    checked.append(f"ids below {vocab_size}" if vocab_size else "no negative ids")
    if not is_part:
        problems += find_holes(indexed, metadata.get("eod"))
        checked.append("holes")
    if not problems:
        print(
            f"{prefix}: {indexed.num_documents:,} documents, {indexed.num_tokens:,} tokens, no problem found "
            f"({', '.join(checked)}){checksum_note}"
        )
    return problems


def _find_bad_ids(indexed: IndexedDataset, vocab_size: int | None) -> list[str]:
    """Return a sentence about the first id that is negative or beyond the vocabulary; [] if there is none.

    vocab_size: None if the size of the vocabulary is unknown, so that only negative ids are found.
    """
    problem = f"outside the vocabulary of {vocab_size}" if vocab_size else "negative"
    for start in range(0, indexed.num_tokens, TOKENS_AT_ONCE):
        ids = indexed.tokens[start : start + TOKENS_AT_ONCE]
        is_bad = ids < 0
        if vocab_size:
            is_bad |= ids >= vocab_size
        if is_bad.any():
            index = is_bad.argmax()
            # The first document that ends after the bad id: if documents end at 3 and 8, id 3 is in document 1.
            document = indexed.document_ends().searchsorted(start + index, side="right")
            return [f"{indexed.prefix}.bin, document {document}: token id {ids[index]} is {problem}"]
    return []


def decode(args: argparse.Namespace) -> None:
    """Run the command `decode`: print documents as text."""
    indexed = IndexedDataset(args.prefix)
    tokenizer = load_tokenizer(args.vocab_file, args.tokenizer_type)
    for number in args.documents:
        if not 0 <= number < indexed.num_documents:
            raise ValueError(f"{args.prefix} has documents 0 to {indexed.num_documents - 1}, but no document {number}")
        # Its sequences are those from its own entry to the entry of the next document.
        begin, end = indexed.document_index[number : number + 2].tolist()
        ids: list[int] = []
        for sequence in range(begin, end):
            ids += indexed[sequence].tolist()
        print(f"--- document {number}: {len(ids)} tokens")
        text = " ".join(map(str, ids)) if args.ids else tokenizer.decode(ids)
        print(text)


def stages(args: argparse.Namespace) -> None:
    """Run the command `stages`: print how many samples, tokens and epochs each corpus gives in each data stage."""
    from megatron.config.families import parse_any_family

    from . import stage_plan

    if bool(args.run_dir) == bool(args.flags):  # both or neither
        raise ValueError("give either --run-dir, or -- and the flags of a training command")
    if args.run_dir:
        config = load_config(args.run_dir)
        iterations = Iterations(config, Path(args.run_dir))
    else:
        config = parse_any_family(args.flags)
        iterations = Iterations(config, None)
    samples = args.samples or iterations.total
    _, (dataset, *_) = load_datasets(config)  # the training data set
    plan = stage_plan.build_plan(dataset, config, samples)
    print(stage_plan.format_table(plan))
    if not args.samples:
        # Settings give the batch size of one replica, and not the number of replicas. Logged rows and
        # --batch-size-schedule give the number of samples of all replicas.
        is_global = iterations.logged or config.train.batch_size_schedule
        whose = "the run" if is_global else "one replica"
        print(f"for {samples:,} samples, those of {whose}; --samples gives another number")
    if args.png:
        stage_plan.draw(plan, args.png)
        print(f"-> {args.png}")


def sample(args: argparse.Namespace) -> None:
    """Run the command `sample`: print a sample as the training run reads it."""
    from . import sample_view  # importing torch is slow, so the other commands avoid it

    config = load_config(args.run_dir)
    tokenizer, datasets = load_datasets(config)
    part = datasets[PARTS.index(args.part)]
    if part is None:
        raise ValueError(f"the {args.part} part of the run is empty; choose another --part")
    # A part with several data sets is a dict from their names. A single data set gets the name "", as --set by default.
    sets = part if isinstance(part, dict) else {"": part}
    if args.set not in sets:
        has_names = any(sets)
        advice = f"set --set to one of {[*sets]}" if has_names else "leave --set out, as there is only one data set"
        raise ValueError(f"the {args.part} part of the run has no data set {args.set!r}; {advice}")
    view = sample_view.t5_view if config.is_t5 else sample_view.gpt2_view
    if config.objective == "sft":
        view = sample_view.sft_view
    tables, masks = view(sets[args.set][args.number], tokenizer, config)
    title = f"sample {args.number} of the {args.part} part of {args.run_dir}"
    print(f"{title}\n{sample_view.as_text(tables)}")
    if args.png:
        sample_view.draw(tables, masks, title, args.png)
        print(f"-> {args.png}")


def build_parser() -> Parser:
    parser = Parser(__doc__, EXAMPLES)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, function: Any, help: str, pair: bool = False) -> argparse.ArgumentParser:
        cmd = commands.add_parser(name, help=help, description=help, examples=EXAMPLES)
        cmd.set_defaults(function=function)
        if pair:
            cmd.add_argument("prefix", type=any_prefix, help="path of the pair, without .bin or .idx")
        return cmd

    def tokenizer_of(cmd: argparse.ArgumentParser, required: bool) -> None:
        cmd.add_argument("--vocab-file", type=local_path, required=required, help="tokenizer file or folder")
        cmd.add_argument("--tokenizer-type", default="auto", help="tokenizer type (default: detected from the file)")

    def add_run_dir(cmd: argparse.ArgumentParser) -> None:
        cmd.add_argument("--run-dir", type=local_path, required=True, help="folder of the run")

    command("info", info, "summarise a pair", pair=True)
    cmd = command("verify", verify, "check lengths, boundaries, checksums and ids", pair=True)
    tokenizer_of(cmd, required=False)
    cmd = command("decode", decode, "print documents as text, without end-of-document tokens", pair=True)
    cmd.add_argument("documents", type=int, nargs="+", help="document numbers, from 0")
    cmd.add_argument("--ids", action="store_true", help="print token ids in place of text")
    tokenizer_of(cmd, required=True)
    _add_writers(command)
    cmd = command("sample", sample, "show a sample as a training run reads it")
    cmd.add_argument("number", type=natural_int, help="sample number, from 0, counted over all epochs")
    add_run_dir(cmd)
    cmd.add_argument("--part", choices=PARTS, default="train", help="part of the data (default: train)")
    cmd.add_argument("--set", default="", help="name of the data set, if the part has several, as in web=PREFIX")
    cmd.add_argument("--png", type=output_file, help="PNG file for a plot of the attention masks")
    cmd = command("stages", stages, "show what each corpus gives in each data stage of a run")
    cmd.add_argument("--run-dir", type=local_path, help="folder of the run")
    cmd.add_argument(
        "--samples", type=positive_int, help="number of samples (default: from the run's metrics and settings)"
    )
    cmd.add_argument("--png", type=output_file, help="PNG file for a plot")
    cmd.add_argument("flags", nargs="*", help="after --: flags of a training command, instead of --run-dir")
    cmd = command("when", print_uses, "show the iterations, samples and positions at which a run trains on a document")
    cmd.add_argument("--document", type=int, required=True, help="document number, from 0")
    cmd.add_argument("--path", type=any_prefix, help="prefix or short name of its corpus (default: the only corpus)")
    add_run_dir(cmd)
    cmd = command("which", print_iteration, "show the documents on which an iteration of a run trains, with their text")
    cmd.add_argument("--iteration", type=int, required=True, help="iteration number, from 1")
    add_run_dir(cmd)
    cmd.add_argument("--full", action="store_true", help="print the whole text")
    return parser


def _add_writers(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands that write new pairs. command: function of `build_parser` that adds one."""
    cmd = command("merge", merge_pairs, "merge several pairs into one, in constant memory")
    cmd.add_argument(
        "prefixes", type=any_path, nargs="+", help="paths of the pairs, in order, with or without .bin or .idx"
    )
    cmd.add_argument("--output", type=output_prefix, required=True, help="path of the new pair, without .bin or .idx")
    cmd = command("split", split_pair, "split a pair into training, validation and test", pair=True)
    cmd.add_argument(
        "--split", default="98,1,1", help="shares of the documents for training, validation and test (default: 98,1,1)"
    )
    cmd.add_argument(
        "--output",
        type=output_prefix,
        help="path of the new pairs, without _train, _valid or _test (default: path of the given pair)",
    )
    cmd = command("drop", drop_documents, "write a pair without some documents", pair=True)
    cmd.fromfile_prefix_chars = "@"
    cmd.add_argument("documents", nargs="+", help="numbers from 0, ranges such as 20-31, or @FILE with one per line")
    cmd.add_argument("--output", type=output_prefix, required=True, help="path of the new pair, without .bin or .idx")


def cli() -> None:
    run(lambda args: args.function(args), build_parser())


if __name__ == "__main__":
    cli()
