"""Whoever calls a public function on tensors reads their shapes in its docstring."""

import ast
from collections.abc import Iterator

from tests.support import ROOT

ROOMS = ("megatron/mpu", "megatron/model", "megatron/optim", "megatron/utils.py")


def _public(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public(node.body)
        elif isinstance(node, ast.FunctionDef) and (node.name == "__call__" or not node.name.startswith("_")):
            yield node


def without_shapes(text: str) -> list[str]:
    """Public functions whose signature has tensors and whose docstring has neither [shape] nor the word scalar."""
    found = []
    for node in _public(ast.parse(text).body):
        every = [*(a.annotation for a in (*node.args.args, *node.args.kwonlyargs)), node.returns]
        names = {n.id for each in every if each for n in ast.walk(each) if isinstance(n, ast.Name)}
        doc = ast.get_docstring(node) or ""
        if "Tensor" in names and "[" not in doc and "scalar" not in doc:
            found.append(node.name)
    return found


def test_public_functions_on_tensors_give_shapes() -> None:
    for room in ROOMS:
        path = ROOT / room
        for file in [path] if path.is_file() else sorted(path.glob("*.py")):
            assert not without_shapes(file.read_text()), file


def test_one_without_is_found() -> None:
    text = "def f(x: Tensor):\n    'Twice.'\ndef g(x: Tensor):\n    '[b] -> [b]'\ndef _h(x: Tensor): ...\n"
    assert without_shapes(text) == ["f"]
