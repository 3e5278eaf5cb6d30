"""The flag `--profile`: runs PyTorch's profiler on all ranks for a few iterations, and writes one Chrome trace.

`--profile` records every operator and kernel, which slows a run and fills a disk. The Chrome trace also contains the
timeline of `--trace`. The flag `--trace` alone records passes, messages and collectives. Recording one of these events
takes hundreds of nanoseconds, so `--trace` can stay on.
"""

import gzip
import json
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from tds import timeline, trace
from tds.align import measure_offset

from ..atomic import atomic_file, process_name
from ..ranks.rank_0 import is_rank_0, print_rank_0

FOLDER = "profile"
MERGED_FILE = "merged.json.gz"
MOST_MERGED = 64  # Files of more ranks are not merged, as the merged file would be too large.
# Default of --profile-iterations: after a start or resume, skip the first number and profile the second.
SKIP_ITERATIONS = 5
PROFILE_ITERATIONS = 3
CLOCK_PREFIX = "perf_counter "  # prefix of the name of a clock event; the value of time.perf_counter_ns() follows
# Number of clock events that are recorded at the start and at the end of the profile. Several are recorded, because an
# event is inaccurate if the thread is preempted between the readings of the two clocks.
CLOCK_EVENTS = 10


class Profile:
    """Profiler of one rank. Calls that start the profiler or write its files are collectives.

    about: metadata of this rank's timeline, such as its stage and the pipeline schedule.
    first, last: first and last profiled iteration.
    """

    def __init__(self, device: torch.device, folder: Path, metadata: dict[str, Any], first: int, last: int) -> None:
        self._device = device
        self._folder = folder
        self._metadata = metadata
        self._first = first
        self._last = last
        self._profiler: profile | None = None
        self._tracer: trace.Tracer | None = None
        self.done = False

    def iteration(self, number: int) -> bool:
        """Prepare for iteration `number`: start profiling before the first profiled iteration, finish after the last.

        Returns True if it started or finished. The caller excludes this time from the speed of the iteration.
        """
        has_changed = True
        is_in_range = self._first <= number <= self._last
        if self._profiler is None and not self.done and is_in_range:
            self._start()
        elif self._profiler is not None and number > self._last:
            self.finish()
        else:
            has_changed = False
        if self._tracer:
            self._tracer.iteration(number)
        return has_changed

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type != "cpu":
            activities += [k for k in torch.profiler.supported_activities() if k != ProfilerActivity.CPU]  # type: ignore[no-untyped-call]
        name = timeline.trace_file_name(dist.get_rank())
        tracer = trace.Tracer(self._device, self._folder / name, self._metadata, self._first, self._last)
        self._tracer = tracer
        # The offset of this rank's clock from rank 0. It is measured again at the end, as clocks drift.
        tracer.clock.append(measure_offset(self._device))
        trace.start(tracer)
        self._profiler = profile(activities=activities, record_shapes=True, acc_events=True)
        self._profiler.start()
        self._mark_clock()  # relates the clock of PyTorch's profiler to that of the tracer

    @staticmethod
    def _mark_clock() -> None:
        """Record events whose names have the time of the tracer's clock, to relate it to the profiler's clock."""
        for _ in range(CLOCK_EVENTS):
            # An empty event, whose name has the time on the clock of the tracer.
            with record_function(f"{CLOCK_PREFIX}{time.perf_counter_ns()}"):
                pass

    def finish(self) -> None:
        """Stop the profiler and write this rank's files; rank 0 merges all files. File errors do not end the run."""
        if self._profiler is None or self._tracer is None:
            return
        self._mark_clock()
        self.stop()
        self._tracer.clock.append(measure_offset(self._device))
        self._tracer.try_to_write()
        path = self._folder / _name_of(dist.get_rank())
        try:
            with atomic_file(path, path.with_name(f"{process_name()}.tmp.json.gz")) as temporary:
                self._profiler.export_chrome_trace(str(temporary))
        except (OSError, RuntimeError, MemoryError) as error:
            print(f"warning: the profile {path} cannot be written: {error}", flush=True)
        self._profiler = None
        self._tracer = None
        dist.barrier()
        if is_rank_0() and dist.get_world_size() <= MOST_MERGED:
            try:
                merge(self._folder)
                print_rank_0(f"wrote the profile of {dist.get_world_size()} ranks to {self._folder / MERGED_FILE}")
            except (OSError, ValueError, KeyError, MemoryError) as error:
                print_rank_0(f"warning: the profiles of the ranks cannot be merged: {error}")

    def stop(self) -> None:
        """Stop the profiler. `finish` can still write the recorded events."""
        if self._profiler and not self.done:
            self.done = True
            self._profiler.stop()
            trace.stop()


def _name_of(rank: int) -> str:
    return f"torch_{rank:05d}.json.gz"


def merge(folder: Path) -> Path:
    """Merge the files of all ranks into one Chrome trace, and return its path.

    For each rank, the file has the timeline of --trace and the events of PyTorch's profiler, with times on the clock of
    rank 0. Raises ValueError if there are no files.
    """
    ranks = timeline.read(folder)
    events = chain.from_iterable(rank.events for rank in ranks)
    # Times count from the first event, as a viewer shows them.
    origin = min((event["ts"] for event in events), default=0.0)
    path = folder / MERGED_FILE
    with atomic_file(path) as temporary, gzip.open(temporary, "wt", encoding="utf-8", compresslevel=4) as file:
        file.write('{"traceEvents":[\n')
        separator = ""
        for rank in ranks:
            for event in _events(folder, rank, origin):
                file.write(separator + json.dumps(event, separators=(",", ":")))
                separator = ",\n"
        file.write("\n]}\n")
    return path


def _events(folder: Path, rank: timeline.RankTrace, origin: float) -> Iterator[dict[str, Any]]:
    """Yield the events of one rank with new process ids.

    PyTorch's profiler gives the first GPU of every rank the process id 0, so the ids of different ranks would collide.
    """
    number = rank.metadata["rank"]
    # A rank has fewer than 1000 processes, so the ids of different ranks do not collide.
    first_pid = 1000 * number
    yield {"ph": "M", "name": "process_name", "pid": first_pid, "args": {"name": rank.metadata["name"]}}
    yield {"ph": "M", "name": "process_sort_index", "pid": first_pid, "args": {"sort_index": first_pid}}
    yield from ({**e, "pid": first_pid, "ts": round(e["ts"] - origin, 3)} for e in rank.events)
    path = folder / _name_of(number)
    if not path.is_file():
        return
    with gzip.open(path, "rt", encoding="utf-8") as file:
        profiled = json.load(file)["traceEvents"]
    shift = _clock_shift(profiled, rank) - origin
    pids: dict[Any, int] = {}
    for event in profiled:
        pid = pids.setdefault(event.get("pid"), first_pid + 1 + len(pids))
        event = {**event, "pid": pid}
        if "ts" in event:
            event["ts"] = round(event["ts"] + shift, 3)
        # The ids of arrows between events begin at the same number on every rank.
        if "id" in event:
            event["id"] = f"{number}-{event['id']}"
        if event.get("name") in ("process_sort_index", "process_name", "process_labels"):
            event["args"] = _label_args(event, number, pid)
        yield event


def _label_args(event: dict[str, Any], rank: int, pid: int) -> dict[str, Any]:
    """Return the arguments of a metadata event of one rank, for a timeline with the processes of all ranks."""
    if event["name"] == "process_sort_index":
        return {"sort_index": pid}
    args = dict(event["args"])
    # The name of a process gets the number of its rank, as all ranks have processes of the same names.
    if "name" in args:
        args["name"] = f"rank {rank}: {args['name']}"
    return args


def _clock_shift(profiled: list[dict[str, Any]], rank: timeline.RankTrace) -> float:
    """Return the microseconds to add to the profiler times of a rank, so that they are on the clock of rank 0.

    profiled: events of the rank's profile. Raises ValueError if there is no clock event among them.
    """
    shifts = []
    for event in profiled:
        name = str(event.get("name", ""))
        if name.startswith(CLOCK_PREFIX) and event.get("ph") == "X":
            # From ns to us, the unit of the trace.
            shifts.append(int(name.removeprefix(CLOCK_PREFIX)) / 1e3 - event["ts"])
    if not shifts:
        raise ValueError(f"the profile of rank {rank.metadata['rank']} has no clock event")
    # perf_counter is read before the profiler's clock. So each difference of the two clocks is too small, and the
    # largest difference is the most accurate.
    shift: float = max(shifts)
    clock = rank.metadata["clock"]
    if clock:
        # Offset of this rank's clock from that of rank 0 in ns, measured when the timeline began.
        shift -= clock[0][1] / 1e3
    return shift
