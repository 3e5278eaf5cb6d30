"""Additions to DeepSpeed's pipeline checkpoints: the partition of the layers, and state outside the layers.

DeepSpeed stores optimizer states by position, so they fit one partition only. State outside the layers means weights
and buffers of three kinds of modules: a `loss_fn` that is a module, the PipelineModule itself, and tied modules that
are only used through a `forward_fn`. Each stage writes a separate file next to DeepSpeed's.
"""

import hashlib
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._torch import raw_bytes
from .groups import gather_objects
from .pipe import ties

Layout = dict[str, Any]  # how the layers are cut
STATE_FILE = "tds_state-stage{stage:02d}-model{model:02d}.pt"
LAYOUT_FILE = "tds_layout.json"


def refuse_url(save_dir: Any) -> None:
    """Raise ValueError for a URL, which DeepSpeed would take for the name of a local folder."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(save_dir)):
        raise ValueError(
            f"save_checkpoint({str(save_dir)!r}): this is no folder on this machine; save to one and upload it"
        )


class PipelineState:
    """The partition of `module` and its state outside the layers, as saved next to DeepSpeed's checkpoint.

    grid: DeepSpeed's PipelineParallelGrid.
    """

    def __init__(self, module: nn.Module, grid: Any) -> None:
        self._module = module
        self._grid = grid
        self._record_initial()

    def _record_initial(self) -> None:
        """Record the initial values of the state outside the layers, so that `save` can find the values that changed.

        Tied modules are not recorded, because their values are equal on all stages.
        """
        state = self._state().items()
        self._initial = {name: value.clone() for name, value in state if not name.startswith("tied_modules.")}

    def _state(self) -> dict[str, Tensor]:
        """Return the state outside the layers that DeepSpeed does not save, by name."""
        module: Any = self._module
        prefixes = [f"{name}." for name in module.fwd_map]  # of the names that DeepSpeed saves
        for key, tied in module.tied_modules.items():
            if tied in module.forward_funcs:  # else a `forward_fn` is the layer, and DeepSpeed does not save `tied`
                prefixes.append(f"tied_modules.{key}.")
        state = {}
        for name, value in module.state_dict().items():
            if name.startswith(tuple(prefixes)):
                continue
            if isinstance(value, Tensor):
                state[name] = value
            else:
                warnings.warn(f"{name} is not a tensor, so it is not saved: keep such state in buffers", stacklevel=4)
        return state

    def save(self, folder: Path) -> None:
        """Write this rank's files into the folder of a checkpoint if the rank is in the first replica."""
        grid = self._grid
        if grid.get_data_parallel_rank():
            return  # the first replica saves for all
        folder.mkdir(parents=True, exist_ok=True)
        # Each file is written under another name and renamed, so that no reader sees a part of it.
        if not grid.get_global_rank():
            (folder / f"{LAYOUT_FILE}.tmp").write_text(json.dumps(layout_of(self._module)), encoding="utf-8")
            os.replace(folder / f"{LAYOUT_FILE}.tmp", folder / LAYOUT_FILE)
        state = {}
        changed = []  # names; `load` prefers the stage that has changed a value
        for name, value in self._state().items():
            # Without clone(), torch.save would write all of the flat memory that a view lies in.
            state[name] = value.detach().cpu().clone()
            if name in self._initial and not torch.equal(self._initial[name].cpu(), state[name]):
                changed.append(name)
        if not state:
            return
        path = folder / STATE_FILE.format(stage=grid.get_stage_id(), model=grid.get_slice_parallel_rank())
        torch.save({"state": state, "changed": changed}, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)

    def load(self, folder: Path, tag: Any, with_optimizer: bool, universal: bool) -> None:
        """Load the state outside the layers from the checkpoint `tag` in `folder`.

        If the checkpoint has the same number of stages, each stage loads the values that it saved. Otherwise every
        stage loads the values from the stage on which they had changed since the model was built. Warns of missing
        values, e.g. in a checkpoint that DeepSpeed itself has written. Raises ValueError if optimizer states are
        loaded too (`with_optimizer`) and the checkpoint has another partition of the layers. A universal checkpoint
        fits any partition, because its optimizer states have names.
        """
        latest = folder / ("latest_universal" if universal else "latest")
        if tag is None and latest.is_file():
            tag = latest.read_text(encoding="utf-8").strip()
        path = folder / str(tag)
        if tag is None or not path.is_dir():
            return  # DeepSpeed reports the error
        if with_optimizer and not universal:
            _refuse_other_layout(path, layout_of(self._module))
        state = self._state()
        if not state:
            return
        model = self._grid.get_slice_parallel_rank()
        # For example, tds_state-stage*-model03.pt: the files of all stages for this tensor-parallel rank.
        pattern = STATE_FILE.format(stage=0, model=model).replace("stage00", "stage*")
        saved_stages = []
        for each in sorted(path.glob(pattern)):
            saved_stages.append(torch.load(each, map_location="cpu", weights_only=True))

        values = {}
        missing = []
        for name in sorted(state):
            stages_with_name = [each for each in saved_stages if name in each["state"]]
            if stages_with_name:
                values[name] = self._choose_stage(len(saved_stages), stages_with_name, name)["state"][name]
            else:
                missing.append(name)
        self._module.load_state_dict(values, strict=False)
        self._record_initial()
        if missing and not self._grid.get_global_rank():
            warnings.warn(f"{path} does not hold {', '.join(missing)}, which keep their initial values", stacklevel=3)

    def _choose_stage(self, num_saved: int, stages_with_name: list[Any], name: str) -> Any:
        """Return the content of the saved stage's file from which this stage loads `name`.

        num_saved: number of saved stages. stages_with_name: the contents of those that have a value of this name, in
        the order of the stages: {"state": values by name, "changed": names of the values that training changed}.
        """
        grid = self._grid
        # All saved stages have the name, and they are as many as the stages of this run.
        if len(stages_with_name) == num_saved == grid.get_pipe_parallel_world_size():
            return stages_with_name[grid.get_stage_id()]  # each stage has saved its own values
        if name.startswith("loss_fn."):
            return stages_with_name[-1]  # the last stage computes the loss
        # Values that training has changed on one stage only are more recent than the initial values on the others.
        for each in stages_with_name:
            if name in each["changed"]:
                return each
        return stages_with_name[0]


def layout_of(module: Any) -> Layout:
    """Return the partition of the layers: `cuts` (first layer of each group) and `chunks` (groups per stage)."""
    return {"cuts": list(map(int, module.parts)), "chunks": getattr(module, "chunks", 1)}


def _read_layout(file: Path) -> Layout:
    """Return how the model of a checkpoint was cut. Raises ValueError, which names the file, if it is damaged."""
    try:
        layout: Layout = json.loads(file.read_text(encoding="utf-8"))
        # Equal to `layout`, but reading both keys raises LookupError if one of them is missing.
        return {"cuts": layout["cuts"], "chunks": layout["chunks"], **layout}
    except (LookupError, RecursionError, TypeError, ValueError):
        raise ValueError(f"{file} is damaged; copy the checkpoint again") from None


def _refuse_other_layout(path: Path, current: Layout) -> None:
    """Raise ValueError if the checkpoint in `path` has another partition of the layers than `current`."""
    file = path / LAYOUT_FILE
    if file.is_file():
        saved = _read_layout(file)
        if current == saved:
            return
        origin = f"cut at {saved['cuts']} with {saved['chunks']} chunks a stage"
    else:
        # DeepSpeed writes no layout and has no chunks, so a model without chunks is taken to be cut in the same way.
        if current["chunks"] == 1:
            return
        origin = "written by DeepSpeed itself"
    raise ValueError(
        f"the checkpoint {path} was {origin}, but this model is cut at {current['cuts']} with {current['chunks']} "
        f"chunks a stage, so optimizer states would go to the wrong layers: cut the model as in the checkpoint, or "
        f"pass load_module_only=True"
    )


def warn_of_copies(module: Any, replicas: Any) -> None:
    """Warn of persistent buffers that differ between replicas, or between the stages of a tied module. Collective.

    replicas: process group of the replicas.
    """
    differing = _differing_buffers(module, replicas)
    if differing:
        warnings.warn(
            f"the buffers {differing} differ between replicas, and a checkpoint holds only the first replica's: reduce "
            "them over the replicas, or register them with persistent=False if they need not be saved",
            stacklevel=4,
        )
    for key, stages, _ in ties(module):
        differing = _differing_buffers(module.tied_modules[key], stages)
        if differing:
            warnings.warn(
                f"the buffers {differing} of the tied module {key!r} differ between its stages: a tie shares weights, "
                "while each stage changes its own buffers, such as the statistics of BatchNorm; move these buffers to "
                "a layer that is not tied",
                stacklevel=4,
            )


def _differing_buffers(module: nn.Module, group: Any) -> str:
    """Return the names of persistent buffers that differ between the ranks of `group`. Collective.

    Ranks other than the first of `group` get an empty string.
    """
    if dist.get_world_size(group) == 1:
        return ""
    weights = set(module.parameters())
    digests = {}  # name of a buffer -> hash of its bytes, which is sent in place of the buffer
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and value not in weights:
            digests[name] = hashlib.sha256(raw_bytes(value)).hexdigest()
    digests_of_ranks = gather_objects(digests, group)
    if dist.get_rank(group):
        return ""  # the first rank compares
    differing = set[str]()
    for digests_of_rank in digests_of_ranks:
        for name, _ in digests_of_rank.items() - digests.items():
            differing.add(name)
    return ", ".join(sorted(differing))
