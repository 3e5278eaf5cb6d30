"""Reading of training data on the ranks that need it. The other ranks open no data files.

In the first and the last pipeline stage, one rank of each model-parallel group reads data.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from .. import mpu
from ..config import Config
from ..data.checked import checked_once
from ..data.corpora import made_with, prefixes_of
from ..data.damage import problems_of
from ..data.fingerprints import content_fingerprint, corpus_fingerprint
from ..data.sampler import ConsecutiveSampler, build_loader
from ..engines.engine import Batches
from ..ranks.agreement import all_ranks, same_everywhere
from ..ranks.objects import from_rank_0
from ..ranks.rank_0 import is_rank_0, print_notes
from ..storage import is_url
from ..tokenizer import Tokenizer
from ..tokenizer.base import other_end
from .task import Datasets, Task, checked_datasets

# Blocks of a file, of 64 MiB by default, that are compared with the checksums of its sidecar at the start of a run.
BLOCKS_AT_START = 4


class Lengths(NamedTuple):
    """Number of encoder tokens and number of decoder tokens of a T5 sample."""

    encoder: int
    decoder: int


class RemoteDataset:
    """Placeholder, on a rank that reads no data, for a data set that other ranks read.

    plan: for T5, the numbers of encoder and decoder tokens of a sample; None for any other data set.
    """

    def __init__(self, plan: Lengths | None) -> None:
        self.plan = plan


def lengths_of(dataset: Any) -> Lengths | None:
    """Return the numbers of encoder and decoder tokens of a T5 data set's samples, or None for other data sets.

    A T5 data set has an attribute `plan` with these numbers.
    """
    plan = getattr(dataset, "plan", None)
    encoder = getattr(plan, "encoder", None)
    decoder = getattr(plan, "decoder", None)
    return Lengths(encoder, decoder) if isinstance(encoder, int) and isinstance(decoder, int) else None


def reads() -> bool:
    """Return True if this rank reads data."""
    mesh = mpu.get_mesh()
    return mesh.model.rank == 0 and mesh.pipe.rank in (0, mesh.pipe.size - 1)


def open_datasets(task: Task, config: Config, tokenizer: Tokenizer) -> Datasets:
    """Return the data sets of `task`. If a rank fails, every rank raises RunError.

    For a task with `reads_alone`, ranks that read no data get placeholders (`RemoteDataset`). Rank 0 checks the
    corpora first. Other ranks that read data skip this check, and only compare the fingerprints of their files with
    those of rank 0.
    """
    checked: dict[str, bool] = {}
    with all_ranks(), checked_once(checked):
        if is_rank_0():
            _check_tokenizer(config, tokenizer)
            _check_content(config)
    if task.reads_alone:
        datasets = _open_where_read(task, config, tokenizer, checked)
    else:
        with all_ranks():
            datasets, notes = checked_datasets(task, config, tokenizer)
        print_notes(notes)
    with all_ranks():
        _check_stages(datasets[0], config)
        fingerprints = _corpus_fingerprints(config) if reads() or not task.reads_alone else None
    same_everywhere(fingerprints)
    return datasets


def _open_where_read(task: Task, config: Config, tokenizer: Tokenizer, checked: dict[str, bool]) -> Datasets:
    datasets: Any = ()
    with all_ranks(), checked_once(checked):
        if is_rank_0():
            datasets, notes = checked_datasets(task, config, tokenizer)
            print_notes(notes)
    placeholders = tuple(map(_placeholder, datasets))
    found, placeholders = from_rank_0((checked, placeholders))
    checked.update(found)
    with all_ranks(), checked_once(checked):
        if reads() and not is_rank_0():
            datasets, _ = checked_datasets(task, config, tokenizer)
    return cast(Datasets, datasets or placeholders)


def _placeholder(dataset: Any) -> Any:
    """Return a `RemoteDataset` for a data set, a dict of them for named data sets, None for None."""
    if isinstance(dataset, Mapping):
        return {name: _placeholder(each) for name, each in dataset.items()}
    return None if dataset is None else RemoteDataset(lengths_of(dataset))


def read(
    dataset: Any,
    config: Config,
    consumed_samples: int,
    skips: Callable[[int], bool] | None = None,
    gas: Callable[[int], int] | None = None,
) -> Batches | None:
    """Return an iterator over this rank's micro-batches, or None on a rank that reads no data.

    consumed_samples: number of samples that earlier iterations have used.
    skips: function that gets the number of an iteration's first sample and returns True to skip the iteration.
    gas: function from the number of an iteration's first sample to the number of its micro-batches on a rank; --gas if
    None.
    """
    if not reads():
        return None
    t = config.train
    share = mpu.get_mesh().share
    sampler = ConsecutiveSampler(t.batch_size, gas or t.gas, *share, consumed_samples, skips)
    remote = any(map(is_url, corpora_of(config)))
    return iter(build_loader(dataset, sampler, config.data.num_workers, read_ahead=remote))


def corpora_of(config: Config) -> list[str]:
    """Return the prefixes of the run's `.bin/.idx` pairs, or [] if no flag names corpora."""
    return prefixes_of(config.data.paths) if config.data.names_corpora else []


def _check_tokenizer(config: Config, tokenizer: Tokenizer) -> None:
    """Raise ValueError if a corpus's metadata shows another tokenizer or another end-of-document token."""
    for path in corpora_of(config):
        about = made_with(path)
        if about is not None and about.get("fingerprint") != tokenizer.fingerprint:
            raise ValueError(
                f"{path}.bin was made with another tokenizer ({about.get('tokenizer')}, SHA-256 "
                f"{str(about.get('fingerprint'))[:12]}) "
                f"than {config.data.vocab_file} ({tokenizer.name}, {tokenizer.fingerprint[:12]})"
            )
        if about is not None and (otherwise := other_end(about, tokenizer, config.data.vocab_file)):
            raise ValueError(f"{path}.bin {otherwise}: pass the tokenizer of the corpus, or preprocess the text again")


def _check_content(config: Config) -> None:
    """Raise ValueError if a bounded look at the corpora on this machine finds damaged blocks or holes."""
    prefixes = [prefix for prefix in corpora_of(config) if not is_url(prefix)]
    blocks = blocks_at_start(config)
    for prefix in prefixes:
        for problem in problems_of(prefix, made_with(prefix), blocks):
            raise ValueError(problem)


def blocks_at_start(config: Config) -> int:
    """Return how many blocks of each local file of a corpus are compared with their checksums before the run begins.

    `megatron/features/corpus_checks.py` compares the others while the run trains.
    """
    local = sum(not is_url(prefix) for prefix in corpora_of(config))
    return min(BLOCKS_AT_START, max(1, 4 * BLOCKS_AT_START // max(local, 1)))


def _check_stages(dataset: Any, config: Config) -> None:
    """Raise ValueError if a data stage begins after the last sample of the run."""
    if config.train.batch_size_schedule:
        return  # a resumed run need not know the sizes of earlier batches, so the end of the run is not known here
    last = config.train.train_iters * config.train_batch_size(dist.get_world_size())
    late = [begin for begin in getattr(dataset, "begins", ()) if begin and begin >= last]
    if late:
        raise ValueError(
            f"--data-stages: the stage at sample {late[0]} begins after the last of the {last} samples of "
            f"--train-iters {config.train.train_iters}; raise --train-iters or leave the stage out"
        )


def _corpus_fingerprints(config: Config) -> dict[str, str]:
    """Return a fingerprint of each corpus, so that ranks can detect nodes with different files.

    All nodes see the same object in object storage, so few requests are enough there.
    """
    looks = {path: corpus_fingerprint if is_url(path) else content_fingerprint for path in corpora_of(config)}
    return {f"the fingerprint of {path}": look(path) for path, look in looks.items()}
