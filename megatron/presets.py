"""Location of the JSON files of configs/: in the checkout, or where pip installed them.

A wheel contains these JSON files as data files (share/megatron-tds/configs). Only pip's record of installed files gives
their location reliably, because virtual environments, --user and --target use different folders.
"""

import importlib.metadata
from functools import cache
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[1] / "configs"


@cache
def folder(kind: str) -> Path:
    """Return the folder of presets of `kind`, "models" or "clusters". It may be missing in a damaged installation."""
    here = _CHECKOUT / kind
    if here.is_dir():
        return here
    try:
        recorded = importlib.metadata.files("megatron-tds") or []
    except importlib.metadata.PackageNotFoundError:
        recorded = []
    places = {Path(str(each.locate())).resolve().parent for each in recorded if each.parts[-3:-1] == ("configs", kind)}
    return next(iter(places), here)


def find(name: str, kind: str) -> Path:
    """Return the path of the preset `name`: an existing file, or else a bundled preset.

    The user may write a bundled preset as NAME or configs/<kind>/NAME.json. If neither exists, return `name` as a path.
    """
    path = Path(name)
    ours = folder(kind) / f"{path.name.removesuffix('.json')}.json"
    if not path.is_file() and path.parent in (Path(), Path("configs") / kind) and ours.is_file():
        return ours
    return path
