"""The training data of a resumed run: what has been consumed stays as it was, what comes may change.

A run reads its corpora in stages (`config/data_stages.py`); without --data-stages it has one stage. The settings in a
checkpoint contain its stages. If a resumed run has other data, --override-data lets a stage with the new data begin at
its next sample.
"""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from megatron.config import Config
from megatron.config.batches import Consumed, schedule_in_samples
from megatron.config.command_line import with_values
from megatron.config.data_stages import Stage, StagedCorpora, parse_stages, prefixes_in, stages_as_json
from megatron.config.fields import ConfigError
from megatron.data.corpus_paths import is_triple, parse_blend
from megatron.data.fingerprints import content_fingerprint
from megatron.ranks.agreement import raise_on_all_ranks
from megatron.ranks.objects import broadcast_from_rank_0
from megatron.ranks.rank_0 import is_rank_0, print_rank_0
from megatron.storage import to_path

from .contradictions import sample_settings
from .reader import CheckpointReader, plain_config
from .wanted import Wanted

Stages = list[Stage]


class _Changes(NamedTuple):
    """Settings that a checkpoint changes: texts of --data-stages and --batch-size-schedule, "" to keep those given.

    note: "" for none.
    """

    stages: str = ""
    schedule: str = ""
    note: str = ""


def with_consumed_data(config: Config, path: Path | None, wanted: Wanted, reads_corpora: bool) -> Config:
    """Return `config` with the stages that the checkpoint `path` has consumed, and after them those of `config`.

    The stages of `config` stay unchanged if they agree with the consumed ones, or if --override-data is needed but not
    given. If the consumed samples had another length, stages and batch sizes that begin at a number of tokens get the
    number of the sample. All ranks must call this. If rank 0 fails, every rank raises RunError.
    reads_corpora: whether the task reads the corpora of --data-path itself; else stages stay unchanged.
    """
    if path is None or not wanted.position:
        return config
    changes = _Changes()
    with raise_on_all_ranks():
        if is_rank_0() and (reads_corpora or config.train.batch_size_schedule):
            override = not wanted.same_data  # --override-data is given
            changes = _changes_by_checkpoint(path, config, override, reads_corpora)
    stages, schedule, note = broadcast_from_rank_0(changes)
    if note:
        print_rank_0(f"note: {note}")
    if schedule:
        config = with_values(config, {"batch_size_schedule": schedule})
    if not stages:
        return config
    data = config.data
    # With --train-data-path alone, there is no validation data. The stages that replace it would hold out documents of
    # the first stage for validation; () prevents that.
    trains_on_all = data.train_data_path is not None and data.valid_data_path is None and data.test_data_path is None
    valid = () if trains_on_all else data.valid_data_path
    return with_values(config, {"data_stages": (stages,), "train_data_path": None, "valid_data_path": valid})


def _changes_by_checkpoint(path: Path, config: Config, override: bool, reads_corpora: bool) -> _Changes:
    """Return what the checkpoint `path` changes in `config`; see `with_consumed_data`."""
    reader = CheckpointReader(path)
    saved = plain_config(reader)
    consumed = Consumed(reader.state["consumed_samples"], reader.state.get("consumed_tokens", 0))
    stages = note = ""
    if reads_corpora and consumed.samples and keeps_sample_order(saved, config):
        stages, note = join_stages(saved, config, consumed, override)
    # Begins in tokens must be converted to samples here only if the run had another --seq-length before. 0 tokens stand
    # for an unknown number, as in checkpoints of other programs; the length then counts as unchanged.
    had_this_length = consumed.tokens in (0, consumed.samples * config.data.seq_length)
    if _has_own_lengths(config) or had_this_length:
        return _Changes(stages, note=note)
    if config.train.train_samples:  # perhaps computed from --train-tokens, when the flags were parsed
        print_rank_0(
            f"note: {consumed.samples} samples have had {consumed.tokens} tokens, but --train-tokens and "
            f"--lr-decay-tokens count --seq-length {config.data.seq_length} for each; for T tokens in all, give "
            f"--train-samples {consumed.samples} + (T - {consumed.tokens}) / {config.data.seq_length}"
        )
    if not stages and reads_corpora and config.data.data_stages:  # `join_stages` returns stages in samples
        stages = stages_as_json([_in_samples(stage, config, consumed) for stage in training_stages(config)])
    schedule = config.train.batch_size_schedule
    if schedule:
        schedule = schedule_in_samples(schedule, config.data.seq_length, consumed)
    return _Changes(stages, schedule or "", note)


def _has_own_lengths(config: Config) -> bool:
    """Return whether the tokens of a sample may differ from --seq-length: those of a T5, or of a custom model."""
    return config.is_t5 or config.model.family is None


def _in_samples(stage: Stage, config: Config, consumed: Consumed) -> Stage:
    """Return a stage of `config` with its begin in samples."""
    tokens = config.data.seq_length
    if _has_own_lengths(config) and consumed.tokens:
        tokens = consumed.tokens // consumed.samples  # only the data tell the length, so it is that of the past
    return stage.in_samples(tokens, consumed)


def keeps_sample_order(saved: Config, config: Config) -> bool:
    """Return whether each corpus gives its samples in the same order with the settings of both runs."""
    if not saved.data.names_corpora or not config.data.names_corpora:
        return False
    if saved.train.seed != config.train.seed or split_selects_others(saved, config):
        return False
    return sample_settings(saved) == sample_settings(config)


def split_selects_others(saved: Config, config: Config) -> bool:
    """Return whether --split selects other training documents than in the checkpoint.

    The sample hash alone can miss a changed split: of the split, only the number of samples in an epoch enters the
    hash, and two splits can have the same number. Existing checkpoints contain such hashes, so their definition must
    not change.
    """
    if not saved.data.names_corpora or not config.data.names_corpora:  # an entry script provides the data sets
        return False
    saved_split = _effective_split(saved)
    split = _effective_split(config)
    if saved_split == split:
        return False
    from megatron.data.corpus_paths import prefixes_of
    from megatron.data.indexed_dataset import DatasetError, IndexedDataset
    from megatron.data.splits import parse_split, split_documents

    saved_shares = parse_split(saved_split)
    shares = parse_split(split)
    # Entry 0 of the shares, and of the document ranges, belongs to the training data.
    for prefix in prefixes_of(config.data.paths):
        try:
            documents = IndexedDataset(prefix).num_documents
        except (DatasetError, OSError):  # no indexed dataset, so the number of documents is unknown: compare the shares
            return saved_shares[0] != shares[0]
        if split_documents(saved_shares, documents)[0] != split_documents(shares, documents)[0]:
            return True
    return False


def _effective_split(config: Config) -> str:
    """Return --split; it has no effect with paths of their own for training, validation and test (a dict)."""
    return "1" if isinstance(config.data.paths, dict) else config.data.split


def join_stages(saved: Config, config: Config, consumed: Consumed, override: bool) -> tuple[str, str]:
    """Return (stages to use as text, or "" for those of `config`; a note, or "").

    saved: settings of the checkpoint. consumed: what it has consumed. override: whether --override-data is given.
    """
    plans = _stage_plans(saved, config, consumed)
    samples = consumed.samples
    saved_split = _split_at(plans.saved, samples)
    current_split = _split_at(plans.current, samples)
    if any(map(_is_unreadable, saved_split.past)):  # --data-stages could not contain these stages: keep `config`
        return "", ""
    if saved_split.past == current_split.past:  # the stages of `config` agree with what has been consumed
        if saved_split.future == current_split.future:
            return "", ""
        return "", f"the data stages after sample {samples} are not those of the checkpoint"
    if saved_split.future == current_split.future:  # what comes is the same, so continue the checkpoint's stages
        return stages_as_json(plans.saved), ""
    if not override:  # the comparison of the sample hashes refuses this start later
        return "", ""
    for stage in current_split.future:
        if _names_twice(stage):  # a stage, unlike --data-path, names each corpus once
            raise ConfigError(f"{stage.name} names a corpus twice; name it once, with the sum of its weights")
    words = " ".join(current_split.future[0].words)
    text = stages_as_json(saved_split.past + current_split.future)
    return text, f"--override-data: a stage with {words} begins at sample {samples}"


class _StagePlans(NamedTuple):
    """The stages of the checkpoint (saved) and those of this run (current)."""

    saved: Stages
    current: Stages


def _stage_plans(saved: Config, config: Config, consumed: Consumed) -> _StagePlans:
    """Return the stages of both settings in comparable form: begins in samples, and one prefix for each corpus.

    If the checkpoint names a corpus `./a` and `config` names it `a`, both plans name it `a`. The same holds for two
    copies of a corpus, which have the same content, unless a stage reads both: then they are two corpora.
    """
    current = [_in_samples(stage, config, consumed) for stage in training_stages(config)]
    saved_stages = [_in_samples(stage, saved, consumed) for stage in training_stages(saved)]
    canonical = _canonical_prefixes([*current, *saved_stages])  # the prefixes of `config` come first, so they win

    # `canonical` has an entry for each prefix in the stages of both.
    def normalise(stages: Stages) -> Stages:
        return [stage.replace_prefixes(canonical.__getitem__) for stage in stages]

    return _StagePlans(normalise(saved_stages), normalise(current))


def _canonical_prefixes(stages: Stages) -> dict[str, str]:
    """Return prefix -> first prefix of the same corpus; copies that share a stage keep different prefixes."""
    names_by_corpus: dict[str, list[str]] = {}  # identity of a corpus -> canonical prefixes in use for its copies
    canonical: dict[str, str] = {}
    for prefix in prefixes_in(stages):
        identity = content_fingerprint(prefix) if _corpus_exists(prefix) else prefix
        names = names_by_corpus.setdefault(identity, [])
        taken: set[str | None] = set()  # canonical prefixes of the other corpora in the stages of this one
        for stage in stages:
            members = prefixes_in([stage])
            if prefix in members:
                taken.update(map(canonical.get, members))  # None for members that have no name yet
        # Let b be a copy of a. If no stage reads both, the name a is free, and b gets it. If a stage reads both, a is
        # taken, and b becomes a name of its own. The first copy always does, as `names` is empty.
        if taken.issuperset(names):
            names.append(prefix)
        canonical[prefix] = next(name for name in names if name not in taken)  # the first free name
    return canonical


def _corpus_exists(prefix: str) -> bool:
    """Return whether a corpus exists: a .bin/.idx pair, or the three pairs of a corpus of CPM-2."""
    return to_path(f"{prefix}.idx").is_file() or is_triple(prefix)


def _is_unreadable(stage: Stage) -> bool:
    """Return whether a run cannot read on after this stage: a corpus is gone, or is in the blend twice."""
    return _names_twice(stage) or not all(map(_corpus_exists, prefixes_in([stage])))


def _names_twice(stage: Stage) -> bool:
    return len(prefixes_in([stage])) < len(stage.blend)


def describe_difference(saved: Config, config: Config, consumed: Consumed) -> str:
    """Return a sentence on how the stages of `config` differ from the ones that the checkpoint has consumed, or ""."""
    if not saved.data.names_corpora or not config.data.names_corpora:
        return ""
    plans = _stage_plans(saved, config, consumed)
    past_saved = _split_at(plans.saved, consumed.samples).past
    past_current = _split_at(plans.current, consumed.samples).past
    # One of the lists may be longer; beside its additional stages, the stage of the other list is None.
    for old_stage, new_stage in zip_longest(past_saved, past_current):
        if new_stage is None:
            return f"{old_stage.name} is only in the checkpoint"
        if old_stage is None:
            return f"{new_stage.name} is only in this run"
        if old_stage != new_stage:
            return f"{old_stage.name} was {' '.join(old_stage.words)} and is now {' '.join(new_stage.words)}"
    return ""


def training_stages(config: Config) -> Stages:
    """Return the stages of the training data; without --data-stages, one stage."""
    data = config.data
    if data.data_stages:
        return list(parse_stages(data.data_stages))
    paths = data.paths
    words = paths["train"] if isinstance(paths, dict) else paths
    assert not isinstance(words, StagedCorpora)  # without --data-stages, these are words such as 0.7 a 0.3 b
    return [Stage(begin=0, unit="samples", blend=tuple(parse_blend(words)))]


class _SplitStages(NamedTuple):
    """Stages before a sample, and those from this sample on, of which the first begins at this sample."""

    past: Stages
    future: Stages


def _split_at(stages: Sequence[Stage], samples: int) -> _SplitStages:
    """Split stages at a sample, and with them the stage in which the sample lies."""
    past = [stage for stage in stages if stage.begin < samples]
    future = [stage for stage in stages if stage.begin > samples]
    # The stage in which the sample lies continues in the future: it then begins at this sample.
    running = next(stage for stage in reversed(stages) if stage.begin <= samples)
    return _SplitStages(past, [running._replace(begin=samples), *future])
