"""Clean raw text files: fix, filter, deduplicate and shuffle documents, and write one .jsonl file and a report."""

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, NamedTuple

from megatron.atomic import name_in_errors

from .clean import DEFAULT_RULES, RULES, Limits, Outcome, clean
from .cli import (
    Parser,
    add_input_flags,
    add_worker_flags,
    all_chunks,
    fraction,
    max_document_bytes,
    natural_int,
    output_file,
    positive_int,
    run,
    unreadable_error,
    write_json,
)
from .dedup import ExactDuplicates, fingerprint, shingles
from .documents import Chunk, counted_documents
from .files import Source, check_outputs, find_files, is_compressed, new_file
from .near_duplicates import NearDuplicates, minhash_signature
from .parallel import ordered_map
from .progress import Progress
from .shuffle import shuffled
from .streams import BadLine, InputError

EXAMPLES = """\
  python tools/clean_corpus.py --input raw/ --output clean.jsonl
  python tools/clean_corpus.py --input 'web/*.jsonl.zst' --output clean.jsonl.gz --script Han --min-script 0.3 \\
      --near-duplicates --dropped dropped.jsonl
  python tools/clean_corpus.py --input poems.txt --output clean.jsonl --off repeated length --on nfkc"""


class CleanedDocument(NamedTuple):
    """A document after the rules.

    fingerprints: reason for which a later document with an equal or similar fingerprint is dropped -> fingerprint.
    copies: how many times the document is used, by the weight of its file.
    """

    original: str
    outcome: Outcome
    fingerprints: dict[str, Any]
    copies: int


class Cleaned(NamedTuple):
    """The cleaned documents of one chunk, as a worker process returns them."""

    documents: list[CleanedDocument]
    bad: list[BadLine]
    source_bytes: int


class _Worker:
    """Settings of a worker process, set once when it starts."""

    args: argparse.Namespace
    rules: set[str]
    limits: Limits


def _start_worker(args: argparse.Namespace) -> None:
    """Set the settings in a worker process, from which `clean_chunk` reads them."""
    limits = {field.name: getattr(args, field.name) for field in fields(Limits)}
    _Worker.args = args
    _Worker.rules = {*DEFAULT_RULES, *args.on} - set(args.off)
    _Worker.limits = Limits(**limits)


def _fingerprints_of(text: str | None) -> dict[str, Any]:
    """Return a document's fingerprints for deduplication; {} for a document that a rule has dropped.

    Worker processes compute the fingerprints, to relieve the main process, which compares them.
    """
    fingerprints: dict[str, Any] = {}
    if text is None:
        return fingerprints
    if "exact-duplicates" not in _Worker.args.off:
        fingerprints["exact duplicate"] = fingerprint(text)
    if _Worker.args.near_duplicates:
        fingerprints["near duplicate"] = minhash_signature(shingles(text))
    return fingerprints


def clean_chunk(chunk: Chunk) -> Cleaned:
    """Clean each document of a chunk in a worker process."""
    args = _Worker.args
    cleaned = []
    bad = []
    for document, copies in counted_documents(chunk, (args.json_key,), args.seed, max_document_bytes(args)):
        if isinstance(document, BadLine):
            bad.append(document)
        elif copies:
            text = document[0]
            outcome = clean(text, _Worker.rules, _Worker.limits)
            cleaned.append(CleanedDocument(text, outcome, _fingerprints_of(outcome.text), copies))
    return Cleaned(cleaned, bad, chunk.length)


class Report:
    """Counts of documents read, kept, dropped and changed."""

    def __init__(self, dropped: IO[str] | None) -> None:
        self.read = self.read_chars = self.kept = self.kept_chars = 0
        self.reasons: Counter[str] = Counter()
        self.changed: Counter[str] = Counter()
        self._dropped = dropped

    def record_dropped(self, reason: str, text: str) -> None:
        """Count a dropped document, and write it to the file that --dropped names, if any."""
        self.reasons[reason] += 1
        if self._dropped:
            with name_in_errors(self._dropped.name):  # the temporary name, which `atomic_file` replaces
                self._dropped.write(json.dumps({"reason": reason, "text": text}, ensure_ascii=False) + "\n")

    def content(self) -> dict[str, Any]:
        """Return the counts for the JSON report next to the output."""
        return {
            "read": self.read, "read_chars": self.read_chars, "kept": self.kept, "kept_chars": self.kept_chars,
            "dropped": dict(self.reasons.most_common()), "changed": dict(self.changed.most_common()),
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """Yield the counts as lines of text."""
        yield f"{'read':<24}{self.read:>12,} documents {self.read_chars:>15,} characters"
        for reason, count in self.reasons.most_common():
            yield f"{'  dropped: ' + reason:<24}{count:>12,}"
        for rule, count in self.changed.most_common():
            yield f"{'  fixed by ' + rule:<24}{count:>12,}"
        share = self.kept_chars / max(self.read_chars, 1)
        yield f"{'kept':<24}{self.kept:>12,} documents {self.kept_chars:>15,} characters ({share:.1%})"


def kept_lines(args: argparse.Namespace, sources: list[Source], report: Report) -> Iterator[bytes]:
    """Clean and deduplicate `sources`, yield kept documents as lines of JSON, and count documents in `report`."""
    seen: dict[str, Any] = {"exact duplicate": ExactDuplicates(), "near duplicate": NearDuplicates(args.similarity)}
    # --split cuts the shuffled corpus, so one copy of a document may be trained on and another may be validated on.
    if not args.no_shuffle and any(source.weight > 1 for source in sources):
        print("note: copies are spread over the output; --split would train on documents of its validation part")
    pending = all_chunks(args, sources)
    with Progress(unit="B", unit_scale=True, desc="cleaning", disable=args.quiet) as progress:
        for cleaned in ordered_map(clean_chunk, pending, args.workers, _start_worker, (args,), args.ray):
            for bad in cleaned.bad:
                if args.on_error == "stop":
                    raise unreadable_error(bad)
                report.read += 1
                report.record_dropped("unreadable", str(bad))
            for original, outcome, fingerprints, copies in cleaned.documents:
                reason = outcome.reason  # "" for a document that no rule drops
                # A document that a rule drops has no fingerprints: it is not compared, and later documents are not
                # compared with it. The others are compared once, so that the copies of FILE@2 are no duplicates of each
                # other. The exact fingerprint comes first, and a duplicate needs no second reason.
                for kind, key in fingerprints.items():
                    if seen[kind].check_and_add(key):
                        reason = kind
                        break
                for _ in range(copies):
                    report.read += 1
                    report.read_chars += len(original)
                    report.changed.update(outcome.changed)
                    if reason or outcome.text is None:  # for mypy: without a text, there is a reason
                        report.record_dropped(reason, original)
                    else:
                        report.kept += 1
                        report.kept_chars += len(outcome.text)
                        line = json.dumps({"text": outcome.text}, ensure_ascii=False)
                        yield line.encode() + b"\n"
            progress.update(cleaned.source_bytes)


def main(args: argparse.Namespace) -> None:
    output = Path(args.output)
    if not output.name.removesuffix(".gz").endswith(".jsonl"):
        raise ValueError(f"--output {output} must end with .jsonl or .jsonl.gz")
    if args.similarity != 0.8 and not args.near_duplicates:  # 0.8 is the default
        raise ValueError("--similarity has no effect without --near-duplicates")
    if args.script != "Han" and not args.min_script:  # the default
        raise ValueError("--script has no effect without --min-script")
    if args.dropped and is_compressed(args.dropped):
        raise ValueError(f"--dropped {args.dropped} is not compressed: leave out its last suffix")
    if both := set(args.on) & set(args.off):
        raise ValueError(f"--on and --off both name {both.pop()}; leave one of them out")
    check_outputs(args.input, [args.output, args.dropped], args.encoding)
    sources = find_files(args.input, args.encoding)  # before temporary files lie in an input folder
    # After an error in this block, existing files of both names remain unchanged, else they are replaced at its end.
    with new_file(output) as temporary, ExitStack() as dropped_stack:
        dropped = None
        if args.dropped:
            part = dropped_stack.enter_context(new_file(args.dropped))
            dropped = dropped_stack.enter_context(open(part, "w", encoding="utf-8"))
        report = Report(dropped)
        # An error while the output is written has no file name, and gets that of the first context that it leaves.
        # Without `name_in_errors`, this would be the context of --dropped.
        with name_in_errors(output), open(temporary, "wb") as plain, ExitStack() as stack:
            file: Any = plain
            if output.suffix == ".gz":  # without the time and the temporary name, so that equal runs write equal files
                file = stack.enter_context(gzip.GzipFile(output.stem, "wb", fileobj=plain, mtime=0))
            lines = kept_lines(args, sources, report)
            if not args.no_shuffle:
                lines = shuffled(lines, args.seed, str(output.parent))
            for line in lines:
                file.write(line)
        content = report.content()
        if not report.kept:  # an error here leaves an existing output unchanged
            raise InputError(f"every document of {', '.join(args.input)} was dropped: {content['dropped']}")
    write_json(f"{output}.report.json", content)
    print("\n".join([*report.lines(), f"-> {output}"]))


def build_parser() -> Parser:
    parser = Parser(__doc__, EXAMPLES)
    add = parser.add_argument
    limits = Limits()
    add_input_flags(parser)
    add("--output", type=output_file, required=True, help="output file, .jsonl or .jsonl.gz")
    add("--json-key", default="text", help="key of the text in a record (default: text)")
    add("--off", nargs="+", default=[], choices=[*RULES, "exact-duplicates"], help="rules to skip, with their limits")
    add(
        "--on", nargs="+", default=[], choices=["nfkc"],
        help="cleaning rules to add to the default rules; nfkc normalises Unicode, which changes punctuation",
    )  # fmt: skip
    add(
        "--min-chars", type=natural_int, default=limits.min_chars,
        help="minimum length of a document in characters (default: 16)",
    )  # fmt: skip
    add(
        "--max-chars", type=positive_int, default=limits.max_chars,
        help="maximum length of a document in characters (default: 10,000,000)",
    )  # fmt: skip
    shares = {
        "max-repeated": "in repeated lines or phrases (default: 0.3)",
        "max-mojibake": "that a wrong encoding produced (default: 0.003)",
        "max-markup": "in HTML tags (default: 0.1)",
        "max-encoded": "in base64 data (default: 0.2)",
        "max-urls": "in lines of URLs (default: 0.5)",
    }
    for name, words in shares.items():
        text = f"largest allowed share of a document's characters {words}"
        add(f"--{name}", type=fraction, default=getattr(limits, name.replace("-", "_")), help=text)
    add("--script", default=limits.script, help="Unicode script that --min-script requires (default: Han)")
    add(
        "--min-script", type=fraction, default=limits.min_script,
        help="smallest allowed share of a document's letters that belong to --script (default: 0)",
    )  # fmt: skip
    add(
        "--near-duplicates", action="store_true",
        help="also drop near duplicates (MinHash; 0.6 kB of memory per document)",
    )  # fmt: skip
    add(
        "--similarity", type=fraction, default=0.8, help="smallest Jaccard similarity of near duplicates (default: 0.8)"
    )
    add("--dropped", type=output_file, help=".jsonl file for the dropped documents and the reasons")
    add("--no-shuffle", action="store_true", help="keep the order of the input")
    add(
        "--seed", type=int, default=1234,
        help="seed of the shuffle and of the random selection of documents for FILE@0.5 (default: 1234)",
    )  # fmt: skip
    add_worker_flags(parser)
    return parser


def cli() -> None:
    run(main, build_parser())


if __name__ == "__main__":
    cli()
