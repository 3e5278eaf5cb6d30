"""State of a PipelineModule that is missing in DeepSpeed's layer checkpoints.

This is the state of a `loss_fn` that is a module, of the PipelineModule itself, and of tied modules that are only
used through a `forward_fn`. Each stage writes a separate file next to DeepSpeed's.
"""

import hashlib
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._torch import raw_bytes

FILE = "tds_state-stage{stage:02d}-model{model:02d}.pt"


class Outside:
    """The state of `module` outside the layers that DeepSpeed saves."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._remember()

    def _remember(self) -> None:
        """Record current values, so that a save knows on which stage they changed.

        Tied modules are left out, because they are equal on all stages.
        """
        here = self._state().items()
        self._begun = {name: value.clone() for name, value in here if not name.startswith("tied_modules.")}

    def _state(self) -> dict[str, Tensor]:
        module: Any = self._module
        saved = [f"{name}." for name in module.fwd_map]
        saved += [f"tied_modules.{key}." for key, tied in module.tied_modules.items() if tied in module.forward_funcs]
        found = {name: value for name, value in module.state_dict().items() if not name.startswith(tuple(saved))}
        for name in [name for name, value in found.items() if not isinstance(value, Tensor)]:
            warnings.warn(f"{name} is no tensor, and is not saved: keep that state in buffers", stacklevel=4)
            del found[name]
        return found

    def save(self, folder: Path, grid: Any) -> None:
        """Write this stage's file, if there is such state."""
        state = {name: value.detach().cpu() for name, value in self._state().items()}
        if not state:
            return
        before = {name: value.cpu() for name, value in self._begun.items()}
        changed = [name for name, value in before.items() if name in state and not torch.equal(value, state[name])]
        path = folder / FILE.format(stage=grid.get_stage_id(), model=grid.get_slice_parallel_rank())
        folder.mkdir(parents=True, exist_ok=True)
        # Without clone(), torch.save would write all of the flat memory that a view lies in.
        torch.save({"state": {k: v.clone() for k, v in state.items()}, "changed": changed}, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)

    def load(self, folder: Path, grid: Any) -> None:
        """Load what the stages have written.

        With as many stages as at the save, each stage loads its own values. Otherwise it loads those of the stage
        that changed them. Warns of missing values, e.g. in a checkpoint that DeepSpeed itself has written.
        """
        here = self._state()
        if not here:
            return
        paths = sorted(
            folder.glob(FILE.format(stage=0, model=grid.get_slice_parallel_rank()).replace("stage00", "stage*"))
        )
        files = [torch.load(path, map_location="cpu", weights_only=True) for path in paths]
        found = {name: value for name in here if (value := _chosen(files, name, grid)) is not None}
        self._module.load_state_dict(found, strict=False)
        self._remember()
        missing = sorted(here.keys() - found.keys())
        if missing and not grid.get_global_rank():
            warnings.warn(f"{folder} does not hold {', '.join(missing)}, which keep their initial values", stacklevel=3)


def _chosen(files: list[Any], name: str, grid: Any) -> Tensor | None:
    having = [each for each in files if name in each["state"]]
    if not having:
        return None
    if len(files) == grid.get_pipe_parallel_world_size() and len(having) == len(files):
        return having[grid.get_stage_id()]["state"][name]  # type: ignore[no-any-return]
    if name.startswith("loss_fn."):
        return having[-1]["state"][name]  # type: ignore[no-any-return]
    return next((each for each in having if name in each["changed"]), having[0])["state"][name]  # type: ignore[no-any-return]


def warn_of_replicas(module: nn.Module, group: Any) -> None:
    """Warn of persistent buffers that differ between the replicas in `group`, by name. Collective."""
    if dist.get_world_size(group) == 1:
        return
    weights = {id(p) for p in module.parameters()}
    state = module.state_dict(keep_vars=True).items()
    buffers = {name: value for name, value in state if isinstance(value, Tensor) and id(value) not in weights}
    mine = {name: hashlib.sha256(raw_bytes(value)).hexdigest() for name, value in buffers.items()}
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, mine, group=group)
    differing = sorted({name for each in told for name in each if each[name] != told[0].get(name)})
    if differing and dist.get_rank(group) == 0:
        warnings.warn(
            f"the buffers {', '.join(differing)} differ between replicas, and a checkpoint holds those of the first: reduce them over "
            f"the replicas, or set persistent=False if they are no state",
            stacklevel=4,
        )
