"""Old import paths of moved modules. They still work, with a warning; the next version drops them."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

# Old package -> new package -> modules that moved there.
_PACKAGES = {
    "megatron.commands": {
        "data_utils": "chats clean_corpus cli inspect_data journal missing preprocess_data progress sample_view "
        "train_tokenizer",
        "megatron_tools": "launch",
        "megatron_tools.convert": "convert_checkpoint export_roles export_tokenizer",
        "megatron_tools.doctor": "doctor",
        "megatron_tools.plan": "plan",
        "megatron_tools.report": "draw_schedule report unigram",
        "megatron_tools.verify": "verify_layout verify_rank",
        "megatron_tools.write": "evaluate generate prompts",
    },
    "megatron.checks": {"megatron_tools.doctor": "corpora finding machine memory network run_dir settings"},
    "megatron.convert": {
        "megatron_tools.convert": "hf_config hf_folder hf_keys hf_llama hf_names hf_rope hf_tokenizer megatron_lm "
        "megatron_settings plain_pickle"
    },
    "megatron.inference": {
        "megatron_tools.write": "generation lm_eval questions",
        "megatron.features": "scoring",
    },
    "megatron.planning": {
        "megatron.estimate": "activations sizes",
        "megatron_tools.plan": "cluster cost layouts report scripts",
    },
    "megatron.reporting": {"megatron_tools.report": "curves differences drawing facts page runs timetable"},
    "megatron.verification": {"megatron_tools.verify": "compare layouts recorder records"},
    "megatron.config": {"megatron.config.foreign": "dependent outcomes translate"},
    "megatron.data": {"data_utils": "indexed_writer merge_split"},
    "megatron.checkpointing": {"megatron_tools": "shapes"},
    "megatron_tools.write": {"megatron.features": "scoring"},
}
MOVED = {
    "megatron.config.foreign_core": "megatron.config.foreign.core",
    "megatron.config.foreign_flags": "megatron.config.foreign.flags",
    "megatron.planning.memory": "megatron.estimate.per_rank",
    "megatron.tokenizer.chat": "data_utils.chat_templates",
    "megatron.training.functions": "megatron.compat.pretrain",
    "megatron.tokenizer.train": "data_utils.tokenizer_training",
    **{
        f"{old}.{name}": f"{new}.{name}"
        for old, homes in _PACKAGES.items()
        for new, names in homes.items()
        for name in names.split()
    },
}
_GONE = {
    old
    for old in _PACKAGES
    if old not in ("megatron.checkpointing", "megatron.config", "megatron.data", "megatron_tools.write")
}  # old packages from which all modules have moved away


def install() -> None:
    """Let imports of old paths find the moved modules."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


class _Finder(MetaPathFinder):
    """Finder of modules at their old paths, last in `sys.meta_path`: it gets only imports that would otherwise fail."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in _GONE:
            return ModuleSpec(name, _Alias(None), is_package=True)
        return ModuleSpec(name, _Alias(MOVED[name])) if name in MOVED else None


class _Alias(Loader):
    """Loader of a module at its old path, with the attributes of the moved module `home`.

    If `home` is None, the loader makes an empty package.
    """

    def __init__(self, home: str | None) -> None:
        self._home = home

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if self._home is None:
            return
        self._warn(module.__name__)
        home = importlib.import_module(self._home)
        module.__getattr__ = lambda name: getattr(home, name)  # type: ignore[method-assign]

    def get_code(self, name: str) -> CodeType:
        """Return code that runs the moved module as `__main__`, so that `python -m` accepts the old path."""
        self._warn(name)
        words = f"import runpy\nrunpy.run_module({self._home!r}, run_name='__main__', alter_sys=True)"
        return compile(words, name, "exec")

    def _warn(self, name: str) -> None:
        warnings.warn(f"{name} has moved to {self._home}; the next version drops the old path", FutureWarning, 3)
