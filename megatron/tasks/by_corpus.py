"""The corpus of each sample in a batch, for the loss of each corpus. Only runs with several corpora have it."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import Config
from ..config.data import DataConfig
from ..data.corpora import prefixes_of
from ..training.task import Batch

KEY = "corpus"


@lru_cache(4)
def _number_of_corpora(data: DataConfig) -> int:
    return len(prefixes_of(data.paths)) if data.names_corpora else 0


def keys(config: Config) -> list[str]:
    """Return the keys of a batch that this module needs: none if the run has only one corpus."""
    return [KEY] if _number_of_corpora(config.data) > 1 else []


def with_numbers(data: Batch | None, config: Config, samples: int) -> Batch | None:
    """Return `data` with the number of each sample's corpus, int64 [samples], if `keys` is not empty.

    Samples of a task's own data sets have no corpus. They get the number of corpora, which belongs to none.
    """
    if data is None or KEY in data or not keys(config):
        return data
    return {**data, KEY: torch.full((samples,), _number_of_corpora(config.data))}


def corpora_of(batch: Batch, config: Config) -> dict[str, Tensor]:
    """Return {"corpora": float [b, c], 1 at the corpus of each sample}; {} with one corpus.

    batch: broadcast batch, with the number of each sample's corpus [b].
    """
    if KEY not in batch:
        return {}
    corpora = _number_of_corpora(config.data)
    return {"corpora": F.one_hot(batch[KEY], corpora + 1)[:, :corpora].float()}
