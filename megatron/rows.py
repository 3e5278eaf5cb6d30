"""Parsing and validation of the rows in metrics.jsonl, which reports and resumed runs read."""

from typing import Any

from .json_text import JsonBoundError, JsonError, brief, format_value, is_list, is_object, parse_json

NUMBER_KEYS = (
    "consumed_samples", "consumed_tokens", "lm_loss", "ppl", "bits_per_byte", "text_loss", "text_accuracy", "lr",
    "grad_norm", "loss_scale", "skipped_steps", "passed_over", "z_loss", "router_loss", "target_share",
    "tokens_per_second", "padding", "tflops", "mfu", "memory_mb", "memory_before_model_mb", "global_batch", "accuracy",
    "questions",
)  # fmt: skip


class RowError(ValueError):
    """A line of metrics.jsonl is valid JSON but not a row that a run writes; the message says why."""


def _is_layer_table(value: Any) -> bool:
    """Return whether `value` is an object of objects, whose values are numbers or null."""
    return is_object(value, lambda layer: is_object(layer, lambda x: type(x) in (int, float, type(None))))


def _is_count_table(value: Any) -> bool:
    """Return whether `value` is an object of lists, one for each layer, with a count for each of its experts."""
    return is_object(value, lambda counts: is_list(counts, lambda x: type(x) is int and x >= 0))


def _is_sample(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("prompt"), str) and isinstance(value.get("text"), str)


def parse_row(line: str) -> dict[str, Any] | None:
    """Return the row in a line of metrics.jsonl; None if the line is incomplete (after a crash). Raises RowError."""
    try:
        row = parse_json(line, "the line")
    except JsonBoundError as error:  # valid JSON, hence no incomplete line, but nested too deeply, for example
        raise RowError(str(error)) from None
    except JsonError:
        return None
    if not isinstance(row, dict):
        raise RowError(f"{brief(line.strip(), 40)} is not a JSON object")
    iteration = row.get("iteration")
    if type(iteration) is not int or iteration < 0:
        raise RowError(f'"iteration" is {format_value(iteration, 40)}, not a whole number')
    for name in NUMBER_KEYS:
        value = row.get(name)
        # True and False, which are instances of int in Python, are no numbers here.
        if value is not None and type(value) not in (int, float):
            raise RowError(f'"{name}" is {format_value(value, 40)}, not a number')
    if not _is_layer_table(row.get("layers", {})):
        raise RowError('"layers" is not an object of objects of numbers')
    if not _is_count_table(row.get("expert_tokens", {})):
        raise RowError('"expert_tokens" is not an object of lists of whole numbers')
    if not is_list(row.get("samples", []), _is_sample):
        raise RowError('"samples" is not a list of objects with the texts "prompt" and "text"')
    if row.get("split") != "train":
        return row
    # Reports compute with these numbers of training rows, so they may not be absent or null there.
    for name in ("consumed_samples", "consumed_tokens"):
        if row.get(name) is None:
            raise RowError(f"a training row lacks {name}")
    if not iteration:  # the first training row has iteration 1
        raise RowError("a training row lacks an iteration")
    return row
