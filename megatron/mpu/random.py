"""Named streams of random numbers, and activation checkpointing that replays them.

Every dropout site draws from a stream of its own, whose state at the start of an iteration is
a pure function of (seed, iteration, name, data rank, and the model rank where activations are
split). So masks do not depend on how layers are cut into pipeline stages nor on the schedule,
model-parallel ranks agree where they hold copies and differ where they hold parts, and a
resumed run needs no saved generator state.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint


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
        self._states: dict[str, Tensor] = {}

    def begin(self, iteration: int) -> None:
        """Start every stream again for this iteration (one optimizer step), and torch's own generators with them.

        Layers that draw from torch's own, as nn.Dropout, so draw the same on all ranks of a model-parallel line, and again
        after a resume; which numbers, depends on the layout.
        """
        self.iteration = iteration
        self._states.clear()
        torch.manual_seed(derive_seed(self.seed, iteration, "torch", self.data_rank, self.pipe_rank))

    @contextmanager
    def fork(self, name: str, device: torch.device, split: bool = False) -> Iterator[None]:
        """Draw from the stream `name` inside the block, leaving torch's own generator untouched.

        split: the activation is split over the model-parallel ranks, so each draws its own mask.
        """
        outside = _get_state(device)
        if name in self._states:
            _set_state(self._states[name], device)
        else:
            where = self.model_rank if split else "all"
            _seed(derive_seed(self.seed, self.iteration, name, self.data_rank, where), device)
        try:
            yield
        finally:
            self._states[name] = _get_state(device)
            _set_state(outside, device)

    @contextmanager
    def _replay(self, states: dict[str, Tensor], iteration: int) -> Iterator[None]:
        later, now = self._states, self.iteration
        self._states, self.iteration = dict(states), iteration
        try:
            yield
        finally:
            self._states, self.iteration = later, now

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For torch's checkpoint: nothing around the forward pass, this moment's states around its repeat."""
        return nullcontext(), self._replay(dict(self._states), self.iteration)


def checkpoint_with(rng: RngStreams, function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(*args)` keeping only its inputs; run it again in the backward pass.

    The repeat draws the very dropout masks of the first run (Chen et al. 2016, with the
    replay of Megatron-LM). Not re-entrant, so inputs without gradient are fine.
    """
    return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=rng.contexts)
