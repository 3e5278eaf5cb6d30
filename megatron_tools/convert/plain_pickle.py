"""Safe loading of foreign pickled files: only tensors and plain values, without executing code from the file."""

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

from megatron.config.messages import describe_error


class _Refused(Exception):
    """Raised if a pickle requests a class or function that is not allowed; the exception's text names it."""


class _Array:
    """Stand-in for numpy.ndarray during unpickling. It accepts only a random generator's state, and discards it."""

    def __init__(self, *_: Any) -> None:
        raise _Refused("numpy.ndarray")

    def __setstate__(self, state: Any) -> None:
        # numpy stores (version 1, shape, dtype, order, bytes). The state is a vector of 4-byte numbers.
        match state:
            case (1, (int(length),), _Dtype(), bool(), bytes(content)) if len(content) == 4 * length:
                return
        raise _Refused("a numpy array that is not the state of a random generator")


class _Dtype:
    """Stand-in for numpy.dtype during unpickling. It accepts only `u4`, the dtype of a random generator's state."""

    def __init__(self, code: Any, *_: Any) -> None:
        if code != "u4":
            raise _Refused(f"numpy.dtype({str(code)[:20]!r})")

    def __setstate__(self, state: Any) -> None:
        """Ignore the dtype's byte order and alignment, because the array's content is discarded."""


def _reconstruct(kind: Any, *_: Any) -> _Array:
    """Return an empty `_Array`, in place of numpy's `_reconstruct`. Raises _Refused unless `kind` is `_Array`.

    numpy's function is not used, because it would call any type that the file passes to it.
    """
    if kind is not _Array:
        raise _Refused(f"numpy's function _reconstruct for an object of type {getattr(kind, '__name__', 'something')}")
    return _Array.__new__(_Array)


MAX_READ_BYTES = 1 << 26  # at most this many bytes of a rejected pickle are read to find the reason
_ALLOWED_PREFIXES = ("torch.", "collections.OrderedDict", "argparse.Namespace", "_io.BytesIO", "megatron.", "numpy.")
# Enums in the args and in the rerun state that Megatron-LM saves, such as megatron.core.enums.ModelType
_ENUM = re.compile(r"megatron\.[\w.]*(enums|rerun_state_machine)\.\w+")

# Substitutes for numpy's functions. numpy 2.0 renamed the module numpy.core, so its old and new name are listed.
_NUMPY: list[tuple[Callable[..., Any], str]] = [
    (_reconstruct, "numpy.core.multiarray._reconstruct"),
    (_reconstruct, "numpy._core.multiarray._reconstruct"),
    (_Array, "numpy.ndarray"),
    (_Dtype, "numpy.dtype"),
]


def load_plain(path: Path) -> Mapping[str, Any]:
    """Load a pickled checkpoint: tensors, plain values, and the settings and random states that Megatron-LM saves.

    Raises ValueError if the file requests any other object. Nothing in the file is executed (torch's `weights_only`).
    States of numpy's random generator become empty objects, and enums of Megatron-LM their values.
    """
    refusal = "and is not loaded; if you trust it, save it again with only its weights"
    # A Namespace only has attributes, and a BytesIO, in which Transformer Engine saves states of FP8, only bytes.
    with torch.serialization.safe_globals([argparse.Namespace, io.BytesIO, *_NUMPY]):
        try:
            content = _load(path)
        except _Refused as error:
            raise ValueError(f"{path} requests {error} {refusal}") from None
        except pickle.UnpicklingError as error:
            requested = re.search(r"GLOBAL ([\w.]+)", str(error))
            # torch names the first object that it refuses. If it is a harmless enum, allow it and load the file again,
            # until nothing else is refused. The function puts the value of a member in place of the member.
            if requested and _ENUM.fullmatch(requested[1]):
                with torch.serialization.safe_globals([(lambda value: value, requested[1])]):
                    return load_plain(path)
            reason = f"requests {requested[1]}" if requested else _reason_of_rejection(path)
            raise ValueError(f"{path} {reason} {refusal}") from None
        except Exception as error:  # damaged bytes can raise errors of any class
            raise ValueError(f"{path} cannot be read: {describe_error(error)}") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} contains a {type(content).__name__}, not a dictionary")
    return content


def _reason_of_rejection(path: Path) -> str:
    """Return why torch's `weights_only` rejects a pickle. Reads the pickle's opcodes without executing them."""
    protocol = 0
    names = list[str]()
    with contextlib.suppress(Exception):  # damaged bytes raise errors of any class
        file = io.BytesIO(_pickled(path))
        while True:  # torch before 1.6 wrote several pickles, then raw data; an error at the raw data ends the loop
            file_protocol, file_names = _globals_of(file)
            protocol = max(protocol, file_protocol)
            names = names + file_names
    disallowed = [name for name in names if not name.startswith(_ALLOWED_PREFIXES)]
    if disallowed:
        return f"requests {disallowed[0]}"
    if protocol > 2:
        return f"is a pickle of protocol {protocol} (torch.save with pickle_protocol=2 writes one that can be read)"
    return "is damaged or contains more than tensors and plain values,"


def _pickled(path: Path) -> bytes:
    """Return the pickle in a file of torch.save: the file itself, or data.pkl in its ZIP archive."""
    if not zipfile.is_zipfile(path):
        with open(path, "rb") as file:
            return file.read(MAX_READ_BYTES)
    with zipfile.ZipFile(path) as archive:
        name = next(each for each in archive.namelist() if each.endswith("data.pkl"))
        with archive.open(name) as file:
            return file.read(MAX_READ_BYTES)


def _globals_of(file: BinaryIO) -> tuple[int, list[str]]:
    """Return a pickle's protocol and the names that it imports, in order."""
    protocol = 0
    names = list[str]()
    strings = list[str]()
    memo: dict[int, str] = {}
    # PROTO gives the protocol. GLOBAL names an import itself, while STACK_GLOBAL takes module and name from the last
    # two strings. The memo stores objects for later use: PUT under a given number, MEMOIZE under the next one, and GET
    # returns them.
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name == "PROTO":
            protocol = int(str(argument))
        elif opcode.name == "GLOBAL":
            names.append(str(argument).replace(" ", "."))
        elif opcode.name == "STACK_GLOBAL":
            names.append(".".join(strings[-2:]))
        elif "UNICODE" in opcode.name:
            strings.append(str(argument))
        elif opcode.name == "MEMOIZE" or "PUT" in opcode.name:
            index = len(memo) if argument is None else int(str(argument))
            memo[index] = strings[-1] if strings else ""
        elif opcode.name in ("BINGET", "LONG_BINGET", "GET"):
            strings.append(memo.get(int(str(argument)), ""))
    return protocol, names


def _load(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # hide torch's warning about newer pickle protocols
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError):  # files from before torch 1.6 cannot be memory-mapped
            return torch.load(path, map_location="cpu", weights_only=True)
