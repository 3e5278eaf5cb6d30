"""Every public name has a docstring, and docstrings of public functions with tensors give shapes."""

import ast
from collections.abc import Iterator

from megatron.config.feature_settings import FeatureSettings
from megatron.training import Feature
from tests.support import ROOT

ROOMS = ("megatron/mpu", "megatron/model", "megatron/optim", "megatron/tasks", "megatron/utils.py")


def _public(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public(node.body)
        elif isinstance(node, ast.FunctionDef) and (node.name == "__call__" or not node.name.startswith("_")):
            yield node


def without_shapes(text: str) -> list[str]:
    """Return public functions that take or return a Tensor and whose docstrings contain neither "[" nor "scalar"."""
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


# Classes whose methods are documented in a base class or protocol.
OF_A_PROTOCOL = {
    "HFTokenizer",
    "SentencePieceTokenizer",
    "PipeEngine",
    "NoPipeEngine",
    "PlainEngine",
    "FunctionsTask",
    "OverlappedReduction",
    "Bf16Reduction",
    "ZeroReduction",
    "Parser",
}
OF_EVERY_COMMAND = {"main", "build_parser", "cli"}
# Methods that the base classes describe.
OF_A_FEATURE = {name for name in (*vars(Feature), *vars(FeatureSettings)) if not name.startswith("_")}


def _undescribed(source: str, path: str) -> Iterator[str]:
    """Yield the public classes, functions and methods of a file that lack a docstring."""

    def inside(node: ast.Module | ast.ClassDef, owner: str) -> Iterator[str]:
        for each in node.body:
            if not isinstance(each, (ast.FunctionDef, ast.ClassDef)) or each.name.startswith("_"):
                continue
            if owner in features and each.name in OF_A_FEATURE:
                continue
            command = path.startswith(("data_utils/", "megatron_tools/")) and each.name in OF_EVERY_COMMAND
            if ast.get_docstring(each) is None and owner not in OF_A_PROTOCOL and not command:
                yield f"{path} {owner and owner + '.'}{each.name}"
            if isinstance(each, ast.ClassDef):
                yield from inside(each, each.name)

    tree = ast.parse(source)
    features = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and {"Feature", "FeatureSettings"} & set(_bases(node))
    }
    yield from inside(tree, "")


def _bases(node: ast.ClassDef) -> list[str]:
    return [base.id for base in node.bases if isinstance(base, ast.Name)]


def test_public_names_have_docstrings() -> None:
    files = [
        path
        for package in ("megatron", "megatron_compat", "megatron_tools", "tds", "data_utils")
        for path in sorted((ROOT / package).rglob("*.py"))
    ]
    assert [name for path in files for name in _undescribed(path.read_text(), str(path.relative_to(ROOT)))] == []
    assert list(_undescribed("class A:\n    def f(self): ...\n    def _g(self): ...\ndef main(): ...", "tds/x.py")) == [
        "tds/x.py A", "tds/x.py A.f", "tds/x.py main",
    ]  # fmt: skip
