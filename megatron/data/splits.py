"""Split of the documents of a corpus into training, validation and test documents."""

from collections.abc import Sequence

PARTS = ("train", "valid", "test")


def parse_split(text: str) -> list[float]:
    """Parse `949,50,1` into fractions that sum to 1. Raises ValueError for invalid text."""
    try:
        weights = [float(part) for part in text.replace("/", ",").split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or any(not 0 <= w < float("inf") for w in weights) or not sum(weights):
        raise ValueError(f"--split {text!r} must be one to three non-negative numbers, such as 949,50,1")
    weights += [0.0] * (3 - len(weights))
    return [weight / sum(weights) for weight in weights]


def split_documents(shares: Sequence[float], documents: int) -> list[range]:
    """Split `documents` documents into consecutive ranges, one per share, by the largest remainder method.

    A non-zero share gets at least one document if there are enough documents.
    """
    exact = [share * documents for share in shares]
    counts = [int(x) for x in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: documents - sum(counts)]:
        counts[i] += 1
    for i, share in enumerate(shares):
        richest = max(range(len(counts)), key=counts.__getitem__)
        if share and not counts[i] and counts[richest] > 1:
            counts[i], counts[richest] = 1, counts[richest] - 1
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return [range(a, b) for a, b in zip(starts, starts[1:], strict=False)]
