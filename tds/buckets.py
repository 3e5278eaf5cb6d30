"""Weights and gradients in flat buckets, each sharded evenly over the replicas (ZeRO, Rajbhandari et al. 2020).

A bucket is the unit of communication between replicas. Every replica holds all weights and gradients of a bucket
and owns one equal share of it. Only the owner of a share keeps the optimizer moments of the share and, for weights in
half precision, its fp32 copy.
"""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._torch import compiled_on_cuda, copy_widened, gather_shares, scatter_sum, storage_use_count
from .flat_matrices import Work, place_weights

NORM_SLICE = 2**20  # elements per partial norm, which is in fp32; the squares of these norms are summed in fp64


class Bucket:
    """Flat memory of some weights and their gradients, of which this replica owns one equal share.

    The parameters become views of this memory. `reduce` sums the gradients over the replicas into the share, and
    `gather` distributes the stepped weights.

    parameters: weights of one dtype on one device. group: process group of the replicas. work: if each weight must be
    wholly in one share, the work of stepping a weight, see `flat_matrices.py`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Any, work: Work | None) -> None:
        self.group = group
        self.replicas = dist.get_world_size(group)
        self.slots, share = place_weights(parameters, self.replicas, work)  # weights and placeholders
        self.parameters = [p for p in self.slots if not p.is_meta]
        first = self.parameters[0]
        self.begin = dist.get_rank(group) * share
        self.end = self.begin + share
        sum_dtype = torch.promote_types(first.dtype, torch.float32)
        self.weights = torch.zeros(share * self.replicas, dtype=first.dtype, device=first.device)
        self.grads = torch.empty(share * self.replicas, dtype=sum_dtype, device=first.device)
        self._grad_of: dict[nn.Parameter, Tensor] = {}  # views of `grads`, of placeholders too
        self.view_of: dict[nn.Parameter, Tensor] = {}  # views of `weights`, in the shapes of the parameters
        at = 0
        for slot in self.slots:
            end = at + slot.numel()
            self._grad_of[slot] = self.grads[at:end].view_as(slot)
            if not slot.is_meta:
                view = self.weights[at:end].view_as(slot)
                view.copy_(slot.detach())
                slot.data = view
                self.view_of[slot] = view
            at = end
        self.own_weights = self.weights[self.begin : self.end]
        self.has_master_copy = sum_dtype is not first.dtype
        # The optimizer steps this replica's share, in fp32 or wider. `to` copies half-precision weights; otherwise it
        # returns the view of the flat memory.
        self.share = nn.Parameter(self.own_weights.to(sum_dtype))
        self.share_grad = self.grads[self.begin : self.end]
        if work is not None:
            # The weights in this replica's share, each with the begin of its elements in the share.
            self.share.pieces = [(p, begin) for p, begin, _ in self._owned_slices()]  # type: ignore[attr-defined]
        self._arrived: set[nn.Parameter] = set()  # parameters that have received a gradient in this step
        self.received: set[nn.Parameter] = set()  # the same of the last step that was reduced
        # {0: this replica's slices of gradients} while a step has gradients. DeepSpeed's utilities read it.
        self.readable_grads: dict[int, list[Tensor]] = {}
        self._free_grads()
        self.pending_work: dist.Work | None = None

    def _owned_slices(self) -> Iterator[tuple[nn.Parameter, int, int]]:
        """Yield each weight in this replica's share, and the range (begin, end) of its elements in it."""
        # For example, a weight of elements 150 to 260 in a share of elements 100 to 200 has the range (50, 100).
        for parameter in self.parameters:
            at = int(self.view_of[parameter].storage_offset())
            begin = max(at, self.begin) - self.begin
            end = min(at + parameter.numel(), self.end) - self.begin
            if begin < end:  # else other replicas own the weight
                yield parameter, begin, end

    def count_views(self) -> None:
        """Record how many tensors view the flat memory.

        Call this method as soon as all parameters are views. Any view that is added later then belongs to a user.
        """
        self._num_views = storage_use_count(self.weights)

    def replaced_weights(self) -> list[nn.Parameter]:
        """Return the weights that no longer view their slice of the flat memory."""
        return [p for p, view in self.view_of.items() if _memory_of(p) != _memory_of(view)]

    def adopt_weights(self, replaced: Sequence[nn.Parameter]) -> bool:
        """Copy the replaced weights into the flat memory and make them views of this memory again.

        Returns False, and does nothing, if another tensor views the flat memory. That tensor may be a weight's old
        data, which the user wants to restore later.
        """
        # Each replaced weight has left the flat memory, so there must be as many fewer views.
        if storage_use_count(self.weights) != self._num_views - len(replaced):
            return False
        for parameter in replaced:
            view = self.view_of[parameter]
            view.copy_(parameter.detach())
            parameter.data = view
        return True

    def add(self, parameter: nn.Parameter) -> None:
        """Accumulate `parameter.grad` into the bucket, and set it to None."""
        grad = parameter.grad
        assert grad is not None
        grad_sum = self._grad_sum(parameter)
        is_first = parameter not in self._arrived
        if grad.is_sparse:
            if is_first:  # the memory has old values, and a sparse gradient has only some of the elements
                grad_sum.zero_()
            grad_sum.add_(grad.to(grad_sum.dtype))  # torch adds sparse tensors of the same dtype only
        elif is_first:  # the first gradient overwrites the memory, so nothing has to be zeroed
            copy_widened(grad_sum, grad)
        else:
            grad_sum.add_(grad)
        self._arrived.add(parameter)
        parameter.grad = None

    @property
    def accumulates_matmuls(self) -> bool:
        """True if this device can add a matmul to the gradient sums in one kernel.

        All devices can do this if weights and sums have the same dtype. Only CUDA devices can add a matmul of
        half-precision weights to fp32 sums.
        """
        return not self.has_master_copy or can_widen_matmul(self.weights.device, self.weights.dtype)

    def add_matmul(self, left: Tensor, right: Tensor, parameter: nn.Parameter) -> None:
        """Accumulate `left` `[o, n]` @ `right` `[n, i]` into the gradient of `parameter` `[o, i]`.

        The matmul is added to the gradient sum without a half-precision copy.
        """
        grad_sum = self._grad_sum(parameter)
        add: Any = torch.addmm
        if left.dtype is not grad_sum.dtype:
            add = partial(add, out_dtype=grad_sum.dtype)
        beta = int(parameter in self._arrived)  # 0 overwrites the sum of the last step; 1 adds to the sum of this step
        add(grad_sum, left, right, beta=beta, out=grad_sum)
        self._arrived.add(parameter)

    def reduce(self) -> None:
        """Start summing gradients over the replicas into `share_grad`, with zeros for missing gradients."""
        self.wait()  # for the last step's all-gather, if no layer has used these weights since
        for parameter in self.parameters:
            if parameter.grad is not None:  # the user has set this gradient, so no autograd hook has added it
                self.add(parameter)
        self.received = self._arrived
        for slot in self.slots:
            if slot not in self._arrived:
                self._grad_sum(slot).zero_()
        if self.replicas > 1:
            self.pending_work = scatter_sum(self.share_grad, self.grads, self.group)

    def gather(self) -> None:
        """Start the all-gather of the updated weights."""
        if self.has_master_copy:
            self.own_weights.copy_(self.share.detach())
        if self.replicas > 1:
            self.pending_work = gather_shares(self.weights, self.own_weights, self.group)

    def pull_weights(self) -> None:
        """Copy the model's weights into this replica's share."""
        if self.has_master_copy:
            self.share.data.copy_(self.own_weights)

    def pull_changes(self) -> None:
        """Copy half-precision weights that a user changed since the last step into this replica's fp32 share."""
        if self.has_master_copy:
            copy_changed_elements(self.share.data, self.own_weights)

    def wait(self) -> None:
        """Wait for the collective that `reduce` or `gather` has started."""
        work = self.pending_work
        self.pending_work = None
        if work is not None:
            work.wait()

    def drop_grads(self) -> None:
        """Drop all gradients at the end of a step and free their memory, which the next forward pass may use."""
        self._arrived = set()  # `received` keeps the set of this step
        self.readable_grads.clear()
        for parameter in self.parameters:
            parameter.grad = None
        self._free_grads()

    def _free_grads(self) -> None:
        self.grads.untyped_storage().resize_(0)  # as in torch's FSDP, the views of `grads` stay its views

    def _grad_sum(self, slot: nn.Parameter) -> Tensor:
        """Return the gradient sum of `slot`, and allocate the memory of all sums if this step has not done so."""
        storage = self.grads.untyped_storage()
        if not storage.size():
            storage.resize_(self.grads.nbytes)
            self.readable_grads[0] = [self.share_grad[begin:end] for _, begin, end in self._owned_slices()]
        return self._grad_of[slot]

    def norm_slices(self, counts: dict[nn.Parameter, bool]) -> list[tuple[Tensor, bool]]:
        """Return pairs: a slice `[n]` of this replica's gradients, and whether the global gradient norm includes it.

        counts: for each parameter, whether this rank includes its gradient in the global norm.
        """
        # For example, of the weights [0, 50), [50, 80) and [80, 90), the last does not count. The ranges are then
        # [0, 80), which counts, and [80, 90), which does not.
        ranges: list[tuple[int, int, bool]] = []  # (begin, end, whether it counts)
        for parameter, begin, end in self._owned_slices():
            if ranges:
                last_begin, last_end, last_is_counted = ranges[-1]
                if last_end == begin and last_is_counted is counts[parameter]:  # neighbours that count alike: merge
                    ranges.pop()
                    begin = last_begin
            ranges.append((begin, end, counts[parameter]))
        slices = []  # of at most NORM_SLICE elements
        for begin, end, is_counted in ranges:
            for piece in torch.split(self.share_grad[begin:end], NORM_SLICE):
                slices.append((piece, is_counted))
        return slices


def copy_changed(exact: Tensor, seen: Tensor) -> Tensor:
    """Copy into the fp32 weights `exact` `[n]` those half-precision weights `seen` `[n]` that a user has changed.

    An unchanged weight in `seen` is the rounded weight in `exact`, which keeps its more precise value. The bits are
    compared, because torch.compile leaves out a cast to half precision whose result is not stored.
    """
    rounded = exact.to(seen.dtype).view(torch.int16)
    is_unchanged = rounded == seen.view(torch.int16)
    values = torch.where(is_unchanged, exact, seen)
    return exact.copy_(values)


def copy_changed_in_slices(exact: Tensor, seen: Tensor) -> Tensor:
    """Do what `copy_changed` does, slice by slice; sizes and storage offsets must be multiples of 4 elements.

    A slice that has changed is compared by values, because only torch.compile leaves out the cast to half precision.
    """
    # A slice fits into the cache of a CPU; on accelerators it is larger, because each slice launches kernels.
    size = NORM_SLICE if exact.is_cpu else 8 * NORM_SLICE
    for at in range(0, exact.numel(), size):
        exact_slice = exact[at : at + size]
        seen_slice = seen[at : at + size]
        rounded = exact_slice.to(seen.dtype)
        # Mostly, nothing has changed. Comparing 64 bits at once is fast; on accelerators, the host would have to wait.
        if exact.is_cpu and torch.equal(rounded.view(torch.int64), seen_slice.view(torch.int64)):
            continue
        torch.where(rounded == seen_slice, exact_slice, seen_slice, out=exact_slice)
    return exact


copy_changed_elements = compiled_on_cuda(copy_changed, copy_changed_in_slices)


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return where the elements of a tensor lie and how they are read; equal for equal views of the same memory."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


@cache
def can_widen_matmul(device: torch.device, dtype: torch.dtype) -> bool:
    """Try a small matmul and return whether `device` can add a matmul of `dtype` to an fp32 tensor."""
    grad_sum = torch.zeros(16, 16, device=device)
    factor = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(grad_sum, factor, factor, out_dtype=torch.float32, out=grad_sum)
    except (RuntimeError, TypeError):  # includes NotImplementedError
        return False
    return bool((grad_sum == 16).all())  # each element is a sum of 16 products 1 x 1
