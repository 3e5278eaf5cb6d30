"""tds/_contract.py lists exactly the names of DeepSpeed that tds uses, and the installed DeepSpeed has all of them.

The test infers an object's class from its variable: `engine`, `optimizer`, `grid` and others, or `self` in a class of
tds that is derived from a class of DeepSpeed.
"""

import ast
import functools
import importlib
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tds import _contract, _deepspeed
from tds._contract import CONTRACT, Names
from tests.support import ROOT

MODULES = [p for p in sorted((ROOT / "tds").glob("*.py")) if p.name != "_contract.py"]
# Class of tds -> kind of DeepSpeed object that `self` denotes in the methods of this class.
SUBCLASSES = {
    "PipelineEngine": "engine",
    "Engine": "engine",
    "ExtendedEngine": "engine",
    "PipelineHooks": "engine",
    "PipelineOverrides": "engine",
    "PipelineEvaluation": "engine",
    "SplitBackward": "engine",
    "_PipelineProbe": "engine",
    "_PlainProbe": "engine",
    "PipelineModule": "module",
}  # fmt: skip
VARIABLES = {
    "engine": "engine",
    "self._engine": "engine",
    "probe": "engine",
    "StockPipelineEngine": "engine",
    "DeepSpeedEngine": "engine",
    "module": "module",
    "model": "module",
    "StockPipelineModule": "module",
    "self._module": "module",
    "grid": "grid",
    "topology": "topology",
    "optimizer": "optimizer",
    "scaler": "scaler",
    "layer": "layer",
    "parameter": "parameter",
    "p": "parameter",
    "timer": "timer",
    "config_class": "config",
    "accelerator": "accelerator",
    "deepspeed": "deepspeed",
    "_ds": "deepspeed",
    "_deepspeed.deepspeed": "deepspeed",
    "utils": "utils",
    "zero": "zero",
    "checkpointing": "checkpointing",
    "comm": "comm",
    "deepspeed.accelerator": "accelerators",
    "_ds.accelerator": "accelerators",
}
ATTRIBUTES = {
    ("engine", "module"): "module", ("engine", "optimizer"): "optimizer", ("engine", "_config"): "config",
    ("engine", "grid"): "grid", ("engine", "monitor"): "monitor", ("engine", "tput_timer"): "throughput",
    ("optimizer", "loss_scaler"): "scaler", ("grid", "_topo"): "topology", ("module", "_topo"): "topology",
    ("accelerators", "get_accelerator"): "accelerator", ("deepspeed", "checkpointing"): "checkpointing",
    ("deepspeed", "comm"): "comm", ("deepspeed", "zero"): "zero",
}  # fmt: skip
PLACES = {  # kind of object -> the classes or modules of DeepSpeed that define the attributes listed in CONTRACT
    "engine": ("deepspeed.runtime.engine:DeepSpeedEngine", "deepspeed.runtime.pipe.engine:PipelineEngine"),
    "module": ("deepspeed.runtime.pipe.module:PipelineModule",),
    "grid": ("deepspeed.runtime.pipe.topology:PipelineParallelGrid",),
    "topology": ("deepspeed.runtime.pipe.topology:ProcessTopology",),
    "config": ("deepspeed.runtime.config:DeepSpeedConfig",),
    "optimizer": (
        "deepspeed.runtime.bf16_optimizer:BF16_Optimizer",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
        "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer",
    ),
    "scaler": ("deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler",),
    "layer": ("deepspeed.runtime.pipe.module:TiedLayerSpec",),
    "timer": ("deepspeed.utils.timer:SynchronizedWallClockTimer.Timer",),
    "throughput": ("deepspeed.utils.timer:ThroughputTimer",),
    "monitor": ("deepspeed.monitor.monitor:MonitorMaster",),
    "accelerator": ("deepspeed.accelerator.abstract_accelerator:DeepSpeedAccelerator",),
    "accelerators": ("deepspeed.accelerator",),
    "deepspeed": ("deepspeed",),
    "utils": ("deepspeed.utils",),
    "zero": ("deepspeed.runtime.zero",),
    "checkpointing": ("deepspeed.runtime.activation_checkpointing.checkpointing",),
    "comm": ("deepspeed.comm", "deepspeed.comm.torch"),
    "parameter": (),
}
TORCH = {
    "engine": nn.Module,
    "module": nn.Module,
    "layer": nn.Module,
    "parameter": torch.Tensor,
    "optimizer": torch.optim.SGD,
}
# Kind of object -> attributes that users' models, torch or tds define, not DeepSpeed.
OTHERS = {
    "module": {"_megatron_batch_fn", "layer_functions", "weight", "sparse", "__spec__", "training"},
    "optimizer": {
        *("param_groups", "state", "found_inf", "grad_scale", "clip", "norm", "read_norm", "gradient_share"),
        *("squared_norm", "wait", "buckets"),
    },
    "layer": {"sparse", "weight"},
    "parameter": {"spec", "tensor", "replica_group"},
    "zero": {"get"},
}  # fmt: skip


def kind_of(value: ast.expr, inside: str | None) -> str | None:
    """Return the kind of DeepSpeed object, such as "engine", that an expression denotes, or None for other objects.

    inside: name of the enclosing class.
    """
    text = ast.unparse(value)
    if text in ("self", "super()"):
        return SUBCLASSES.get(inside or "")
    if text in VARIABLES:
        return VARIABLES[text]
    if isinstance(value, ast.Call):
        return kind_of(value.func, inside)
    if isinstance(value, ast.Attribute):
        return ATTRIBUTES.get((kind_of(value.value, inside) or "", value.attr))
    return None


def names_of(node: ast.AST, inside: str | None = None) -> Iterator[tuple[str, str, bool]]:
    """Yield (kind of object, attribute, whether tds defines the attribute) for uses of DeepSpeed objects in `node`."""
    if isinstance(node, ast.ClassDef):
        inside = node.name
        for each in node.body if inside in SUBCLASSES else ():
            if isinstance(each, (ast.FunctionDef, ast.AnnAssign)):
                yield (
                    SUBCLASSES[inside],
                    each.name if isinstance(each, ast.FunctionDef) else ast.unparse(each.target),
                    True,
                )
            elif isinstance(each, ast.Assign):
                names = [n.id for target in each.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
                yield from ((SUBCLASSES[inside], name, True) for name in names)
    if isinstance(node, ast.Attribute) and (kind := kind_of(node.value, inside)):
        yield kind, node.attr, isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
        name, kind = node.args[1], kind_of(node.args[0], inside)
        if kind and isinstance(name, ast.Constant):
            yield kind, name.value, False
    for child in ast.iter_child_nodes(node):
        yield from names_of(child, inside)


@functools.cache
def in_code() -> dict[str, set[str]]:
    """Return kind of DeepSpeed object -> attributes that tds uses, without those that only tds defines."""
    used, ours = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for path in MODULES:
        for kind, name, defined in names_of(ast.parse(path.read_text())):
            (ours if defined else used)[kind].add(name)
    found = {}
    for kind, places in PLACES.items():
        theirs = set().union(*(release_names(place) for place in places))
        names = {name for name in used[kind] | ours[kind] if name in theirs or name not in ours[kind]}
        found[kind] = names - set(dir(TORCH.get(kind, object))) - OTHERS.get(kind, set())
    return found


@functools.cache
def release_names(place: str) -> frozenset[str]:
    """Return the attributes of a class or module of the installed DeepSpeed, including those that its methods set."""
    module, _, path = place.partition(":")
    thing: Any = functools.reduce(getattr, filter(None, path.split(".")), importlib.import_module(module))
    found = set(dir(thing))
    for each in getattr(thing, "__mro__", ()):
        if each.__module__.startswith("deepspeed"):
            tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found.add(node.attr)
                elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "self.__dict__":
                    found.add(ast.literal_eval(node.slice))
    return frozenset(found)


def listed(kind: str) -> set[str]:
    if kind == "parameter":
        return set(_contract.OF_PARAMETERS.split())
    return {name for each in CONTRACT if each.place in PLACES[kind] for name in " ".join(each[2:]).split()}


@functools.cache
def nodes_of_tds() -> tuple[ast.AST, ...]:
    return tuple(node for path in MODULES for node in ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports() -> frozenset[tuple[str, str]]:
    """Return (module, name) for each name that tds imports from DeepSpeed."""
    froms = (node for node in nodes_of_tds() if isinstance(node, ast.ImportFrom))
    theirs = (node for node in froms if (node.module or "").startswith("deepspeed"))
    return frozenset((node.module or "", alias.name) for node in theirs for alias in node.names)


@pytest.mark.parametrize("kind", PLACES)
def test_the_code_uses_the_listed_names_and_no_others(kind: str) -> None:
    words = {node.value for node in nodes_of_tds() if isinstance(node, ast.Constant)}
    imported = {name for module, name in imports() if module in PLACES[kind]}
    found = in_code()[kind] - {name for _, name in imports() if kind == "deepspeed"}
    assert found <= listed(kind), "used, but not in tds/_contract.py"
    assert listed(kind) <= found | imported | words | OTHERS.get(kind, set()), "in tds/_contract.py, but not used"


def test_every_import_of_deepspeed_is_listed() -> None:
    known = {(each.place, name) for each in CONTRACT for name in each.uses.split()}
    assert imports() <= known
    unused = {each for each in known if each[0].startswith("deepspeed.") and ":" not in each[0]} - imports()
    called = listed("checkpointing") | listed("accelerators") | listed("comm") | listed("utils") | listed("zero")
    assert {name for _, name in unused} <= called, "in tds/_contract.py, but not imported"


@pytest.mark.parametrize("names", CONTRACT, ids=lambda names: f"{names.place.rpartition('.')[2]} {names.purpose}")
def test_the_installed_release_has_every_name(names: Names) -> None:
    everything = " ".join(names[2:]).split()
    assert sorted(set(everything) - release_names(names.place)) == []
    assert all(list(group.split()) == sorted(group.split()) for group in names[2:])


def test_deepspeed_uses_what_a_distributed_optimizer_offers() -> None:
    tree = ast.parse((ROOT / "tds" / "distributed_optimizer.py").read_text())
    ours = {
        name
        for node in ast.walk(tree)
        for name in (getattr(node, "attr", ""), getattr(node, "name", ""), getattr(node, "id", ""))
    }
    runtime = Path(_deepspeed.deepspeed.__file__).parent / "runtime"
    text = "".join(path.read_text() for path in runtime.glob("*.py"))
    for name in _contract.OF_OPTIMIZERS.split():
        assert name in ours | {"overflow"}, f"tds.DistributedOptimizer has no {name}"
        assert name in text, f"DeepSpeed no longer uses {name}"


def test_a_missing_name_is_reported_with_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _deepspeed.missing_names() == []
    gone = (
        Names("deepspeed.runtime.engine:DeepSpeedEngine", "the optimizer step", overrides="_take_model_stride"),
        Names("deepspeed.runtime.nowhere", "training in fp16", uses="FP16"),
    )
    monkeypatch.setattr(_deepspeed, "CONTRACT", gone)
    lacks = (
        r"DeepSpeedEngine\._take_model_stride, needed for the optimizer step.*nowhere\.FP16, needed for training "
        r"in fp16"
    )
    with pytest.raises(_deepspeed.UnsupportedDeepSpeed, match=lacks):
        _deepspeed.refuse_other_releases(_deepspeed.deepspeed.__version__)
    monkeypatch.setenv("TDS_ANY_DEEPSPEED", "1")
    assert "_take_model_stride" in str(_deepspeed.refuse_other_releases("0.19.0"))
