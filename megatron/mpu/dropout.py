"""Dropout that draws from a named stream, in code that is compiled as in code that is not.

A compiler cannot look into a generator. It sees one operation without inputs that it could fuse, `megatron::keep_mask`, and
fuses what is done with the mask. Which stream an operation draws from is told by a number in a tensor, because a name would be
compiled into the graph, and every layer would need a graph of its own.

Shapes: ... any.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .random import RngStreams

_streams: "WeakValueDictionary[int, Stream]" = WeakValueDictionary()
_generators: dict[torch.device, torch.Generator] = {}


class Stream:
    """One dropout site. split: each model-parallel rank draws its own masks, because it holds a part of what is dropped from."""

    def __init__(self, rng: RngStreams, name: str, split: bool = False) -> None:
        self.rng, self.name, self.split = rng, name, split
        number = max(_streams, default=0) + 1
        _streams[number] = self
        self.number = torch.tensor(number, device="cpu")

    def __reduce__(self) -> tuple[Any, ...]:
        return Stream, (self.rng, self.name, self.split)  # a copy has a number of its own

    def drop(self, x: Tensor, p: float, turn: int = 0) -> Tensor:
        """[...] -> [...]: each element 0 with probability p, else divided by 1 - p (Srivastava et al. 2014).

        turn: of several draws from one stream within a layer, which of them this is: a compiler takes two that are told alike for one.
        """
        rest = 1 - p or 1.0  # where all are dropped nothing is divided
        if x.device.type == "cpu":  # which multiplies by a bool at half the speed
            return x * self.keep_mask(x.shape, p, x.device, x.dtype, turn).div_(rest)
        mask = self.keep_mask(x.shape, p, x.device, torch.bool, turn)  # a byte is kept for each element
        return (x * mask).mul_(1 / rest)

    def keep_mask(
        self, shape: Sequence[int], p: float, device: torch.device, dtype: torch.dtype, turn: int = 0
    ) -> Tensor:
        """[*shape] of that dtype: 0 with probability p, else 1. turn: see `drop`."""
        if torch.compiler.is_compiling():
            found: Tensor = _in_graph(self.number, list(shape), p, device, dtype, turn)
            return found
        return self.draw(shape, p, device, dtype)

    def draw(self, shape: Sequence[int], p: float, device: torch.device, dtype: torch.dtype) -> Tensor:
        """[*shape], the same, at once."""
        generator = _generators.get(device)
        if generator is None:
            generator = _generators[device] = torch.Generator(device)
        generator.manual_seed(self.rng.next_seed(self.name, self.split))
        return torch.empty(shape, dtype=dtype, device=device).bernoulli_(1 - p, generator=generator)


@torch.library.custom_op("megatron::keep_mask", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _in_graph(
    stream: Tensor, shape: list[int], p: float, device: torch.device, dtype: torch.dtype, turn: int
) -> Tensor:
    return _streams[int(stream)].draw(shape, p, device, dtype)


@_in_graph.register_fake
def _(stream: Tensor, shape: list[int], p: float, device: torch.device, dtype: torch.dtype, turn: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
