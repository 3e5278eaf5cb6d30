"""Whether the pieces of a checkpoint make up all of it: told from the index and the headers of files, without reading tensors."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import CheckpointError, open_tensors
from .reader import CheckpointReader


def check_whole(folder: Path, tensors: Mapping[str, Any], expected: Mapping[str, Sequence[int]] | None = None) -> None:
    """Raise CheckpointError naming a tensor or rows that are missing, or a file that does not hold what the index says.

    tensors: of the index, key -> shape, dim, pieces. expected: key -> shape of what there has to be; without it, what the
    index names.
    """
    for key, shape in (expected or {}).items():
        if key not in tensors:
            raise CheckpointError(f"no rank has written {key!r}")
        if list(tensors[key]["shape"]) != list(shape):
            raise CheckpointError(f"{key!r} has shape {tensors[key]['shape']}, not {list(shape)}")
    files: dict[str, Any] = {}
    for key, entry in tensors.items():
        dim, at = entry["dim"], 0
        for piece in sorted(entry["pieces"], key=lambda piece: int(piece["begin"])):
            if piece["begin"] != at:
                break
            at = piece["end"]
            name = piece["file"]
            if name not in files:
                files[name] = open_tensors(folder / name)
            _check_piece(folder / name, files[name], key, dim, entry["shape"], piece["end"] - piece["begin"])
        if at != entry["shape"][dim]:
            raise CheckpointError(f"rows {at} and on of {key!r} were written by no rank")


def _check_piece(path: Path, file: Any, key: str, dim: int, whole: Sequence[int], rows: int) -> None:
    shape = [*whole[:dim], rows, *whole[dim + 1 :]]
    if key not in file.keys() or file.get_slice(key).get_shape() != shape:  # noqa: SIM118  # it is no dict
        raise CheckpointError(f"{path} does not hold {key!r} of shape {shape}")


def is_whole(checkpoint: Path) -> bool:
    """Whether a published checkpoint has all it needs to be loaded, as far as that shows without reading its tensors."""
    try:
        reader = CheckpointReader(checkpoint)
        check_whole(checkpoint, reader.tensors)
    except (CheckpointError, KeyError, TypeError, IndexError):
        return False
    return bool(reader.tensors)
