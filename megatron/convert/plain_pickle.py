"""Pickled files of others, loaded for tensors and plain values only: nothing that a file asks for is run."""

import argparse
import contextlib
import io
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

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


MOST_LOOKED_AT = 1 << 26  # bytes
_OF_TENSORS = ("torch.", "collections.OrderedDict", "argparse.Namespace", "numpy.")

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
            what = f"asks for {wanted[1]}" if wanted else _what_newer_protocols_ask_for(path)
            raise ValueError(f"{path} {what}, {refused}") from None
        except Exception as error:  # what damaged bytes make of an unpickler is open
            raise ValueError(f"{path} cannot be read: {describe(error)}") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a dictionary")
    return content


def _what_newer_protocols_ask_for(path: Path) -> str:
    """Return what is wrong with a pickle that torch's `weights_only` does not read, from a look at its opcodes; nothing is run."""
    protocol, names = 0, list[str]()
    with contextlib.suppress(Exception):  # damaged bytes raise errors of any class
        file = io.BytesIO(_pickled(path))
        while True:  # before torch 1.6 a file held several pickles, the last of them cut off by what follows
            newest, more = _globals_of(file)
            protocol, names = max(protocol, newest), names + more
    strange = [name for name in names if not name.startswith(_OF_TENSORS)]
    if strange:
        return f"asks for {strange[0]}"
    if protocol > 2:
        return f"is a pickle of protocol {protocol} (torch.save with pickle_protocol=2 writes one that can be read)"
    return "is damaged, or holds more than tensors and plain values"


def _pickled(path: Path) -> bytes:
    if not zipfile.is_zipfile(path):
        with open(path, "rb") as file:
            return file.read(MOST_LOOKED_AT)
    with zipfile.ZipFile(path) as archive:
        name = next(each for each in archive.namelist() if each.endswith("data.pkl"))
        with archive.open(name) as file:
            return file.read(MOST_LOOKED_AT)


def _globals_of(file: BinaryIO) -> tuple[int, list[str]]:
    """Return the protocol of a pickle and the names that it imports, in order."""
    protocol, names, texts = 0, list[str](), list[str]()
    memo: dict[int, str] = {}
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name == "PROTO":
            protocol = int(str(argument))
        elif opcode.name == "GLOBAL":
            names.append(str(argument).replace(" ", "."))
        elif opcode.name == "STACK_GLOBAL":
            names.append(".".join(texts[-2:]))
        elif "UNICODE" in opcode.name:
            texts.append(str(argument))
        elif opcode.name == "MEMOIZE" or "PUT" in opcode.name:
            memo[len(memo) if argument is None else int(str(argument))] = texts[-1] if texts else ""
        elif opcode.name in ("BINGET", "LONG_BINGET", "GET"):
            texts.append(memo.get(int(str(argument)), ""))
    return protocol, names


def _load(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of newer protocols, which users cannot change
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError):  # the format before torch 1.6 cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)
