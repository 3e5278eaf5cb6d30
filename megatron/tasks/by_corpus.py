"""The corpus of each sample in a batch, for the loss of each corpus. Only runs with several corpora have it."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import mpu

from ..training.task import Batch

KEY = "corpus"


def broadcast_with_corpora(
    data: Batch | None,
    keys: Sequence[str],
    corpora: int,
    samples: int,
    sizes: Mapping[str, Sequence[int]] | None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Broadcast a batch of `samples` samples; return it, and {"corpora": float [b, c], 1 at the corpus of each sample}.

    data: batch of the first model-parallel rank; may be None on the others. corpora: c, the number of corpora.
    sizes: shapes of the tensors, or None if the ranks do not know them, see `mpu.broadcast_data`.
    Samples of a task's own data sets have no number of their corpus, 0 to c - 1. They get c, which belongs to none.
    """
    if data is not None and KEY not in data:
        data = {**data, KEY: torch.full((samples,), corpora)}
    if sizes is not None:
        sizes = {**sizes, KEY: (samples,)}
    batch = mpu.broadcast_data([*keys, KEY], data, torch.int64, sizes=sizes)
    corpus_numbers = batch.pop(KEY)
    # The column `corpora`, of samples that belong to no corpus, is cut off.
    is_of_corpus = F.one_hot(corpus_numbers, corpora + 1)[:, :corpora]
    return batch, {"corpora": is_of_corpus.float()}
