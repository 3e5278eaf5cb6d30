"""Where a run starts: from its own newest checkpoint, from another one, or from the beginning."""

import hashlib
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.data.corpora import prefixes_of
from megatron.data.sample_hash import extend
from megatron.optim import settled
from megatron.ranks.errors import RunError, on_all_ranks
from megatron.ranks.rank_0 import is_rank_0, print_rank_0

from .files import find_checkpoint, latest_checkpoint, recover
from .load import Wanted, load_checkpoint
from .nearby import look_of
from .reader import CheckpointReader, plain_config
from .state import TrainState


def start_or_resume(
    config: Config, engine: Any, save_dir: str, fingerprint: str, dataset: Any
) -> tuple[TrainState, Config]:
    """Load the newest checkpoint of this run; else what --load names, as its flags say; else nothing.

    Returns where the run is, and its settings with the learning rate's schedule that it goes on by.

    dataset: that of training; the samples that it gives are compared with those that the checkpoint has seen.
    Raises RunError alike on every rank.
    """
    on_all_ranks(lambda: recover(Path(save_dir)) if is_rank_0() else None)
    load, wanted = config.checkpoint.load, Wanted.by(config)
    path = on_all_ranks(lambda: latest_checkpoint(Path(save_dir)))
    if path is not None and load:
        wanted = Wanted()  # the flags were for --load
    elif load:
        path = on_all_ranks(lambda: find_checkpoint(load))
    begin = on_all_ranks(lambda: _corpora(config))
    if path is None:
        return TrainState(sample_hash=begin), config
    state = load_checkpoint(path, engine, config, fingerprint, wanted)
    if not wanted.position:
        print_rank_0(f"starts with the weights of {path}")
        state.sample_hash = begin
        return state, config
    print_rank_0(f"resumed at iteration {state.iteration} after {state.consumed_samples} samples")
    config, note = settled(config, plain_config(CheckpointReader(path)))
    if note and state.iteration:
        print_rank_0(f"note: {note}")
    found = on_all_ranks(lambda: extend(begin, dataset, 0, state.consumed_samples))

    def of_old() -> int:
        """Until checkpoints knew the corpora, the hash began with 0."""
        return on_all_ranks(lambda: extend(0, dataset, 0, state.consumed_samples))

    if wanted.same_data and state.sample_hash != found and state.sample_hash != of_old():
        raise RunError(
            f"the {state.consumed_samples} samples before this point were others than those that these data, --split and "
            f"--seed give, so what follows may have been seen before; --override-data goes on"
        )
    state.sample_hash = found
    return state, config


def _corpora(config: Config) -> int:
    """What the hash of samples begins with: which corpora are trained on, wherever they lie."""
    if not (config.data.data_path or config.data.train_data_path):
        return 0  # the data sets of an entry script of one's own
    paths = config.data.paths
    looks = " ".join(map(look_of, prefixes_of(paths["train"] if isinstance(paths, dict) else paths)))
    return int.from_bytes(hashlib.sha256(looks.encode()).digest()[:8])
