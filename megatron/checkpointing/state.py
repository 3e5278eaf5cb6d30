"""What changes while a run goes on and is no tensor."""

from dataclasses import dataclass


@dataclass
class TrainState:
    """Streams of random numbers are pure functions of (rng_seed, iteration), so these two are their whole state."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    sample_hash: int = 0  # of the samples consumed, in their order; see data/sample_hash.py
    rng_seed: int | None = None  # of dropout; None before a run has set it
