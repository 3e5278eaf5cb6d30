"""The report of a hang lists the ranks' stacks, the progress of the device and unfinished collectives."""

import json
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tds import heartbeat, recorder
from tds._torch import recorded_collectives
from tds.fault_board import format_reports
from tds.recorder import DeviceProgress, pending_collectives


def _report(stack: str, **more: Any) -> dict[str, Any]:
    return {"what": "stage 0, in Forward", "since": 1.0, "stack": stack, **more}


def test_a_stack_that_many_ranks_share_stands_there_once() -> None:
    reports = {rank: _report("waits" if rank % 2 else f"stack {rank}") for rank in range(6) if rank != 3}
    lines = format_reports(reports, 6, {})
    assert [line for line in lines if not line.startswith("---")] == ["stack 0", "waits", "stack 2", "stack 4"]
    assert lines.index("waits") == lines.index("--- rank 5, stage 0, in Forward, for 1.0 s") + 1
    assert "--- rank 3 does not answer: its process is dead or was stopped" in lines
    assert sum(line.startswith("--- rank") for line in lines) == 6


def test_what_a_rank_adds_stands_below_it() -> None:
    lines = format_reports({0: _report("s", more=["begun and not ended: all_reduce"]), 1: _report("s")}, 2, {})
    assert lines[1] == "    begun and not ended: all_reduce" and lines[3] == "s"


class _Event:
    """A stand-in for torch.Event; the first `done` events that were recorded are complete."""

    done = 0

    def __init__(self, device: torch.device) -> None:
        self.number = 0

    def record(self) -> None:
        _Event.made = self.number = getattr(_Event, "made", 0) + 1

    def query(self) -> bool:
        return self.number <= _Event.done


def test_how_far_the_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", _Event)
    finished = DeviceProgress(torch.device("meta"))
    assert finished.last_finished() is None
    for what in "abcd":
        finished.record_submitted(what)
    assert finished.last_finished() is None
    _Event.done = 3
    assert finished.last_finished() == "c"


def test_collectives_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(number: int, state: str, **more: Any) -> dict[str, Any]:
        return {
            "profiling_name": "nccl:all_reduce",
            "collective_seq_id": number,
            "p2p_seq_id": 0,
            "is_p2p": False,
            "state": state,
            "input_dtypes": ["BFloat16"],
            "input_sizes": [[2, 4]],
            "process_group": ["3", "data"],
            "retired": False,
            **more,
        }

    entries = [entry(1, "completed"), entry(2, "scheduled", retired=True), *(entry(n, "started") for n in range(3, 9))]
    monkeypatch.setattr(recorder, "recorded_collectives", lambda: entries)
    said = pending_collectives()
    assert said[0] == "nccl:all_reduce number 3 of the group data (bfloat16 [2, 4])"
    assert len(said) == 5 and said[-1] == "and 2 more"
    sent = entry(0, "started", is_p2p=True, p2p_seq_id=7, profiling_name="nccl:send 0->1")
    monkeypatch.setattr(recorder, "recorded_collectives", lambda: [sent])
    assert pending_collectives() == ["nccl:send 0->1 number 7 of the group data (bfloat16 [2, 4])"]


def test_one_that_is_marked_as_ended_a_moment_later_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([[{"profiling_name": "gloo:barrier"}], [{"profiling_name": "gloo:barrier", "retired": True}]])
    monkeypatch.setattr(recorder, "recorded_collectives", lambda: next(looks))
    assert pending_collectives() == []


def test_each_recorder_of_torch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both flight recorders of torch, the general one and NCCL's, are read, even if one of them raises an error."""

    def dump(number: int) -> Any:
        return lambda includeCollectives: json.dumps({"entries": [{"collective_seq_id": number}]})  # noqa: N803

    def broken(includeCollectives: bool) -> str:  # noqa: N803
        raise RuntimeError

    module = SimpleNamespace(_dump_nccl_trace_json=dump(1), _dump_fr_trace_json=dump(2))
    monkeypatch.setattr(torch._C, "_distributed_c10d", module)
    assert [each["collective_seq_id"] for each in recorded_collectives()] == [1, 2]
    module._dump_nccl_trace_json = broken
    assert [each["collective_seq_id"] for each in recorded_collectives()] == [2]


def test_a_dump_that_is_off_costs_no_report() -> None:
    begin = time.monotonic()
    assert pending_collectives() == []
    assert time.monotonic() - begin < 1


def test_reports_of_several_hosts_name_them() -> None:
    reports = {rank: _report("waits") for rank in (0, 1)}
    hosts = {0: "node1", 1: "node1", 2: "node2"}
    lines = format_reports(reports, 3, hosts)
    assert [line.split(",")[0].split(" does")[0] for line in lines if line.startswith("---")] == [
        "--- rank 0 on node1",
        "--- rank 1 on node1",
        "--- rank 2 on node2",
    ]


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, heartbeat.DEFAULT_SECONDS), ("", heartbeat.DEFAULT_SECONDS), ("0", 0), ("90", 90)]
)
def test_timeout_of_silent_hosts(monkeypatch: pytest.MonkeyPatch, text: str | None, seconds: float) -> None:
    monkeypatch.delenv("TDS_HOST_TIMEOUT", raising=False)
    if text is not None:
        monkeypatch.setenv("TDS_HOST_TIMEOUT", text)
    assert heartbeat.host_timeout() == seconds
    for wrong in ("-1", "nan", "inf", "a minute"):
        monkeypatch.setenv("TDS_HOST_TIMEOUT", wrong)
        with pytest.raises(ValueError, match="TDS_HOST_TIMEOUT"):
            heartbeat.host_timeout()


def test_the_host_of_a_rank_0_that_has_ended_is_watched_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        watch = threading.Thread(target=heartbeat._watch_rank_0, args=(server.getsockname()[1], 45.0), daemon=True)
        watch.start()
        connection, _ = server.accept()
        assert connection.recv(100)
        connection.close()
        watch.join(5.0)
    assert not watch.is_alive()


def test_ranks_do_not_wait_for_a_rank_0_that_watches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of rank 0's host may turn the watch off; other hosts learn this from the store."""
    store = torch.distributed.HashStore()
    threads: list[Any] = []
    monkeypatch.setattr(heartbeat, "default_store", lambda: store)
    monkeypatch.setattr(heartbeat, "spans_hosts", lambda: True)
    monkeypatch.setattr(heartbeat, "start_thread", lambda *args: threads.append(args))
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    store.set_timeout(timedelta(seconds=5))
    for rank, seconds in ((0, "0"), (1, "45")):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        monkeypatch.setenv("TDS_HOST_TIMEOUT", seconds)
        heartbeat.watch_hosts()
    assert threads == []
