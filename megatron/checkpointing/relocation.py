"""Support for moving and copying a run directory.

The tokenizer's files are copied next to the checkpoints. A fingerprint identifies each corpus wherever its files are.
`config/settings_files.py` replaces paths into a run directory that has moved.
"""

import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from ..atomic import atomic_folder, copy_file, remove, write_text
from ..config import Config
from ..config.command_line import with_values
from ..storage import RemotePath
from ..tokenizer.load import VOCAB_FILES, find_vocab_file, has_vocab_file
from ..tokenizer.sibling_files import (
    GENERATION,
    MORE_TEMPLATES,
    SETTINGS,
    TEMPLATE,
    TOKEN_FILES,
    make_placeholder,
    read_generation_config,
    read_token_ids,
    read_tokenizer_class,
)

TOKENIZER_FOLDER = "tokenizer"
COMPANION_FILES = ("merges.txt", "gpt2-merges.txt", SETTINGS, *TOKEN_FILES, TEMPLATE)


def copy_tokenizer(vocab_file: str, home: Path) -> None:
    """Copy a tokenizer's files into `home`/tokenizer, with chat templates, special token ids and generation settings.

    If the folder has another tokenizer, all of its files are replaced.
    Raises OSError, and ValueError if a JSON file of the tokenizer is invalid.
    """
    source = find_vocab_file(vocab_file)
    folder = home / TOKENIZER_FOLDER
    if folder.resolve() == source.resolve().parent:  # the run already uses the copy
        return
    if folder.exists() and not holds_only(source, folder):
        # Copy everything into an empty home first, so that a failure leaves the folder as it was.
        with TemporaryDirectory(prefix="tokenizer.", suffix=".tmp", dir=home) as temporary_home:
            copy_tokenizer(vocab_file, Path(temporary_home))
            remove(folder)
            (Path(temporary_home) / TOKENIZER_FOLDER).rename(folder)
        return
    folder.mkdir(exist_ok=True)
    for name in (source.name, *COMPANION_FILES):
        path = source.with_name(name)
        if path.is_file():
            copy_file(path, folder / name)
    for path in source.with_name(MORE_TEMPLATES).glob("*.jinja"):
        (folder / MORE_TEMPLATES).mkdir(exist_ok=True)
        copy_file(path, folder / MORE_TEMPLATES / path.name)
    copy_special_tokens(source, home)
    if not has_vocab_file(folder):  # the file has a name of its own, perhaps from a placeholder in `vocab_file`
        write_text(folder / "tokenizer.json", json.dumps(make_placeholder(source.name)))


def holds_only(source: Path, folder: Path) -> bool:
    """Return whether a folder has a copy of the tokenizer's file `source`, and no file of another tokenizer."""
    placeholder = json.dumps(make_placeholder(source.name)).encode()
    for name in {*VOCAB_FILES} - {source.name}:
        path = folder / name
        if path.is_file() and path.read_bytes() != placeholder:
            return False
    kept = folder / source.name
    return kept.is_file() and kept.read_bytes() == source.read_bytes()


def copy_folder(source: Path, target: Path) -> None:
    """Copy the folder `source`, which may be in object storage, into the new folder `target` on this machine."""
    target.mkdir()
    for path in source.glob("*"):
        copy = target / path.name
        if path.is_dir():
            copy_folder(path, copy)
        elif isinstance(path, RemotePath):
            path.download(copy)
        else:
            copy_file(path, copy)


def copy_special_tokens(source: Path, home: Path) -> None:
    """Copy the special token ids and generation settings found beside `source` into `home`/tokenizer, for exports.

    From config.json, only the special token ids and the tokenizer's class are copied: with the model's settings, the
    folder would look like a model. Raises OSError, and ValueError if a JSON file is invalid.
    source: the tokenizer's file.
    """
    ids = read_token_ids(source)  # those of config.json
    tokenizer_class = read_tokenizer_class(source)
    # Chat templates need the class. In config.json, it may follow from the model_type alone. Without
    # config.json, it can only be in tokenizer_config.json, which is copied itself.
    if tokenizer_class and source.with_name("config.json").is_file():
        ids["tokenizer_class"] = tokenizer_class
    folder = home / TOKENIZER_FOLDER
    for name, content in ((GENERATION, read_generation_config(source)), ("config.json", ids)):
        if content:
            folder.mkdir(exist_ok=True)
            write_text(folder / name, json.dumps(content, indent=2))


def kept_tokenizer(home: Path, vocab_file: str | None) -> str | None:
    """Return the path of the tokenizer that was copied into `home`; None if there is no copy.

    If `home`/tokenizer contains a file named like `vocab_file`, return the path of this file, else that of the folder.
    home: a run directory, or its folder of checkpoints. vocab_file: --vocab-file of the run that made the copy.
    """
    folder = home / TOKENIZER_FOLDER
    if vocab_file:
        kept_file = folder / Path(vocab_file).name
        if kept_file.is_file():
            return str(kept_file)
    return str(folder) if has_vocab_file(folder) else None


def tokenizer_homes(checkpoint: Path) -> list[Path]:
    """Return the folders in which a checkpoint's run may have put its folder tokenizer/, the likelier one first.

    A checkpoint is SAVE/iter_0001000 or RUN/checkpoints/iter_0001000, and its tokenizer SAVE/tokenizer or
    RUN/tokenizer.
    """
    folder = checkpoint.absolute().parent
    return [folder, folder.parent] if folder.name == "checkpoints" else [folder]


def with_kept_tokenizer(config: Config, checkpoint: Path) -> Config:
    """Return `config` with --vocab-file set to the tokenizer that was copied beside `checkpoint`, if there is one."""
    given = config.data.vocab_file
    homes = tokenizer_homes(checkpoint)
    if isinstance(checkpoint, RemotePath):
        if given and Path(given).exists():  # so nothing needs to be downloaded
            return config
        homes = [_download_tokenizer(checkpoint.parent / TOKENIZER_FOLDER)]
    for home in homes:
        vocab_file = kept_tokenizer(home, given)
        if vocab_file:
            return with_values(config, {"vocab_file": vocab_file})
    return config


def _download_tokenizer(folder: RemotePath) -> Path:
    """Return a local folder in whose tokenizer/ the files of `folder` are; it may be empty."""
    from ..data.remote_tokens import cache_folder

    files = [*folder.glob("*"), *(folder / MORE_TEMPLATES).glob("*")]
    # If the files change, they get another folder.
    versions = repr([(str(path), path.stamp()) for path in files])
    home = cache_folder() / f"tokenizer-{hashlib.sha256(versions.encode()).hexdigest()[:32]}"
    try:
        with atomic_folder(home) as new_home:
            copy_folder(folder, new_home / TOKENIZER_FOLDER)
    except OSError:
        if not home.is_dir():  # else another rank or process has made the same folder
            raise
    return home


def with_own_tokenizer(config: Config, run_dir: Path) -> Config:
    """Return the settings of the run in `run_dir`; --vocab-file is its copy of the tokenizer, if there is one."""
    vocab_file = kept_tokenizer(run_dir, config.data.vocab_file) or config.data.vocab_file
    return with_values(config, {"vocab_file": vocab_file})
