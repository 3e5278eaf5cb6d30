"""The rules of the house, read off the source. A new arrow is a decision: change MAY_IMPORT in the same commit."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

# Package -> which of ours it may import. Longest name wins.
MAY_IMPORT = {
    "tds": set(),
    "data_utils": set(),
    "megatron.atomic": set(),
    "megatron.config": set(),
    "megatron.config.ds_config": {"tds"},
    "megatron.mpu": set(),
    "megatron.tokenizer": {"megatron.atomic"},
    "megatron.data": set(),
    "megatron.kernels": {"megatron.config", "megatron.ranks.device"},
    "megatron.model": {"megatron.mpu", "megatron.config", "megatron.kernels"},
    "megatron.model.pipe": {"tds", "megatron.mpu", "megatron.config", "megatron.model"},
    "megatron.optim": {"megatron.mpu", "megatron.config", "megatron.kernels"},
    "megatron.ranks": {"tds", "megatron.config", "megatron.mpu", "megatron.model"},
    "megatron.ranks.device": set(),
    "megatron.checkpointing": {
        "tds",
        "megatron.atomic",
        "megatron.config",
        "megatron.ranks",
        "megatron.mpu",
        "megatron.model",
        "megatron.optim",
        "megatron.data",
        "megatron.tokenizer",
    },
    "megatron.convert": {
        "megatron.config",
        "megatron.mpu",
        "megatron.model",
        "megatron.tokenizer",
        "megatron.checkpointing",
    },
    "megatron.inference": {"megatron.mpu", "megatron.model", "megatron.tokenizer"},
    "megatron.training": {
        "tds",
        "megatron.atomic",
        "megatron.config",
        "megatron.config.ds_config",
        "megatron.ranks",
        "megatron.ranks.device",
        "megatron.mpu",
        "megatron.model",
        "megatron.optim",
        "megatron.data",
        "megatron.tokenizer",
        "megatron.checkpointing",
    },
    "megatron.utils": {"megatron.mpu"},
    "megatron": {"megatron.mpu", "megatron.ranks", "megatron.training"},  # what tutorials import from here
}
# Package -> which of the outside world it may import beside the standard library.
OUTSIDE = {
    "megatron.atomic": set(),
    "tds": {"torch", "deepspeed"},
    "data_utils": {"regex", "zstandard", "datasketch", "pyarrow", "ray"},  # each imported where it is needed
    "megatron.config": set(),
    "megatron.kernels": {"torch", "apex"},
    "megatron.mpu": {"torch"},
    "megatron.tokenizer": {"numpy", "sentencepiece", "jieba", "rjieba", "tokenizers"},
    "megatron.data": {"numpy", "torch"},
    "megatron.model": {"torch"},
    "megatron.optim": {"torch"},
    "megatron.ranks": {"torch", "tqdm"},
    "megatron.checkpointing": {"torch", "safetensors"},
    "megatron.convert": {"torch", "transformers", "sentencepiece", "tokenizers"},
    "megatron.inference": {"torch", "lm_eval"},
    "megatron.training": {"torch", "tqdm", "tensorboard"},
    "megatron": {"torch"},
}
PACKAGES = ("megatron", "tds", "data_utils", "tools")
STANDARD = set(__import__("sys").stdlib_module_names)


def owner(module: str, packages: object = MAY_IMPORT) -> str | None:
    names = [p for p in packages if (module + ".").startswith(p + ".")]  # type: ignore[attr-defined]
    return max(names, key=len, default=None)


def sources(root: Path = ROOT) -> Iterator[tuple[Path, str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            yield path, module, ast.parse(path.read_text())
    for path in sorted(root.glob("pretrain_*.py")):
        yield path, path.stem, ast.parse(path.read_text())


def imported(path: Path, tree: ast.Module, root: Path) -> Iterator[str]:
    here = path.relative_to(root).parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level + 1]) if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def broken_arrows(root: Path) -> list[str]:
    bad = []
    for path, module, tree in sources(root):
        home = owner(module)
        if home is None:
            continue
        for target in imported(path, tree, root):
            ours, top = owner(target), target.split(".")[0]
            mine = ours is None or (home + ".").startswith(ours + ".") or (ours + ".").startswith(home + ".")
            if ours and not mine and ours not in MAY_IMPORT[home]:
                bad.append(f"{path.relative_to(root)} imports {target}")
            outside = OUTSIDE[owner(module, OUTSIDE) or ""]
            known = {"megatron", "tds", "data_utils"} | STANDARD | outside
            upward = top == "megatron" and ours is None and target != "megatron.mpu"
            if top not in known or upward:
                bad.append(f"{path.relative_to(root)} imports {target}")
    return bad


def test_arrows() -> None:
    assert broken_arrows(ROOT) == []


def test_a_broken_arrow_is_found(tmp_path: Path) -> None:
    for name, text in {
        "megatron/mpu/layers.py": "from .mesh import current\nfrom megatron.config import Config\nimport numpy\n",
        "megatron/model/gpt2.py": "from megatron import mpu\nfrom ..config import ModelConfig\nimport tds as deepspeed\n",
        "megatron/model/pipe.py": "import tds\nfrom .gpt2 import GPT2Model\nfrom ..training import pretrain\n",
        "tds/engine.py": "import deepspeed\nfrom megatron.mpu import get_topology\n",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert sorted(broken_arrows(tmp_path)) == [
        "megatron/model/gpt2.py imports tds",
        "megatron/model/pipe.py imports megatron.training.pretrain",
        "megatron/mpu/layers.py imports megatron.config.Config",
        "megatron/mpu/layers.py imports numpy",
        "tds/engine.py imports megatron.mpu.get_topology",
    ]


def test_no_circles_inside_a_package() -> None:
    """Files of a package import each other one way."""
    graph: dict[str, set[str]] = {}
    for path, module, tree in sources():
        top = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
        found = imported(path, ast.Module(body=list(top), type_ignores=[]), ROOT)
        graph[module] = set(found)
    modules = set(graph)
    edges = {m: {max((x for x in modules if (t + ".").startswith(x + ".")), key=len, default="") for t in targets} - {"", m}
             for m, targets in graph.items()}  # fmt: skip
    edges = {
        m: {t for t in to if t not in ("megatron", "tds", "megatron.mpu", "megatron.model")} for m, to in edges.items()
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for target in edges[module]:
                visit(target, (*path, module))
            done.add(module)

    for module in edges:
        visit(module, ())


@pytest.mark.parametrize("path", [p for p, _, _ in sources()], ids=lambda p: str(p.relative_to(ROOT)))
def test_sizes(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400, "one idea a file, at most 400 lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{node.name} does not fit on a screen"


def test_every_file_says_what_it_holds() -> None:
    for path, _, tree in sources():
        assert ast.get_docstring(tree), path


def test_settings_are_passed_not_looked_up() -> None:
    """get_args() is for entry scripts; torch.cuda stands in one file; nobody declares globals."""
    for path, module, tree in sources():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Name)
                and node.id == "get_args"
                and module.startswith(("megatron.model", "megatron.mpu", "megatron.data", "tds"))
            ):
                pytest.fail(f"{path} calls get_args")
            if isinstance(node, ast.Attribute) and node.attr == "cuda" and module != "megatron.ranks.device":
                pytest.fail(f"{path} names cuda")
            assert not isinstance(node, ast.Global), f"{path} declares a global"


def test_the_project_names_no_place_of_ours() -> None:
    """No absolute paths, no loose ends."""
    for path, _, _ in sources():
        text = path.read_text()
        for word in ("/root/", "/home/", "/tmp/", "TODO", "FIXME", "XXX"):
            assert word not in text, f"{word} in {path}"
