"""What all command-line tools share: usage errors exit 2, failures exit 1, each in one sentence on stderr."""

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from data_utils.documents import LARGEST_DOCUMENT
from megatron.atomic import write_text
from megatron.config.fields import describe
from megatron.config.translate import suggestion
from megatron.streams import NAMES, Named, guarded

from .missing import MissingFiles, refuse_missing


class Parser(argparse.ArgumentParser):
    """Errors in one sentence; `--debug` shows the traceback of a failure."""

    def __init__(self, description: str, examples: str, **more: Any) -> None:
        super().__init__(
            description=description,
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **more,
        )
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """What is not known is refused, all of it in one sentence, each with what it may have been meant for."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            names = [word.split("=")[0] for word in rest if word.startswith("-") and not is_number(word)] or rest[:1]
            known = re.findall(r"--[a-z0-9][\w-]*", found.usages)
            problems = [f"unknown argument {name}{instead(name, known)}" for name in names]
            many = f"{len(problems)} things cannot be taken as they are:"
            self.error(problems[0] if len(problems) == 1 else "\n  ".join([many, *problems]))
        return found

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Beside what is not known the flags that are, in `usages`: those of a command with those of the tool."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            found.usages = getattr(found, "usages", "") + self.format_usage()
        return found, rest

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; --help shows examples", file=sys.stderr)
        sys.exit(2)


# Flags of other projects' tools -> ours, or what is done instead.
ELSEWHERE = {
    "--tokenizer-model": "--vocab-file", "--vocab": "--vocab-file", "--tokenizer-name-or-path": "--vocab-file",
    "--dataset-impl": "pairs of .bin and .idx are always mapped: leave it out", "--num-return-sequences": "--num-samples",
    "--do-sample": "--temperature 0 takes the likeliest token, any other draws: leave it out", "--max-length": "--max-new-tokens",
    "--load-dir": "--load", "--save-dir": "--output", "--output-dir": "--output", "--model-name-or-path": "--load",
    "--target-tensor-parallel-size": "checkpoints know no layout: leave it out",
    "--target-pipeline-parallel-size": "checkpoints know no layout: leave it out",
}  # fmt: skip


def instead(name: str, known: Sequence[str]) -> str:
    """`; did you mean --x?`, or a sentence, for a flag that a tool with the flags `known` does not have."""
    said = ELSEWHERE.get("--" + name.lstrip("-").replace("_", "-"), "")
    if " " in said:
        return f": {said}"
    return f"; did you mean {said}?" if said in known else suggestion(name, known, strange=False)


def is_number(word: str) -> bool:
    """`-1`, which is no flag."""
    with contextlib.suppress(ValueError):
        return float(word) == float(word)
    return False


def input_flags(parser: argparse.ArgumentParser) -> None:
    """What all tools that read text have in common."""
    add = parser.add_argument
    add(
        "--input", nargs="+", required=True,
        help="files, folders or globs of .jsonl, .ndjson, .json, .csv, .txt or .parquet, plain or .gz, .bz2, .xz, .zst; FILE@2 takes it twice",
    )  # fmt: skip
    add("--encoding", default="utf-8", help="of the input, such as gb18030 or utf-16 (default: utf-8)")
    add("--on-error", choices=("stop", "skip"), default="stop", help="what to do with a document that cannot be read")
    add(
        "--max-document-mb", type=_megabytes, default=LARGEST_DOCUMENT / 2**20,
        help="longest document; a worker needs 30 times it with sentencepiece, 60 with cpm, 120 with hf (default: 8)",
    )  # fmt: skip


def worker_flags(parser: argparse.ArgumentParser) -> None:
    """Who does the work."""
    add = parser.add_argument
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    add(
        "--ray", metavar="ADDRESS",
        help="the workers are processes of this Ray cluster: auto for the one this machine belongs to, local to start one here",
    )  # fmt: skip


def _megabytes(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a positive number")


def largest(args: argparse.Namespace) -> int:
    """--max-document-mb in bytes."""
    return int(args.max_document_mb * 2**20)


def refused(bad: object) -> ValueError:
    """The error of a document that cannot be read, with the flag that leaves it out."""
    return ValueError(f"{bad} (--on-error skip leaves such documents out)")


def write_json(path: str, content: object) -> None:
    """Write `content`, whole or not at all."""
    write_text(path, json.dumps(content, indent=2))


def run(
    main: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> None:
    """Run a tool: exit 0, or 1 after a sentence about what went wrong."""
    args = parser.parse_args(argv)
    with guarded("the work continues", "stderr"), _named_stdout():
        _run(main, parser, args)


@contextlib.contextmanager
def _named_stdout() -> Iterator[None]:
    before = sys.stdout
    if before is not None:
        sys.stdout = Named(before)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout = before


def _give_up_stdout() -> None:
    """Let what is still buffered go nowhere, or Python would fail once more as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(main: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    try:
        refuse_missing(args)
        main(args)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output has had enough, as head(1)
        _give_up_stdout()
    except (ValueError, OSError, RuntimeError) as error:
        if args.debug:
            raise
        print(f"{parser.prog}: {error if isinstance(error, MissingFiles) else describe(error)}", file=sys.stderr)
        if isinstance(error, OSError) and error.filename == NAMES["stdout"]:
            _give_up_stdout()
        sys.exit(1)
