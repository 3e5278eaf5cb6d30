"""Identity of the code that runs: a hash of its source, and the versions of Python and of the packages it uses."""

import hashlib
import platform
from importlib import metadata
from pathlib import Path

import megatron
import tds

PACKAGES = ("torch", "deepspeed", "numpy", "safetensors")


def source_files() -> dict[str, Path]:
    """Return all Python files of the packages megatron and tds that this process has imported, by relative path."""
    folders = [Path(str(package.__file__)).parent for package in (megatron, tds)]
    files = {file.relative_to(folder.parent).as_posix(): file for folder in folders for file in folder.rglob("*.py")}
    return dict(sorted(files.items()))


def source_hash(script: str | None = None) -> str:
    """Return the SHA-256 of paths and contents of `source_files()`, followed by the content of an entry script.

    script: path of the entry script, or None. The script's own path does not change the hash.
    """
    digest = hashlib.sha256()
    for name, file in source_files().items():
        digest.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    if script is not None:
        digest.update(f"script\0{hashlib.sha256(Path(script).read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of Python and of `PACKAGES`, by name."""
    return {"Python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}
