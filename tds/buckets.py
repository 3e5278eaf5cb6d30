"""Weights and gradients in flat memory, by the bucket, each cut evenly over the replicas (ZeRO, Rajbhandari et al. 2020).

A bucket is what replicas send each other at once. Every replica has all of its weights and gradients, and owns one
of as many equal shares: it alone keeps the moments of that share, and the fp32 copy of weights in half precision.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._torch import gather_shares, scatter_sum, users

ALIGNMENT = 64  # elements: a share then begins where every device copies fast
LONGEST_STRETCH = 2**20  # of which one norm is taken in fp32; more of them are added up in fp64


class Bucket:
    """parameters: of one dtype and device, which look into the flat memory from now on. group: of the replicas."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: Any) -> None:
        self.parameters, self.group = list(parameters), group
        self.replicas, self.rank = dist.get_world_size(group), dist.get_rank(group)
        first = self.parameters[0]
        numbers = sum(p.numel() for p in self.parameters)
        share = -(-numbers // (self.replicas * ALIGNMENT)) * ALIGNMENT
        self.begin, self.end = self.rank * share, (self.rank + 1) * share
        exact = torch.promote_types(first.dtype, torch.float32)
        self.weights = torch.zeros(share * self.replicas, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(share * self.replicas, dtype=exact, device=first.device)
        self._grad_of: dict[nn.Parameter, Tensor] = {}
        self._place_of: dict[nn.Parameter, Tensor] = {}  # in `weights`
        self._at: dict[nn.Parameter, int] = {}
        at = 0
        for parameter in self.parameters:
            end = at + parameter.numel()
            place = self.weights[at:end].view_as(parameter)
            place.copy_(parameter.detach())
            parameter.data = place
            self._place_of[parameter] = place
            self._grad_of[parameter], self._at[parameter] = self.grads[at:end].view_as(parameter), at
            at = end
        mine = self.weights[self.begin : self.end]
        self.copies = exact is not first.dtype
        # What the optimizer steps: this replica's share, in fp32 at least.
        self.share = nn.Parameter(mine.to(exact) if self.copies else mine)
        self.share_grad = self.grads[self.begin : self.end]
        self._arrived: set[nn.Parameter] = set()  # in this step
        self.left = False  # whether gradients of this step are on their way, or summed
        self.work: dist.Work | None = None

    def stretch(self, parameter: nn.Parameter) -> tuple[int, int]:
        """From where to where in this replica's share `parameter` lies; empty if it lies in others'."""
        at = self._at[parameter]
        begin, end = max(at, self.begin), min(at + parameter.numel(), self.end)
        return begin - self.begin, max(end, begin) - self.begin

    def settle(self) -> None:
        """Note how many tensors look into the flat memory: from now on one more is a user's. Call it when `attach` is done."""
        self._views = users(self.weights)

    def place_of(self, parameter: nn.Parameter) -> Tensor:
        """Return the part of the flat memory, in the shape of `parameter`, that belongs to it."""
        return self._place_of[parameter]

    def replaced(self) -> list[nn.Parameter]:
        """Weights that no longer lie in the flat memory, or lie in it differently."""
        return [p for p, place in self._place_of.items() if not _is_same_view(p, place)]

    def take_in(self, replaced: Sequence[nn.Parameter]) -> bool:
        """Copy these weights into the flat memory and let them lie there again. False, and nothing done, if that could be seen.

        It could where somebody else looks into the flat memory, e.g. keeps what was swapped out to put it back later.
        """
        if users(self.weights) != self._views - len(replaced):
            return False
        for parameter in replaced:
            self._place_of[parameter].copy_(parameter.detach())
            parameter.data = self._place_of[parameter]
        return True

    def add(self, parameter: nn.Parameter) -> None:
        """Take over what autograd has found, and let go of its memory."""
        assert parameter.grad is not None
        total, grad = self._grad_of[parameter], parameter.grad
        if parameter in self._arrived:
            total.add_(grad.to(total.dtype) if grad.is_sparse else grad)
        elif grad.is_sparse:
            total.zero_().add_(grad.to(total.dtype))
        else:  # not one pass more, to fill in zeros first
            total.copy_(grad)
        self._arrived.add(parameter)
        parameter.grad = None

    @property
    def adds_products(self) -> bool:
        """Whether this device multiplies and adds to the sums in one pass: in their own dtype all do, from half precision only CUDA does."""
        return not self.copies or widens(self.weights.device, self.weights.dtype)

    def add_product(self, left: Tensor, right: Tensor, parameter: nn.Parameter) -> None:
        """The gradient of `parameter` [o, i] is left [o, n] times right [n, i]: add it, without a copy in half precision."""
        total = self._grad_of[parameter]
        add: Any = torch.addmm if left.dtype is total.dtype else partial(torch.addmm, out_dtype=total.dtype)
        add(total, left, right, beta=int(parameter in self._arrived), out=total)
        self._arrived.add(parameter)

    def reduce(self) -> None:
        """Begin to add up gradients over the replicas; zeros where there is none. Afterwards `share_grad` holds the sums."""
        for parameter in self.parameters:
            if parameter.grad is not None:  # set by hand, so no hook of autograd has seen it
                self.add(parameter)
            if parameter not in self._arrived:
                self._grad_of[parameter].zero_()
        if self.replicas > 1:
            self.work = scatter_sum(self.share_grad, self.grads, self.group)

    def gather(self) -> None:
        """Begin to bring the new weights of all shares together."""
        if self.copies:
            self.weights[self.begin : self.end].copy_(self.share.detach())
        if self.replicas > 1:
            self.work = gather_shares(self.weights, self.weights[self.begin : self.end], self.group)

    def take_weights(self) -> None:
        """Into this replica's share, from the weights of the model."""
        if self.copies:
            self.share.data.copy_(self.weights[self.begin : self.end])

    def take_changes(self) -> None:
        """Into this replica's fp32 share, from weights in half precision that a user changed in place since the last step."""
        if not self.copies:
            return
        for at in range(0, self.share.numel(), LONGEST_STRETCH):
            exact, seen = (t[at : at + LONGEST_STRETCH] for t in (self.share.data, self.weights[self.begin : self.end]))
            exact.copy_(torch.where(exact.to(seen.dtype) == seen, exact, seen))

    def wait(self) -> None:
        """Until what was begun is done."""
        work, self.work = self.work, None
        if work is not None:
            work.wait()

    def shares_of_grads(self) -> list[Tensor]:
        """Of each parameter of which this replica owns something, that part of the summed gradient, 1-D."""
        stretches = [self.stretch(parameter) for parameter in self.parameters]
        return [self.share_grad[begin:end] for begin, end in stretches if begin < end]

    def forget_grads(self) -> None:
        """A new step begins."""
        self._arrived.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def stretches(self, counts: dict[nn.Parameter, bool]) -> list[tuple[Tensor, bool]]:
        """This replica's share of the gradients in pieces, and whether each counts in a sum over the model; `counts` says of which parameters."""
        joined: list[list[Any]] = []
        for parameter in self.parameters:
            begin, end = self.stretch(parameter)
            if begin == end:
                continue
            if joined and joined[-1][1] == begin and joined[-1][2] is counts[parameter]:
                joined[-1][1] = end
            else:
                joined.append([begin, end, counts[parameter]])
        return [
            (self.share_grad[at : min(at + LONGEST_STRETCH, end)], counted)
            for begin, end, counted in joined
            for at in range(begin, end, LONGEST_STRETCH)
        ]


def _is_same_view(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())


@cache
def widens(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `device` adds a product of matrices of `dtype` to an fp32 sum, found out by a small one."""
    total, factor = torch.zeros(16, 16, device=device), torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # NotImplementedError is one
        return False
    return bool((total == 16).all())
