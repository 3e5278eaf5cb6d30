"""Agreement of the ranks: on settings and versions, and on errors."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..config import Config, settings
from ..config.fields import flag
from ..config.messages import shorten_list
from .errors import RunError, one_line_error
from .objects import gather_objects
from .source import kernel_choices, package_versions, source_hash, user_file_hashes


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise the same RunError on all ranks if the `with` block fails on any rank, so that no rank hangs.

    All ranks must enter the block; its end is a collective. The block must not contain a collective that a rank
    could miss by failing before it. The RunError has the message of the lowest rank that failed. Only ValueError and
    OSError, the errors that user input causes, are handled. Other exceptions are bugs and propagate on the rank that
    raised them.
    """
    own_problem = None
    try:
        yield
    except (ValueError, OSError) as error:
        own_problem = one_line_error(error)
    for rank, problem in enumerate(gather_objects(own_problem)):
        if problem is not None:
            raise RunError(problem if rank == 0 else f"rank {rank}: {problem}")


def settings_and_versions(config: Config) -> dict[str, str]:
    """Return the settings and versions that must agree between ranks, keyed by their names in error messages."""
    values = {}
    for section, _, field in settings():
        values[flag(field.name)] = str(getattr(getattr(config, section), field.name))
    files = {"--deepspeed-config": config.train.deepspeed_config, "--param-groups": config.optim.param_groups}
    for name, path in files.items():
        if path:
            content = Path(path).read_bytes()
            values[f"the SHA-256 of {name} {path}"] = hashlib.sha256(content).hexdigest()[:12]
    values["the SHA-256 of the source of megatron and tds"] = source_hash()[:12]
    for name, version in package_versions().items():
        values[f"the version of {name}"] = version
    return values | kernel_choices()


def tokenizer_identity(tokenizer: Any) -> dict[str, str]:
    """Return what must agree between the tokenizers of all ranks; special tokens may come from other files."""
    special_tokens = repr(sorted(getattr(tokenizer, "specials", {}).items()))
    return {
        "the SHA-256 of --vocab-file": tokenizer.fingerprint,
        "the end-of-document id of --vocab-file": str(tokenizer.eod),
        "the first ids of a text by --vocab-file": str(getattr(tokenizer, "start", ())),
        "the SHA-256 of the special tokens of --vocab-file": hashlib.sha256(special_tokens.encode()).hexdigest()[:12],
    }


def require_equal_code() -> None:
    """Raise RunError on all ranks if they run different entry scripts or have imported different files of a module.

    A module that only some ranks have imported is not compared: a script may let one rank import more than the others.
    """
    hashes = {f"the SHA-256 of the {name}": digest[:12] for name, digest in user_file_hashes().items()}
    require_equal_values(hashes, only_common=True)


def require_equal_values(values: Mapping[str, str] | None, only_common: bool = False) -> None:
    """Raise RunError on all ranks if a value differs between ranks; the message has its name and the values.

    All ranks must call this. The ranks exchange a hash of the values; only if the hashes differ, they exchange the
    values themselves.
    values: values by name; None on a rank that has nothing to compare. only_common: compare only the names that all
    ranks have.
    """
    if dist.get_world_size() == 1:
        return
    digest = None  # of a rank that has nothing to compare
    if values is not None:
        digest = hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()
    digests = set(gather_objects(digest))
    if len(digests - {None}) <= 1:  # ranks without values do not count
        return
    values_by_rank = {rank: known for rank, known in enumerate(gather_objects(values)) if known is not None}
    differences = _differences(values_by_rank, only_common)
    if not differences:  # with `only_common`, the hashes differ although no common value does
        return
    description = "; ".join(differences[:3])
    if len(differences) > 3:
        description += f"; {len(differences) - 3} more differ"
    raise RunError(f"{description}: start all ranks with the same settings, code and versions")


def _differences(values_by_rank: Mapping[int, Mapping[str, str]], only_common: bool) -> list[str]:
    """Describe each name whose values differ between ranks.

    values_by_rank: rank -> values by name. only_common: skip the names that some ranks lack.
    """
    names = Counter(chain(*values_by_rank.values()))  # name -> number of ranks that have it
    differences = []
    for name, num_ranks in names.items():
        if only_common and num_ranks < len(values_by_rank):
            continue
        value_by_rank = {rank: known.get(name, "not known") for rank, known in values_by_rank.items()}
        usual_value, first_rank, other_ranks = split_by_majority(value_by_rank)
        if other_ranks:
            other_value = value_by_rank[other_ranks[0]]
            elsewhere = f"{other_value} on {describe_ranks(other_ranks)}"
            differences.append(f"{name} is {usual_value} on rank {first_rank} and {elsewhere}")
    return differences


def split_by_majority(values: Mapping[int, Any]) -> tuple[Any, int, list[int]]:
    """Return the most frequent value (the first one on a tie), its first rank, and all ranks without it."""
    usual_value, _ = Counter(values.values()).most_common(1)[0]
    first_rank = next(rank for rank, value in values.items() if value == usual_value)
    return usual_value, first_rank, [rank for rank, value in values.items() if value != usual_value]


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return the first of some ranks in words."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {shorten_list(ranks)}"
