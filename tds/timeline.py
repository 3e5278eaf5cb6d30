"""Reader of the ranks' timelines, which puts them on one clock and merges them into one Chrome trace.

Pure Python, so a laptop can read what a cluster has written. trace.py writes timelines, align.py compares the
clocks.
"""

import json
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]  # one event of the Trace Event Format
FOLDER, MERGED = "trace", "merged.json"
ROWS = "steps", "parts of a step", "passes and messages", "collectives"  # rows of a rank in Perfetto, by track
# For each send: the matching receive, and the receiver's virtual stage minus the sender's.
RECEIVE_OF = {"SendActivation": ("RecvActivation", 1), "SendGrad": ("RecvGrad", -1)}


def trace_file_name(rank: int) -> str:
    """Return the file name of a rank's timeline."""
    return f"rank_{rank:05d}.json"


class Merged(NamedTuple):
    """The result of `merge`. error_us: bound on the remaining clock error against rank 0, in microseconds."""

    path: Path
    ranks: int
    error_us: float


class RankTrace(NamedTuple):
    """One rank's events (Trace Event Format, microseconds), on the clock of rank 0."""

    metadata: Event
    events: list[Event]
    error_us: float

    def spans(self, iteration: int, kinds: Sequence[str]) -> Iterator[Event]:
        """Yield the spans of these kinds in an iteration, in recorded order."""
        return (e for e in self.events if e["cat"] in kinds and e["args"]["iteration"] == iteration)


def read(folder: Path) -> list[RankTrace]:
    """Return the timelines of all ranks in a folder. Raises ValueError if there are none or a file is invalid."""
    paths = sorted(folder.glob("rank_*.json"))
    if not paths:
        raise ValueError(f"{folder} holds no timeline: tds.trace.start(), or --trace of an entry script, writes one")
    traces = []
    for path in paths:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            spans = [event for event in content["traceEvents"] if event["ph"] == "X"]  # others name rows
            traces.append(_to_rank_0_clock(content["otherData"], spans))
        except RecursionError:
            raise ValueError(f"{path} is not a timeline: its JSON is nested too deeply") from None
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a timeline: {type(error).__name__} {str(error)[:100]}") from None
    return traces


def _to_rank_0_clock(metadata: Event, events: list[Event]) -> RankTrace:
    """Convert events to rank 0's clock, assuming linear drift between the first and last comparison of the clocks."""
    clock = metadata["clock"]  # (time, offset from rank 0's clock, error bound) of each comparison, in ns
    if not clock:  # never compared: any error is possible
        return RankTrace(metadata, events, float("inf"))
    first_time, first_offset, first_error = clock[0]
    last_time, last_offset, last_error = clock[-1]
    drift = (last_offset - first_offset) / (last_time - first_time) if last_time > first_time else 0.0
    shifted = []
    for event in events:
        ahead = first_offset + drift * (event["ts"] * 1e3 - first_time)  # ns ahead of rank 0
        shifted.append({**event, "ts": event["ts"] - ahead / 1e3})
    return RankTrace(metadata, shifted, max(first_error, last_error) / 1e3)


def merge(folder: Path, ranks: Sequence[RankTrace] | None = None) -> Merged:
    """Write one Chrome trace of all ranks, atomically, with arrows that show messages.

    ranks: the result of `read(folder)`; None: call it.
    """
    ranks = ranks or read(folder)
    path = folder / MERGED
    records = []
    spans: list[Event] = []
    for rank in ranks:
        metadata = rank.metadata
        records += name_events(metadata["rank"], metadata["name"])
        spans += rank.events
    zero = min((event["ts"] for event in spans), default=0.0)  # the merged timeline begins at 0
    for event in [*spans, *_arrows(ranks)]:
        records.append({**event, "ts": round(event["ts"] - zero, 3)})
    write_events(path, records)
    return Merged(path, len(ranks), max(r.error_us for r in ranks))


def write_events(path: Path, events: Sequence[Event], **more: Any) -> None:
    """Write a file in the Trace Event Format atomically. more: further keys of the file."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.write_text(json.dumps({"traceEvents": events, **more}, separators=(",", ":")), encoding="utf-8")
    os.replace(temporary, path)


def name_events(rank: int, name: str) -> list[Event]:
    """Return the events that name a rank and its rows."""
    events: list[Event] = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}]
    for track, row in enumerate(ROWS):
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": row}})
    return events


def _arrows(ranks: Sequence[RankTrace]) -> Iterator[Event]:
    """Yield flow events from the start of each send to the end of its receive.

    An iteration may have several messages with the same key: of training, and of each evaluation after it. They arrive
    in the order in which they were sent.
    """
    receives: dict[tuple[Any, ...], list[Event]] = {}
    for rank in ranks:
        for event in rank.events:
            name = event["name"]
            if event["cat"] == "message" and name.startswith("Recv"):
                key = _message_key(rank, event, name, 0)  # 0: the event itself is at the receiver
                receives.setdefault(key, []).append(event)
    for rank in ranks:
        for event in rank.events:
            name = event["name"]
            if name not in RECEIVE_OF:
                continue
            key = _message_key(rank, event, *RECEIVE_OF[name])
            same_key = receives.get(key)
            if not same_key:  # the receiver has not recorded this message
                continue
            receive = same_key.pop(0)
            common = {"name": "message", "cat": "flow", "id": f"{event['pid']}-{event['ts']}"}
            yield {**common, "ph": "s", "pid": event["pid"], "tid": event["tid"], "ts": event["ts"]}
            end = receive["ts"] + 0.99 * receive["dur"]  # viewers drop an arrow that ends outside of its span
            yield {**common, "ph": "f", "bp": "e", "pid": receive["pid"], "tid": receive["tid"], "ts": end}


def _message_key(rank: RankTrace, event: Event, name: str, hop: int) -> tuple[Any, ...]:
    """Return a key that is equal for a send and the matching receive.

    name: the name of the receive. hop: the receiver's virtual stage minus that of `event`.
    """
    metadata = rank.metadata
    args = event["args"]
    stage = args["chunk"] * metadata["stages"] + metadata["stage"] + hop
    return args["iteration"], metadata["replica"], metadata["model"], name, stage, args["micro"]
