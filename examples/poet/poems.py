"""Write the poems of npm's package chinese-poetry as a corpus: train.jsonl and valid.jsonl, the same for everybody.

It takes poems of four or eight lines of equally five or seven characters, about 260,000 of the Tang and Song
dynasties. A document is a poem's title, and below it two lines a row:

    静夜思
    床前看月光，疑是地上霜。
    举头望山月，低头思故乡。

One poem of 100 is for validation, chosen by a hash of its characters, in whichever script it is written. A poem of
which another one has most characters in the same places is left out of training if the other one is for validation.
"""

import hashlib
import json
import re
import sys
import tarfile
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data_utils.cli import Parser, local_path, run
from data_utils.progress import Progress
from megatron.atomic import write_text
from megatron.json_text import parse_json

EXAMPLES = """\
  npm pack chinese-poetry@2.0.1
  python examples/poet/poems.py --input chinese-poetry-2.0.1.tgz --output runs/poet/data"""
FILES = re.compile(r"(?:^|/)quantangshi/poet\.(?:tang|song)\.\d+\.json$")
HAN = re.compile("[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+")
BREAKS = re.compile("[，。？！；：、]")
LENGTHS = (5, 7)  # characters of a line
COUNTS = (4, 8)  # lines of a poem
LONGEST_TITLE = 20  # characters
HELD_OUT = 100  # one poem of so many is for validation
PIECE = 3  # characters of the pieces by which near duplicates are found
ALIKE = 0.5  # poems that share more than this fraction of their pieces are near duplicates


class Poem(NamedTuple):
    """A title, and lines without punctuation marks; `rows` are the lines as they were, with the marks."""

    title: str
    lines: tuple[str, ...]
    rows: tuple[str, ...]

    @property
    def text(self) -> str:
        """The document of the poem."""
        return "\n".join([self.title, *self.rows])


def contents(source: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the files of poems in a package, a .tgz file or a folder, in the order of their names.

    Raises ValueError if there are none.
    """
    found = 0
    if source.is_dir():
        for path in sorted(source.rglob("*.json")):
            if FILES.search(path.as_posix()):
                found += 1
                yield str(path), path.read_text(encoding="utf-8")
    else:
        with tarfile.open(source) as package:
            for member in sorted(package.getmembers(), key=lambda each: each.name):
                file = package.extractfile(member) if FILES.search(member.name) else None
                if file is not None:
                    found += 1
                    yield f"{source}: {member.name}", file.read().decode("utf-8")
    if not found:
        raise ValueError(f"{source} contains no quantangshi/poet.tang.0.json; give the package chinese-poetry")


def poem_of(record: Any) -> Poem | None:
    """Return a poem of the package's form {title, paragraphs}; None if its lines are of another number or length."""
    rows = tuple(row.strip() for row in record["paragraphs"])
    lines = tuple(filter(None, BREAKS.split("".join(rows))))
    lengths = {len(line) for line in lines}
    if len(lines) not in COUNTS or len(lengths) != 1 or not lengths <= set(LENGTHS):
        return None
    if not all(HAN.fullmatch(line) for line in lines):
        return None
    title = record["title"].strip()
    if not 0 < len(title) <= LONGEST_TITLE:
        return None
    return Poem(title, lines, rows)


def is_held_out(poem: Poem) -> bool:
    """Return whether a poem is for validation, by its characters as they are in the package."""
    digest = hashlib.blake2b("".join(poem.lines).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT == 0


def pieces(poem: Poem) -> set[str]:
    """Return all runs of PIECE characters within a line."""
    found = set()
    for line in poem.lines:
        for start in range(len(line) - PIECE + 1):
            found.add(line[start : start + PIECE])
    return found


class NearDuplicates:
    """Finds poems that share more than the fraction ALIKE of their pieces with one of `poems`."""

    def __init__(self, poems: Iterable[Poem]) -> None:
        self._with: dict[str, list[int]] = {}
        for number, poem in enumerate(poems):
            for piece in pieces(poem):
                self._with.setdefault(piece, []).append(number)

    def __contains__(self, poem: Poem) -> bool:
        mine = pieces(poem)
        shared: Counter[int] = Counter()
        for piece in mine:
            shared.update(self._with.get(piece, ()))
        return bool(shared) and max(shared.values()) > ALIKE * len(mine)


def read(source: Path, counts: Counter[str]) -> dict[tuple[str, ...], Poem]:
    """Return the regulated poems of a package by their lines; of equal ones the first. Count what is left out."""
    found: dict[tuple[str, ...], Poem] = {}
    for name, text in Progress(contents(source), desc="reading", unit=" files"):
        for record in parse_json(text, name, list):
            poem = poem_of(record)
            if poem is None:
                counts["of another form"] += 1
            elif poem.lines in found:
                counts["copies"] += 1
            else:
                found[poem.lines] = poem
    return found


def converter(script: str) -> Callable[[str], str]:
    """Return a function text -> text in `script`, simplified or traditional. Raises ValueError without OpenCC."""
    if script == "traditional":
        return str
    try:
        from opencc import OpenCC
    except ImportError:
        raise ValueError(
            "simplified characters need OpenCC: pip install opencc, or give --script traditional"
        ) from None
    convert: Callable[[str], str] = OpenCC("t2s").convert
    return convert


def write(path: Path, poems: Iterable[Poem], convert: Callable[[str], str]) -> None:
    """Write poems as a .jsonl file, one document a line."""
    lines = []
    for poem in poems:
        document = {"text": convert(poem.text)}
        lines.append(json.dumps(document, ensure_ascii=False) + "\n")
    write_text(path, "".join(lines))
    print(f"{len(lines):,} poems -> {path}")


def main(args: Namespace) -> None:
    """Convert a package as the arguments say, and print how many poems there are and what was left out."""
    convert = converter(args.script)
    counts: Counter[str] = Counter()
    poems = read(Path(args.input), counts).values()
    held_out = [poem for poem in poems if is_held_out(poem)]
    known = NearDuplicates(held_out)
    training = []
    for poem in poems:
        if is_held_out(poem):
            continue
        if poem in known:
            counts["similar to a poem for validation"] += 1
        else:
            training.append(poem)
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("valid", held_out), ("train", training)):
        write(folder / f"{name}.jsonl", chosen, convert)
    left_out = ", ".join(f"{count:,} {why}" for why, count in counts.items())
    print(f"left out: {left_out}")


def build_parser() -> Parser:
    """Return the parser of the tool."""
    parser = Parser((__doc__ or "").split("\n\n")[0], EXAMPLES)
    parser.add_argument("--input", required=True, type=local_path, help="the package: its .tgz file, or a folder")
    parser.add_argument("--output", required=True, type=local_path, help="folder of train.jsonl and valid.jsonl")
    parser.add_argument(
        "--script",
        choices=("simplified", "traditional"),
        default="simplified",
        help="script of the text (default: simplified)",
    )
    return parser


def cli() -> None:
    """Entry point of the command."""
    run(main, build_parser())


if __name__ == "__main__":
    cli()
