"""Ties of modules over pipeline stages: all weights of a tied module, not only those that its spec lists."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._deepspeed import TiedLayerSpec
from .groups import gather_objects
from .start import raise_if_any_failed

Comm = Mapping[str, Any]  # an entry of `tied_comms`
Shapes = Mapping[str, tuple[int, ...]]


class _Copy(NamedTuple):
    """What one stage has of a tied module: the names that its spec lists, and the shapes of weights and buffers."""

    listed: Sequence[str]
    weights: Shapes
    buffers: Shapes


def tie_all_weights(module: Any, comms: Comm) -> None:
    """Extend each tie to all weights that its stages have, and give the stages equal initial values. Collective.

    DeepSpeed ties only the weights in `tied_weight_attr`. Each stage would initialise and train its own copy of the
    module's other weights. On a single stage, all layers with the key use one module, so the numbers would depend on
    the layout. The initial values are those of the stage with the first of these layers, as in one process. Buffers
    have equal initial values, too, but the stages then change them apart.
    module: the PipelineModule. comms: its `tied_comms`.
    Raises ValueError on all ranks if a weight of a tied module is on some of its stages only, or in several shapes.
    """
    if module.num_stages == 1:
        return
    buffers = _agree_on_names(comms)
    for key, comm in comms.items():
        # On all stages of a tie but its first, DeepSpeed has set `ds_pipe_replicated` of all weights of the module, so
        # that a gradient norm counts each weight once. A weight that is not tied is on this stage alone, so it must
        # count.
        tied = {attrgetter(name)(comm["module"]) for name in comm["weight_attr"]}
        for p in comm["module"].parameters():
            if p not in tied:
                p.ds_pipe_replicated = False
        source = comm["ranks"][_first_stage_index(module, key)]  # the rank whose values the others get
        for name in [*comm["weight_attr"], *buffers[key]]:
            _broadcast_bytes(attrgetter(name)(comm["module"]), source, comm["group"])


def _agree_on_names(comms: Comm) -> dict[str, list[str]]:
    """Set the names of the weights of each tie, and return key -> names of the buffers that its stages have."""
    buffers = {}
    # A mismatch is raised after the loop, or the other stages would wait in the collectives of the ties that follow.
    error = None
    for key, comm in comms.items():
        copies = gather_objects(_describe_copy(comm), comm["group"])
        names = []  # those that all stages have, in one shape
        for name, shape in copies[0].buffers.items():
            if all(each.buffers.get(name) == shape for each in copies):
                names.append(name)
        buffers[key] = names
        try:
            # One name for each tensor, the first: a tensor with two names would be summed twice.
            first_names = dict[Tensor, str]()
            for name in _tied_names(key, copies):
                first_names.setdefault(attrgetter(name)(comm["module"]), name)
            comm["weight_attr"] = list(first_names.values())
        except ValueError as mismatch:
            error = mismatch
    raise_if_any_failed(error)
    if error:
        raise error
    return buffers


def _describe_copy(comm: Comm) -> _Copy:
    """Return the names and shapes of this stage's copy of a tied module."""
    named = comm["module"].named_parameters(remove_duplicate=False)
    weights = {name: tuple(p.shape) for name, p in named}
    buffers = {name: tuple(each.shape) for name, each in comm["module"].named_buffers()}
    return _Copy(list(comm["weight_attr"]), weights, buffers)


def _tied_names(key: str, copies: Sequence[_Copy]) -> list[str]:
    """Return the names of the weights to tie, in one order on all stages: the listed ones, then the others.

    A weight that is not listed may be on a single stage, whose layers alone use it: it is not tied.
    """
    # Dicts without values serve as sets that keep their order.
    listed_names: dict[str, None] = {}
    all_names: dict[str, None] = {}
    for copy in copies:
        listed_names |= dict.fromkeys(copy.listed)
        all_names |= dict.fromkeys(copy.weights)
    tied = []
    for name in listed_names | all_names:
        shapes = [copy.weights.get(name) for copy in copies]  # None on a stage without this weight
        num_holders = len(shapes) - shapes.count(None)
        if name not in listed_names and num_holders == 1:
            continue
        if len(set(shapes)) > 1:
            raise ValueError(
                f"the stages of the tied module {key!r} have the weight {name} in the shapes {shapes}: build the same "
                f"class with the same arguments in all layers with this key"
            )
        tied.append(name)
    return tied


def _first_stage_index(module: Any, key: str) -> int:
    """Return the place, among the stages of a tie, of the one that has the first layer with this key."""
    stages = []
    for index, spec in enumerate(module._layer_specs):
        if isinstance(spec, TiedLayerSpec) and spec.key == key:
            stages.append(module.stage_owner(index))
    return sorted(set(stages)).index(stages[0])


@torch.no_grad()
def _broadcast_bytes(tensor: Tensor, source: int, group: Any) -> None:
    """Copy the bytes of `tensor`, of any dtype, from the rank `source` to the group."""
    contiguous = tensor.detach().resolve_conj().contiguous()
    dist.broadcast(contiguous.view(-1).view(torch.uint8), source, group=group)
    tensor.copy_(contiguous)
