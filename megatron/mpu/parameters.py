"""What a parameter knows of itself, in one record: which part of the whole it is, and how its first values are drawn.

Initial values are the same for any number of model-parallel ranks: those of a large parameter are drawn in stretches of rows,
each from a seed of its own, of which a rank draws the ones that it has rows of; others for the whole, which is then cut.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .mappings import all_reduce
from .mesh import Axis
from .random import derive_seed, seeded

InitMethod = Callable[[Tensor], object]  # fills a whole weight in place, as those of torch.nn.init do

zeros: InitMethod = nn.init.zeros_
ones: InitMethod = nn.init.ones_

_filled_later: ContextVar[bool] = ContextVar("filled later", default=False)
_undrawn: ContextVar[bool] = ContextVar("undrawn", default=False)


# Which give each number without looking at the others or at the shape.
_BY_NUMBER = (
    nn.init.zeros_,
    nn.init.ones_,
    nn.init.constant_,
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.trunc_normal_,
)
AT_ONCE = 1 << 20  # numbers that are drawn from one seed, or those of a row if it has more


def normal(std: float) -> InitMethod:
    """Values of a normal distribution around 0."""
    return partial(nn.init.normal_, mean=0.0, std=std)


NORMAL = normal(0.02)  # what GPT-2 and BERT begin with


class Rows(NamedTuple):
    """Rows `begin` to `end` (not included) along the dimension `dim` of a whole parameter."""

    dim: int
    begin: int
    end: int


@dataclass(frozen=True)
class ParamSpec:
    """Of a parameter of this rank: its part of the whole. Shapes: [local], its own, padding included; [full], the whole's, without.

    init_method: draws the first values; None where nobody declared any, and those of its module stay.
    dim: the dimension that is split, None for a copy on every rank. full_size: true size of that dimension over all ranks.
    rank, size: which of how many parts. shared_along_sequence: a copy whose gradients are summed over the ranks, as
    each of them sees its own stretch of the sequence only.
    """

    local_shape: tuple[int, ...]
    init_method: InitMethod | None = None
    dim: int | None = None
    full_size: int = 0
    rank: int = 0
    size: int = 1
    shared_along_sequence: bool = False

    @property
    def split(self) -> bool:
        """Whether other ranks hold other parts."""
        return self.dim is not None and self.size > 1

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, as if there were one rank and no padding."""
        shape = list(self.local_shape)
        if self.dim is not None:
            shape[self.dim] = self.full_size
        return tuple(shape)

    @property
    def rows(self) -> Rows:
        """The true rows of the whole parameter that this rank holds, without padding; all of them of a copy."""
        if self.dim is None:
            return Rows(0, 0, self.local_shape[0])
        length = self.local_shape[self.dim]
        return Rows(self.dim, *(min(rows * length, self.full_size) for rows in (self.rank, self.rank + 1)))

    def without_padding(self, part: Tensor) -> Tensor:
        """What this rank holds, of any shape with as many numbers as [local] -> its true rows, a view."""
        dim, begin, end = self.rows
        return part.view(self.local_shape).narrow(dim, 0, end - begin)

    def with_padding(self, rows: Tensor) -> Tensor:
        """The true rows of this rank -> [local], with zeros as padding; itself where there is none."""
        if rows.shape == self.local_shape:
            return rows
        part = torch.zeros(self.local_shape, dtype=rows.dtype)
        self.without_padding(part).copy_(rows)
        return part

    @torch.no_grad()
    def put(self, whole: Tensor, parameter: Tensor) -> None:
        """Copy this rank's rows of `whole` [full] into `parameter` [local]; padding becomes zero."""
        dim, begin, end = self.rows
        parameter.zero_()
        parameter.narrow(dim, 0, end - begin).copy_(whole.narrow(dim, begin, end - begin))

    def fill(self, parameter: nn.Parameter, seed: int | None = None) -> None:
        """Draw the first values into `parameter` [local]; with a seed from that, leaving torch's generator as it is.

        Nothing where nobody declared any, where the parameter is on the meta device, and, with a seed, inside `undrawn`.
        """
        if self.init_method is None or parameter.is_meta or (_undrawn.get() and seed is not None):
            return
        if seed is not None and getattr(self.init_method, "func", self.init_method) in _BY_NUMBER:
            self._fill_by_rows(parameter, self.init_method, seed)
            return
        whole = torch.empty(self.full_shape, dtype=parameter.dtype, device="cpu")
        with torch.no_grad(), nullcontext() if seed is None else seeded(seed):
            self.init_method(whole)
        self.put(whole, parameter)

    @torch.no_grad()
    def _fill_by_rows(self, parameter: nn.Parameter, init_method: InitMethod, seed: int) -> None:
        """The same values whoever holds which rows; what is not held is not drawn but up to the borders of a stretch."""
        dim, begin, end = self.rows
        shape = list(self.full_shape)
        step = max(AT_ONCE * shape[dim] // max(math.prod(shape), 1), 1)
        parameter.zero_()
        for at in range(begin - begin % step, end, step):
            shape[dim] = min(step, self.full_shape[dim] - at)
            stretch = torch.empty(shape, dtype=parameter.dtype, device="cpu")
            with seeded(derive_seed(seed, "rows", at) if at else seed):
                init_method(stretch)
            low, high = max(at, begin), min(at + shape[dim], end)
            parameter.narrow(dim, low - begin, high - low).copy_(stretch.narrow(dim, low - at, high - low))


def spec_of(parameter: nn.Parameter) -> ParamSpec:
    """What was declared of `parameter`; of any other that it is a copy on every rank, also where ZeRO-3 has taken it apart."""
    spec = getattr(parameter, "spec", None)
    if isinstance(spec, ParamSpec):
        return spec
    return ParamSpec(tuple(getattr(parameter, "ds_shape", parameter.shape)))


def is_split(parameter: nn.Parameter) -> bool:
    """Whether `parameter` says that model-parallel ranks hold other parts, by either name that DeepSpeed reads and users set."""
    return bool(getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "model_parallel", False))


def declare(
    parameter: nn.Parameter,
    init_method: InitMethod = zeros,
    *,
    dim: int | None = None,
    full_size: int | None = None,
    axis: Axis | None = None,
    sequence: Axis | None = None,
) -> nn.Parameter:
    """Give `parameter` [local] its first values, and write on it, as `parameter.spec`, what norms and checkpoints must know of it.

    init_method: is given the whole parameter, on the CPU, and draws from torch's default generator; ranks that hold
    parts of it must have the same seed, as after `torch.manual_seed(seed)` on all of them.
    dim: the dimension that is split over `axis`, None for a copy on every rank.
    full_size: true size of that dimension over all ranks, padding left out; by default there is none.
    sequence: the ranks over which the gradients of a copy are summed, as each of them sees its own stretch of the
    sequence, or of the heads, only: for the weights of norms, biases after a sum, learned positions.
    """
    size, rank = (axis.size, axis.rank) if axis is not None and dim is not None else (1, 0)
    if dim is not None and full_size is None:
        full_size = parameter.shape[dim] * size
    shared = sequence is not None and sequence.size > 1
    spec = ParamSpec(tuple(parameter.shape), init_method, dim, full_size or 0, rank, size, shared)
    parameter.spec = spec  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = spec.split  # type: ignore[attr-defined]  # the name DeepSpeed and Megatron read
    if shared and sequence is not None:
        parameter.register_hook(partial(all_reduce, axis=sequence))  # type: ignore[no-untyped-call]
    if not _filled_later.get():
        spec.fill(parameter)
    return parameter


@contextmanager
def filled_later() -> Iterator[None]:
    """Parameters declared inside stay as they are: who builds them knows their names, and fills them by these."""
    token = _filled_later.set(True)
    try:
        yield
    finally:
        _filled_later.reset(token)


@contextmanager
def undrawn() -> Iterator[None]:
    """Declared parameters that are filled from a seed get no values inside: for a model whose weights are all read from a file next.

    What is drawn from torch's generator still is, or what a user's layer draws after it would be other numbers.
    """
    token = _undrawn.set(True)
    try:
        yield
    finally:
        _undrawn.reset(token)
