"""Validation of checkpoint.json, before any of its values is used to open a file or to allocate memory."""

import math
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from megatron.json_text import are_number_pairs, brief, format_value, is_list, is_object

from .files import WEIGHT
from .state import TrainState

MAX_ELEMENTS = 2**48  # maximum number of elements in a tensor, a thousand times more than in any model
REQUIRED_KEYS = ("format", "state", "rng_seed", "optimizer", "tokenizer", "positions", "config", "tensors")


class SchemaError(ValueError):
    """checkpoint.json is invalid; the message names the key and the problem."""


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number, 0 or more, of at most 63 bits."""
    return type(value) is int and 0 <= value < 2**63


def _require(is_valid: bool, where: str, expected: str, value: Any) -> None:
    """Raise SchemaError, which names the place `where` and shows `value`, unless `is_valid`."""
    if not is_valid:
        raise SchemaError(f"{where} must be {expected}, not {format_value(value, 60)}")


def check_index(content: Mapping[str, Any], files: Collection[str]) -> None:
    """Raise SchemaError unless the content of a checkpoint.json is valid.

    files: the file names in the list of checksums.
    """
    for key in REQUIRED_KEYS:
        if key not in content:
            raise SchemaError(f"the key {key!r} is missing")
    _check_state(content["state"])
    seed = content["rng_seed"]
    tokenizer = content["tokenizer"]
    positions = content["positions"]
    _require(_is_seed(seed), "rng_seed", "a whole number", seed)
    _require(tokenizer is None or _is_text(tokenizer), "tokenizer", "a text", tokenizer)
    _require(is_count(positions), "positions", "a whole number", positions)
    _check_optimizer(content["optimizer"])
    _check_config(content["config"])
    tensors = content["tensors"]
    _require(isinstance(tensors, dict), "tensors", "an object", tensors)
    for key, entry in tensors.items():
        _check_tensor(f"tensors[{brief(repr(key))}]", entry, files)
    _check_moments(content["optimizer"], tensors)


def _check_config(config: Any) -> None:
    _require(isinstance(config, dict), "config", "an object", config)
    for name in ("model", "data", "optim", *config):  # three required sections, and all that there are
        section = config.get(name)
        _require(isinstance(section, dict), f"config.{name}", "an object", section)
    optimizer = config["optim"].get("optimizer")
    _require(_is_text(optimizer), "config.optim.optimizer", "a text", optimizer)


def _count_elements(shape: list[int]) -> int:
    """Return the number of elements of a tensor, or a number above MAX_ELEMENTS as soon as a product exceeds it."""
    product = 1
    for size in shape:
        product *= size
        if product > MAX_ELEMENTS:
            break
    return product


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_seed(value: Any) -> bool:
    return value is None or type(value) is int


def _is_uint64(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**64  # sample_hash may be any unsigned 64-bit number


# Key of the state -> (check of its value, what the value must be). The values of the other keys are numbers.
_STATE_CHECKS = {
    "recent": (are_number_pairs, "a list of pairs of numbers"),  # version 0.2.0 and older
    "features": (lambda value: is_object(value, lambda each: isinstance(each, dict)), "an object of objects"),
    "forks": (
        lambda value: is_list(value, lambda fork: is_list(fork, is_count, 2)),
        "a list of pairs of whole numbers",
    ),
    "rng_seed": (_is_seed, "a whole number, 0 or more"),
}


def _check_state(state: Any) -> None:
    _require(isinstance(state, dict), "state", "an object", state)
    known = {"recent", *(f.name for f in fields(TrainState))}
    for name, value in state.items():
        if name not in known:
            raise SchemaError(
                f"state has the unknown key {brief(repr(name))}; known keys are {', '.join(sorted(known))}"
            )
        is_valid_value, expected = _STATE_CHECKS.get(name, (_is_uint64, "a whole number, 0 or more"))
        _require(is_valid_value(value), f"state.{name}", expected, value)
    for name in ("iteration", "consumed_samples"):  # a missing key is reported like the value null
        _require(name in state, f"state.{name}", "a whole number, 0 or more", None)


def _check_optimizer(optimizer: Any) -> None:
    _require(isinstance(optimizer, dict), "optimizer", "an object", optimizer)
    step = optimizer.get("step")
    _require(is_count(step), "optimizer.step", "a whole number", step)
    steps = optimizer.get("steps", {})
    is_valid = is_object(steps, is_count)
    _require(is_valid, "optimizer.steps", "an object of whole numbers, keyed by weight name", steps)
    moments = optimizer.get("moments")
    _require(is_list(moments, _is_text), "optimizer.moments", "a list of names", moments)
    for name in ("without_moments", "frozen"):
        names = optimizer.get(name, [])
        _require(is_list(names, _is_text), f"optimizer.{name}", "a list of names", names)
    # Name of a weight -> its moments, such as {"a.weight": ["momentum_buffer"]}: at least one, and each one is known.
    moments_of = optimizer.get("moments_of", {})
    is_valid = is_object(moments_of, lambda names: bool(names) and is_list(names, lambda name: name in moments))
    _require(is_valid, "optimizer.moments_of", "an object of lists of names in optimizer.moments", moments_of)
    scaler = optimizer.get("loss_scaler")
    _require(is_object(scaler, _is_finite), "optimizer.loss_scaler", "an object of numbers", scaler)


def _check_moments(optimizer: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Raise SchemaError if a weight lacks some of its moments.

    A weight that is frozen or never had a gradient has no moments. optimizer.moments_of lists the moments of weights
    that should have only some of them.
    """
    prefix = f"{WEIGHT}."
    moments = optimizer["moments"]
    without_moments = optimizer.get("without_moments")
    moments_of = optimizer.get("moments_of", {})
    has_first = False  # whether any weight has the first moment
    for key in tensors:
        if not key.startswith(prefix):
            continue
        name = key.removeprefix(prefix)
        expected = moments_of.get(name, moments)
        missing = [moment for moment in expected if f"{moment}.{name}" not in tensors]
        # A weight may lack all its moments if it is listed. Older checkpoints have no such list (None).
        lacks_all = len(missing) == len(expected)
        is_allowed = lacks_all and (without_moments is None or name in without_moments)
        if missing and not is_allowed:
            raise SchemaError(f"tensors lacks {missing[0]}.{name}, but optimizer.moments lists {missing[0]}")
        has_first |= bool(moments) and f"{moments[0]}.{name}" in tensors
    # Without the list, each weight alone may lack its moments, but not all weights together.
    if moments and without_moments is None and not has_first:
        raise SchemaError(f"optimizer.moments lists {', '.join(moments)}, but no weight has such a moment")


def _check_tensor(where: str, entry: Any, files: Collection[str]) -> None:
    """Check a tensor's shape and split dimension, and that its pieces cover the tensor exactly once."""
    _require(isinstance(entry, dict), where, "an object", entry)
    shape = entry.get("shape")
    dim = entry.get("dim")
    pieces = entry.get("pieces")
    is_valid = bool(shape) and is_list(shape, is_count) and _count_elements(shape) <= MAX_ELEMENTS
    _require(is_valid, f"{where}.shape", f"a list of sizes with a product of {MAX_ELEMENTS} at most", shape)
    is_valid = is_count(dim) and dim < len(shape)
    _require(is_valid, f"{where}.dim", f"the index of one of the {len(shape)} dimensions", dim)
    _require(isinstance(pieces, list) and bool(pieces), f"{where}.pieces", "a list", pieces)
    row_ranges = []
    for piece in pieces:
        is_valid = isinstance(piece, dict) and is_count(piece.get("begin")) and is_count(piece.get("end"))
        _require(is_valid, f"each of {where}.pieces", "an object with file, begin and end", piece)
        name = piece.get("file")
        is_valid = isinstance(name, str) and name in files
        _require(is_valid, f"each file in {where}.pieces", "in the list of checksums", name)
        row_ranges.append((piece["begin"], piece["end"]))
    next_row = 0
    for begin, end in sorted(row_ranges):
        if begin != next_row or end < next_row:
            raise SchemaError(f"{where}.pieces: expected a piece from row {next_row} on, found rows {begin} to {end}")
        next_row = end
    expected = f"{shape[dim]}, the size in {where}.shape"
    _require(next_row == shape[dim], f"the end of the last piece in {where}.pieces", expected, next_row)
