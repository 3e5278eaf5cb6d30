"""Description of what --override-data changes: which samples a resumed run skips and repeats."""

from typing import Any, NamedTuple

from megatron.config import Config
from megatron.data.blend import consumed_by_corpus
from megatron.data.corpora import parse_blend

from .relocation import corpus_fingerprint


class Corpus(NamedTuple):
    """One corpus of a training blend.

    identity: fingerprint of the corpus's files. Copies of the files have the same fingerprint.
    weight: weight of the corpus in the blend, as the user wrote it; None if the user gave no weight.
    """

    prefix: str
    identity: str
    weight: str | None


def describe(saved: Config, config: Config, dataset: Any, consumed: int, in_order: bool) -> str:
    """Return one sentence on the samples that a resumed run will skip and repeat.

    saved, config: settings of the checkpoint and of the resumed run.
    dataset: the training data set of `config`.
    consumed: number of samples that the checkpoint has consumed.
    in_order: whether each corpus gives its samples in the same order with `saved` and with `config`. If so, the
    sentence names the skipped and repeated samples of each corpus. The resumed run continues as if it had read the
    first `consumed` samples of the new data: this determines its next sample in each corpus.
    """
    unknown = (
        f"the {consumed} samples consumed so far differ from what this data, --split and --seed produce, "
        "so samples may be skipped and repeated"
    )
    if not in_order or not _names_corpora(saved) or not _names_corpora(config):
        return unknown
    there, here = _corpora(saved), _corpora(config)
    lengths = dict(zip([c.identity for c in here], _epochs(dataset, len(here)), strict=True))
    before = _consumed(there, lengths, consumed)
    after = _consumed(here, lengths, consumed)
    if before is None or after is None or _is_ambiguous(there, here):
        return unknown
    prefixes = {c.identity: c.prefix for c in (*there, *here)}
    changes = [
        change
        for identity, prefix in prefixes.items()
        if (change := _change(prefix, before.get(identity, 0), after.get(identity), identity in before))
    ]
    return f"after {consumed} samples the training data changes: {'; '.join(changes)}" if changes else unknown


def _change(prefix: str, before: int, after: int | None, known: bool) -> str:
    if after is None:
        return f"{prefix} ends after its sample {before - 1}" if before else ""
    if after > before:
        return f"{prefix} {'skips' if known else 'is new and skips'} its samples {before} to {after - 1}"
    return f"{prefix} repeats its samples {after} to {before - 1}" if after < before else ""


def _names_corpora(config: Config) -> bool:
    return bool(config.data.data_path or config.data.train_data_path)


def _corpora(config: Config) -> list[Corpus]:
    paths = config.data.paths
    words = paths["train"] if isinstance(paths, dict) else paths
    return [Corpus(prefix, corpus_fingerprint(prefix), weight) for weight, prefix in parse_blend(words)]


def _is_ambiguous(there: list[Corpus], here: list[Corpus]) -> bool:
    """Return whether either blend contains a corpus twice, or the files at some prefix have changed.

    there, here: corpora of the checkpoint's blend and of this run's blend.
    """
    now = {c.prefix: c.identity for c in here}
    rewritten = any(now.get(c.prefix, c.identity) != c.identity for c in there)
    return rewritten or any(len({c.identity for c in blend}) < len(blend) for blend in (there, here))


def _epochs(dataset: Any, corpora: int) -> list[int]:
    members = dataset.datasets if corpora > 1 else [dataset]
    return [int(member.samples_per_epoch) for member in members]


def _consumed(corpora: list[Corpus], lengths: dict[str, int], consumed: int) -> dict[str, int] | None:
    """Return how many of a blend's first `consumed` samples come from each corpus, keyed by the corpus's identity.

    Returns None if the weight of a corpus is unknown.
    lengths: number of samples in an epoch of each corpus of this run, keyed by identity. A corpus to which the user
    gave no weight is weighted by this number.
    """
    weights = [c.weight or lengths.get(c.identity) for c in corpora]
    if len(corpora) > 1 and None in weights:
        return None
    counts = consumed_by_corpus([weight or 1 for weight in weights], consumed)
    return dict(zip([c.identity for c in corpora], counts, strict=True))
