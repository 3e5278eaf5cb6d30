"""What all command-line tools share: usage errors exit 2, failures exit 1, each in one sentence on stderr."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

# Tools are run as files (`python tools/x.py`); the packages stand one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.options import describe  # noqa: E402


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


def write_text(path: str | Path, text: str) -> None:
    """Under a temporary name first, so that nobody reads half of it."""
    temporary = f"{path}.{os.getpid()}.tmp"
    Path(temporary).write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: str, content: object) -> None:
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
