"""Bits per byte beside each loss: the loss of a target in bits, divided by the bytes of text that a target has.

A loss in nats per token depends on the tokenizer: fewer and longer tokens have a higher loss. Bits per byte of UTF-8
can be compared between tokenizers.
"""

import math
import sys
from functools import cache, partial
from itertools import pairwise
from typing import Any

from .. import mpu
from ..ranks.rank_0 import is_rank_0
from ..training.feature import Feature
from ..training.run_state import Run


class BitsPerByte(Feature):
    """Feature that adds `bits_per_byte` to the rows of training, of evaluations and of the corpora of a blend."""

    def start(self, run: Run) -> None:
        from .target_bytes import bytes_per_target, corpus_bytes_per_target

        self._run = run
        self._samples = range(run.state.consumed_samples)  # those of the last row of training
        self._bytes_per_target = cache(partial(bytes_per_target, run))
        self._bytes_of_corpus = cache(partial(corpus_bytes_per_target, run))

    def extend(self, row: dict[str, Any]) -> None:
        """Add `bits_per_byte` to a row with a loss, if the samples of its data set show the bytes of their targets."""
        if row.get("split") == "train":  # the rows of its corpora follow
            self._samples = range(self._samples.stop, self._run.state.consumed_samples)
        if not is_rank_0() or row.get("lm_loss") is None:
            return
        # The split is `train`, or `train/wiki` for the corpus wiki. The name "" stands for the whole data set.
        part, _, name = row["split"].partition("/")
        target_bytes = self._known_bytes(part).get(name)
        if not target_bytes:  # the counted samples of a blend may lack a rare corpus, so count in the corpus itself
            target_bytes = self._bytes_of_corpus(part, name)
        if target_bytes:
            # From nats per target to bits per target to bits per byte.
            row["bits_per_byte"] = row["lm_loss"] / math.log(2) / target_bytes

    def _known_bytes(self, part: str) -> dict[str, float]:
        """Return the bytes of a target by name; for training, those of the data stages of the last row.

        The name "" has the mean of these stages, weighted by their samples in the row.
        """
        from ..training.remote_datasets import stage_begins

        stages = stage_begins(self._run.datasets[0]) if part == "train" else ()
        begins = stages or [0]  # without stages, all samples are counted together
        train = self._run.config.train
        end_of_part = sys.maxsize  # the last stage of training has no end
        if part != "train":  # an evaluation, whose loss is the mean over this many samples
            end_of_part = train.eval_iters * train.gas * train.batch_size * mpu.get_mesh().share.size
        samples = self._samples
        known: dict[str, float] = {}
        weighted_bytes = 0.0
        for begin, end in pairwise([*begins, end_of_part]):
            # Of the row's samples 80 to 119, a stage of samples 0 to 99 has 20, and the next stage has 20.
            count = min(end, samples.stop) - max(begin, samples.start)
            if stages and count <= 0:
                continue  # the row has no samples of this stage
            known |= self._bytes_per_target(part, range(begin, end))
            weighted_bytes += count * known.get("", 0.0)  # no "" if the form of the samples is unknown
        if stages and weighted_bytes:
            known[""] = weighted_bytes / len(samples)
        return known
