"""Write the tables of measurements in docs/benchmarks.md and docs/scaling.md from benchmarks/results.toml.

The tables in docs/releases.md are made by docs/site/releases.py.

`python -m docs.site.results` writes each table between `<!--table:NAME-->` and `<!--/table-->` of the English and the
Chinese page; a test fails when a page is stale.
"""

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from . import releases
from .reference import table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results.toml"
PAGES = tuple(
    ROOT / "docs" / f"{name}{end}.md"
    for name in ("benchmarks", "poet", "scaling", "releases", "reliability")
    for end in ("", "_zh")
)
BLOCK = re.compile(r"(<!--table:([\w-]+)-->\n).*?(?=<!--/table-->)", re.DOTALL)


@cache
def results() -> dict[str, Any]:
    """Return the content of results.toml; decimal numbers are strings, so that 0.90 keeps its last digit."""
    return tomllib.loads(RESULTS.read_text(encoding="utf-8"), parse_float=str)


def _cell(value: Any, language: str) -> str:
    """Return the text of a table cell in the language of the page.

    value: a number, text, or a list [median, lowest, highest], which becomes `median (lowest–highest)`.
    """
    if isinstance(value, list):
        middle, low, high = (_cell(each, language) for each in value)
        return f"{middle} ({low}–{high})"
    if isinstance(value, int):
        return f"{value:,}"
    return results()["zh"].get(value, value) if language == "zh" else value


def block(name: str, language: str) -> str:
    """Return the table `name` of results.toml as Markdown, below its caption.

    The caption names the command that measured the table, and the date and machine if results.toml has them.
    """
    if name == "releases":
        return releases.block(language)
    if name == "packages":
        return releases.packages_block(language)
    found = results()["table"][name]
    machine = results()["machines"].get(found.get("machine"), {}).get(language)
    measured = "Measured with `{}`" if language == "en" else "用 `{}` 测量"
    command = measured.format(found["command"]) if "command" in found else None
    comma, colon = (", ", ":") if language == "en" else ("，", "：")
    caption = comma.join(filter(None, (command, found.get("date"), machine)))
    heads, *rows = (tuple(_cell(each, language) for each in row) for row in (found["columns"], *found["rows"]))
    return (f"{caption}{colon}\n\n" if caption else "") + table(heads, rows)


def filled(path: Path) -> str:
    """Return the text of a page with its tables rewritten from results.toml."""
    language = "zh" if path.stem.endswith("_zh") else "en"
    text = path.read_text(encoding="utf-8")
    return BLOCK.sub(lambda found: f"{found[1]}\n{block(found[2], language)}\n", text)


def pages() -> dict[Path, str]:
    """Return the expected contents of the pages that have tables of measurements."""
    return {path: filled(path) for path in PAGES}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
