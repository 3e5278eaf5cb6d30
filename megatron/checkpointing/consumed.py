"""The samples that a run has consumed: their hash, and the check that a resumed run would have consumed the same."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from megatron.config import Config
from megatron.config.batches import Consumed
from megatron.config.data_stages import prefixes_in
from megatron.data.fingerprints import FORMER_FINGERPRINTS, content_fingerprint
from megatron.data.sample_hash import extend_hash
from megatron.ranks.rank_0 import print_rank_0

from .data_plan import describe_difference, split_selects_others, training_stages
from .files import CheckpointError
from .state import TrainState
from .wanted import Wanted

SLOW_COMPARISON = 10**8  # Comparing more samples than this takes more than a few seconds.


def initial_hash(config: Config, fingerprint: Callable[[str], str] = content_fingerprint) -> int:
    """Return the initial value of the sample hash: a hash of the training corpora's content, not of their paths.

    Corpora that only later stages use do not count, because later stages may change.
    fingerprint: function that returns a hash of the content of a corpus.
    """
    if not config.data.names_corpora:
        return 0  # a custom entry script provides the data sets, so there are no corpora to hash
    first_stage = training_stages(config)[:1]
    corpora = " ".join(map(fingerprint, prefixes_in(first_stage)))
    return int.from_bytes(hashlib.sha256(corpora.encode()).digest()[:8])  # 8 bytes, as a sample hash has 64 bits


def hash_samples(
    initial_value: int, state: TrainState, saved: Config, config: Config, dataset: Any, wanted: Wanted
) -> int:
    """Return the hash of the first `state.consumed_samples` samples of `dataset`.

    Raises CheckpointError if these are not the samples that the checkpoint has consumed. With --override-data, prints a
    note and records the number of samples in `state` instead.
    initial_value: hash of no samples; see `initial_hash`. saved: settings of the checkpoint.
    """
    samples = state.consumed_samples
    if samples > SLOW_COMPARISON:
        print(f"comparing the {samples} samples consumed so far with those that the data produces", flush=True)
    current_hash = extend_hash(initial_value, dataset, 0, samples)
    # Besides the present hash, those that earlier versions would have stored for these samples are accepted.
    is_known = state.sample_hash == current_hash or state.sample_hash in _old_hashes(config, dataset, samples)
    # The hash can miss a changed --split, which makes no difference as long as nothing is consumed.
    if is_known and not (samples and split_selects_others(saved, config)):
        return current_hash
    problem = f"the {samples} samples consumed so far differ from what this data, --split and --seed produce"
    if wanted.same_data:  # --override-data is not given
        change = describe_difference(saved, config, Consumed(samples, state.consumed_tokens))
        where = f" ({change})" if change else ""
        raise CheckpointError(f"{problem}{where}; pass --override-data to continue")
    print_rank_0(f"note: --override-data: {problem}, so samples may be skipped and repeated")
    state.reordered_at = samples
    return current_hash


def _old_hashes(config: Config, dataset: Any, samples: int) -> Iterator[int]:
    """Yield the hashes that earlier versions, newest first, would have stored for the first `samples` samples.

    Earlier versions identified a corpus by other fingerprints. Fingerprints entered the initial value, and the sample
    ids of a run with data stages. Before that, the initial value was 0.
    """
    from megatron.data.staged import StagedDataset

    old_dataset = dataset
    for fingerprint in FORMER_FINGERPRINTS:
        if isinstance(dataset, StagedDataset):
            old_dataset = dataset.with_former_ids(fingerprint)
        yield extend_hash(initial_hash(config, fingerprint), old_dataset, 0, samples)
    # After the loop, `old_dataset` has the ids of the oldest fingerprint, as in the versions that began with 0.
    yield extend_hash(0, old_dataset, 0, samples)
