"""DeepSpeed's own checkpoints, with a note of how the layers were cut: its optimizer states are kept by their position."""

import json
import os
from pathlib import Path
from typing import Any

from .outside import Outside, warn_of_replicas

NOTE = "tds_layout.json"


def layout_of(module: Any) -> dict[str, Any]:
    """Which layers each stage holds."""
    return {"cuts": [int(cut) for cut in getattr(module, "cuts", module.parts)], "chunks": getattr(module, "chunks", 1)}


class ComparesReplicas:
    """Mixin of both engines: at the first save it names buffers that differ between replicas, as only one replica's are saved."""

    _compared = False

    def save_checkpoint(self: Any, *args: Any, **more: Any) -> Any:
        """Save as DeepSpeed does, and name buffers that replicas do not share at the first save."""
        if not self._compared:
            self._compared = True
            warn_of_replicas(self.module, self.seq_data_parallel_group)
        return super().save_checkpoint(*args, **more)  # type: ignore[misc]


class Checkpoints(ComparesReplicas):
    """Mixin of the pipeline engine: DeepSpeed's save and load, with the cut of the layers and the state outside of them."""

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
        """As DeepSpeed's. Raises ValueError, before anything is loaded, if the optimizer states are those of another cut."""
        states = more.get("load_optimizer_states", args[1] if len(args) > 1 else True)
        only_module = more.get("load_module_only", args[3] if len(args) > 3 else False)
        path = _folder_of(Path(load_dir), tag)
        if path and states and not only_module:
            _refuse_another_cut(path, layout_of(self.module))
        if path:
            self._outside.load(path, self.grid)
        return super().load_checkpoint(load_dir, tag, *args, **more)  # type: ignore[misc]


def _folder_of(folder: Path, tag: Any) -> Path | None:
    """The folder of a checkpoint; None where there is none, for which DeepSpeed has its own words."""
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
