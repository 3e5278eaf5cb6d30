"""Check that a checkpoint is complete by reading only checkpoint.json and the headers of the files, not the tensors."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import CheckpointError, open_tensors
from .reader import CheckpointReader


def check_complete(
    folder: Path, tensors: Mapping[str, Any], expected: Mapping[str, Sequence[int]] | None = None
) -> None:
    """Raise CheckpointError if a tensor or some of its rows are missing, or if a file's header contradicts `tensors`.

    tensors: key -> shape, dim and pieces, as in checkpoint.json.
    expected: key -> shape of each tensor that must exist. If None, only the files of `tensors` are checked.
    """
    for key, shape in (expected or {}).items():
        if key not in tensors:
            raise CheckpointError(f"no rank has written {key!r}")
        if list(tensors[key]["shape"]) != list(shape):
            raise CheckpointError(f"{key!r} was written with shape {tensors[key]['shape']} instead of {list(shape)}")
    shapes: dict[str, dict[str, list[int]]] = {}  # file -> key -> shape
    for key, entry in tensors.items():
        dim = entry["dim"]
        at = 0
        for piece in sorted(entry["pieces"], key=lambda piece: int(piece["begin"])):
            if piece["begin"] != at:
                break
            at = piece["end"]
            name = piece["file"]
            if name not in shapes:
                file: Any = open_tensors(folder / name)
                shapes[name] = {each: file.get_slice(each).get_shape() for each in file.keys()}  # noqa: SIM118  # no dict
            shape = [*entry["shape"][:dim], piece["end"] - piece["begin"], *entry["shape"][dim + 1 :]]
            if shapes[name].get(key) != shape:
                raise CheckpointError(f"{folder / name} does not hold {key!r} of shape {shape}")
        if at != entry["shape"][dim]:
            raise CheckpointError(f"no rank has written rows {at} and later of {key!r}")


def is_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint under its final name is complete, judging by checkpoint.json and the file headers."""
    try:
        reader = CheckpointReader(checkpoint)
        check_complete(checkpoint, reader.tensors)
    except (ValueError, KeyError, TypeError, IndexError):  # a CheckpointError is a ValueError
        return False
    return bool(reader.tensors)
