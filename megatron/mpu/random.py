"""Named random streams.

Every dropout site draws from its own stream. Its draws are a pure function of seed, iteration, name, data
rank, the number of earlier draws in this iteration and, where activations are sharded, the model rank. So
masks depend neither on how layers are cut into pipeline stages nor on the schedule. Model-parallel ranks draw
equal masks for replicated activations and different ones for sharded activations. A resumed run needs no
saved generator state, and a recomputation only resets the counters of draws.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from ..seeds import derive_seed, seed_generators

# Step between the seeds of successive draws. Both 32-bit halves are odd, so that seeds differ even if a generator uses
# only 32 bits (Steele et al. 2014).
SEED_STEP = 0x9E3779B97F4A7C15


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's generator of `device`, by default the CPU, inside the block; restore its state afterwards."""
    if device is None or device.type == "cpu":
        saved_state = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)
        restore = torch.set_rng_state
    else:
        module = torch.get_device_module(device)
        saved_state = module.get_rng_state(device)
        restore = partial(module.set_rng_state, device=device)
        module.manual_seed(seed)
    try:
        yield
    finally:
        restore(saved_state)


class RngStreams:
    """Dropout streams of this rank; each stream is created by its first draw."""

    def __init__(self, seed: int = 1234, data_rank: int = 0, model_rank: int = 0, pipe_rank: int = 0) -> None:
        self.seed = seed
        self.data_rank = data_rank
        self.model_rank = model_rank
        self.pipe_rank = pipe_rank
        self.iteration = 0
        self.recomputing = False  # whether a backward pass is running a forward pass again
        self._draws: dict[str, int] = {}  # number of draws of each stream in this iteration
        self._seeds: dict[tuple[int, int, str, bool], int] = {}  # (seed, iteration, name, split) -> seed of first draw

    def __deepcopy__(self, _: object) -> "RngStreams":
        """Return the streams themselves: copies of a layer draw from those of the process, too."""
        return self

    def begin(self, iteration: int) -> None:
        """Restart every stream for this iteration (one optimizer step) and reseed the process's generators.

        Layers that use these generators, such as nn.Dropout, thus draw the same values on all ranks of a
        model-parallel group, and also after a resume. Unlike draws from streams, these values depend on the layout.
        """
        self.iteration = iteration
        self._draws.clear()
        self._seeds.clear()
        seed_generators(derive_seed(self.seed, iteration, "torch", self.data_rank, self.pipe_rank))

    def next_seed(self, name: str, split: bool) -> int:
        """Return the seed of the next draw from stream `name`.

        split: the activation is sharded over the model-parallel ranks, so each rank gets its own seed.
        """
        stream = self.seed, self.iteration, name, split
        if stream not in self._seeds:
            rank_key = self.model_rank if split else "all"
            self._seeds[stream] = derive_seed(self.seed, self.iteration, name, self.data_rank, rank_key)
        earlier_draws = self._draws.get(name, 0)
        self._draws[name] = earlier_draws + 1
        return (self._seeds[stream] + earlier_draws * SEED_STEP) % (1 << 63)

    def fork(self, name: str, device: torch.device, split: bool = False) -> AbstractContextManager[None]:
        """Draw from stream `name` inside the block, leaving torch's generator unchanged. split: see `next_seed`."""
        return seeded(self.next_seed(name, split), device)

    def get_state(self) -> tuple[dict[str, int], int]:
        """Return how often each stream has been drawn from, and the iteration."""
        return dict(self._draws), self.iteration

    def set_state(self, state: tuple[dict[str, int], int]) -> None:
        """Continue every stream from `state`, so that a recomputation draws the same masks."""
        draws, self.iteration = state
        self._draws = dict(draws)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts that torch's checkpoint needs: none for the forward pass, a replay for the recomputation.

        The replay resets the draw counters to their values at the time of this call.
        """
        return nullcontext(), _Replay(self, self.get_state())


@dataclass
class _Replay(AbstractContextManager[None]):
    """Context that repeats the draws of `rng` that followed `state`, then continues where the streams were before.

    A class, because each backward pass through one recomputed block enters the context again.
    """

    rng: RngStreams
    state: tuple[dict[str, int], int]

    def __enter__(self) -> None:
        self._state_before = self.rng.get_state()
        self.rng.set_state(self.state)
        self.rng.recomputing = True

    def __exit__(self, *_: object) -> None:
        self.rng.set_state(self._state_before)
        self.rng.recomputing = False
