"""What all command-line tools share: usage errors exit 2, failures exit 1, each in one sentence on stderr."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from data_utils.documents import LARGEST_DOCUMENT
from megatron.atomic import write_text
from megatron.config.fields import describe


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

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; --help shows examples", file=sys.stderr)
        sys.exit(2)


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
    try:
        main(args)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read the output has had enough, as head(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, RuntimeError) as error:
        if args.debug:
            raise
        print(f"{parser.prog}: {describe(error)}", file=sys.stderr)
        sys.exit(1)
