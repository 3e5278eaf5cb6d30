"""One rank's share of a checkpoint: parameters with their moments, written as one file."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.model.layers import global_parameters
from tds import optimizer_state as zero_state
from tds.average import AVERAGE
from tds.pipe import is_pipeline

from .checksums import Checksum
from .files import WEIGHT
from .stream import Slot, StreamWriter


class Part(NamedTuple):
    """A parameter, and what a checkpoint stores of it.

    kinds: kinds of tensors stored for the parameter: "weight" and the names of its moments.
    mine: whether this rank writes these tensors.
    shared: whether other pipeline stages hold the parameter as well.
    """

    name: str
    parameter: nn.Parameter
    kinds: list[str]
    mine: bool
    shared: bool = False


def parts_of(engine: Any, moments: list[str]) -> list[Part]:
    """Return all parameters of this rank, and which of them this rank writes.

    The data-parallel ranks that hold a parameter divide such parameters evenly by size.
    """
    mesh = mpu.get_mesh()
    every = list(global_parameters(engine.module))
    loads: dict[mpu.Axis, list[int]] = {}
    writes = {}
    for name, parameter in sorted(every, key=lambda item: -math.prod(mpu.spec_of(item[1]).local_shape)):
        axis = mpu.replicas_of(parameter)
        load = loads.setdefault(axis, [0] * axis.size)
        writer = load.index(min(load))
        writes[name] = writer == axis.rank
        load[writer] += math.prod(mpu.spec_of(parameter).local_shape)
    parts = []
    for name, parameter in every:
        _, begin, end = mpu.spec_of(parameter).rows  # begin == end if this shard is only vocabulary padding
        mine = writes[name] and mpu.counts_here(parameter, mesh.model.rank) and begin < end
        if name.startswith("loss_fn."):  # all stages hold the loss function, but only the last stage trains it
            mine = mine and mesh.pipe.rank == mesh.pipe.size - 1
        kinds = [WEIGHT, *zero_state.moments_of(engine, parameter, moments)]
        parts.append(Part(name, parameter, kinds, mine, _is_on_every_stage(engine.module, name)))
    return parts


def _is_on_every_stage(model: Any, name: str) -> bool:
    """Return whether the parameter `name` of a PipelineModule belongs to none of its layers.

    It then belongs to a tied module or to the PipelineModule itself, and several stages hold it.
    """
    return is_pipeline(model) and not hasattr(model, "named_layers") and name.split(".")[0] not in model.fwd_map


def expected_shapes(parts: list[Part]) -> dict[str, list[int]]:
    """Return key -> full shape of the tensors that this rank expects in the checkpoint.

    These tensors are all weights of `parts`, and the moments that this rank writes.
    """
    return {
        f"{kind}.{part.name}": list(mpu.spec_of(part.parameter).full_shape)
        for part in parts
        for kind in (part.kinds if part.mine else [WEIGHT])
    }


def list_moments(
    reports: Sequence[Mapping[str, Any]], tensors: Mapping[str, Any], moments: Sequence[str]
) -> dict[str, Any]:
    """Return the entries of checkpoint.json that say which weights lack some of `moments`.

    without_moments: names of the weights that have none, because they are frozen or never had a gradient; a frozen
    weight may still have an average, which `moments_of` lists. frozen: names of the weights that are not trained.
    moments_of: name -> moments of each weight that has some of them, as with Muon.
    reports: results of `write_share` and `Buffers.write`.
    """
    names = (key.removeprefix(f"{WEIGHT}.") for key in tensors if key.startswith(f"{WEIGHT}."))
    found = {name: [moment for moment in moments if f"{moment}.{name}" in tensors] for name in names}
    some = {name: own for name, own in found.items() if 0 < len(own) < len(moments)}
    without = sorted(name for name, own in found.items() if moments and not {*own} - {AVERAGE})
    frozen = sorted({name for report in reports for name in report.get("frozen", ())})
    return {"without_moments": without, "frozen": frozen} | ({"moments_of": some} if some else {})


def steps_of(engine: Any, parts: list[Part], most: int) -> dict[str, int]:
    """Return name -> step count of each parameter that this rank writes and whose step count is not `most`.

    most: the optimizer's step count, the largest of all parameters.
    """
    counts = zero_state.step_counts(engine)
    steps = {part.name: counts.get(part.parameter, most) for part in parts if part.mine}
    return {name: step for name, step in steps.items() if step != most}


def values_of(engine: Any, parts: list[Part]) -> Iterator[tuple[str, Tensor]]:
    """Yield the key and value of each tensor that this rank writes.

    With ZeRO, reading a tensor is a collective, so every rank must consume the iterator to its end.
    """
    for name, parameter, kinds, mine, _ in parts:
        for kind in kinds:
            weight = kind == WEIGHT
            value = zero_state.get_weight(parameter) if weight else zero_state.get_moment(engine, parameter, kind)
            if mine:
                yield f"{kind}.{name}", mpu.spec_of(parameter).without_padding(value)


def write_share(
    path: Path, parts: list[Part], values: Iterable[tuple[str, Tensor]], checksum: Checksum
) -> dict[str, Any] | None:
    """Write this rank's file and return the file's report; None if this rank has nothing to write.

    The report has the file's name ("file"), its checksum ("sum"), and each tensor's full shape and stored rows
    ("tensors"). "learns" has names of parameters that several stages hold: those that get a gradient on this stage.
    "frozen" has the names of the weights that are not trained.
    Raises OSError, and ValueError for a weight that is not finite.
    """
    values = iter(values)
    learned = {part.name for part in parts if part.parameter.requires_grad}
    shared = {part.name for part in parts if part.shared}
    slots = []
    places = {}
    learns = set()
    for name, parameter, kinds, *_ in (part for part in parts if part.mine):
        spec = mpu.spec_of(parameter)
        dim, begin, end = spec.rows
        shape = list(spec.stored_shape)
        shape[dim] = end - begin
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        for kind in kinds:
            slots.append(Slot(f"{kind}.{name}", tuple(shape), dtype))
            places[f"{kind}.{name}"] = {
                "dim": dim,
                "begin": begin,
                "end": end,
                "shape": list(spec.full_shape),
            }
    try:
        if not slots:
            return None
        with StreamWriter(path, slots, checksum) as writer:
            for key, value in values:
                writer.add(key, value)
                kind, name = key.split(".", 1)
                if kind == WEIGHT and name in learned and not _finite(value):
                    raise ValueError(f"the weight {name} is not finite")
                if name in shared and kind not in (WEIGHT, AVERAGE) and value.count_nonzero():
                    learns.add(name)
    finally:
        for _ in values:  # reading a value may be a collective, so read all of them for the other ranks
            pass
    frozen = [part.name for part in parts if part.mine and part.name not in learned]
    return {"file": path.name, "sum": writer.sum, "tensors": places, "learns": learns, "frozen": frozen}


def _finite(x: Tensor) -> bool:
    """Return whether all elements are finite, without allocating a boolean tensor of the size of `x`."""
    return not x.numel() or all(map(math.isfinite, (each.item() for each in torch.aminmax(x))))


def merge(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the reports of all files; return key -> full shape, split dimension and pieces of each tensor.

    Several stages hold and write the parameters of the PipelineModule itself, and those parameters of a tied module
    that are not tied. For such a parameter, the result names the file of the stage on which it gets gradients.
    """
    merged: dict[str, Any] = {}
    for report in reports:
        for key, place in report["tensors"].items():
            entry = merged.setdefault(key, {"shape": place["shape"], "dim": place["dim"], "pieces": {}})
            if place["begin"] not in entry["pieces"] or key.split(".", 1)[1] in report["learns"]:
                piece = {"file": report["file"], "begin": place["begin"], "end": place["end"]}
                entry["pieces"][place["begin"]] = piece
    return {key: {**entry, "pieces": list(entry["pieces"].values())} for key, entry in merged.items()}
