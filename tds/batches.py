"""The micro-batches of a step, copied into separate memory when they are read."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._torch import host_copy
from .boundary import BoundaryError, check_sendable
from .nested import as_tuple, map_tensors, to_device


class DataEnded(RuntimeError, StopIteration):
    """The data iterator ended; the message names the stage and the number of micro-batches read.

    It is a StopIteration, because DeepSpeed raises StopIteration here.
    everywhere: True if all stages raise this error before any of them has computed anything in this step. A training
        loop may then catch the error and continue.
    """

    everywhere = False


InputLayout = tuple[tuple[torch.dtype, torch.Size], ...]


@dataclass(eq=False)
class Batches:
    """Reader of a step's `total` micro-batches.

    read: function that returns the next micro-batch, or raises StopIteration at the end of the data.
    needs_inputs, needs_labels: whether this stage uses inputs and labels; unused ones are dropped.

    The iterator may reuse its buffers for the next micro-batch, so each batch is copied when it is read. The copy is
    moved to the device when it is used. For an accelerator it lies in pinned memory, so the host need not wait.
    """

    read: Callable[[], Any]
    total: int
    device: torch.device
    stage: int
    needs_inputs: bool
    needs_labels: bool
    count: int = 0  # number of micro-batches read so far
    _ended: bool = False
    _inputs: dict[int, Any] = field(default_factory=dict)
    _labels: dict[int, Any] = field(default_factory=dict)
    # A run is a sequence of micro-batches whose inputs have equal dtypes and shapes.
    _layout: InputLayout | None = None  # input dtypes and shapes of the last micro-batch read
    _run_starts: list[int] = field(default_factory=list)  # the first micro-batch of each run

    def inputs(self, micro: int) -> Any:
        """Return the inputs of a micro-batch, a tensor or a tuple, on the device, and drop this reader's copy.

        Raises DataEnded if the data end too early, and BoundaryError if an input is not a tensor.
        """
        self.read_to(micro + 1)
        return to_device(self._inputs.pop(micro), self.device)

    def labels(self, micro: int) -> Any:
        """Return the labels of a micro-batch on the device, and drop this reader's copy."""
        self.read_to(micro + 1)
        return to_device(self._labels.pop(micro), self.device)

    def all_labels(self) -> Sequence[Any]:
        """Read the whole step and return all labels; `count_targets` needs them before the first forward pass."""
        self.read_to(self.total)
        return list(self._labels.values())

    def run_end(self, micro: int) -> int:
        """Return the first micro-batch after `micro` whose inputs have another shape or dtype, or are not read yet."""
        next_run = bisect_right(self._run_starts, micro)
        if next_run == len(self._run_starts):
            return self.count
        return self._run_starts[next_run]  # a run ends where the next one starts

    def end_on_any_replica(self, replicas: Any) -> DataEnded | None:
        """Return the DataEnded error that this rank must raise if any replica's data have ended, else None.

        All replicas then skip this step, so a loop may continue with the next epoch. replicas: the process
        group of the replicas for tensors in host memory; None if there is only one replica.
        """
        own_end = None
        try:
            self.read_to(1)
        except DataEnded as error:
            own_end = error
        if replicas is None:
            return own_end
        ended = torch.tensor(float(own_end is not None))  # the maximum is 1 if any replica's data ended
        dist.all_reduce(ended, op=dist.ReduceOp.MAX, group=replicas)
        if not ended.item():
            return None
        return own_end or DataEnded(  # the second if this rank itself still has data
            f"the data of another replica of stage {self.stage} ended, so all replicas of this stage skip this step"
        )

    def prefetch(self, number: int) -> None:
        """Read until `number` micro-batches are read, or the data end."""
        while not self._ended and self.count < min(number, self.total):
            try:
                batch = self.read()
            except StopIteration:
                self._ended = True
            else:
                self._store(self.count, batch)  # increments `count`

    def read_to(self, needed: int) -> None:
        """Read until `needed` micro-batches are read. Raises DataEnded if there are fewer."""
        self.prefetch(needed)
        if self.count < needed:
            raise DataEnded(
                f"the data iterator of stage {self.stage} ended after {self.count} of {self.total} micro-batches"
            )

    def _store(self, micro: int, batch: Any) -> None:
        """Copy the parts of a micro-batch that this stage needs. Raises BoundaryError for a batch of another form."""
        location = f"stage {self.stage}, inputs of micro-batch {micro}"
        if batch is None:
            raise BoundaryError(f"{location}: there are no data: give train_batch() or eval_batch() an iterator")
        is_sequence = isinstance(batch, (tuple, list))
        if not is_sequence or not 1 <= len(batch) <= 2:
            actual = f"{len(batch)} values" if is_sequence else type(batch).__name__
            raise BoundaryError(
                f"{location}: a batch is (inputs, labels), each a tensor or a tuple, not {actual}; convert what the "
                f"iterator returns in model._megatron_batch_fn or engine.set_batch_fn"
            )
        inputs = as_tuple(batch[0])
        copy_tensor = partial(host_copy, device=self.device)
        if self.needs_inputs:
            check_sendable(inputs, location)
            self._inputs[micro] = map_tensors(batch[0], copy_tensor)
        if self.needs_labels:
            labels = batch[1] if len(batch) > 1 else None
            copy_object = partial(_copy_object, f"stage {self.stage}, labels of micro-batch {micro}")  # for non-tensors
            self._labels[micro] = map_tensors(labels, copy_tensor, copy_object)
        layout = tuple((t.dtype, t.shape) for t in inputs if isinstance(t, Tensor))
        if layout != self._layout:  # a new run (see `_layout`), because dtypes or shapes differ from the batch before
            self._layout = layout
            self._run_starts.append(micro)
        self.count += 1


def _copy_object(location: str, value: Any) -> Any:
    """Return a copy of a label that is not a tensor, such as an array. Raises BoundaryError if it cannot be copied."""
    try:
        return deepcopy(value)
    except Exception as error:  # any class may define how its objects are copied
        raise BoundaryError(
            f"{location}: a {type(value).__name__} cannot be copied ({error}); give tensors or arrays, or tuples or "
            f"dicts of them"
        ) from error
