"""Additions to a hang report: pending collectives, shortage of memory, and the last work that the device has finished.

On an accelerator, the host runs far ahead of the device. So the host's stack shows the last work that it submitted, not
the work that the device waits for. This module reads pending collectives from torch's flight recorder. It also records
a device event after each instruction, which shows whether the device has finished the instruction.
"""

import os
import time
from collections import deque
from typing import Any

import torch

from ._torch import recorded_collectives

ENTRIES = "2000"  # entries of the flight recorder, enough for several steps
MAX_RECORDED = 1024  # number of newest instructions that are stored
MAX_SHOWN = 4  # maximum number of collectives in a report
MARK_DELAY = 0.5  # seconds; torch may mark a finished collective as finished this much later


def record_collectives() -> None:
    """Turn torch's flight recorder on unless the environment configures it; call it before ranks are connected."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the older name of the variable below
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", ENTRIES)


def pending_collectives() -> list[str]:
    """Describe the collectives that this rank has started and that have not ended, oldest first."""
    # torch may mark a finished collective late, so look again until none is pending or MARK_DELAY is over.
    deadline = time.monotonic() + MARK_DELAY
    pending = _find_pending()
    while pending and time.monotonic() < deadline:
        time.sleep(0.05)
        pending = _find_pending()
    lines = list(map(_describe, pending[:MAX_SHOWN]))
    if len(pending) > MAX_SHOWN:
        lines.append(f"and {len(pending) - MAX_SHOWN} more")
    return lines


def _find_pending() -> list[dict[str, Any]]:
    """Return the flight recorder's entries of collectives that have not ended."""
    return [each for each in recorded_collectives() if not each.get("retired") and each.get("state") != "completed"]


def _describe(entry: dict[str, Any]) -> str:
    """Describe an entry of the flight recorder: the collective, its number, its group and its tensors."""
    # torch may change the fields of an entry from release to release, so none of them is required.
    number_key = "p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"
    count = entry.get(number_key)
    dtypes = entry.get("input_dtypes", [])
    sizes = entry.get("input_sizes", [])
    tensors = [f"{dtype} {size}".lower() for dtype, size in zip(dtypes, sizes, strict=False)]
    group = (entry.get("process_group") or ["?"])[-1]  # the last item describes the group
    return f"{entry.get('profiling_name')} number {count} of the group {group} ({', '.join(tensors)})"


def allocation_retries(device: torch.device) -> str | None:
    """Return a sentence if the allocator of this device has run short of memory, else None.

    Each retry synchronizes the device and frees cached memory.
    """
    retries = torch.accelerator.memory_stats(device).get("num_alloc_retries", 0)
    return f"its device ran short of memory {retries} times: allocations were retried" if retries else None


class DeviceProgress:
    """Record of how far the device has come with the submitted work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._submitted: deque[tuple[Any, torch.Event]] = deque(maxlen=MAX_RECORDED)

    def record_submitted(self, what: Any) -> None:
        """Record that the host has submitted all work of `what`."""
        event = torch.Event(self.device)
        event.record()
        self._submitted.append((what, event))

    def last_finished(self) -> Any:
        """Return the newest recorded `what` that the device has finished, or None."""
        for what, event in reversed(self._submitted):
            if event.query():
                return what
        return None
