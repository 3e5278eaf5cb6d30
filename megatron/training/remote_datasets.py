"""Placeholders of data sets on the ranks that read no data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Lengths(NamedTuple):
    """Number of encoder tokens and number of decoder tokens of a T5 sample."""

    encoder: int
    decoder: int


@dataclass
class RemoteDataset:
    """Placeholder, on a rank that reads no data, for a data set that other ranks read.

    plan: for T5, the numbers of encoder and decoder tokens of a sample; None for any other data set.
    begins: number of the first sample of each data stage; empty for a data set without stages.
    """

    plan: Lengths | None
    begins: Sequence[int] = ()


def t5_lengths(dataset: Any) -> Lengths | None:
    """Return the numbers of encoder and decoder tokens of a T5 data set's samples, or None for other data sets.

    A T5 data set has an attribute `plan` with these numbers.
    """
    plan = getattr(dataset, "plan", None)
    encoder = getattr(plan, "encoder", None)
    decoder = getattr(plan, "decoder", None)
    return Lengths(encoder, decoder) if isinstance(encoder, int) and isinstance(decoder, int) else None


def stage_begins(dataset: Any) -> Sequence[int]:
    """Return the number of the first sample of each data stage; empty for a data set without stages."""
    # A user's data set may use the name for something else.
    return getattr(dataset, "begins", ()) if is_builtin(dataset) else ()  # type: ignore[no-any-return]


def begins_stage(dataset: Any, samples: range) -> bool:
    """Return whether a data stage begins with one of `samples`: another blend of corpora, with other losses."""
    return any(begin in samples for begin in stage_begins(dataset))


def is_builtin(dataset: Any) -> bool:
    """Return whether a data set is of a class of this package, not of a user's class."""
    return type(dataset).__module__.startswith("megatron.")


def placeholder_of(dataset: Any) -> Any:
    """Return a `RemoteDataset` for a data set, a dict of them for named data sets, None for None."""
    if isinstance(dataset, Mapping):
        return {name: placeholder_of(each) for name, each in dataset.items()}
    return None if dataset is None else RemoteDataset(t5_lengths(dataset), stage_begins(dataset))
