"""Agreement of the ranks: on settings and versions, and on errors."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..config import Config, settings
from ..config.fields import first_of, flag
from .errors import RunError, complaint
from .objects import gather_objects
from .source import kernel_choices, own_files, source_hash, versions


@contextmanager
def all_ranks() -> Iterator[None]:
    """Raise the same RunError on all ranks if the `with` block fails on any rank, so that no rank hangs.

    All ranks must enter the block; its end is a collective. The block must not contain a collective that a rank
    could miss by failing before it. The RunError has the message of the lowest rank that failed. Only ValueError and
    OSError, the errors that user input causes, are handled. Other exceptions are bugs and propagate on the rank that
    raised them.
    """
    problem = None
    try:
        yield
    except (ValueError, OSError) as error:
        problem = complaint(error)
    for rank, text in enumerate(gather_objects(problem)):
        if text is not None:
            raise RunError(text if rank == 0 else f"rank {rank}: {text}")


def settings_and_versions(config: Config) -> dict[str, str]:
    """Return the settings and versions that must agree between ranks, keyed by their names in error messages."""
    found = {}
    for section, _, f in settings():
        found[flag(f.name)] = str(getattr(getattr(config, section), f.name))
    files = {"--deepspeed-config": config.train.deepspeed_config, "--param-groups": config.optim.param_groups}
    for name, path in files.items():
        if path:
            content = Path(path).read_bytes()
            found[f"the SHA-256 of {name} {path}"] = hashlib.sha256(content).hexdigest()[:12]
    found["the SHA-256 of the source of megatron and tds"] = source_hash()[:12]
    for name, version in versions().items():
        found[f"the version of {name}"] = version
    return found | kernel_choices()


def identity_of(tokenizer: Any) -> dict[str, str]:
    """Return what must agree between the tokenizers of all ranks; special tokens may come from other files."""
    specials = repr(sorted(getattr(tokenizer, "specials", {}).items()))
    return {
        "the SHA-256 of --vocab-file": tokenizer.fingerprint,
        "the end-of-document id of --vocab-file": str(tokenizer.eod),
        "the first ids of a text by --vocab-file": str(getattr(tokenizer, "start", ())),
        "the SHA-256 of the special tokens of --vocab-file": hashlib.sha256(specials.encode()).hexdigest()[:12],
    }


def same_code_everywhere() -> None:
    """Raise RunError on all ranks if they run different entry scripts or have imported different files of a module.

    A module that only some ranks have imported is not compared: a script may let one rank import more than the others.
    """
    hashes = {f"the SHA-256 of the {name}": digest[:12] for name, digest in own_files().items()}
    same_everywhere(hashes, common=True)


def same_everywhere(values: Mapping[str, str] | None, common: bool = False) -> None:
    """Raise RunError on all ranks if a value differs between ranks; the message has its name and the values.

    All ranks must call this. The ranks exchange a hash of the values; only if the hashes differ, they exchange the
    values themselves.
    values: values by name; None on a rank that has nothing to compare. common: compare only the names that all ranks
    have.
    """
    if dist.get_world_size() == 1:
        return
    digest = None
    if values is not None:
        digest = hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()
    digests = set(gather_objects(digest))
    if len(digests - {None}) <= 1:
        return
    everywhere = {rank: each for rank, each in enumerate(gather_objects(values)) if each is not None}
    differences = _differences(everywhere, common)
    if not differences:
        return
    named = "; ".join(differences[:3])
    if len(differences) > 3:
        named += f"; {len(differences) - 3} more differ"
    raise RunError(f"{named}: start all ranks with the same settings, code and versions")


def _differences(everywhere: Mapping[int, Mapping[str, str]], common: bool) -> list[str]:
    """Describe each name whose values differ between ranks.

    everywhere: rank -> values by name. common: skip the names that some ranks lack.
    """
    names = Counter[str]()
    for each in everywhere.values():
        names.update(each.keys())
    found = []
    for name, ranks in names.items():
        if common and ranks < len(everywhere):
            continue
        by_rank = {rank: each.get(name, "not known") for rank, each in everywhere.items()}
        usual, first, others = split_usual(by_rank)
        if others:
            other = by_rank[others[0]]
            found.append(f"{name} is {usual} on rank {first} and {other} on {name_ranks(others)}")
    return found


def split_usual(values: Mapping[int, Any]) -> tuple[Any, int, list[int]]:
    """Return the most frequent value (the first one on a tie), its first rank, and all ranks without it."""
    usual, _ = Counter(values.values()).most_common(1)[0]
    first = next(rank for rank, value in values.items() if value == usual)
    return usual, first, [rank for rank, value in values.items() if value != usual]


def name_ranks(ranks: Sequence[int]) -> str:
    """Return the first of some ranks in words."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {first_of(ranks)}"
