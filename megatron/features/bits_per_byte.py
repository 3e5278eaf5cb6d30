"""Bits per byte beside each loss: the loss of a target in bits, divided by the bytes of text that a target has.

A loss in nats per token depends on the tokenizer: fewer and longer tokens have a higher loss. Bits per byte of UTF-8
can be compared between tokenizers.
"""

import math
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..ranks.rank_0 import is_rank_0
from ..training.feature import Feature

if TYPE_CHECKING:
    from ..training.run_state import Run


class BitsPerByte(Feature):
    """Feature that adds `bits_per_byte` to the rows of training, of evaluations and of the corpora of a blend."""

    def start(self, run: "Run") -> None:
        self._run = run
        self._first_sample = run.state.consumed_samples
        # (data set, first sample of a stage) -> result of `bytes_per_target`
        self._bytes_per_target: dict[tuple[str, int], dict[str, float]] = {}
        # (data set, name of a corpus) -> result of `corpus_bytes_per_target`
        self._bytes_of_corpus: dict[tuple[str, str], float | None] = {}

    def extend(self, row: dict[str, Any]) -> None:
        """Add `bits_per_byte` to a row with a loss, if the samples of its data set show the bytes of their targets."""
        if not is_rank_0() or "lm_loss" not in row:
            return
        # The split is `train`, or `train/wiki` for the corpus wiki. The name "" stands for the whole data set.
        part, _, name = row["split"].partition("/")
        target_bytes = self._known_bytes(part).get(name) or self._bytes_of_rare_corpus(part, name)
        if target_bytes:
            # From nats per target to bits per target to bits per byte.
            row["bits_per_byte"] = row["lm_loss"] / math.log(2) / target_bytes

    def _known_bytes(self, part: str) -> dict[str, float]:
        """Return the bytes of a target by name, in the data stages that this run has read; the last stage wins."""
        from ..training.remote_datasets import stage_begins
        from .target_bytes import bytes_per_target

        run = self._run
        stages = stage_begins(run.datasets[0]) if part == "train" else ()
        begins = stages or [0]
        known: dict[str, float] = {}
        for begin, end in pairwise([*begins, sys.maxsize]):
            if end <= self._first_sample or 0 < begin >= run.state.consumed_samples:
                continue
            key = (part, begin)
            if key not in self._bytes_per_target:
                self._bytes_per_target[key] = bytes_per_target(run, part, range(begin, end))
            # A row may still have the loss of a corpus that only an earlier stage reads.
            known |= self._bytes_per_target[key]
        return known

    def _bytes_of_rare_corpus(self, part: str, name: str) -> float | None:
        """Return the bytes of a target of a corpus that the counted samples of its blend lack; None if unknown."""
        from .target_bytes import corpus_bytes_per_target

        key = (part, name)
        if key not in self._bytes_of_corpus:
            self._bytes_of_corpus[key] = corpus_bytes_per_target(self._run, part, name)
        return self._bytes_of_corpus[key]
