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
from megatron.data.corpora import content_fingerprint, parse_blend
from megatron.data.cpm_triples import is_triple
from megatron.ranks.agreement import all_ranks
from megatron.ranks.objects import from_rank_0
from megatron.ranks.rank_0 import is_rank_0, print_rank_0
from megatron.storage import place

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
    found: tuple[str, str] = "", ""
    with all_ranks():
        if is_rank_0():
            reader = CheckpointReader(path)
            saved = plain_config(reader)
            samples = reader.state["consumed_samples"]
            if samples and reads_corpora and is_in_order(saved, config):
                tokens = reader.state["consumed_tokens"] // samples
                found = joined(saved, config, samples, tokens, not wanted.same_data)
    text, note = from_rank_0(found)
    if note:
        print_rank_0(f"note: {note}")
    if not text:
        return config
    d = config.data
    separate = d.train_data_path is not None and d.valid_data_path is None and d.test_data_path is None
    valid = () if separate else d.valid_data_path
    return replace(config, data=replace(d, data_stages=(text,), train_data_path=None, valid_data_path=valid))


def is_in_order(saved: Config, config: Config) -> bool:
    """Return whether each corpus gives its samples in the same order with the settings of both runs."""
    same = settings_of_samples(saved) == settings_of_samples(config) and saved.train.seed == config.train.seed
    return same and saved.data.names_corpora and config.data.names_corpora and saved.data.split == config.data.split


def joined(saved: Config, config: Config, samples: int, tokens: int, override: bool) -> tuple[str, str]:
    """Return (stages to use as text, or "" for those of `config`; a note, or "").

    saved: settings of the checkpoint. samples: number of samples that it has consumed. tokens: tokens of a sample.
    override: whether --override-data is given.
    """
    there, here = _plans(saved, config, tokens)
    before = _split(there, samples)
    after = _split(here, samples)
    if any(_cannot_be_read(stage) for stage in before.past):
        return "", ""
    if before.past == after.past:
        changed = before.future != after.future
        return "", f"the data stages after sample {samples} are not those of the checkpoint" if changed else ""
    if before.future == after.future:
        return text_of(there), ""
    if not override:
        return "", ""
    words = " ".join(after.future[0].words)
    return text_of(before.past + after.future), f"--override-data: a stage with {words} begins at sample {samples}"


def _plans(saved: Config, config: Config, tokens: int) -> tuple[Blends, Blends]:
    """Return the stages of both settings, which begin at samples of `tokens` tokens.

    They name each corpus by one prefix, even if it has several prefixes, such as `a` and `./a`: by the first one in
    `config`. Copies of a corpus have the same content, so they count as one corpus.
    """
    here, there = (stages_of(each) for each in (config, saved))
    identities = {prefix: _identity(prefix) for prefix in prefixes_in([*here, *there])}
    spelling: dict[str, str] = {}
    for prefix, identity in identities.items():
        spelling.setdefault(identity, prefix)

    def plain(stages: Blends) -> Blends:
        return [each.in_samples(tokens).renamed(lambda prefix: spelling[identities[prefix]]) for each in stages]

    return plain(there), plain(here)


def _identity(prefix: str) -> str:
    return content_fingerprint(prefix) if place(f"{prefix}.idx").is_file() else prefix


def _is_there(prefix: str) -> bool:
    return place(f"{prefix}.idx").is_file() or is_triple(prefix)


def _cannot_be_read(stage: Stage) -> bool:
    """Return whether a run cannot read on after this stage: a corpus is gone, or is in the blend twice."""
    prefixes = [prefix for _, prefix in stage.blend]
    return len(set(prefixes)) < len(prefixes) or not all(map(_is_there, prefixes))


def difference(saved: Config, config: Config, samples: int, tokens: int) -> str:
    """Return a sentence on how the stages of `config` differ from the ones that the checkpoint has consumed, or ""."""
    if not saved.data.names_corpora or not config.data.names_corpora:
        return ""
    past = [_split(stages, samples).past for stages in _plans(saved, config, tokens)]
    if past[0] == past[1]:
        return ""
    for there, here in zip(*past, strict=False):
        if there != here:
            return f"{there.name} was {' '.join(there.words)} and is now {' '.join(here.words)}"
    extra = max(past, key=len)[min(map(len, past))]
    return f"{extra.name} is only in {'the checkpoint' if len(past[0]) > len(past[1]) else 'this run'}"


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
