"""The training data of a resumed run: what has been consumed stays as it was, what comes may change.

A run reads its corpora in stages (`config/data_stages.py`); without --data-stages it has one stage. The settings in a
checkpoint contain its stages. If a resumed run has other data, --override-data lets a stage with the new data begin at
its next sample.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megatron.config import Config
from megatron.config.data_stages import Stage, Staged, parse_stages, prefixes_in, text_of
from megatron.data.corpus_paths import parse_blend
from megatron.data.fingerprints import content_fingerprint
from megatron.ranks.agreement import all_ranks
from megatron.ranks.objects import from_rank_0
from megatron.ranks.rank_0 import is_rank_0, print_rank_0
from megatron.storage import to_path

from .contradictions import settings_of_samples
from .reader import CheckpointReader, plain_config
from .wanted import Wanted

Blends = list[Stage]


def with_consumed_data(config: Config, path: Path | None, wanted: Wanted, reads_corpora: bool) -> Config:
    """Return `config` with the stages that the checkpoint `path` has consumed, and after them those of `config`.

    The stages of `config` stay unchanged if they agree with the consumed ones, or if --override-data is needed but not
    given. All ranks must call this. If rank 0 fails, every rank raises RunError.
    reads_corpora: whether the task reads the corpora of --data-path itself; else stages stay unchanged.
    """
    if path is None or not wanted.position:
        return config
    found = ("", "")
    with all_ranks():
        if is_rank_0() and reads_corpora:
            found = _stages_after(path, config, override=not wanted.same_data)
    text, note = from_rank_0(found)
    if note:
        print_rank_0(f"note: {note}")
    if not text:
        return config
    data = config.data
    separate = data.train_data_path is not None and data.valid_data_path is None and data.test_data_path is None
    valid = () if separate else data.valid_data_path
    staged = replace(data, data_stages=(text,), train_data_path=None, valid_data_path=valid)
    return replace(config, data=staged)


def _stages_after(path: Path, config: Config, override: bool) -> tuple[str, str]:
    """Return the result of `joined` for the checkpoint `path`."""
    reader = CheckpointReader(path)
    saved = plain_config(reader)
    samples = reader.state["consumed_samples"]
    if not samples or not is_in_order(saved, config):
        return "", ""
    tokens = reader.state["consumed_tokens"] // samples
    return joined(saved, config, samples, tokens, override)


def is_in_order(saved: Config, config: Config) -> bool:
    """Return whether each corpus gives its samples in the same order with the settings of both runs."""
    if not saved.data.names_corpora or not config.data.names_corpora:
        return False
    if saved.train.seed != config.train.seed or saved.data.split != config.data.split:
        return False
    return settings_of_samples(saved) == settings_of_samples(config)


def joined(saved: Config, config: Config, samples: int, tokens: int, override: bool) -> tuple[str, str]:
    """Return (stages to use as text, or "" for those of `config`; a note, or "").

    saved: settings of the checkpoint. samples: number of samples that it has consumed. tokens: tokens of a sample.
    override: whether --override-data is given.
    """
    plans = _plans(saved, config, tokens)
    before = _split(plans.there, samples)
    after = _split(plans.here, samples)
    if any(_cannot_be_read(stage) for stage in before.past):
        return "", ""
    if before.past == after.past:
        changed = before.future != after.future
        return "", f"the data stages after sample {samples} are not those of the checkpoint" if changed else ""
    if before.future == after.future:
        return text_of(plans.there), ""
    if not override:
        return "", ""
    words = " ".join(after.future[0].words)
    return text_of(before.past + after.future), f"--override-data: a stage with {words} begins at sample {samples}"


class _Plans(NamedTuple):
    """The stages of the checkpoint and those of this run."""

    there: Blends
    here: Blends


def _plans(saved: Config, config: Config, tokens: int) -> _Plans:
    """Return the stages of both settings, which begin at samples of `tokens` tokens.

    They name each corpus by one prefix, even if it has several prefixes, such as `a` and `./a`: by the first one in
    `config`. Copies of a corpus have the same content, so they count as one corpus.
    """
    here = stages_of(config)
    there = stages_of(saved)
    first: dict[str, str] = {}  # identity of a corpus -> its first prefix
    spelling = {}
    for prefix in prefixes_in([*here, *there]):
        spelling[prefix] = first.setdefault(_identity(prefix), prefix)

    def plain(stages: Blends) -> Blends:
        return [stage.in_samples(tokens).renamed(spelling.__getitem__) for stage in stages]

    return _Plans(plain(there), plain(here))


def _identity(prefix: str) -> str:
    return content_fingerprint(prefix) if to_path(f"{prefix}.idx").is_file() else prefix


def _is_there(prefix: str) -> bool:
    """Return whether a corpus exists: a .bin/.idx pair, or the three pairs of a corpus of CPM-2."""
    if to_path(f"{prefix}.idx").is_file():
        return True
    from megatron.data.cpm_triples import is_triple

    return is_triple(prefix)


def _cannot_be_read(stage: Stage) -> bool:
    """Return whether a run cannot read on after this stage: a corpus is gone, or is in the blend twice."""
    prefixes = [prefix for _, prefix in stage.blend]
    if len(set(prefixes)) < len(prefixes):
        return True
    return not all(map(_is_there, prefixes))


def difference(saved: Config, config: Config, samples: int, tokens: int) -> str:
    """Return a sentence on how the stages of `config` differ from the ones that the checkpoint has consumed, or ""."""
    if not saved.data.names_corpora or not config.data.names_corpora:
        return ""
    plans = _plans(saved, config, tokens)
    past_there = _split(plans.there, samples).past
    past_here = _split(plans.here, samples).past
    for there, here in zip(past_there, past_here, strict=False):
        if there != here:
            return f"{there.name} was {' '.join(there.words)} and is now {' '.join(here.words)}"
    if len(past_there) > len(past_here):
        return f"{past_there[len(past_here)].name} is only in the checkpoint"
    if len(past_there) < len(past_here):
        return f"{past_here[len(past_there)].name} is only in this run"
    return ""


def stages_of(config: Config) -> Blends:
    """Return the stages of the training data; without --data-stages, one stage."""
    data = config.data
    if data.data_stages:
        return list(parse_stages(data.data_stages))
    paths = data.paths
    words = paths["train"] if isinstance(paths, dict) else paths
    assert not isinstance(words, Staged)
    return [Stage(0, "samples", tuple(parse_blend(words)))]


class _Split(NamedTuple):
    """Stages before a sample, and those from this sample on, of which the first begins at this sample."""

    past: Blends
    future: Blends


def _split(stages: Sequence[Stage], samples: int) -> _Split:
    past = [each for each in stages if each.begin < samples]
    future = [each for each in stages if each.begin > samples]
    now = next(each for each in reversed(stages) if each.begin <= samples)
    return _Split(past, [now._replace(begin=samples), *future])
