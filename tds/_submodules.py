"""Import hook for DeepSpeed's submodules under the name tds: `import tds.runtime.engine`.

A module that defines a class which tds replaces, such as PipelineEngine, is under the name tds a view of DeepSpeed's
module with the class of tds. The packages around it are views, too. All other modules are DeepSpeed's own.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
PACKAGE = __name__.partition(".")[0]
RENAMED = {"TPipelineEngine": f"{PACKAGE}.engine"}  # module of CPM-Pretrain's TDS, an older engine -> its name here

REMOVED = {  # modules that CPM-Pretrain's TDS had or imported, and what to use instead of them
    "pt": f"{PACKAGE}.runtime.utils, {PACKAGE}.runtime.config or {PACKAGE}.runtime.fp16.loss_scaler",
    "utils.distributed": f"{PACKAGE}.init_distributed",
}
MOVED_NAMES = {  # names that CPM-Pretrain's TDS took from DeepSpeed, and the DeepSpeed modules that have them now
    "ADAM_OPTIMIZER": "deepspeed.runtime.engine",
    "LAMB_OPTIMIZER": "deepspeed.runtime.engine",
    "add_tuning_arguments": "deepspeed.runtime.lr_schedules",
}
REPLACED = (  # classes of DeepSpeed -> those of tds that replace them in modules under the name tds
    ("deepspeed.runtime.pipe.engine:PipelineEngine", f"{PACKAGE}.engine:PipelineEngine"),
    ("deepspeed.runtime.pipe.module:PipelineModule", f"{PACKAGE}.pipe:PipelineModule"),
    ("deepspeed.runtime.engine:DeepSpeedEngine", f"{PACKAGE}.base_engine:Engine"),
)
VIEWED = "deepspeed.runtime", "deepspeed.runtime.pipe", *(theirs.partition(":")[0] for theirs, _ in REPLACED)


def install() -> None:
    """Install the import hook, so that `import tds.x` imports `deepspeed.x` if tds has no file x.py."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # This finder must come first, or Python would load a second copy of a module from DeepSpeed's folder.
        sys.meta_path.insert(0, _Finder())


@functools.cache
def _replacement_classes() -> dict[int, Any]:
    """Map the id of each class of DeepSpeed that tds replaces to the class of tds."""
    return {id(resolve_name(theirs)): resolve_name(ours) for theirs, ours in REPLACED}


def tds_version_of(value: Any) -> Any:
    """Return what stands under the name tds for `value`, an attribute of a module of DeepSpeed."""
    if isinstance(value, ModuleType) and value.__name__ in VIEWED:
        return importlib.import_module(value.__name__.replace("deepspeed", PACKAGE, 1))
    return _replacement_classes().get(id(value), value)


class _View(ModuleType):
    """A module of DeepSpeed with the classes of tds; an attribute that is set is set in DeepSpeed's module."""

    def __init__(self, theirs: ModuleType) -> None:
        super().__init__(theirs.__name__, theirs.__doc__)
        super().__setattr__("_theirs", theirs)

    def __getattr__(self, name: str) -> Any:
        return tds_version_of(getattr(super().__getattribute__("_theirs"), name))

    def __setattr__(self, name: str, value: Any) -> None:
        # importlib sets `__spec__` and submodules of a module; those of this view differ from DeepSpeed's.
        if name.startswith("__") or isinstance(value, _View):
            super().__setattr__(name, value)
        else:
            setattr(self._theirs, name, value)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """The names that `from tds.x import *` imports and that tools which patch modules restore."""
        return {name: tds_version_of(value) for name, value in vars(self._theirs).items()}

    def __dir__(self) -> list[str]:
        return dir(self._theirs)


class _Finder(MetaPathFinder):
    """Import finder for submodules of tds that have no file in tds: it finds DeepSpeed's submodules instead."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of e.g. tds.runtime.utils, which loads deepspeed.runtime.utils; None: not for this finder."""
        package, _, inner = name.partition(".")
        if package != PACKAGE or not inner or (HERE / f"{inner}.py").is_file():
            return None  # not a submodule of tds, or one that tds has itself
        if inner in REMOVED:
            raise ModuleNotFoundError(f"{name}, a part of CPM-Pretrain's TDS, is gone: use {REMOVED[inner]}", name=name)
        theirs = RENAMED.get(inner, f"deepspeed.{inner}")
        if importlib.util.find_spec(theirs) is None:
            return None  # DeepSpeed has no such module, so Python raises its usual error
        return ModuleSpec(name, _Alias(theirs))


class _Alias(Loader):
    """Loader that imports the module `theirs` and returns it under the requested name, e.g. `tds.runtime.engine`."""

    def __init__(self, theirs: str) -> None:
        self._theirs = theirs

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._theirs)
        self._spec = module.__spec__
        return _View(module) if self._theirs in VIEWED else module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has overwritten DeepSpeed's own spec of the module
