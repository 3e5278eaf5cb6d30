"""What the tasks of all families share: broadcast of a batch over the model-parallel ranks, and its loss."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron import mpu

from ..config import Config
from ..config.data import DataConfig
from ..data.corpora import prefixes_of
from ..training.task import Batch, Task


@lru_cache(4)
def _count_corpora(data: DataConfig) -> int:
    return len(prefixes_of(data.paths)) if data.names_corpora else 0


def broadcast_batch(
    data: Batch | None,
    keys: Sequence[str],
    config: Config,
    sizes: Mapping[str, Sequence[int]] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return (the tensors `keys` of a batch, int64 [b, ...], the dict of further tensors of `Targets`) on all ranks.

    data: batch of the first model-parallel rank. sizes: shapes of the tensors, see `mpu.broadcast_data`.
    With several corpora, the further tensors are {"corpora": float [b, c], 1 at the corpus of each sample}.
    """
    corpora = _count_corpora(config.data)
    if corpora > 1:
        from .by_corpus import broadcast_with_corpora

        return broadcast_with_corpora(data, keys, corpora, config.train.batch_size, sizes)
    return mpu.broadcast_data(keys, data, torch.int64, sizes=sizes), {}


class LanguageTask(Task):
    """Base class of tasks whose model computes the loss, because it may compute the logits in chunks."""

    def loss(self, model: Any, batch: tuple[Any, Any]) -> Tensor:
        """Return the loss summed over the targets of a micro-batch, a scalar. The model is one without a pipeline."""
        inputs, (labels, loss_mask, *extra_dicts) = batch
        extra_targets = extra_dicts[0] if extra_dicts else {}
        total: Tensor = model(*inputs, labels=labels, loss_mask=loss_mask, **extra_targets)
        return total
