"""Check that a checkpoint is complete by reading only checkpoint.json and the headers of the files, not the tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .files import CheckpointError
from .reader import CheckpointReader
from .stream import open_tensors


def check_complete(folder: Path, tensors: Mapping[str, Any], expected: Mapping[str, list[int]] | None = None) -> None:
    """Raise CheckpointError if a tensor or some of its rows are missing, or if a file's header contradicts `tensors`.

    tensors: key -> shape, dim and pieces, as in checkpoint.json.
    expected: key -> shape of each tensor that must exist. If None, only the files of `tensors` are checked.
    """
    for key, shape in (expected or {}).items():
        if key not in tensors:
            raise CheckpointError(f"no rank has written {key!r}")
        if tensors[key]["shape"] != shape:
            raise CheckpointError(f"{key!r} was written with shape {tensors[key]['shape']} instead of {shape}")

    shapes_of_files: dict[str, dict[str, list[int]]] = {}  # file -> key -> shape of its piece
    for key, entry in tensors.items():
        dim = entry["dim"]
        # The pieces must follow each other along `dim`, as rows 0 to 4, 4 to 8 and 8 to 10 of [10, h] do.
        next_row = 0
        for piece in sorted(entry["pieces"], key=lambda piece: int(piece["begin"])):
            if piece["begin"] != next_row:  # rows are missing here, which the check after the loop reports
                break
            next_row = piece["end"]

            # The header of the file must list the piece with its shape, such as [4, h] for rows 4 to 8.
            name = piece["file"]
            if name not in shapes_of_files:  # the header of each file is read once
                file = open_tensors(folder / name)
                shapes = {each: file.get_slice(each).get_shape() for each in file.keys()}  # noqa: SIM118  # no dict
                shapes_of_files[name] = shapes
            piece_shape = list(entry["shape"])
            piece_shape[dim] = piece["end"] - piece["begin"]
            if shapes_of_files[name].get(key) != piece_shape:
                raise CheckpointError(f"{folder / name} does not hold {key!r} of shape {piece_shape}")
        if next_row != entry["shape"][dim]:
            raise CheckpointError(f"no rank has written rows {next_row} and later of {key!r}")


def is_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint under its final name is complete, judging by checkpoint.json and the file headers."""
    try:
        reader = CheckpointReader(checkpoint)
        check_complete(checkpoint, reader.tensors)
    except (ValueError, KeyError, TypeError, IndexError):  # a CheckpointError is a ValueError
        return False
    return bool(reader.tensors)  # a checkpoint without tensors is of no use
