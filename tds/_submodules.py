"""Import hook for DeepSpeed's submodules under the name tds: `import tds.runtime.engine`."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
PACKAGE = __name__.partition(".")[0]
RENAMED = {"TPipelineEngine": f"{PACKAGE}.engine"}  # module of CPM-Pretrain's TDS, an older engine -> its name here

GONE = {  # modules that CPM-Pretrain's TDS had or imported, and what to use instead of them
    "pt": f"{PACKAGE}.runtime.utils, {PACKAGE}.runtime.config or {PACKAGE}.runtime.fp16.loss_scaler",
    "utils.distributed": f"{PACKAGE}.init_distributed",
}
MOVED = {  # names that CPM-Pretrain's TDS took from DeepSpeed, and the DeepSpeed modules that have them now
    "ADAM_OPTIMIZER": "deepspeed.runtime.engine",
    "LAMB_OPTIMIZER": "deepspeed.runtime.engine",
    "add_tuning_arguments": "deepspeed.runtime.lr_schedules",
}


def install() -> None:
    """Install the import hook, so that `import tds.x` imports `deepspeed.x` if tds has no file x.py."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # This finder must come first, or Python would load a second copy of a module from DeepSpeed's folder.
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Import finder for submodules of tds that have no file in tds: it finds DeepSpeed's submodules instead."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, inner = name.partition(".")
        if package != PACKAGE or not inner or (HERE / f"{inner}.py").is_file():
            return None
        if inner in GONE:
            raise ModuleNotFoundError(f"{name}, a part of CPM-Pretrain's TDS, is gone: use {GONE[inner]}", name=name)
        theirs = RENAMED.get(inner, f"deepspeed.{inner}")
        if importlib.util.find_spec(theirs) is None:
            return None
        return ModuleSpec(name, _Alias(theirs))


class _Alias(Loader):
    """Loader that imports the module `theirs` and returns it under the requested name, e.g. `tds.runtime.engine`."""

    def __init__(self, theirs: str) -> None:
        self._theirs = theirs

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._theirs)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has overwritten DeepSpeed's own spec of the module
