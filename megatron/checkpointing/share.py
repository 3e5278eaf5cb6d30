"""One rank's share of a checkpoint: parameters with their moments, written as one file."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.model.layers import global_parameters
from tds import optimizer_state as zero_state
from tds.average import AVERAGE
from tds.pipe import is_pipeline

from .buffers import SavedBuffers
from .checksums import Checksum
from .failures import as_user_error
from .files import WEIGHT
from .slow import warn_if_slow
from .stream import Slot, StreamWriter, stored_dtype


class Part(NamedTuple):
    """A parameter, and what a checkpoint stores of it.

    kinds: kinds of tensors stored for the parameter: "weight" and the names of its moments.
    is_written_here: whether this rank writes these tensors.
    is_shared: whether other pipeline stages hold the parameter as well.
    """

    name: str
    parameter: nn.Parameter
    kinds: list[str]
    is_written_here: bool
    is_shared: bool = False


def local_parts(engine: Any, moments: list[str]) -> list[Part]:
    """Return all parameters of this rank and whether it writes them; replicas divide the work evenly by size."""
    mesh = mpu.get_mesh()
    parameters = dict(global_parameters(engine.module))
    assigned = _assigned_names(parameters)
    is_last_stage = mesh.pipe.rank == mesh.pipe.size - 1
    parts = []
    for name, parameter in parameters.items():
        _, begin, end = mpu.spec_of(parameter).rows
        has_rows = begin < end  # False if this shard is only vocabulary padding
        is_trained_here = is_last_stage or not name.startswith("loss_fn.")  # only the last stage uses the loss
        is_unique = mpu.is_unique_param(parameter, mesh.model.rank)  # first of the ranks and stages with equal values
        is_written_here = has_rows and is_trained_here and is_unique and name in assigned
        kinds = [WEIGHT, *zero_state.moments_of(engine, parameter, moments)]
        parts.append(Part(name, parameter, kinds, is_written_here, _is_outside_layers(engine.module, name)))
    return parts


def _assigned_names(parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """Return the names of the parameters that this data-parallel rank writes.

    From the largest to the smallest, each one goes to the rank with the least to write so far: sizes 5, 3, 2 and 1
    give 5 + 1 to rank 0 and 3 + 2 to rank 1.
    """
    sizes = {name: math.prod(mpu.spec_of(parameter).local_shape) for name, parameter in parameters.items()}
    loads: dict[mpu.Axis, list[int]] = {}  # replicas of a parameter -> elements that each of these ranks writes
    assigned = set()
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        axis = mpu.replicas_of(parameters[name])
        axis_loads = loads.setdefault(axis, [0] * axis.size)
        writer = axis_loads.index(min(axis_loads))
        axis_loads[writer] += sizes[name]
        if writer == axis.rank:  # all of these ranks compute the same writers
            assigned.add(name)
    return assigned


def _is_outside_layers(model: Any, name: str) -> bool:
    """Return whether the parameter `name` of a PipelineModule belongs to a tied module or to the PipelineModule itself.

    Several stages hold such a parameter.
    """
    # A model with `named_layers` has global names, in which a tied layer is a layer like any other.
    if hasattr(model, "named_layers") or not is_pipeline(model):
        return False
    return name.split(".")[0] not in model.fwd_map  # its keys are the numbers of the layers that are not tied


def written_values(engine: Any, parts: list[Part]) -> Iterator[tuple[str, Tensor]]:
    """Yield the key and value of each tensor that this rank writes.

    With ZeRO, reading a tensor is a collective, so every rank must consume the iterator to its end.
    """
    for part in parts:
        spec = mpu.spec_of(part.parameter)
        for kind in part.kinds:
            if kind == WEIGHT:
                value = zero_state.get_weight(part.parameter)
            else:
                value = zero_state.get_moment(engine, part.parameter, kind)
            if part.is_written_here:
                yield f"{kind}.{part.name}", spec.without_padding(value)


def write_share(
    path: Path, parts: list[Part], values: Iterable[tuple[str, Tensor]], checksum: Checksum
) -> dict[str, Any] | None:
    """Write this rank's file and return the file's report; None if this rank has nothing to write.

    The report has the file's name ("file"), its checksum ("sum"), and each tensor's full shape and stored rows
    ("tensors"). "with_gradient" has names of parameters that several stages hold and that get a gradient on this one.
    "frozen" has the names of the weights that are not trained.
    Raises OSError, and ValueError for a weight that is not finite.
    """
    values = iter(values)
    written_parts = {part.name: part for part in parts if part.is_written_here}
    with_gradient = set()
    try:
        if not written_parts:
            return None  # after `finally` has read the values
        layout: dict[Slot, dict[str, Any]] = {}  # name, shape and dtype of a tensor -> full shape and stored rows
        for part in written_parts.values():
            spec = mpu.spec_of(part.parameter)
            dim, begin, end = spec.rows
            shape = list(spec.stored_shape)
            shape[dim] = end - begin
            dtype = stored_dtype(part.parameter)
            for kind in part.kinds:
                placement = {"dim": dim, "begin": begin, "end": end, "shape": list(spec.full_shape)}
                layout[Slot(f"{kind}.{part.name}", tuple(shape), dtype)] = placement
        with StreamWriter(path, layout, checksum) as writer:
            for key, value in values:
                writer.add(key, value)
                kind, name = key.split(".", 1)
                part = written_parts[name]
                if kind == WEIGHT and part.parameter.requires_grad and not _is_finite(value):
                    raise ValueError(f"the weight {name} is not finite")
                if part.is_shared and kind not in (WEIGHT, AVERAGE) and value.count_nonzero():
                    with_gradient.add(name)  # without gradients, the moments of the optimizer stay 0
    finally:
        for _ in values:  # reading a value may be a collective, so read all of them for the other ranks
            pass
    frozen = [name for name, part in written_parts.items() if not part.parameter.requires_grad]
    tensors = {slot.name: place for slot, place in layout.items()}
    return {
        "file": path.name,
        "sum": writer.checksum,
        "tensors": tensors,
        "with_gradient": with_gradient,
        "frozen": frozen,
    }


def _is_finite(x: Tensor) -> bool:
    """Return whether all elements are finite, without allocating a boolean tensor of the size of `x`."""
    if not x.numel():
        return True
    low, high = torch.aminmax(x)  # both are NaN if an element is
    return math.isfinite(low.item()) and math.isfinite(high.item())


class Report(NamedTuple):
    """Report on a rank's share for rank 0: the written files, the expected shapes, and differing step counts."""

    files: list[dict[str, Any]]
    expected: dict[str, list[int]]
    steps: dict[str, int]


@dataclass
class Share:
    """This rank's share of a checkpoint.

    path: file of the parameters. steps: see `differing_steps`. file_reports: reports of the written files. error: error
    while writing, which `Saver.finish` raises on all ranks.
    """

    path: Path
    parts: list[Part]
    buffers: SavedBuffers
    checksum: Checksum
    steps: dict[str, int]
    file_reports: list[dict[str, Any]] = field(default_factory=list)
    error: Exception | None = None

    def write(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Write the parameters and the buffers of this rank. values: key and value of each tensor of `parts`."""
        buffers_path = self.path.with_stem(f"{self.path.stem}-buffers")
        try:
            with warn_if_slow(self.path):
                report = write_share(self.path, self.parts, values, self.checksum)
                buffers_report = self.buffers.write(buffers_path, self.checksum)
        except Exception as error:
            self.record_error(error)
            return
        self.file_reports = list(filter(None, (report, buffers_report)))  # None: this rank has no such file

    def record_error(self, error: Exception) -> None:
        """Keep an error of this rank until all ranks can raise it."""
        self.error = as_user_error(error)

    def report(self) -> Report:
        """Return the report for rank 0."""
        # Key -> full shape of the tensors that must be saved: buffers, weights, and the moments that this rank writes.
        expected = self.buffers.expected
        for part in self.parts:
            kinds = part.kinds if part.is_written_here else [WEIGHT]  # some rank must have written the weight
            for kind in kinds:
                expected[f"{kind}.{part.name}"] = list(mpu.spec_of(part.parameter).full_shape)
        return Report(self.file_reports, expected, self.steps)


def share_file_name() -> str:
    """Return the name of this rank's file of parameters."""
    mesh = mpu.get_mesh()
    return f"pipe{mesh.pipe.rank:02d}-model{mesh.model.rank:02d}-data{mesh.data.rank:02d}.safetensors"
