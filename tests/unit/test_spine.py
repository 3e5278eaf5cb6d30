"""The spine: the files that one reads to follow a text through a GPT-2 in two stages of two tensor-parallel ranks.

Its size may only fall, and so may the number of files that a run imports, and the density of all functions. If a number
has fallen, lower its limit in the same commit.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.runs import Start, make
from tests.support import ROOT, on_ranks
from tests.unit.test_weight import tokens_of

SPINE = [ROOT / line for line in (ROOT / "tests/unit/spine.txt").read_text().split()]
PACKAGES = ("tds", "megatron", "megatron_compat", "megatron_tools", "data_utils")
LOOPS = (ast.For, ast.While)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DECISIONS = (ast.If, ast.IfExp, ast.Try, ast.BoolOp, *LOOPS, *COMPREHENSIONS)
# Limits of the spine, of the imports of a run, and of the density of functions.
FILES, LINES, TOKENS = 49, 7_898, 45_645
IMPORTED = 275
TOKENS_A_LINE, DECISIONS_A_LINE, COMPREHENSIONS_A_FUNCTION = 8.762, 0.2225, 0.302
TUPLE_ASSIGNMENTS, NESTED_COMPREHENSIONS = 0.001, 0.001


def test_the_spine_only_becomes_shorter() -> None:
    texts = [path.read_text(encoding="utf-8") for path in SPINE]
    assert len(set(SPINE)) == len(SPINE) <= FILES
    assert sum(text.count("\n") for text in texts) <= LINES
    assert sum(map(tokens_of, texts)) <= TOKENS


@pytest.mark.parametrize("page", ["docs/design.md", "docs/design_zh.md"])
def test_the_page_gives_the_reading_order(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    order = text[: text.index("| `tds/` |")]  # the table of folders follows
    rows = re.findall(r"^\| `([\w/.]+\.py)` \| (.+) \|$", order, re.M)
    assert [ROOT / name for name, _ in rows] == SPINE
    assert len({sentence for _, sentence in rows}) == len(rows), "each file has a sentence of its own"


def _imported(folder: str, data: str, vocab_file: str) -> int:
    with make(Start("gpt2", Path(folder), "--train-iters 1 --precision fp32"), data, vocab_file):
        names = [name for name in sys.modules if name.split(".")[0] in ("megatron", "tds")]
    return sum(str(ROOT) in (getattr(sys.modules[name], "__file__", None) or "") for name in names)


def test_a_run_imports_no_more_files(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    (count,) = on_ranks(1, _imported, str(tmp_path), tiny_data, vocab_file)
    assert count <= IMPORTED


def _functions() -> Iterator[tuple[list[str], ast.FunctionDef]]:
    """Yield (lines of the body without its docstring, function) of each function of 8 to 45 lines."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            lines = source.split("\n")
            for node in ast.walk(ast.parse(source)):
                if not isinstance(node, ast.FunctionDef):
                    continue
                last = node.end_lineno or 0
                body = node.body[ast.get_docstring(node) is not None :]
                if body and 8 <= last - node.lineno + 1 <= 45:
                    yield lines[body[0].lineno - 1 : last], node


def _is_tuple_assignment(node: Any) -> bool:
    """Return whether a statement assigns a tuple of several values to several names, other than a swap."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    names = {ast.unparse(each) for each in target.elts}
    values = {ast.unparse(each) for each in node.value.elts}
    return names != values


def _nests(node: Any) -> bool:
    """Return whether a comprehension contains another one."""
    if not isinstance(node, COMPREHENSIONS):
        return False
    inner = [each for each in ast.walk(node) if each is not node and isinstance(each, COMPREHENSIONS)]
    return bool(inner) or len(node.generators) > 1


def _measured(body: list[str], node: ast.FunctionDef) -> dict[str, float]:
    """Return the density of a function: tokens a line of code, decisions a line of the whole function, and others."""
    code = [line for line in body if line.strip() and not line.strip().startswith("#")]
    whole = (node.end_lineno or 0) - node.lineno + 1
    inside = [each for statement in node.body for each in ast.walk(statement)]
    return {
        "tokens": (tokens_of("if True:\n" + "\n".join(body)) - 3) / len(code),  # 3 for the added line
        "decisions": sum(isinstance(each, DECISIONS) for each in inside) / whole,
        "comprehensions": sum(isinstance(each, COMPREHENSIONS) for each in inside),
        "tuples": any(map(_is_tuple_assignment, inside)),
        "nested": any(map(_nests, inside)),
    }


@pytest.fixture(scope="module")
def density() -> dict[str, float]:
    """Means over all functions."""
    every = [_measured(body, node) for body, node in _functions()]
    return {name: sum(each[name] for each in every) / len(every) for name in every[0]}


def test_functions_only_become_plainer(density: dict[str, float]) -> None:
    limits = {
        "tokens": TOKENS_A_LINE,
        "decisions": DECISIONS_A_LINE,
        "comprehensions": COMPREHENSIONS_A_FUNCTION,
        "tuples": TUPLE_ASSIGNMENTS,
        "nested": NESTED_COMPREHENSIONS,
    }
    assert {name: round(value, 3) for name, value in density.items() if value > limits[name]} == {}
