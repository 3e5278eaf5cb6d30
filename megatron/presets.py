"""Where the JSON files of configs/ lie: in the checkout, or where pip put them.

A wheel carries them as data files (share/megatron-tds/configs), whose place only pip's record knows for certain
(environments, --user and --target differ).
"""

import importlib.metadata
from functools import cache
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[1] / "configs"


@cache
def folder(kind: str) -> Path:
    """The folder of `kind`: models or clusters. One that is not there if an installation lost it."""
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
    """The file that `name` means: itself if it is there; otherwise, of NAME or configs/<kind>/NAME.json, ours; else again itself."""
    path = Path(name)
    ours = folder(kind) / f"{path.name.removesuffix('.json')}.json"
    if not path.is_file() and path.parent in (Path(), Path("configs") / kind) and ours.is_file():
        return ours
    return path
