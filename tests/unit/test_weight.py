"""No package may have more tokens of code than LIMITS allows; a change that raises a limit must say why in its message.

Tokens of code are counted without comments, blank lines and docstrings, which may grow freely.
"""

import ast
import io
import tokenize
from pathlib import Path

import pytest

from tests.support import ROOT

# Package -> (tokens of code, folders that hold modules). Lower a limit when the code has become smaller.
LIMITS = {
    "tds": (62_620, 1),
    "megatron": (212_290, 15),
    "megatron_compat": (13_416, 2),
    "data_utils": (37_760, 1),
    "megatron_tools": (85_000, 7),
}
SLACK = 0.02  # if the code is more than this fraction below its limit, lower the limit
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def tokens_of(source: str) -> int:
    """Return the number of tokens of Python source without comments, layout and docstrings."""
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and ast.get_docstring(node, clean=False) is not None
    }
    return sum(
        token.type not in LAYOUT and not (token.type == tokenize.STRING and token.start[0] in docstrings)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
    )


def weight_of(package: Path) -> tuple[int, int]:
    """Return the tokens of code in a package, and the number of folders that hold modules."""
    files = sorted(package.rglob("*.py"))
    return sum(tokens_of(file.read_text(encoding="utf-8")) for file in files), len({file.parent for file in files})


def test_tokens_are_counted_without_docstrings_and_comments() -> None:
    assert tokens_of('"""Doc."""\n\n\ndef f(x):  # why\n    """Doc."""\n    return x\n') == len(
        ["def", "f", "(", "x", ")", ":", "return", "x"]
    )


@pytest.mark.parametrize("package", LIMITS)
def test_the_code_only_becomes_smaller(package: str) -> None:
    tokens, folders = weight_of(ROOT / package)
    limit, rooms = LIMITS[package]
    assert tokens <= limit, (
        f"{package} has {tokens} tokens of code: make it smaller, or say why it grows and raise LIMITS"
    )
    assert tokens >= limit * (1 - SLACK), f"{package} has only {tokens} tokens of code: lower LIMITS"
    assert folders == rooms, f"{package} has {folders} folders with modules"
