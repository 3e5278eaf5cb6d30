"""Location of the JSON files of configs/: in the checkout, or where pip installed them.

A wheel contains these JSON files as data files (share/megatron-tds/configs). Only pip's record of installed files gives
their location reliably, because virtual environments, --user and --target use different folders.
"""

import importlib.metadata
import os
from functools import cache
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[1] / "configs"


@cache
def preset_folder(kind: str) -> Path:
    """Return the folder of presets of `kind`, "models" or "clusters". It may be missing in a damaged installation."""
    checkout_folder = _CHECKOUT / kind
    if checkout_folder.is_dir():
        return checkout_folder
    try:
        installed = importlib.metadata.files("megatron-tds") or []
    except importlib.metadata.PackageNotFoundError:
        installed = []
    # Of all files that pip has installed, those of .../configs/<kind>/ are in one folder. Without any, return the
    # checkout's folder, which does not exist.
    folders = {Path(str(f.locate())).resolve().parent for f in installed if f.parts[-3:-1] == ("configs", kind)}
    return next(iter(folders), checkout_folder)


def find_preset(name: str, kind: str) -> Path:
    """Return the path of the preset `name`: an existing file, or else a bundled preset.

    The user may write a bundled preset as NAME or configs/<kind>/NAME.json. If neither exists, return `name` as a path.
    """
    path = Path(name)
    if os.path.isfile(name):  # False for a name that is too long, where Path.is_file() raises OSError
        return path
    bundled = preset_folder(kind) / f"{path.name.removesuffix('.json')}.json"
    names_preset = path.parent in (Path(), Path("configs") / kind)  # Path() is the parent of a name without folder
    if names_preset and os.path.isfile(bundled):
        return bundled
    return path
