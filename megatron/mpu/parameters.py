"""What a parameter knows of itself: which part of the whole it is, and how its first values are drawn.

Initial values are always drawn for the whole parameter and then cut, so they are the same for any number of
model-parallel ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial

import torch
from torch import Tensor, nn

from .mesh import Axis
from .random import seeded

InitMethod = Callable[[Tensor], object]  # fills a whole weight in place, as those of torch.nn.init do

zeros: InitMethod = nn.init.zeros_
ones: InitMethod = nn.init.ones_

_filled_later: ContextVar[bool] = ContextVar("filled later", default=False)


def normal(std: float) -> InitMethod:
    """Values of a normal distribution around 0."""
    return partial(nn.init.normal_, mean=0.0, std=std)


NORMAL = normal(0.02)  # what GPT-2 and BERT begin with


def declare(
    parameter: nn.Parameter,
    init_method: InitMethod = zeros,
    *,
    dim: int | None = None,
    full_size: int | None = None,
    axis: Axis | None = None,
) -> nn.Parameter:
    """Give `parameter` its first values, and write on it what norms and checkpoints must know of it.

    init_method: is given the whole parameter, on the CPU, and draws from torch's default generator; ranks that hold
    parts of it must have the same seed, as after `torch.manual_seed(seed)` on all of them.
    dim: the dimension that is split over `axis`, None for a copy on every rank.
    full_size: true size of that dimension over all ranks, padding left out.
    """
    split = dim is not None and axis is not None and axis.size > 1
    parameter.tensor_model_parallel = split  # type: ignore[attr-defined]  # the name DeepSpeed and Megatron read
    parameter.init_method = init_method  # type: ignore[attr-defined]
    parameter.partition_dim = dim  # type: ignore[attr-defined]
    parameter.full_size = full_size  # type: ignore[attr-defined]
    parameter.model_rank = axis.rank if axis and dim is not None else 0  # type: ignore[attr-defined]
    if not _filled_later.get() and not parameter.is_meta:
        fill(parameter)
    return parameter


@contextmanager
def filled_later() -> Iterator[None]:
    """Parameters declared inside stay as they are: who builds them knows their names, and fills them by these."""
    token = _filled_later.set(True)
    try:
        yield
    finally:
        _filled_later.reset(token)


def fill(parameter: nn.Parameter, seed: int | None = None) -> None:
    """Draw the first values of a declared parameter; with a seed from that, leaving torch's generator as it is."""
    init_method: InitMethod = parameter.init_method  # type: ignore[attr-defined]
    whole = torch.empty(full_shape(parameter), dtype=parameter.dtype, device="cpu")
    with torch.no_grad(), nullcontext() if seed is None else seeded(seed):
        init_method(whole)
    put(parameter, parameter, whole)


def local_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Shape of this rank's part, also where ZeRO-3 has taken it apart."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def own_rows(parameter: nn.Parameter) -> tuple[int, int, int]:
    """(dimension, first, last+1) of the true rows of the whole parameter that this rank holds.

    Padding is left out; (0, 0, rows) for a parameter that is a copy on every rank.
    """
    dim, shape = getattr(parameter, "partition_dim", None), local_shape(parameter)
    if dim is None:
        return 0, 0, shape[0]
    rank = parameter.model_rank  # type: ignore[attr-defined]
    rows = shape[dim]
    full = parameter.full_size  # type: ignore[attr-defined]
    return dim, min(rank * rows, full), min((rank + 1) * rows, full)


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Shape of the whole parameter, as if there were one rank and no padding."""
    shape = list(local_shape(parameter))
    dim = getattr(parameter, "partition_dim", None)
    if dim is not None:
        shape[dim] = parameter.full_size  # type: ignore[attr-defined]
    return tuple(shape)


@torch.no_grad()
def put(parameter: Tensor, like: nn.Parameter, whole: Tensor) -> None:
    """Copy this rank's rows of `whole` into `parameter`, laid out as `like`; padding becomes zero."""
    dim, first, end = own_rows(like)
    parameter.zero_()
    parameter.narrow(dim, 0, end - first).copy_(whole.narrow(dim, first, end - first))
