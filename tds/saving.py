"""DeepSpeed's checkpoints with a note of the partition: optimizer states are stored by position."""

import json
import os
from pathlib import Path
from typing import Any

from .outside import Outside, warn_of_replicas

NOTE = "tds_layout.json"


def layout_of(module: Any) -> dict[str, Any]:
    """Return the partition of the layers over the stages."""
    return {"cuts": [int(cut) for cut in getattr(module, "cuts", module.parts)], "chunks": getattr(module, "chunks", 1)}


class ComparesReplicas:
    """Mixin of both engines that warns at the first save of buffers that differ between replicas.

    Only one replica's buffers are saved.
    """

    _compared = False

    def save_checkpoint(self: Any, *args: Any, **more: Any) -> Any:
        """Save as DeepSpeed does; at the first save, also warn of buffers that differ between replicas."""
        if not self._compared:
            self._compared = True
            warn_of_replicas(self.module, self.seq_data_parallel_group)
        return super().save_checkpoint(*args, **more)  # type: ignore[misc]


class Checkpoints(ComparesReplicas):
    """Mixin of the pipeline engine: DeepSpeed's save and load, plus the partition and state outside the layers."""

    _outside: Outside  # made by the engine with its groups

    def save_checkpoint(self: Any, save_dir: Any, tag: Any = None, *args: Any, **more: Any) -> Any:
        tag = str(tag or f"global_step{self.global_steps}")
        if not self.grid.get_data_parallel_rank():
            self._outside.save(Path(save_dir, tag), self.grid)
        if self.global_rank == 0:
            folder = Path(save_dir, tag)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{NOTE}.tmp").write_text(json.dumps(layout_of(self.module)), encoding="utf-8")
            os.replace(folder / f"{NOTE}.tmp", folder / NOTE)
        return super().save_checkpoint(save_dir, tag, *args, **more)  # type: ignore[misc]

    def load_checkpoint(self: Any, load_dir: Any, tag: Any = None, *args: Any, **more: Any) -> Any:
        """Load as DeepSpeed does. Raises ValueError before loading optimizer states of another partition."""
        states = more.get("load_optimizer_states", args[1] if len(args) > 1 else True)
        only_module = more.get("load_module_only", args[3] if len(args) > 3 else False)
        path = _folder_of(Path(load_dir), tag)
        if path and states and not only_module:
            _refuse_another_cut(path, layout_of(self.module))
        if path:
            self._outside.load(path, self.grid)
        return super().load_checkpoint(load_dir, tag, *args, **more)  # type: ignore[misc]


def _folder_of(folder: Path, tag: Any) -> Path | None:
    """Return the folder of a checkpoint, or None if it does not exist, which DeepSpeed reports."""
    latest = folder / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text(encoding="utf-8").strip()
    path = folder / str(tag)
    return path if tag is not None and path.is_dir() else None


def _refuse_another_cut(path: Path, here: dict[str, Any]) -> None:
    note = path / NOTE
    there = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else None
    if here == there or (there is None and here["chunks"] == 1):
        return
    was = f"cut at {there['cuts']} with {there['chunks']} chunks a stage" if there else "written by DeepSpeed itself"
    raise ValueError(
        f"the checkpoint {path} was {was}, this model is cut at {here['cuts']} with {here['chunks']}, so the states of "
        f"the optimizer would go to other layers: cut it the same way, or load with load_module_only=True"
    )
