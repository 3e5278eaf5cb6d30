"""The part of the training state that is not tensors: iteration, consumed samples and seed."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


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
    features: dict[str, dict[str, Any]] = field(default_factory=dict)  # name of a feature -> what it stores
    # (iteration, seconds since 1970) of each resume that abandoned later checkpoints.
    forks: tuple[tuple[int, int], ...] = ()
    # Number of samples before the last resume whose data would have given other samples; None without such a resume.
    reordered_at: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the values as in checkpoint.json, without empty ones, whose names older versions do not know."""
        return {name: value for name, value in asdict(self).items() if value not in ((), {}, None)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainState":
        """Return the state with values from checkpoint.json.

        Version 0.2.0 and older stored the steps of --skip-step-sigma under `recent`.
        """
        known = dict(values)
        known["forks"] = tuple(map(tuple, values.get("forks", ())))
        recent = known.pop("recent", None)
        if recent:
            known["features"] = {"spike_guard": {"recent": recent}}
        return cls(**known)
