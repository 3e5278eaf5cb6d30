"""Split of the documents of a corpus into training, validation and test documents."""

from collections.abc import Sequence

PARTS = ("train", "valid", "test")


def parse_split(text: str) -> list[float]:
    """Parse `949,50,1` into fractions that sum to 1. Raises ValueError for invalid text."""
    try:
        # Megatron-LM accepts 949/50/1, too.
        weights = list(map(float, text.replace("/", ",").split(",")))
    except ValueError:
        weights = []
    total = sum(weights)
    are_valid = all(0 <= weight < float("inf") for weight in weights)
    if not 1 <= len(weights) <= 3 or not are_valid or not total:
        raise ValueError(f"--split {text!r} must be one to three non-negative numbers, such as 949,50,1")
    weights += [0.0] * (3 - len(weights))
    return [weight / total for weight in weights]


def split_documents(shares: Sequence[float], documents: int) -> list[range]:
    """Split `documents` documents into consecutive ranges, one per share, by the largest remainder method.

    A non-zero share gets at least one document if there are enough documents.
    """
    # Shares of 0.5, 0.3 and 0.2 of 9 documents are exactly 4.5, 2.7 and 1.8. Rounded down, these are 4, 2 and 1; the
    # two documents that are left go to the largest remainders, 0.8 and 0.7. So the counts are 4, 3 and 2.
    exact = [share * documents for share in shares]
    counts = list(map(int, exact))
    # Of equal remainders, the first one stays in front.
    by_remainder = sorted(range(len(shares)), key=lambda i: exact[i] - counts[i], reverse=True)
    for i in by_remainder[: documents - sum(counts)]:
        counts[i] += 1
    # Each non-zero share without a document takes one from the largest range.
    for i, share in enumerate(shares):
        largest = counts.index(max(counts))
        if share and not counts[i] and counts[largest] > 1:
            counts[i] = 1
            counts[largest] -= 1
    ranges = []
    start = 0
    for count in counts:
        ranges.append(range(start, start + count))
        start += count
    return ranges
