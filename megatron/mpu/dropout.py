"""Dropout that draws from a named random stream, in eager and in compiled code alike.

torch.compile cannot trace a random generator. So the custom operation `megatron::keep_mask` draws each mask, and
the compiler fuses only the operations that use the mask. A number in a tensor identifies the stream, because a
name would become a constant of the graph, and every layer would need its own graph.

Shapes: ... any.
"""

import functools
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .random import RngStreams

_streams: "WeakValueDictionary[int, Stream]" = WeakValueDictionary()
_generator_of = functools.cache(torch.Generator)  # by device


class Stream:
    """Random stream of one dropout site.

    split: each model-parallel rank draws its own masks, because it holds a different part of the activation.
    """

    def __init__(self, rng: RngStreams, name: str, split: bool = False) -> None:
        self.rng = rng
        self.name = name
        self.split = split
        number = max(_streams, default=0) + 1  # differs from those of all streams that still exist
        _streams[number] = self
        self.number = torch.tensor(number, device="cpu")

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle and deepcopy make copies by the constructor, which registers each copy under its own number.
        return Stream, (self.rng, self.name, self.split)

    def drop(self, x: Tensor, p: float, turn: int = 0) -> Tensor:
        """Set each element of x [...] to 0 with probability p, else divide it by 1 - p (Srivastava et al. 2014).

        turn: a different number for each draw that one layer takes from this stream. Without it, a compiler would merge
        the draws, because their arguments are equal.
        """
        keep_prob = 1.0 if p == 1 else 1 - p  # p = 1 drops everything: avoid 0 / 0
        # Autograd saves 1 byte per element of a bool mask. On a CPU, multiplying by such a mask is half as fast.
        mask_dtype = x.dtype if x.device.type == "cpu" else torch.bool
        mask = self.keep_mask(x.shape, p, x.device, mask_dtype, turn)
        return (x * mask).mul_(1 / keep_prob)  # in 16 bits, a mask divided by keep_prob would be off by up to 0.4 %

    def keep_mask(
        self, shape: Sequence[int], p: float, device: torch.device, dtype: torch.dtype, turn: int = 0
    ) -> Tensor:
        """Return a mask [*shape] of `dtype`: 0 with probability p, else 1. turn: number of this draw, see `drop`."""
        if torch.compiler.is_compiling():
            mask: Tensor = _keep_mask_op(self.number, list(shape), p, device, dtype, turn)
            return mask
        return self.draw(shape, p, device, dtype)  # without `turn`: `next_seed` gives each call its own seed

    def draw(self, shape: Sequence[int], p: float, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Draw a mask [*shape] for `keep_mask`. In a compiled graph, a custom operation calls this function."""
        generator = _generator_of(device)
        generator.manual_seed(self.rng.next_seed(self.name, self.split))
        return torch.empty(shape, dtype=dtype, device=device).bernoulli_(1 - p, generator=generator)


@torch.library.custom_op("megatron::keep_mask", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _keep_mask_op(
    stream: Tensor, shape: list[int], p: float, device: torch.device, dtype: torch.dtype, turn: int
) -> Tensor:
    return _streams[int(stream)].draw(shape, p, device, dtype)


@_keep_mask_op.register_fake
def _(stream: Tensor, shape: list[int], p: float, device: torch.device, dtype: torch.dtype, turn: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
