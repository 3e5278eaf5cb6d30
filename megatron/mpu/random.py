"""Named streams of random numbers, and activation checkpointing that replays them.

Every dropout site draws from a stream of its own. What it draws is a pure function of (seed, iteration, name, data rank, the model
rank where activations are split, and how often it has drawn in this iteration). So masks do not depend on how layers are cut into
pipeline stages nor on the schedule, model-parallel ranks agree where they hold copies and differ where they hold parts, a resumed
run needs no saved generator state, and a recomputation needs only to count from the same number again.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

GOLDEN = 0x9E3779B97F4A7C15  # odd in each half, so that seeds differ where a generator takes only 32 bits of them (Steele et al. 2014)


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any parts, the same on every machine and Python."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch's generator of the CPU starts from `seed`; afterwards it is as it was."""
    outside = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(outside)


def _get_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)  # type: ignore[no-any-return]


def _set_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def _seed(seed: int, device: torch.device) -> None:
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.get_device_module(device).manual_seed(seed)


class RngStreams:
    """The dropout streams of this rank, made when first used."""

    def __init__(self, seed: int = 1234, data_rank: int = 0, model_rank: int = 0, pipe_rank: int = 0) -> None:
        self.seed, self.data_rank, self.model_rank, self.pipe_rank = seed, data_rank, model_rank, pipe_rank
        self.iteration = 0
        self._draws: dict[str, int] = {}  # of each stream in this iteration
        self._seeds: dict[tuple[int, int, str, bool], int] = {}

    def begin(self, iteration: int) -> None:
        """Start every stream again for this iteration (one optimizer step), and torch's own generators with them.

        Layers that draw from torch's own, as nn.Dropout, so draw the same on all ranks of a model-parallel line, and again
        after a resume; which numbers, depends on the layout.
        """
        self.iteration = iteration
        self._draws.clear()
        self._seeds.clear()
        torch.manual_seed(derive_seed(self.seed, iteration, "torch", self.data_rank, self.pipe_rank))

    def next_seed(self, name: str, split: bool) -> int:
        """Of the next draw from the stream `name`; split: the activation is split over the model-parallel ranks, so each draws its own."""
        key = self.seed, self.iteration, name, split
        if key not in self._seeds:
            where = self.model_rank if split else "all"
            self._seeds[key] = derive_seed(self.seed, self.iteration, name, self.data_rank, where)
        before = self._draws.get(name, 0)
        self._draws[name] = before + 1
        return (self._seeds[key] + before * GOLDEN) % (1 << 63)

    @contextmanager
    def fork(self, name: str, device: torch.device, split: bool = False) -> Iterator[None]:
        """Draw from the stream `name` inside the block, leaving torch's own generator untouched. split: see `next_seed`."""
        outside = _get_state(device)
        _seed(self.next_seed(name, split), device)
        try:
            yield
        finally:
            _set_state(outside, device)

    @contextmanager
    def _replay(self, draws: dict[str, int], iteration: int) -> Iterator[None]:
        later, now = self._draws, self.iteration
        self._draws, self.iteration = dict(draws), iteration
        try:
            yield
        finally:
            self._draws, self.iteration = later, now

    def get_state(self) -> tuple[dict[str, int], int]:
        """Return how often each stream has been drawn from, and the iteration."""
        return dict(self._draws), self.iteration

    def set_state(self, state: tuple[dict[str, int], int]) -> None:
        """Continue every stream from `state`, so that what is computed again draws the same masks."""
        draws, self.iteration = state
        self._draws = dict(draws)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For torch's checkpoint: nothing around the forward pass, around its repeat the streams as they are at this moment."""
        return nullcontext(), self._replay(dict(self._draws), self.iteration)


def checkpoint_with(rng: RngStreams, function: Callable[..., Any], *args: Any, torchs_own: bool = False) -> Any:
    """Run `function(*args)` keeping only its inputs; run it again in the backward pass.

    The repeat draws the very dropout masks of the first run (Chen et al. 2016, with the
    replay of Megatron-LM). Not re-entrant, so inputs without gradient are fine. torchs_own: it may draw from torch's own
    generators, too, as nn.Dropout does; their states are then kept.
    """
    return torch_checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=torchs_own, context_fn=rng.contexts
    )
