"""The part of the training state that is not tensors: iteration, consumed samples and seed."""

from dataclasses import dataclass


@dataclass
class TrainState:
    """Iteration, consumed samples and dropout seed of a run.

    Random streams are pure functions of (rng_seed, iteration), so no other random state is saved.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    sample_hash: int = 0  # hash of the consumed samples, in order; see data/sample_hash.py
    rng_seed: int | None = None  # seed of dropout; None until the run sets the seed
