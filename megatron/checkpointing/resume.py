"""The start of a run: from its own newest checkpoint, from the checkpoint of --load, or from scratch."""

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron.config import Config
from megatron.config.data_stages import prefixes_in
from megatron.data.corpora import content_fingerprint, corpus_fingerprint, prefixes_of
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.sample_hash import extend
from megatron.data.splits import parse_split, split_documents
from megatron.data.staged import StagedDataset
from megatron.optim import settled
from megatron.ranks.agreement import all_ranks
from megatron.ranks.objects import from_rank_0
from megatron.ranks.rank_0 import is_rank_0, print_rank_0
from megatron.storage import place

from .data_plan import difference, stages_of
from .files import CheckpointError, find_checkpoint, latest_checkpoint, numbered_checkpoints
from .leftovers import recover
from .load import load_checkpoint
from .reader import CheckpointReader, plain_config
from .state import TrainState
from .wanted import Wanted

MANY = 10**8  # Comparing more samples than this takes more than a few seconds.


class Start(NamedTuple):
    """The checkpoint to start from (None to start from scratch) and the parts to load from it."""

    path: Path | None
    wanted: Wanted


def find_start(config: Config, save_dir: str) -> Start:
    """Return the checkpoint to start from: this run's newest checkpoint, else that of --load, else none.

    If any rank fails, every rank raises RunError.
    """
    load = config.checkpoint.load
    path = None
    with all_ranks():  # Rank 0 alone looks, because a run that is training may replace `latest` meanwhile.
        if is_rank_0():
            recover(place(save_dir))
            path = latest_checkpoint(place(save_dir))
    path = from_rank_0(path)
    wanted = Wanted.by(config, beside_load=path is not None and bool(load))
    if path is not None and load:
        print_rank_0(f"--load {load} is ignored: this run resumes from its own checkpoint {path}")
    elif load and place(load).resolve() in {place(each).resolve() for each in (save_dir, config.log.run_dir) if each}:
        print_rank_0(f"note: --load {load} holds no checkpoint yet: the run begins with new weights")
    elif load:
        with all_ranks():
            path = find_checkpoint(load) if is_rank_0() else None
        path = from_rank_0(path)
    return Start(path, wanted)


def start_or_resume(
    start: Start, config: Config, engine: Any, fingerprint: str, dataset: Any
) -> tuple[TrainState, Config]:
    """Load the checkpoint that `find_start` returned, if any.

    Returns the state of the run, and `config`. If the run continues the checkpoint's learning-rate schedule, this
    schedule replaces the one in `config`.
    Rank 0 checks that the samples consumed so far are those of `dataset`, the training data set.
    If any rank fails, every rank raises RunError.
    """
    path, wanted = start
    with all_ranks():
        begin = _corpora(config) if is_rank_0() else 0
    if path is None:
        return TrainState(sample_hash=begin), config
    state = load_checkpoint(path, engine, config, fingerprint, wanted)
    if not wanted.position:
        print_rank_0(f"this run starts with the weights of {path}")
        state.sample_hash = begin
        return state, config
    state.forks = from_rank_0(_with_fork(state, path) if is_rank_0() else ())
    print_rank_0(f"resumed at iteration {state.iteration} after {state.consumed_samples} samples")
    saved = plain_config(CheckpointReader(path))
    # Iteration 0 means imported weights. Their checkpoint has only a default learning-rate schedule: ignore it.
    if state.iteration:
        config, note = settled(config, saved)
        if note:
            print_rank_0(f"note: {note}")
        if note := _other_batches(saved, config, state.consumed_samples):
            print_rank_0(f"note: {note}")

    if state.consumed_samples > MANY and is_rank_0():
        print(
            f"comparing the {state.consumed_samples} samples consumed so far with those that the data produces",
            flush=True,
        )

    with all_ranks():
        state.sample_hash = _hash_samples(begin, state, saved, config, dataset, wanted) if is_rank_0() else 0
    return state, config


def _with_fork(state: TrainState, path: Path) -> tuple[tuple[int, int], ...]:
    """Return the forks of the state loaded from `path`, with this resume if it abandons later checkpoints."""
    later = [each for each in numbered_checkpoints(path.parent) if each > state.iteration]
    return (*state.forks, (state.iteration, int(time.time()))) if later else state.forks


def _other_batches(saved: Config, config: Config, consumed: int) -> str | None:
    """Return a message if --batch-size-schedule differs from the checkpoint's, else None."""
    there = saved.train.batch_size_schedule
    here = config.train.batch_size_schedule
    if there == here:
        return None
    batches = config.batches(dist.get_world_size())
    return (
        f"--batch-size-schedule is {here or 'not given'}, but was {there or 'not given'} in the checkpoint; only the "
        f"position in samples counts: from sample {consumed} on, an iteration has {batches.size_at(consumed)} samples"
    )


def _hash_samples(begin: int, state: TrainState, saved: Config, config: Config, dataset: Any, wanted: Wanted) -> int:
    """Return the hash of the first `state.consumed_samples` samples of `dataset`.

    Raises CheckpointError if these are not the samples that the checkpoint has consumed. With --override-data, prints a
    note instead.
    begin: initial value of the hash, from `_corpora`.
    """
    found = extend(begin, dataset, 0, state.consumed_samples)
    others = state.consumed_samples > 0 and _other_documents(saved, config)
    samples = state.consumed_samples
    if not others and (state.sample_hash == found or state.sample_hash in _former_hashes(config, dataset, samples)):
        return found
    differ = f"the {samples} samples consumed so far differ from what this data, --split and --seed produce"
    if wanted.same_data:
        change = difference(saved, config, samples, state.consumed_tokens // max(samples, 1))
        raise CheckpointError(f"{differ}{f' ({change})' if change else ''}; pass --override-data to continue")
    print_rank_0(f"note: --override-data: {differ}, so samples may be skipped and repeated")
    return found


def _former_hashes(config: Config, dataset: Any, samples: int) -> Iterator[int]:
    """Yield the hashes of the first `samples` samples by which earlier versions would describe `dataset`.

    The initial value was a hash of the ends of the corpora only, and before that 0.
    """
    former = dataset.with_former_ids() if isinstance(dataset, StagedDataset) else dataset
    for begin in (_corpora(config, corpus_fingerprint), 0):
        yield extend(begin, former, 0, samples)


def _other_documents(saved: Config, config: Config) -> bool:
    """Return whether --split selects other training documents than in the checkpoint.

    The sample hash alone can miss a changed split: of the split, only the number of samples in an epoch enters the
    hash, and two splits can have the same number. Existing checkpoints contain such hashes, so their definition must
    not change.
    """
    both = saved.data, config.data
    if saved.data.split == config.data.split or not all(data.names_corpora for data in both):
        return False
    if any(isinstance(data.paths, dict) for data in both):  # --split has no effect
        return False
    there = parse_split(saved.data.split)
    here = parse_split(config.data.split)
    for prefix in prefixes_of(config.data.paths):
        try:
            documents = IndexedDataset(prefix).num_documents
        except (DatasetError, OSError):  # no indexed dataset at this prefix
            return there[0] != here[0]
        if split_documents(there, documents)[0] != split_documents(here, documents)[0]:
            return True
    return False


def _corpora(config: Config, look: Callable[[str], str] = content_fingerprint) -> int:
    """Return the initial value of the sample hash: a hash of the training corpora's content, not of their paths.

    Corpora that only later stages use do not count, because later stages may change.
    """
    if not config.data.names_corpora:
        return 0  # a custom entry script provides the data sets, so there are no corpora to hash
    looks = " ".join(map(look, prefixes_in(stages_of(config)[:1])))
    return int.from_bytes(hashlib.sha256(looks.encode()).digest()[:8])
