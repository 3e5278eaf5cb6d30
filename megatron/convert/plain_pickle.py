"""Pickled files of others, loaded for tensors and plain values only: nothing that a file asks for is run."""

import argparse
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..config.fields import describe


class _Refused(Exception):
    """What a file asks for, where it is more than the state of numpy's generator."""


class _Array:
    """Stands for numpy.ndarray: the state of a generator is checked for what it is, and dropped."""

    def __init__(self, *_: Any) -> None:
        raise _Refused("numpy.ndarray")

    def __setstate__(self, state: Any) -> None:
        match state:
            case (1, (int(length),), _Words(), bool(), bytes(content)) if len(content) == 4 * length:
                return
        raise _Refused("a numpy array that is no generator's state")


class _Words:
    """Stands for numpy.dtype, of 32-bit words only."""

    def __init__(self, code: Any, *_: Any) -> None:
        if code != "u4":
            raise _Refused(f"numpy.dtype({str(code)[:20]!r})")

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment: nobody reads the words."""


def _reconstruct(kind: Any, *_: Any) -> _Array:
    """Stands for numpy's function of this name, which calls what it is given; this one knows one kind, and calls nothing."""
    if kind is not _Array:
        raise _Refused(f"numpy's _reconstruct of {getattr(kind, '__name__', 'something')}")
    return _Array.__new__(_Array)


# numpy itself is not asked; 2.0 renamed the module.
_NUMPY: list[tuple[Callable[..., Any], str]] = [
    (_reconstruct, "numpy.core.multiarray._reconstruct"),
    (_reconstruct, "numpy._core.multiarray._reconstruct"),
    (_Array, "numpy.ndarray"),
    (_Words, "numpy.dtype"),
]


def load_plain(path: Path) -> Mapping[str, Any]:
    """Unpickle tensors, plain values, and the settings and generator states that Megatron-LM saves next to them.

    Raises ValueError, and runs nothing, where a file asks for more (torch's `weights_only`). What stood for
    numpy's generator is an empty object.
    """
    refused = "which is not run; save it again with only its weights, where you trust it"
    with torch.serialization.safe_globals([argparse.Namespace, *_NUMPY]):  # a Namespace: names and values
        try:
            content = _load(path)
        except _Refused as error:
            raise ValueError(f"{path} asks for {error}, {refused}") from None
        except pickle.UnpicklingError as error:
            wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
            what = f"asks for {wanted[1]}" if wanted else "is damaged, or holds more than tensors and plain values"
            raise ValueError(f"{path} {what}, {refused}") from None
        except Exception as error:  # what damaged bytes make of an unpickler is open
            raise ValueError(f"{path} cannot be read: {describe(error)}") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a dictionary")
    return content


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError):  # the format before torch 1.6 cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True)
