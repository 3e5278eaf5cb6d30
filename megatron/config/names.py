"""Names of settings: the section of each one, renamed and removed settings, and suggestions for misspelled names."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._compat import compat
from .fields import ConfigError, flag
from .sections import settings

HOME = {f.name: section for section, _, f in settings()}  # name of a setting -> name of its section
# Setting of flags that act on one start, or on the checkpoint of --load -> its default.
ONCE = {
    "finetune": False, "load_optim": True, "load_rng": True, "override_data": False, "override_lock": False,
    "override_lr_schedule": False, "override_tokenizer": False,
}  # fmt: skip
# Former name of a setting -> its new name. Flags, files, checkpoints and `get_args()` accept both for one version.
RENAMED = {"failed_saves": "max_failed_saves", "unfused": "reference_ops"}
# Former setting, which files of earlier versions contain -> what replaces it; "" if training never depended on it.
REMOVED = {
    "certificate": "",
    "csv": "",  # pandas.read_json(path, lines=True) reads metrics.jsonl
    "without": "write a corpus without the documents with `tools/inspect_data.py drop` and name it in --data-path",
}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the entry of `known` closest to `name`, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def replace_renamed_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return `argv` with renamed flags replaced by their new names, and a note for each renamed flag."""
    new_names = {flag(former): flag(name) for former, name in RENAMED.items()}
    words = []
    notes = []
    for word in argv:
        old_flag, equals, value = word.partition("=")
        new_flag = new_names.get(old_flag, old_flag)
        if new_flag != old_flag:
            notes.append(f"{old_flag} is now {new_flag}; the next version drops the old name")
        words.append(new_flag + equals + value)
    return words, notes


def unknown_arguments(words: Sequence[str]) -> Iterator[str]:
    """Yield an error for each unknown flag among the words that the parser did not consume."""
    if not words:
        return
    suggest_flag = compat("flags.translate").suggest_flag  # it also knows flags of other frameworks
    known = ["--config", *map(flag, HOME)]  # HOME has the names of all settings
    removal_errors = {flag(name): removal_error(name) for name in REMOVED}
    names = [word.split("=")[0] for word in words if word.startswith("--")]
    for name in names or words[:1]:  # without a flag, the first word is the mistake
        # A flag that has been removed has an error of its own.
        yield removal_errors.get(name) or f"unknown argument {name}{suggest_flag(name, known)}"


def removal_error(name: str) -> str:
    """Return an error for a removed setting."""
    advice = REMOVED[name] or "leave it out"
    return f"{flag(name)} has been removed: {advice}"


def refuse_removed(saved: Mapping[str, Any], where: Path) -> None:
    """Raise ConfigError if the settings of a run changed its samples by a setting that has been removed.

    saved: section -> the settings that the run saved, by name. where: the file that holds them, for the message.
    """
    for values in saved.values():
        for name, advice in REMOVED.items():
            # A section may be no mapping in a damaged file, and null means that a setting was not given.
            is_given = isinstance(values, Mapping) and values.get(name) is not None
            if is_given and advice:  # a removed setting without advice never changed the samples
                raise ConfigError(f"{where}: {removal_error(name)}")
