"""Reading of training data on the ranks that need it. The other ranks open no data files.

In the first and the last pipeline stage, one rank of each model-parallel group reads data.
"""

from collections.abc import Callable
from typing import Any, cast

from .. import mpu
from ..checkpointing.resume import Start
from ..config import Config
from ..data.checked import reuse_checks
from ..data.sampler import ConsecutiveSampler, build_loader
from ..engines.engine import Batches
from ..ranks.agreement import raise_on_all_ranks, require_equal_values
from ..ranks.objects import broadcast_from_rank_0
from ..ranks.rank_0 import is_rank_0, print_notes
from ..storage import is_url
from ..tokenizer import Tokenizer
from .inputs import check_corpora, check_stages, check_tokenizer, corpora_of_run, corpus_fingerprints
from .remote_datasets import is_builtin, placeholder_of
from .task import Datasets, Task
from .task_checks import checked_datasets


def reads_data() -> bool:
    """Return True if this rank reads data."""
    mesh = mpu.get_mesh()
    return mesh.model.rank == 0 and mesh.pipe.rank in (0, mesh.pipe.size - 1)  # stages that need inputs or labels


def open_datasets(task: Task, given_config: Config, config: Config, tokenizer: Tokenizer, start: Start) -> Datasets:
    """Return the data sets of `task`. If a rank fails, every rank raises RunError.

    For a task with `reads_alone`, ranks that read no data get placeholders (`RemoteDataset`). Rank 0 checks the
    corpora first. Other ranks that read data skip this check, and only compare the fingerprints of their files with
    those of rank 0.

    given_config: the settings without the data stages that only the checkpoint names. Those stages have ended, so their
    corpora may have another tokenizer. start: the checkpoint from which the run resumes, if any.
    """
    checks: dict[str, bool] = {}  # corpus -> result of its check; opening a corpus inside `reuse_checks` adds it
    with raise_on_all_ranks(), reuse_checks(checks):
        if is_rank_0():
            check_tokenizer(given_config, tokenizer)
            check_corpora(config)
    if task.reads_alone:
        datasets = _open_on_reading_ranks(task, config, tokenizer, checks)
    else:
        with raise_on_all_ranks():
            datasets, notes = checked_datasets(task, config, tokenizer)
        print_notes(notes)
    check_stages(datasets[0], config, start)  # raises if a data stage begins after the end of the run
    has_opened_corpora = reads_data() or not task.reads_alone
    with raise_on_all_ranks():
        fingerprints = corpus_fingerprints(config) if has_opened_corpora else None  # None: nothing to compare
    require_equal_values(fingerprints)
    return datasets


def _open_on_reading_ranks(task: Task, config: Config, tokenizer: Tokenizer, checks: dict[str, bool]) -> Datasets:
    """Open the data sets on rank 0, then on the other ranks that read data; return placeholders on the rest."""
    datasets: Any = None
    placeholders = None
    with raise_on_all_ranks(), reuse_checks(checks):
        if is_rank_0():
            datasets, notes = checked_datasets(task, config, tokenizer)
            print_notes(notes)
            placeholders = tuple(map(placeholder_of, datasets))  # for ranks that read no data
    # The other ranks reuse the checks of rank 0, which take long for a large corpus.
    checks, placeholders = broadcast_from_rank_0((checks, placeholders))
    with raise_on_all_ranks(), reuse_checks(checks):
        if not reads_data():
            datasets = placeholders
        elif not is_rank_0():  # rank 0, which always reads data, has its data sets
            datasets, _ = checked_datasets(task, config, tokenizer)
    return cast(Datasets, datasets)


def read_batches(
    dataset: Any,
    config: Config,
    consumed_samples: int,
    should_skip: Callable[[int], bool] | None = None,
    gas: Callable[[int], int] | None = None,
) -> Batches | None:
    """Return an iterator over this rank's micro-batches, or None on a rank that reads no data.

    consumed_samples: number of samples that earlier iterations have used.
    should_skip: function that gets the number of an iteration's first sample and returns True to skip the iteration.
    gas: function that gets this number and returns the iteration's number of micro-batches on a rank; None for --gas.
    """
    if not reads_data():
        return None
    train = config.train
    share = mpu.get_mesh().share
    sampler = ConsecutiveSampler(
        train.batch_size, gas or train.gas, share.rank, share.size, consumed_samples, should_skip
    )
    # Threads cannot give each sample of a user's data set its own random numbers, as they share the generators.
    read_ahead = is_builtin(dataset) and any(map(is_url, corpora_of_run(config)))
    loader = build_loader(dataset, sampler, config.data.num_workers, read_ahead, train.seed)
    return iter(loader)
