"""Formatting of the log line of an iteration. The columns of successive lines are aligned."""

import math
import time
from collections.abc import Mapping
from typing import Any


def format_count(number: float) -> str:
    """Format a number with three digits and a suffix, in at most six characters, such as 20.5K or 1.02M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        # 999.5K has four digits after rounding to three, so it counts as 1.00M.
        if number >= 0.9995 * size:
            return f"{number / size:#.3g}".rstrip(".") + letter  # of 1.02, 20.5 or 150.
    return f"{number:.0f}"


def format_duration(seconds: float) -> str:
    """Format a duration as 4:05, 3:04:05 or 2d 03:04:05."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}:{minutes:02d}:{rest:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class TimeLeft:
    """Estimator of the remaining time of a run, from the time and the samples between its log lines.

    The estimate includes the time of evaluations and saves, but not of the startup.
    """

    _first: tuple[int, float] | None = None  # samples and time of the first log line

    def estimate(self, done: int, total: int, seconds: float, now: float | None = None) -> float:
        """Return the remaining seconds after `done` of the `total` samples of the run.

        seconds: time per sample before this log line; used only for the first log line.
        now: current reading of time.monotonic(); None reads the clock.
        """
        now = time.monotonic() if now is None else now
        if self._first is None:
            self._first = done, now
        first_done, first_time = self._first
        sample_seconds = seconds
        if done > first_done:  # not for the first log line, from which the time is measured
            sample_seconds = (now - first_time) / (done - first_done)
        return (total - done) * sample_seconds


def training_line(
    row: Mapping[str, Any], last: int, seconds: float, left: float, details: bool = False, when: float | None = None
) -> str:
    """Return the log line of an iteration.

    Without `details`, the line has at most 120 columns in fp32 and bf16.
    row: the row of this iteration in metrics.jsonl.
    last: number of the run's last iteration (--train-iters).
    seconds: time per iteration.
    left: estimated remaining seconds of the run.
    details: True to add more columns, such as TFLOP/s and memory.
    The line has no column for a value that the run does not have, such as loss scale or MFU. With experts, it has the
    largest imbalance of all layers, and the number of experts of all layers without tokens if there are any.
    """
    norm = math.inf if row["grad_norm"] is None else row["grad_norm"]  # a file has null for infinity
    layers = row.get("layers", {}).values()
    # Both values of a layer are None before the first step that was not skipped.
    imbalances = [layer["imbalance"] for layer in layers if layer.get("imbalance") is not None]
    dead_experts = sum(layer.get("dead_experts") or 0 for layer in layers)
    columns = [
        time.strftime("%m-%d %H:%M:%S" if details else "%H:%M:%S", time.localtime(when)),
        f"iteration {row['iteration']:{len(str(last))}d}/{last}",
        f"loss {row['lm_loss']:7.4f}",
    ]
    if "z_loss" in row:
        columns.append(f"z loss {row['z_loss']:.2e}")
    if "router_loss" in row:
        columns.append(f"router loss {row['router_loss']:.2e}")
    if imbalances:
        columns.append(f"imbalance {max(imbalances):5.2f}")
    columns += [f"lr {row['lr']:.2e}", f"grad norm {norm:7.3f}"]
    if row["loss_scale"] is not None:
        columns.append(f"loss scale {row['loss_scale']:8g}")
    columns.append(f"{row['tokens_per_second']:9,.0f} tokens/s")
    if row.get("padding"):
        columns.append(f"padding {row['padding']:5.1%}")
    if row["mfu"] is not None:
        columns.append(f"MFU {row['mfu']:5.1%}")
    if details:
        columns += [
            f"{100 * row['iteration'] / max(last, 1):5.1f}%",
            f"{format_count(row['consumed_tokens']):>5} tokens",
            f"{seconds * 1e3:6.0f} ms",
            f"{row['tflops']:8.3g} TFLOP/s",
            _format_memory(row),
        ]
    columns.append(f"{format_duration(left):>7} left")
    skipped = row["skipped_steps"]
    if skipped:
        columns.append(f"{skipped} skipped step{'s' if skipped > 1 else ''}")
    if dead_experts:
        columns.append(f"{dead_experts} dead expert{'s' if dead_experts > 1 else ''}")
    straggler = row.get("straggler")
    if straggler:
        columns.append(f"rank {straggler['rank']} takes {straggler['factor']:.1f} times the median of its peers")
    return " | ".join(columns)


def _format_memory(row: Mapping[str, Any]) -> str:
    """Return the peak memory; on a CPU, of the process, and how much of it came with the model and its training."""
    peak = f"{row['memory_mb'] / 1e3:6.2f} GB"
    before = row.get("memory_before_model_mb")  # only on a CPU
    return peak if before is None else f"{peak} ({(row['memory_mb'] - before) / 1e3:.2f} GB since the model)"
