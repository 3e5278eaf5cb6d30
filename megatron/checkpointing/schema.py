"""Validation of checkpoint.json, before any of its values is used to open a file or to allocate memory."""

import math
from collections.abc import Collection, Mapping
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


def _is_count(value: Any) -> bool:
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
    seed, tokenizer, positions = (content[key] for key in ("rng_seed", "tokenizer", "positions"))
    _expect(seed is None or type(seed) is int, "rng_seed", "a whole number", seed)
    _expect(tokenizer is None or isinstance(tokenizer, str), "tokenizer", "a text", tokenizer)
    _expect(_is_count(positions), "positions", "a whole number", positions)
    _check_optimizer(content["optimizer"])
    config = content["config"]
    _expect(isinstance(config, dict), "config", "an object", config)
    for name in ("model", "data", "optim", *config):
        _expect(isinstance(config.get(name), dict), f"config.{name}", "an object", config.get(name))
    _expect(
        isinstance(config["optim"].get("optimizer"), str),
        "config.optim.optimizer",
        "a text",
        config["optim"].get("optimizer"),
    )
    _expect(isinstance(content["tensors"], dict), "tensors", "an object", content["tensors"])
    for key, entry in content["tensors"].items():
        _check_tensor(f"tensors[{brief(repr(key))}]", entry, files)
    _check_moments(content["optimizer"], content["tensors"])


def _elements(shape: list[int]) -> int:
    """Return the number of elements of a tensor, or a number above MOST as soon as a product exceeds it."""
    product = 1
    for size in shape:
        product *= size
        if product > MOST:
            break
    return product


def _is_pair_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(x) is float and math.isfinite(x) for x in value)


def _is_fork(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))


def _check_state(state: Any) -> None:
    _expect(isinstance(state, dict), "state", "an object", state)
    known = {"recent", *(f.name for f in fields(TrainState))}  # version 0.2.0 and older stored `recent`
    for name, value in state.items():
        if name not in known:
            raise SchemaError(
                f"state has the unknown key {brief(repr(name))}; known keys are {', '.join(sorted(known))}"
            )
        if name == "recent":
            right = isinstance(value, list) and all(map(_is_pair_of_numbers, value))
            _expect(right, "state.recent", "a list of pairs of numbers", value)
            continue
        if name == "features":
            right = isinstance(value, dict) and all(isinstance(each, dict) for each in value.values())
            _expect(right, "state.features", "an object of objects", value)
            continue
        if name == "forks":
            right = isinstance(value, list) and all(map(_is_fork, value))
            _expect(right, "state.forks", "a list of pairs of whole numbers", value)
            continue
        # sample_hash may be any unsigned 64-bit number. rng_seed may be negative or None.
        right = type(value) is int and 0 <= value < 2**64 if name != "rng_seed" else value is None or type(value) is int
        _expect(right, f"state.{name}", "a whole number, 0 or more", value)
    for name in ("iteration", "consumed_samples"):
        _expect(name in state, f"state.{name}", "a whole number, 0 or more", None)


def _check_optimizer(optimizer: Any) -> None:
    _expect(isinstance(optimizer, dict), "optimizer", "an object", optimizer)
    step = optimizer.get("step")
    scaler = optimizer.get("loss_scaler")
    _expect(_is_count(step), "optimizer.step", "a whole number", step)
    steps = optimizer.get("steps", {})
    right = isinstance(steps, dict) and all(map(_is_count, steps.values()))
    _expect(right, "optimizer.steps", "an object of whole numbers, keyed by weight name", steps)
    for name in ("moments", "without_moments", "frozen"):
        names = optimizer.get(name, [] if name != "moments" else None)
        right = isinstance(names, list) and all(isinstance(each, str) for each in names)
        _expect(right, f"optimizer.{name}", "a list of names", names)
    some = optimizer.get("moments_of", {})
    right = isinstance(some, dict) and all(
        isinstance(own, list) and own and all(name in optimizer["moments"] for name in own) for own in some.values()
    )
    _expect(right, "optimizer.moments_of", "an object of lists of names in optimizer.moments", some)
    right = isinstance(scaler, dict) and all(
        isinstance(value, (int, float)) and math.isfinite(value) for value in scaler.values()
    )
    _expect(right, "optimizer.loss_scaler", "an object of numbers", scaler)


def _check_moments(optimizer: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Raise SchemaError if a weight lacks some of its moments.

    A weight that is frozen or never had a gradient has no moments. optimizer.moments_of lists the moments of weights
    that should have only some of them.
    """
    weights = [key.removeprefix(f"{WEIGHT}.") for key in tensors if key.startswith(f"{WEIGHT}.")]
    moments = optimizer["moments"]
    without = optimizer.get("without_moments")
    some = optimizer.get("moments_of", {})
    for name in weights:
        own = some.get(name, moments)
        missing = [moment for moment in own if f"{moment}.{name}" not in tensors]
        known = len(missing) == len(own) and (without is None or name in without)
        if missing and not known:
            raise SchemaError(f"tensors lacks {missing[0]}.{name}, but optimizer.moments lists {missing[0]}")
    if moments and without is None and not any(f"{moments[0]}.{name}" in tensors for name in weights):
        raise SchemaError(f"optimizer.moments lists {', '.join(moments)}, but no weight has such a moment")


def _check_tensor(where: str, entry: Any, files: Collection[str]) -> None:
    """Check a tensor's shape and split dimension, and that its pieces cover the tensor exactly once."""
    _expect(isinstance(entry, dict), where, "an object", entry)
    shape, dim, pieces = (entry.get(name) for name in ("shape", "dim", "pieces"))
    right = isinstance(shape, list) and bool(shape) and all(map(_is_count, shape)) and _elements(shape) <= MOST
    _expect(right, f"{where}.shape", f"a list of sizes with a product of {MOST} at most", shape)
    right = _is_count(dim) and dim < len(shape)
    _expect(right, f"{where}.dim", f"the index of one of the {len(shape)} dimensions", dim)
    _expect(isinstance(pieces, list) and bool(pieces), f"{where}.pieces", "a list", pieces)
    for piece in pieces:
        right = isinstance(piece, dict) and _is_count(piece.get("begin")) and _is_count(piece.get("end"))
        _expect(right, f"each of {where}.pieces", "an object with file, begin and end", piece)
        name = piece.get("file")
        _expect(
            isinstance(name, str) and name in files, f"each file in {where}.pieces", "in the list of checksums", name
        )
    at = 0
    for piece in sorted(pieces, key=lambda piece: (piece["begin"], piece["end"])):
        if piece["begin"] != at or piece["end"] < at:
            raise SchemaError(
                f"{where}.pieces: expected a piece from row {at} on, found rows {piece['begin']} to {piece['end']}"
            )
        at = piece["end"]
    _expect(
        at == shape[dim], f"the end of the last piece in {where}.pieces", f"{shape[dim]}, the size in {where}.shape", at
    )
