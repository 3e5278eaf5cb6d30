"""Bits per byte beside each loss: the loss of a target in bits, divided by the bytes of text that a target has.

A loss in nats per token depends on the tokenizer: fewer and longer tokens have a higher loss. Bits per byte of UTF-8
can be compared between tokenizers.
"""

import math
from typing import TYPE_CHECKING, Any

from ..ranks.rank_0 import is_rank_0
from ..training.feature import Feature

if TYPE_CHECKING:
    from ..training.run_state import Run


class BitsPerByte(Feature):
    """Feature that adds `bits_per_byte` to the rows of training, of evaluations and of the corpora of a blend."""

    def start(self, run: "Run") -> None:
        self._run = run
        self._bytes_per_target: dict[str, dict[str, float]] = {}  # by data set, see `bytes_per_target`

    def extend(self, row: dict[str, Any]) -> None:
        """Add `bits_per_byte` to a row with a loss, if the samples of its data set show the bytes of their targets."""
        if not is_rank_0() or "lm_loss" not in row:
            return
        # The split is `train`, or `train/wiki` for the corpus wiki. The name "" stands for the whole data set.
        part, _, name = row["split"].partition("/")
        if part not in self._bytes_per_target:
            from .target_bytes import bytes_per_target

            self._bytes_per_target[part] = bytes_per_target(self._run, part)
        target_bytes = self._bytes_per_target[part].get(name)
        if target_bytes:
            # From nats per target to bits per target to bits per byte.
            row["bits_per_byte"] = row["lm_loss"] / math.log(2) / target_bytes
