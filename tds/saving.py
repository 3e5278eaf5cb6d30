"""DeepSpeed's own checkpoints, with a note of how the layers were cut: its optimizer states are kept by place."""

from typing import Any

NOTE = "tds_layout"


def layout_of(module: Any) -> dict[str, Any]:
    """Which layers each stage holds."""
    return {"cuts": [int(cut) for cut in getattr(module, "cuts", module.parts)], "chunks": getattr(module, "chunks", 1)}


class Checkpoints:
    """What the engine does otherwise than DeepSpeed's when it saves and loads."""

    def save_checkpoint(self: Any, save_dir: Any, tag: Any = None, client_state: Any = None, **more: Any) -> Any:
        state = {**(client_state or {}), NOTE: layout_of(self.module)}
        return super().save_checkpoint(save_dir, tag, client_state=state, **more)  # type: ignore[misc]

    def load_checkpoint(self: Any, load_dir: Any, tag: Any = None, *args: Any, **more: Any) -> Any:
        """As DeepSpeed's. Raises ValueError if the optimizer states are those of a model that was cut in another way."""
        path, state = super().load_checkpoint(load_dir, tag, *args, **more)  # type: ignore[misc]
        if path is None or not isinstance(state, dict):
            return path, state
        here, there = layout_of(self.module), state.pop(NOTE, None)
        states = not more.get("load_module_only") and more.get(
            "load_optimizer_states", args[1] if len(args) > 1 else True
        )
        if states and here != there and (there or here["chunks"] > 1):
            was = (
                f"cut at {there['cuts']} with {there['chunks']} chunks a stage"
                if there
                else "written by DeepSpeed itself"
            )
            raise ValueError(
                f"the checkpoint {path} was {was}, this model is cut at {here['cuts']} with {here['chunks']}, so the states of "
                f"the optimizer would go to other layers: cut it the same way, or load with load_module_only=True"
            )
        return path, state
