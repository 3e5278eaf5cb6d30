"""The project's rules, checked on the source: imports, private names, file sizes and others.

If a new import between packages is intended, add it to MAY_IMPORT in the same commit.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

# Packages of the core, all of which data_utils and megatron_tools may import.
CORE = {
    *(
        "megatron._compat",
        "megatron._torch",
        "megatron.atomic",
        "megatron.config",
        "megatron.config.ds_config",
        "megatron.mpu",
    ),
    *("megatron.tokenizer", "megatron.data", "megatron.model", "megatron.model.pipe", "megatron.model.t5_pipe"),
    *("megatron.optim", "megatron.ranks", "megatron.ranks.device", "megatron.checkpointing", "megatron.training"),
    *(
        "megatron.tasks",
        "megatron.storage",
        "megatron.utils",
        "megatron.locks",
        "megatron.features",
        "megatron.engines",
    ),
    *("megatron.estimate", "megatron.timers"),
}
# Package -> packages of this project that it may import. The longest matching name applies.
MAY_IMPORT = {
    "tds": set(),
    "megatron._torch": set(),  # gives access to private names of torch
    "megatron.atomic": set(),
    "megatron.storage": set(),
    "megatron.config": {"megatron.storage"},
    "megatron.config.ds_config": {"tds", "megatron.storage", "megatron.config.ds_file"},
    "megatron.config.ds_file": {"tds", "megatron.storage"},
    "megatron.config.schedules": {"tds"},
    "megatron.fused": {"megatron._torch"},  # functions that CUDA runs compiled
    "megatron.mpu": {"megatron._torch", "megatron.fused"},
    "megatron.mpu.grads": {"tds", "megatron.mpu", "megatron.mpu.mesh"},
    "megatron.mpu.mesh": {"tds", "megatron.mpu"},
    "megatron.tokenizer": {"megatron.atomic"},
    "megatron.data": {"megatron.atomic", "megatron.storage", "megatron.config"},
    "megatron.kernels": set(),
    "megatron.model": {"megatron._torch", "megatron.fused", "megatron.mpu", "megatron.config", "megatron.kernels"},
    "megatron.model.cuts": {"tds", "megatron.config", "megatron.model"},
    "megatron.model.pipe": {"tds", "megatron.mpu", "megatron.config", "megatron.model", "megatron.model.cuts"},
    "megatron.model.t5_pipe": {"megatron.config", "megatron.model", "megatron.model.pipe"},
    "megatron.optim": {"megatron.mpu", "megatron.config", "megatron.kernels"},
    "megatron.optim.whole_matrices": {"tds", "megatron.mpu"},
    "megatron.ranks": {
        "tds",
        "megatron._torch",
        "megatron.atomic",
        "megatron.config",
        "megatron.data",  # to kill data workers
        "megatron.mpu",
        "megatron.model",
    },
    "megatron.ranks.device": {"megatron._torch"},
    "megatron.checkpointing": {
        "tds",
        "megatron.atomic",
        "megatron.config",
        "megatron.ranks",
        "megatron.mpu",
        "megatron.model",
        "megatron.optim",
        "megatron.data",
        "megatron.storage",
        "megatron.tokenizer",
    },
    "megatron.training": {
        "tds",
        "megatron._torch",
        "megatron.atomic",
        "megatron.config",
        "megatron.config.ds_config",
        "megatron.ranks",
        "megatron.ranks.device",
        "megatron.mpu",
        "megatron.model",
        "megatron.model.pipe",
        "megatron.model.t5_pipe",
        "megatron.optim",
        "megatron.data",
        "megatron.storage",
        "megatron.tokenizer",
        "megatron.checkpointing",
        "megatron.engines",
        "megatron.locks",
        "megatron.timers",
        "megatron.tasks",  # for the type of `pretrain`, which is loaded on first use
    },
    "megatron.engines": {
        "tds",
        "megatron.config",
        "megatron.config.ds_config",
        "megatron.mpu",
        "megatron.model",
        "megatron.optim",
        "megatron.ranks",
        "megatron.timers",
        "megatron.training",
    },
    "megatron.estimate": {
        "tds",
        "megatron._torch",
        "megatron.config",
        "megatron.config.ds_config",
        "megatron.model",
        "megatron.model.cuts",
        "megatron.model.pipe",
        "megatron.model.t5_pipe",
        "megatron.mpu",
    },
    "megatron.timers": {"tds", "megatron.ranks"},
    # A run finds its features by the names in config/feature_table.py, so no package of the core imports them.
    "megatron.features": {
        "tds",
        "megatron._torch",
        "megatron.atomic",
        "megatron.checkpointing",
        "megatron.config",
        "megatron.config.ds_config",
        "megatron.ranks",
        "megatron.storage",
        "megatron.ranks.device",
        "megatron.mpu",
        "megatron.model",
        "megatron.model.pipe",
        "megatron.model.t5_pipe",
        "megatron.optim",
        "megatron.data",
        "megatron.tokenizer",
        "megatron.timers",
        "megatron.training",
        "megatron.engines",
        "megatron.estimate",
    },
    "megatron.locks": {"tds", "megatron.atomic", "megatron.ranks", "megatron.training", "megatron.engines"},
    "megatron.tasks": {
        "megatron.ranks",
        "megatron.config",
        "megatron.mpu",
        "megatron.model",
        "megatron.model.pipe",
        "megatron.model.t5_pipe",
        "megatron.data",
        "megatron.tokenizer",
        "megatron.training",
        "megatron.utils",
    },
    "megatron.utils": {"megatron.mpu"},
    "megatron": {"megatron._compat", "megatron.mpu", "megatron.ranks", "megatron.training"},
    # The packages beside the core may import the whole core; the core never imports these packages.
    "megatron_compat": {"megatron", *CORE},
    "data_utils": {"tds", "megatron", "megatron_compat", *CORE},
    "megatron_tools": {"tds", "data_utils", "megatron", *CORE},
}
# Package -> third-party packages that it may import.
OUTSIDE = {
    "megatron.atomic": set(),
    "megatron.storage": {"fsspec"},
    "tds": {"torch", "deepspeed"},
    "data_utils": {
        "numpy",
        "regex",
        "tokenizers",
        "sentencepiece",
        "torch",
        "tqdm",
        "zstandard",
        "rensa",
        "jinja2",
        "matplotlib",
        "pyarrow",
        "ray",
    },  # optional packages are imported inside functions
    "megatron.config": set(),
    "megatron.kernels": {"torch", "apex"},
    "megatron.mpu": {"torch"},
    "megatron.tokenizer": {"numpy", "sentencepiece", "jieba", "rjieba", "tokenizers", "tiktoken"},
    "megatron.data": {"numpy", "torch"},
    "megatron.model": {"torch"},
    "megatron.optim": {"torch"},
    "megatron.seeds": {"numpy", "torch"},
    "megatron.ranks": {"torch", "tqdm"},
    "megatron.checkpointing": {"torch", "safetensors", "blake3"},
    "megatron.training": {"torch", "tqdm"},
    "megatron.features": {"numpy", "torch", "tqdm", "tensorboard", "wandb", "swanlab", "mlflow", "lm_eval"},
    "megatron.locks": set(),
    "megatron.engines": {"torch"},
    "megatron.estimate": {"torch"},
    "megatron.timers": {"torch", "tqdm"},
    "megatron.tasks": {"torch"},
    "megatron_compat": {"torch"},
    "megatron": {"torch"},
    "megatron_tools": {
        "numpy",
        "torch",
        "tqdm",
        "matplotlib",
        "gradio",
        "transformers",
        "sentencepiece",
        "tokenizers",
    },
}
PACKAGES = ("megatron", "megatron_compat", "megatron_tools", "tds", "data_utils", "tools")
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
            known = {"megatron", "megatron_compat", "megatron_tools", "tds", "data_utils"} | STANDARD | outside
            upward = (
                top == "megatron" and ours is None and target != "megatron.mpu" and home.split(".")[0] == "megatron"
            )
            if top not in known or upward:
                bad.append(f"{path.relative_to(root)} imports {target}")
    return bad


def test_the_core_names_the_package_for_other_frameworks_once() -> None:
    files = [*(ROOT / "megatron").rglob("*.py"), *(ROOT / "tds").rglob("*.py")]
    pattern = re.compile(r"(from|import) megatron_compat|import_module\(f?.megatron_compat")
    naming = [path.name for path in files if pattern.search(path.read_text())]
    assert naming == ["_compat.py"]


def test_arrows() -> None:
    assert broken_arrows(ROOT) == []


def test_a_broken_arrow_is_found(tmp_path: Path) -> None:
    for name, text in {
        "megatron/mpu/layers.py": "from .mesh import current\nfrom megatron.config import Config\nimport numpy\n",
        "megatron/model/gpt2.py": "from megatron import mpu\nfrom ..config import ModelConfig\nimport tds as "
        "deepspeed\n",
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
    """Files of a package do not import each other in a circle."""
    graph: dict[str, set[str]] = {}
    for path, module, tree in sources():
        top = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
        found = imported(path, ast.Module(body=list(top), type_ignores=[]), ROOT)
        graph[module] = set(found)
    modules = set(graph)
    edges = {
        m: {max((x for x in modules if (t + ".").startswith(x + ".")), key=len, default="") for t in targets} - {"", m}
        for m, targets in graph.items()
    }
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


# File -> private names of third-party libraries that it uses. An upgrade of torch may break these files; an upgrade
# of DeepSpeed may break any file in tds/.
PRIVATE = {
    "megatron/_torch.py": {
        "_C",
        "_functional_collectives", "_assert_async", "_base", "_inductor", "_is_amx_tile_supported",
        "_compiled_call_impl", "_linear_pointwise", "_reorder_linear_weight", "_unsafe_view",
        "_non_persistent_buffers_set", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_mm", "_softmax_backward_data", "_version",
        "_monitor_workers", "_remaining_restarts",
        "_SetExcludeDispatchKeyGuard", "_triton", "_will_engine_execute_node", "_world",
    },
    "tds/_torch.py": {
        "_C", "_cdata", "_compiled_call_impl", "_distributed_c10d", "_foreach_mul_", "_foreach_norm", "_functorch",
        "_get_backend", "_get_default_store", "_storage_Use_Count",
    },
    "tds/diagnose.py": {"_current_frames"},  # sys._current_frames: the only way to see another thread's stack
    # DeepSpeed sets ds_shape on partitioned parameters. mpu may not import tds, so mpu itself reads ds_shape.
        "megatron/mpu/parameters.py": {"ds_shape"},
}  # fmt: skip
OF_TORCH = {name for file, names in PRIVATE.items() for name in names if not file.startswith("megatron/mpu/")}
# Undocumented attributes of DeepSpeed's engines, optimizers, modules and parameters, which only tds may use.
OF_DEEPSPEED = {
    "bf16_groups",
    "buffered_allreduce_fallback",
    "check_grad_overflow",
    "cur_iter",
    "cur_scale",
    "ds_id",
    "ds_pipe_replicated",
    "ds_process_group",
    "ds_shape",
    "ds_tensor",
    "enable_backward_allreduce",
    "fp32_groups_gradients",
    "fp32_partitioned_groups_flat",
    "get_grads_for_norm",
    "immediate_grad_update",
    "tied_comms",
    "using_bf16_optimizer",
    "StockPipelineEngine",
    "StockPipelineModule",
}
# Public names with an underscore: some of Python's, and an attribute that users set on their models.
PROMISED = {"_asdict", "_replace", "_exit", "_fields", "_megatron_batch_fn"}


def _own_names(root: Path) -> set[str]:
    """Return the names that classes and modules of this project define."""
    found: set[str] = set()
    for _, _, tree in sources(root):
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    found.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return found


def private_names(root: Path) -> dict[str, set[str]]:
    """Return file -> private names of other libraries that it uses."""
    ours, used = _own_names(root), dict[str, set[str]]()
    for path, module, tree in sources(root):
        found: set[str] = set()
        of_tds = module.split(".")[0] == "tds"
        for node in ast.walk(tree):
            name = ""
            if isinstance(node, ast.Attribute):
                name = node.attr
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and name.startswith("_"):
                    continue
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
                given = node.args[1]
                if node.func.id in ("getattr", "setattr", "hasattr") and isinstance(given, ast.Constant):
                    name = str(given.value)
            private = name.startswith("_") and not name.startswith("__") and name not in ours | PROMISED
            if (private and (not of_tds or name in OF_TORCH)) or (name in OF_DEEPSPEED and not of_tds):
                found.add(name)
        for target in imported(path, tree, root):
            top, *parts = target.split(".")
            if top == "deepspeed" and not of_tds:
                found.add(target)
            if top == "torch" or (top == "tds" and not of_tds):
                found |= {part for part in parts if part.startswith("_") and not part.startswith("__")}
        if found:
            used[str(path.relative_to(root))] = found
    return used


def test_private_names_of_others_stand_behind_one_door() -> None:
    assert private_names(ROOT) == PRIVATE


def test_a_private_name_elsewhere_is_found(tmp_path: Path) -> None:
    for name, text in {
        "megatron/mpu/layers.py": "import torch\ntorch._C._nothing()\nclass A:\n    def _mine(self): self._mine()\n",
        "megatron/training/loop.py": "from tds import _deepspeed\nimport deepspeed\n",
        "tools/train.py": "def f(engine, p):\n    engine.optimizer.bf16_groups\n    getattr(p, 'ds_tensor', p)\n",
        "tds/clip.py": "import torch\nfrom deepspeed import zero\ntorch._foreach_norm([])\n",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert private_names(tmp_path) == {
        "megatron/mpu/layers.py": {"_C", "_nothing"},
        "megatron/training/loop.py": {"_deepspeed", "deepspeed"},
        "tools/train.py": {"bf16_groups", "ds_tensor"},
        "tds/clip.py": {"_foreach_norm"},
    }


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
    """Library code does not call get_args(), and no code uses `global`; only megatron/ranks/device.py uses `.cuda`."""
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
    """The source contains neither absolute paths nor TODO marks."""
    for path, _, _ in sources():
        text = path.read_text()
        for word in ("/root/", "/home/", "/tmp/", "TODO", "FIXME", "XXX"):
            assert word not in text, f"{word} in {path}"
