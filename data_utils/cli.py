"""Code shared by all command-line tools.

A tool exits with status 2 after a usage error and with status 1 after any other error. In both cases it prints a
one-sentence message to stderr.
"""

import argparse
import contextlib
import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

from megatron.atomic import write_text
from megatron.config.data import corpus_prefix, is_number
from megatron.config.fields import at_least, between, more_than
from megatron.config.messages import describe_error, format_problems
from megatron.packages import pip_install
from megatron.storage import PathError, check_location, require_local
from megatron.streams import NAMES, NamedStdout, guard_streams, raise_open_files
from megatron_compat.flags.translate import suggest_flag

from .documents import MAX_DOCUMENT_BYTES, Chunk, chunks
from .files import Source, new_file
from .missing import MissingFiles, check_inputs_exist


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formatter that keeps lines short.

    It wraps paragraphs at spaces, and moves a long list of choices from the usage to the help of its flag.
    """

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Any:
        if _has_long_choices(action):
            # argparse wants one name for each value of the flag.
            return lambda count: (default_metavar,) * count
        return super()._metavar_formatter(action, default_metavar)

    def _expand_help(self, action: argparse.Action) -> str:
        """Append the choices of a flag to its help if they are too long to stand beside its name."""
        text = super()._expand_help(action)
        return f"{text}: {', '.join(action.choices or ())}" if _has_long_choices(action) else text

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap text paragraph by paragraph, except the examples."""
        if text.startswith("examples:"):
            return text
        return "\n\n".join(textwrap.fill(each, width, break_on_hyphens=False) for each in text.split("\n\n"))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)  # flags are not broken


def _has_long_choices(action: argparse.Action) -> bool:
    return action.metavar is None and sum(len(str(choice)) for choice in action.choices or ()) > 30


class Parser(argparse.ArgumentParser):
    """An argument parser with one-sentence errors and `--debug` for tracebacks."""

    def __init__(self, description: str | None, examples: str, **kwargs: Any) -> None:
        super().__init__(
            description=description,
            epilog=f"examples:\n{examples}",
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
            **kwargs,
        )
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Return the parsed arguments. Reports all unknown arguments in one error, each with a suggestion."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            names = []
            for word in unknown:
                if word.startswith("-") and not is_number(word):  # such as -1
                    names.append(word.split("=")[0])
            # Other unknown words may be values of unknown flags, so the first one is reported only without such flags.
            if not names:
                names = unknown[:1]
            known = re.findall(r"--[a-z0-9][\w-]*", parsed.usages)
            problems = []
            for name in names:
                problems.append(f"unknown argument {name}{unknown_flag_hint(name, known)}")
            self.error(format_problems(problems, "unknown arguments"))
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Return (namespace, unknown arguments).

        If there are unknown arguments, `namespace.usages` collects the usage lines of the tool and its subcommand.
        """
        self._argv = list(sys.argv[1:] if args is None else args)
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            parsed.usages = getattr(parsed, "usages", "") + self.format_usage()
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        # argparse gives up at a missing flag, which may only be misspelled.
        if "are required: " in message:
            message = format_problems([*self._misspelled(), message], "errors in the arguments")
        print(f"{self.prog}: {message}; --help shows examples", file=sys.stderr)
        sys.exit(2)

    def _misspelled(self) -> Iterator[str]:
        """Yield an error for each unknown flag; argparse itself reports only the required flags that are missing."""
        known = re.findall(r"--[a-z0-9][\w-]*", self.format_usage())
        for word in self._argv:
            name = word.split("=")[0]
            if name.startswith("--") and name not in known:
                hint = unknown_flag_hint(name, known)
                if hint:  # a flag unlike all known ones is no misspelled required flag
                    yield f"unknown argument {name}{hint}"


# Flag of another project's tool -> the equivalent flag of this project's tools, or an explanation
FOREIGN_FLAGS = {
    "--tokenizer-model": "--vocab-file", "--vocab": "--vocab-file", "--tokenizer-name-or-path": "--vocab-file",
    "--dataset-impl": ".bin and .idx files are always memory-mapped; remove the flag",
    "--num-return-sequences": "--num-samples", "--max-length": "--max-new-tokens",
    "--do-sample": "--temperature 0 decodes greedily, any other value samples; remove the flag",
    "--load-dir": "--load", "--save-dir": "--output", "--output-dir": "--output", "--model-name-or-path": "--load",
    "--target-tensor-parallel-size": "checkpoints load in every layout; remove the flag",
    "--target-pipeline-parallel-size": "checkpoints load in every layout; remove the flag",
}  # fmt: skip


def unknown_flag_hint(name: str, known: Sequence[str]) -> str:
    """Return the end of the message for an unknown flag: `; did you mean --x?` or an explanation.

    name: the unknown flag. known: the flags of the tool.
    """
    dashed = "--" + name.lstrip("-").replace("_", "-")
    counterpart = FOREIGN_FLAGS.get(dashed, "")
    # A flag has no spaces, so this is an explanation.
    if " " in counterpart:
        return f": {counterpart}"
    if counterpart in known:
        return f"; did you mean {counterpart}?"
    return suggest_flag(name, known, all_foreign=False)


def number_type(check: Callable[[Any], str | None], kind: Callable[[str], float] = float) -> Callable[[str], Any]:
    """Return the type of a flag whose value is a finite number.

    check: function that returns an error text for an invalid number, else None, as those of megatron/config/fields.py.
    kind: float, or int for a whole number.
    """

    def convert(text: str) -> float:
        value = kind(text)
        problem = check(value) if abs(value) < math.inf else "must be finite"  # the comparison is false for NaN, too
        if problem:
            raise argparse.ArgumentTypeError(f"{text} {problem}")
        return value

    # If `kind` raises ValueError, as for "abc", argparse prints this name: "invalid int value: 'abc'".
    convert.__name__ = kind.__name__
    return convert


positive_int = number_type(at_least(1), int)
natural_int = number_type(at_least(0), int)
positive_float = number_type(more_than(0))
fraction = number_type(between(0, 1))


def local_path(text: str) -> str:
    """Return the argument `text`, a path on this machine. Refuses URLs, and words like URLs with a mistake."""
    return _check_argument(require_local, text)


def output_file(text: str) -> str:
    """Return the argument `text`, a file to write on this machine. Refuses folders and places that are not writable."""
    path = Path(local_path(text)).absolute()
    if os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file")
    # The nearest folder above that exists, in which the tool will create the missing ones. The root always exists.
    folder = next(filter(os.path.exists, path.parents))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written to {folder}")
    return text


def output_prefix(text: str) -> str:
    """Return the argument `text`, the first part of the paths of files to write on this machine."""
    if not os.path.basename(local_path(text)):
        raise argparse.ArgumentTypeError(f"{text!r} needs a name after the folder, such as {text}corpus")
    return text


def any_path(text: str) -> str:
    """Return the argument `text`, a path or the URL of a place in object storage."""
    return _check_argument(check_location, text)


def any_prefix(text: str) -> str:
    """Return the prefix of the .bin/.idx pair that the argument `text` names, a path or a URL."""
    return corpus_prefix(any_path(text))


def _check_argument(check: Callable[[str], str], text: str) -> str:
    try:
        return check(text)
    except PathError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags shared by the data tools that read text."""
    add = parser.add_argument
    add(
        "--input", nargs="+", required=True, type=local_path,
        help="files, folders or globs of .jsonl, .ndjson, .json, .csv, .txt or .parquet, plain or .gz, .bz2, .xz, "
        ".zst; FILE@2 reads FILE twice, FILE@0.5 a random half of its documents",
    )  # fmt: skip
    add(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="whether an unreadable document stops the tool or is skipped (default: stop)",
    )
    add_text_flags(parser)


def add_text_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags shared by all tools whose --input is text."""
    add = parser.add_argument
    add(
        "--encoding",
        default="utf-8",
        help="encoding of --input, such as gb18030 or utf-16; auto finds that of each file (default: utf-8)",
    )
    add(
        "--max-document-mb", type=positive_float, default=MAX_DOCUMENT_BYTES / 2**20,
        help="size limit of a document in MiB (default: 8). A worker process needs 30 times this much memory with a "
        "sentencepiece tokenizer, 60 times with a cpm tokenizer, 120 times with an hf tokenizer",
    )  # fmt: skip
    add("--quiet", action="store_true", help="show no progress bar")


def usable_cores() -> int:
    """Return the number of cores that this process may use, which SLURM or Docker may limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def add_worker_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for worker processes."""
    add = parser.add_argument
    add(
        "--workers",
        type=natural_int,
        default=usable_cores(),
        help="number of worker processes (default: one per core)",
    )
    add(
        "--ray", metavar="ADDRESS",
        help="Ray cluster that runs the workers: its address, auto for the cluster that this machine belongs to, or "
        "local to start a cluster on this machine",
    )  # fmt: skip


def max_document_bytes(args: argparse.Namespace) -> int:
    """Return --max-document-mb in bytes, at most 2**62: Python's reader of CSV takes 64-bit numbers."""
    return min(int(args.max_document_mb * 2**20), 1 << 62)


def all_chunks(args: argparse.Namespace, sources: Iterable[Source]) -> Iterator[Chunk]:
    """Yield the chunks of all files, in order."""
    for source in sources:
        yield from chunks(source, largest=max_document_bytes(args))


def unreadable_error(bad: object) -> ValueError:
    """Return the error for the unreadable document `bad`; its message names the flag that skips such documents."""
    return ValueError(f"{bad} (pass --on-error skip to skip such documents)")


def write_json(path: str | Path, content: object) -> None:
    """Write `content` as JSON, atomically."""
    write_text(path, json.dumps(content, indent=2))


def new_figure(feature: str, **kwargs: Any) -> Any:
    """Return a figure of matplotlib. Raises ValueError, which names `feature` needs it, if it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"{feature} needs the package matplotlib: {pip_install('matplotlib')}") from None
    return Figure(**kwargs)


def save_figure(figure: Any, path: str | Path, **kwargs: Any) -> None:
    """Write a figure of matplotlib as a PNG, atomically."""
    with new_file(path) as temporary:
        figure.savefig(temporary, format="png", **kwargs)


def run(
    main: Callable[[argparse.Namespace], None] | str,
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None = None,
) -> None:
    """Parse the command line and run a tool; if the tool fails, print a one-sentence error and exit with 1.

    main: the tool's function, or its name "module:function", which is then imported only after the flags are parsed.
    """
    raise_open_files()  # every corpus keeps two files open
    args = parser.parse_args(argv)
    function: Any = resolve_name(main) if isinstance(main, str) else main
    with guard_streams("the work continues", "stderr"):
        # An OSError of NamedStdout names standard output as its file, by which it is recognised below. stdout is None
        # if the shell has closed it (>&-).
        named_stdout: Any = None if sys.stdout is None else NamedStdout(sys.stdout)
        with contextlib.redirect_stdout(named_stdout):
            try:
                check_inputs_exist(args)
                function(args)
                if sys.stdout is not None:
                    sys.stdout.flush()
            except KeyboardInterrupt:
                sys.exit(130)  # as shells report Ctrl-C: 128 + the number of SIGINT
            except BrokenPipeError:  # the reader of the output has closed the pipe, as head(1) does
                _give_up_stdout()
            except (ValueError, OSError, RuntimeError) as error:
                if args.debug:
                    raise
                # MissingFiles has several lines, which describe_error() would join.
                message = str(error) if isinstance(error, MissingFiles) else describe_error(error)
                print(f"{parser.prog}: {message}", file=sys.stderr)
                if isinstance(error, OSError) and error.filename == NAMES["stdout"]:
                    _give_up_stdout()
                sys.exit(1)


def _give_up_stdout() -> None:
    """Redirect a failed stdout to /dev/null, because Python flushes stdout at exit and would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
