"""Timelines of steps are recorded, corrected for clock offsets between ranks, and merged from the ranks' files."""

import json
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron import mpu
from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron.mpu.sequence import start_all_gather
from megatron_tools.report.draw_schedule import build_parser, draw_run, main
from megatron_tools.report.iterations import iterations
from tds import timeline, trace
from tds._torch import gather_shares
from tds.align import bound_offset
from tds.schedule import Backward, Forward, find_schedule
from tds.timetable import bubble_fraction, simulate_times
from tests.sentences import SENTENCES
from tests.support import on_ranks

CPU = torch.device("cpu")


def about(stage: int, stages: int = 2, micros: int = 4) -> dict[str, object]:
    return {
        "rank": stage, "stage": stage, "stages": stages, "replica": 0, "model": 0, "pipeline": True, "schedule": "1f1b",
        "extra_warmup": 0, "chunks": 1, "micros": micros, "name": f"rank {stage}",
    }  # fmt: skip


def test_the_distance_of_two_clocks_lies_within_its_bound() -> None:
    """The clock offset that `bound_offset` estimates from collectives errs by at most the bound that it returns."""
    dice = random.Random(1)
    for apart in (0, 5_000, -3_000_000, 10**12):
        zeros, mine = [], []
        for call in range(12):
            together = call * 1_000_000
            zeros.append((together - dice.randint(0, 90_000), together + dice.randint(1, 90_000)))
            mine.append((together - dice.randint(0, 90_000) + apart, together + dice.randint(1, 90_000) + apart))
        distance, error = bound_offset(mine, zeros)
        assert abs(distance - apart) <= error < 90_000


def test_the_newest_iterations_or_those_asked_for_are_kept(tmp_path: Path) -> None:
    newest = trace.Tracer(CPU, tmp_path / "rank_00000.json", about(0))
    asked = trace.Tracer(CPU, tmp_path / "rank_00001.json", about(1), range(3, 6))
    for tracer in (newest, asked):
        trace.start(tracer)
        for number in range(1, 2 * trace.KEPT_ITERATIONS + 11):
            tracer.iteration(number)
            with trace.span("train_batch", "step"):
                trace.sent(7)
                trace.end(trace.begin(), "SendActivation", "message", 0)
        trace.stop()
    assert [n for n, _ in newest.spans()] == list(range(trace.KEPT_ITERATIONS + 11, 2 * trace.KEPT_ITERATIONS + 11))
    assert [n for n, _ in asked.spans()] == [3, 4, 5]
    assert all(len(pieces) == 2 and pieces[0].size == 7 for _, pieces in asked.spans())
    assert newest.path.exists() and not list(
        tmp_path.glob("*.tmp")
    )  # the trace file is written during the iterations, not when the recorder closes
    asked.write()
    events = json.loads(asked.path.read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X"} and all(
        e["dur"] >= 0 and "tdur" in e for e in events if e["ph"] == "X"
    )


def test_the_clock_of_a_device_is_read_when_recording_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times between device events are 32-bit floats: after a day, they are multiples of 8 ms."""
    read: list[int] = []
    monkeypatch.setattr(trace.Tracer, "_record_reference", lambda self: read.append(1))
    tracer = trace.Tracer(torch.device("cuda"), tmp_path / "rank_00000.json", about(0), range(3, 6))
    found = []
    for number in range(1, 7):
        tracer.iteration(number)
        found.append(len(read))
    assert found == [0, 0, 1, 1, 1, 1]


def test_collectives_are_noted_only_while_somebody_records(tmp_path: Path) -> None:
    before = dist.barrier, dist.all_reduce
    trace.start(trace.Tracer(CPU, tmp_path / "x.json", about(0)))
    assert dist.barrier is not before[0]
    trace.stop()
    assert (dist.barrier, dist.all_reduce) == before
    assert trace.begin() is None


def _gathered(folder: Path) -> list[str]:
    """Return the names of the collectives that a trace has of gathers over a rank's model-parallel and data axis."""
    mpu.initialize_model_parallel(1)
    tracer = trace.Tracer(CPU, folder / "x.json", about(0))
    trace.start(tracer)
    tracer.iteration(1)
    gather_shares(torch.zeros(2), torch.ones(2), mpu.get_data_parallel_group()).wait()
    start_all_gather(torch.ones(2), mpu.get_mesh().data).wait()
    trace.stop()
    return [span.name for span in tracer._current_spans]


def test_gathers_are_recorded(tmp_path: Path) -> None:
    (names,) = on_ranks(1, _gathered, tmp_path)
    assert [name.startswith("all_gather_") for name in names] == [True, True]


def _written(folder: Path, shift_ms: float) -> float:
    """Write timelines of a simulated step of two stages; return the bubble.

    shift_ms: milliseconds by which the clock of stage 1 is ahead.
    """
    plan = [list(find_schedule({})(stage, 2, 4)) for stage in range(2)]
    spans = simulate_times(plan)
    seconds = max(span.end for span in spans)
    names = {"F": Forward.__name__, "B": Backward.__name__}
    for stage in range(2):
        ahead = int(shift_ms * 1e6) * stage
        tracer = trace.Tracer(CPU, folder / timeline.trace_file_name(stage), about(stage))
        tracer.iteration(1)
        tracer._current_spans.append(
            trace.RecordedSpan(ahead, ahead + int(1e6 * seconds), 0, "train_batch", "step", -1, 0, 0)
        )
        for s in spans:
            if s.stage == stage:
                passed = (ahead + int(s.begin * 1e6), ahead + int(s.end * 1e6))
                tracer._current_spans.append(trace.RecordedSpan(*passed, 0, names[s.kind], "pass", s.micro, 0, 0))
                kind, ends = ("SendActivation", passed[1]) if stage == 0 else ("RecvActivation", passed[0])
                if s.kind == "F":
                    tracer._current_spans.append(
                        trace.RecordedSpan(ends, ends + 1000, 0, kind, "message", s.micro, 0, 64)
                    )
        tracer.clock = [(0, float(ahead), 1000.0), (10**9, float(ahead), 2000.0)]
        tracer.write()
    return bubble_fraction(spans)


def test_a_reader_finds_the_step_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / timeline.FOLDER
    bubble = _written(folder, 5_000.0)
    (found,) = iterations(timeline.read(folder))
    assert found.seconds == pytest.approx(0.015) and found.bubble == pytest.approx(bubble) == pytest.approx(1 / 5)
    merged = timeline.merge(folder)
    assert (merged.ranks, merged.error_us) == (2, 2.0)
    events = json.loads(merged.path.read_text())["traceEvents"]
    arrows = [e for e in events if e.get("cat") == "flow"]
    spans = [e for e in events if e["ph"] == "X"]
    for arrow in arrows:
        row = [e for e in spans if (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"])]
        assert any(e["ts"] <= arrow["ts"] < e["ts"] + e["dur"] for e in row), "a viewer draws it"
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == set(timeline.ROWS)
    assert len(arrows) == 2 * 4 and {e["pid"] for e in arrows if e["ph"] == "s"} == {0}
    picture = tmp_path / "x.svg"
    draw_run(
        build_parser().parse_args(["--run", str(tmp_path), "--svg", str(picture), "--png", str(tmp_path / "x.png")])
    )
    assert "ideal 1f1b of the same passes: 15.0 ms, bubble 20.0%" in capsys.readouterr().out
    assert picture.read_text().count("<rect") == 1 + 2 * 16 + 2  # background, 16 passes in 2 diagrams, legend
    assert "time, ms" in picture.read_text() and (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    (folder / timeline.trace_file_name(0)).unlink()
    with pytest.raises(ValueError, match=SENTENCES["the_timeline_of_stage_0_is"]):
        iterations(timeline.read(folder))


def test_an_arrow_ends_at_the_receive_of_its_own_step_or_evaluation(tmp_path: Path) -> None:
    """A step and two evaluations of one iteration send micro-batch 0 over the same boundary."""
    for stage, kind in enumerate(("SendActivation", "RecvActivation")):
        tracer = trace.Tracer(CPU, tmp_path / timeline.trace_file_name(stage), about(stage))
        tracer.iteration(1)
        for begin_ms in (0, 20, 40):
            begin = (begin_ms + stage) * 1_000_000
            tracer._current_spans.append(trace.RecordedSpan(begin, begin + 1_000_000, 0, kind, "message", 0, 0, 0))
        tracer.clock = [(0, 0.0, 0.0)]
        tracer.write()
    events = json.loads(timeline.merge(tmp_path).path.read_text())["traceEvents"]
    begins = [e["ts"] for e in events if e["ph"] == "s"]
    ends = [e["ts"] for e in events if e["ph"] == "f"]
    assert begins == [0.0, 20_000.0, 40_000.0]
    assert ends == [1_990.0, 21_990.0, 41_990.0]  # 99 % into the receive, which begins 1 ms after the send


def test_settings() -> None:
    assert parse(["--trace", "--trace-iterations", "3-9"]).log.trace_range == (3, 9)
    assert parse(["--trace"]).log.trace_range is None
    with pytest.raises(ConfigError, match="--trace-iterations needs --trace"):
        parse(["--trace-iterations", "3"])
    with pytest.raises(ConfigError, match=SENTENCES["must_be_a_number_or_a"]):
        parse(["--trace", "--trace-iterations", "9-3"])


def test_a_schedule_of_many_chunks_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    main(build_parser().parse_args(["--schedule", "interleaved", "--chunks", "9", "--stages", "2", "--micros", "2"]))
    assert "Fh0 Fh1 Fi0 Fi1" in capsys.readouterr().out


@pytest.mark.parametrize("chunks", ["0", "-1"])
def test_a_schedule_without_chunks_is_refused(chunks: str) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--stages", "2", "--micros", "2", "--chunks", chunks])
