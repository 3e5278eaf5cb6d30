"""Support for moving and copying a run directory.

The tokenizer's files are copied next to the checkpoints. When a run directory has moved, paths in the settings that
point into it are replaced by the new ones. A fingerprint identifies each corpus wherever its files are.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..atomic import copy_file, whole_file, whole_folder
from ..config import Config
from ..config.data_stages import with_prefixes
from ..data.corpora import renamed
from ..storage import RemotePath, is_url
from ..tokenizer.load import file_of, folder_has_one
from ..tokenizer.sibling_files import (
    GENERATION,
    MORE_TEMPLATES,
    SETTINGS,
    TEMPLATE,
    TOKEN_FILES,
    class_beside,
    generation_beside,
    ids_beside,
)

FOLDER = "tokenizer"
WITH_IT = ("merges.txt", "gpt2-merges.txt", SETTINGS, *TOKEN_FILES, TEMPLATE)


def keep_tokenizer(vocab_file: str, home: Path) -> None:
    """Copy a tokenizer's files into `home`/tokenizer, with chat templates, special token ids and generation settings.

    Raises OSError, and ValueError if a JSON file of the tokenizer is invalid.
    """
    source = file_of(vocab_file)
    folder = home / FOLDER
    if folder.resolve() == source.resolve().parent:
        return
    folder.mkdir(exist_ok=True)
    for path in (source, *(source.with_name(name) for name in WITH_IT)):
        if path.is_file():
            copy_file(path, folder / path.name)
    more = sorted(source.with_name(MORE_TEMPLATES).glob("*.jinja"))
    if more:
        (folder / MORE_TEMPLATES).mkdir(exist_ok=True)
    for path in more:
        copy_file(path, folder / MORE_TEMPLATES / path.name)
    keep_roles(source, home)


def copy_folder(source: Path, target: Path) -> None:
    """Copy the folder `source`, which may be in object storage, into the new folder `target` on this machine."""
    target.mkdir()
    for path in source.glob("*"):
        there = target / path.name
        if path.is_dir():
            copy_folder(path, there)
        elif isinstance(path, RemotePath):
            path.download(there)
        else:
            copy_file(path, there)


def kept_beside(home: Path) -> Path:
    """Return the path of the config.json beside the tokenizer that was copied into `home`.

    The file may be missing.
    """
    return home / FOLDER / "config.json"


def keep_roles(source: Path, home: Path) -> None:
    """Copy the special token ids and generation settings found beside `source` into `home`/tokenizer, for exports.

    From config.json, only the special token ids and the tokenizer's class are copied: with the model's settings, the
    folder would look like a model. Raises OSError, and ValueError if a JSON file is invalid.
    source: the tokenizer's file.
    """
    ids = ids_beside(source)
    named = class_beside(source)
    ids |= {"tokenizer_class": named} if named and ids else {}
    for name, content in ((GENERATION, generation_beside(source)), ("config.json", ids)):
        if content:
            (home / FOLDER).mkdir(exist_ok=True)
            with whole_file(home / FOLDER / name) as there:
                Path(there).write_text(json.dumps(content, indent=2), encoding="utf-8")


def kept_tokenizer(home: Path, vocab_file: str | None) -> str | None:
    """Return the path of the tokenizer that was copied into `home`; None if there is no copy.

    If `home`/tokenizer contains a file named like `vocab_file`, return the path of this file, else that of the folder.
    home: a run directory, or its folder of checkpoints. vocab_file: --vocab-file of the run that made the copy.
    """
    folder = home / FOLDER
    if vocab_file is not None and (folder / Path(vocab_file).name).is_file():
        return str(folder / Path(vocab_file).name)
    return str(folder) if folder_has_one(folder) else None


def with_kept_tokenizer(config: Config, checkpoint: Path) -> Config:
    """Return `config` with --vocab-file set to the tokenizer that was copied beside `checkpoint`, if there is one."""
    given = config.data.vocab_file
    checkpoint = checkpoint.absolute()
    homes = [checkpoint.parent, checkpoint.parent.parent]
    if isinstance(checkpoint, RemotePath):
        if given and Path(given).exists():
            return config
        homes = [_fetched(checkpoint.parent / FOLDER)]
    for home in homes:
        found = kept_tokenizer(home, given)
        if found is not None:
            return replace(config, data=replace(config.data, vocab_file=found))
    return config


def _fetched(folder: RemotePath) -> Path:
    """Return a local folder in whose tokenizer/ the files of `folder` are; it may be empty."""
    from ..data.remote_tokens import cache_folder

    files = sorted(folder.glob("*"))
    versions = repr([(str(path), path.stamp()) for path in files])
    home = cache_folder() / f"tokenizer-{hashlib.sha256(versions.encode()).hexdigest()[:32]}"
    try:
        with whole_folder(home) as there:
            copy_folder(folder, there / FOLDER)
    except OSError:
        if not home.is_dir():  # else another rank or process has made the same folder
            raise
    return home


def relocated(config: Config, run_dir: Path) -> Config:
    """Return `config` for a run directory that was moved to `run_dir`: replace all paths that point into it."""
    d = config.data
    was = config.log.run_dir

    def moved(path: str) -> str:
        if was is None or not path or is_url(path):
            return path
        inside = os.path.relpath(path, was)
        return path if inside.startswith("..") else str(run_dir / inside)

    def all_moved(words: Sequence[str] | None) -> tuple[str, ...] | None:
        return None if words is None else tuple(renamed(word, moved) for word in words)

    vocab_file = kept_tokenizer(run_dir, d.vocab_file)
    if vocab_file is None and d.vocab_file:
        vocab_file = moved(d.vocab_file)
    paths: dict[str, Any] = {}
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        paths[name] = all_moved(getattr(d, name))
    if d.data_stages:
        paths["data_stages"] = (with_prefixes(d.data_stages[0], moved),)
    data = replace(d, vocab_file=vocab_file, **paths)
    return replace(config, data=data, log=replace(config.log, run_dir=str(run_dir)))
