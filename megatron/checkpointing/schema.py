"""Validation of checkpoint.json, before any of its values is used to open a file or to allocate memory."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any

from megatron.json_text import JsonError, brief, parse_json, shown

from .files import WEIGHT
from .state import TrainState

MOST = 2**48  # maximum number of elements in a tensor, a thousand times more than in any model
KEYS = ("format", "state", "rng_seed", "optimizer", "tokenizer", "positions", "config", "tensors")


class SchemaError(ValueError):
    """checkpoint.json is invalid; the message names the key and the problem."""


def read(text: str) -> dict[str, Any]:
    """Parse the JSON in `text`. Raises SchemaError for invalid JSON, duplicate keys, NaN and infinities."""

    try:
        content: dict[str, Any] = parse_json(text, "the file", dict, constants=False)
    except JsonError as error:
        raise SchemaError(str(error)) from None
    return content


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number, 0 or more, of at most 63 bits."""
    return type(value) is int and 0 <= value < 2**63


def _expect(right: bool, where: str, what: str, found: Any) -> None:
    if not right:
        raise SchemaError(f"{where} must be {what}, not {shown(found, 60)}")


def check(content: Mapping[str, Any], files: Collection[str]) -> None:
    """Raise SchemaError unless the content of a checkpoint.json is valid.

    files: the file names in the list of checksums.
    """
    for key in KEYS:
        if key not in content:
            raise SchemaError(f"the key {key!r} is missing")
    _check_state(content["state"])
    seed = content["rng_seed"]
    tokenizer = content["tokenizer"]
    positions = content["positions"]
    _expect(seed is None or type(seed) is int, "rng_seed", "a whole number", seed)
    _expect(tokenizer is None or isinstance(tokenizer, str), "tokenizer", "a text", tokenizer)
    _expect(is_count(positions), "positions", "a whole number", positions)
    _check_optimizer(content["optimizer"])
    _check_config(content["config"])
    tensors = content["tensors"]
    _expect(isinstance(tensors, dict), "tensors", "an object", tensors)
    for key, entry in tensors.items():
        _check_tensor(f"tensors[{brief(repr(key))}]", entry, files)
    _check_moments(content["optimizer"], tensors)


def _check_config(config: Any) -> None:
    _expect(isinstance(config, dict), "config", "an object", config)
    for name in ("model", "data", "optim", *config):
        section = config.get(name)
        _expect(isinstance(section, dict), f"config.{name}", "an object", section)
    optimizer = config["optim"].get("optimizer")
    _expect(isinstance(optimizer, str), "config.optim.optimizer", "a text", optimizer)


def _elements(shape: list[int]) -> int:
    """Return the number of elements of a tensor, or a number above MOST as soon as a product exceeds it."""
    product = 1
    for size in shape:
        product *= size
        if product > MOST:
            break
    return product


def is_list(value: Any, right: Callable[[Any], bool], length: int | None = None) -> bool:
    """Return whether a value is a list, of `length` items if given, that are all `right`."""
    return isinstance(value, list) and length in (None, len(value)) and all(map(right, value))


def _is_object(value: Any, right: Callable[[Any], bool]) -> bool:
    """Return whether a value is an object whose values are all `right`."""
    return isinstance(value, dict) and all(map(right, value.values()))


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _is_recent(value: Any) -> bool:
    return is_list(value, lambda pair: is_list(pair, lambda x: type(x) is float and math.isfinite(x), 2))


def _are_features(value: Any) -> bool:
    return _is_object(value, lambda each: isinstance(each, dict))


def _are_forks(value: Any) -> bool:
    return is_list(value, lambda fork: is_list(fork, is_count, 2))


def _is_seed(value: Any) -> bool:
    return value is None or type(value) is int


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**64  # sample_hash may be any unsigned 64-bit number


# Key of the state -> check of its value, and what the value must be. The others are numbers.
_STATE = {
    "recent": (_is_recent, "a list of pairs of numbers"),  # version 0.2.0 and older
    "features": (_are_features, "an object of objects"),
    "forks": (_are_forks, "a list of pairs of whole numbers"),
    "rng_seed": (_is_seed, "a whole number, 0 or more"),
}


def _check_state(state: Any) -> None:
    _expect(isinstance(state, dict), "state", "an object", state)
    known = {"recent", *(f.name for f in fields(TrainState))}
    for name, value in state.items():
        if name not in known:
            raise SchemaError(
                f"state has the unknown key {brief(repr(name))}; known keys are {', '.join(sorted(known))}"
            )
        is_right, what = _STATE.get(name, (_is_number, "a whole number, 0 or more"))
        _expect(is_right(value), f"state.{name}", what, value)
    for name in ("iteration", "consumed_samples"):
        _expect(name in state, f"state.{name}", "a whole number, 0 or more", None)


def _check_optimizer(optimizer: Any) -> None:
    _expect(isinstance(optimizer, dict), "optimizer", "an object", optimizer)
    step = optimizer.get("step")
    _expect(is_count(step), "optimizer.step", "a whole number", step)
    steps = optimizer.get("steps", {})
    right = _is_object(steps, is_count)
    _expect(right, "optimizer.steps", "an object of whole numbers, keyed by weight name", steps)
    moments = optimizer.get("moments")
    _expect(is_list(moments, _is_name), "optimizer.moments", "a list of names", moments)
    for name in ("without_moments", "frozen"):
        names = optimizer.get(name, [])
        _expect(is_list(names, _is_name), f"optimizer.{name}", "a list of names", names)
    some = optimizer.get("moments_of", {})
    right = _is_object(some, lambda own: bool(own) and is_list(own, lambda name: name in moments))
    _expect(right, "optimizer.moments_of", "an object of lists of names in optimizer.moments", some)
    scaler = optimizer.get("loss_scaler")
    _expect(_is_object(scaler, _is_finite), "optimizer.loss_scaler", "an object of numbers", scaler)


def _check_moments(optimizer: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Raise SchemaError if a weight lacks some of its moments.

    A weight that is frozen or never had a gradient has no moments. optimizer.moments_of lists the moments of weights
    that should have only some of them.
    """
    prefix = f"{WEIGHT}."
    weights = [key.removeprefix(prefix) for key in tensors if key.startswith(prefix)]
    moments = optimizer["moments"]
    without = optimizer.get("without_moments")
    some = optimizer.get("moments_of", {})
    has_first = False  # whether a weight has the first moment
    for name in weights:
        own = some.get(name, moments)
        missing = [moment for moment in own if f"{moment}.{name}" not in tensors]
        is_known = len(missing) == len(own) and (without is None or name in without)
        if missing and not is_known:
            raise SchemaError(f"tensors lacks {missing[0]}.{name}, but optimizer.moments lists {missing[0]}")
        has_first |= bool(moments) and f"{moments[0]}.{name}" in tensors
    if moments and without is None and not has_first:
        raise SchemaError(f"optimizer.moments lists {', '.join(moments)}, but no weight has such a moment")


def _check_tensor(where: str, entry: Any, files: Collection[str]) -> None:
    """Check a tensor's shape and split dimension, and that its pieces cover the tensor exactly once."""
    _expect(isinstance(entry, dict), where, "an object", entry)
    shape = entry.get("shape")
    dim = entry.get("dim")
    pieces = entry.get("pieces")
    right = bool(shape) and is_list(shape, is_count) and _elements(shape) <= MOST
    _expect(right, f"{where}.shape", f"a list of sizes with a product of {MOST} at most", shape)
    right = is_count(dim) and dim < len(shape)
    _expect(right, f"{where}.dim", f"the index of one of the {len(shape)} dimensions", dim)
    _expect(isinstance(pieces, list) and bool(pieces), f"{where}.pieces", "a list", pieces)
    for piece in pieces:
        right = isinstance(piece, dict) and is_count(piece.get("begin")) and is_count(piece.get("end"))
        _expect(right, f"each of {where}.pieces", "an object with file, begin and end", piece)
        name = piece.get("file")
        right = isinstance(name, str) and name in files
        _expect(right, f"each file in {where}.pieces", "in the list of checksums", name)
    at = 0
    for begin, end in sorted((piece["begin"], piece["end"]) for piece in pieces):
        if begin != at or end < at:
            raise SchemaError(f"{where}.pieces: expected a piece from row {at} on, found rows {begin} to {end}")
        at = end
    size = shape[dim]
    _expect(at == size, f"the end of the last piece in {where}.pieces", f"{size}, the size in {where}.shape", at)
