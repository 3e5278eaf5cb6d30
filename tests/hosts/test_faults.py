"""Faults of hosts and links in whole runs: transient ones change no number, others end all ranks, and the run resumes.

With --full and HOSTS_TABLE=FILE, the rows of the table in docs/reliability.md are appended to FILE.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron.checkpointing import CheckpointReader, find_checkpoint
from tests.support import covering

from .lab import Lab, lab, needs_hosts
from .ranks import Rank
from .runs import results_of, start_gpt2, wait_for_iteration

LAYOUTS = {
    "pp 2": "--pipe-parallel-size 2",
    "dp 2": "--pipe-parallel-size 0",
    "tp 2": "--pipe-parallel-size 0 --model-parallel-size 2",
}
STEPS = "--train-iters 16 --save-interval 4 --batch-size 2 --gas 2"
PACE = 0.1  # seconds that each iteration sleeps
LASTING = 60.0  # seconds in which all ranks must have ended, by default


class Fault(NamedTuple):
    """A fault of the second host, unless its name says otherwise.

    lasts: seconds until `end` undoes a transient fault; None: the fault stays. dead: ranks whose machines are dead.
    """

    begin: Callable[[Lab, list[Rank]], None]
    end: Callable[[Lab, list[Rank]], None] | None = None
    lasts: float | None = None
    dead: tuple[int, ...] = ()


def change(**condition: object) -> Callable[[Lab, list[Rank]], None]:
    return lambda net, ranks: net.link(net.hosts[1], **condition)


def send(number: int) -> Callable[[Lab, list[Rank]], None]:
    return lambda net, ranks: os.kill(ranks[1].pid, number)


def cut_power(victim: int) -> Callable[[Lab, list[Rank]], None]:
    def begin(net: Lab, ranks: list[Rank]) -> None:
        net.link(net.hosts[victim], up=False)
        ranks[victim].kill()

    return begin


FAULTS = {
    "50 ms delay": Fault(change(delay=0.05), change(delay=0.0), 5.0),
    "5% of the packets lost": Fault(change(loss=0.05), change(loss=0.0), 5.0),
    "link limited to 0.5 MB/s": Fault(change(rate=5e5), change(rate=0.0), 5.0),
    "link down for 20 s": Fault(change(up=False), change(up=True), 20.0),
    "process stopped for 20 s": Fault(send(signal.SIGSTOP), send(signal.SIGCONT), 20.0),
    "process killed": Fault(send(signal.SIGKILL), dead=(1,)),
    "connections reset": Fault(change(resetting=True)),
    "link down": Fault(change(up=False)),
    "power cut": Fault(cut_power(1), dead=(1,)),
    "power cut of the first host": Fault(cut_power(0), dead=(0,)),
}
CHOSEN = [("connections reset", "pp 2")]
CASES = [(fault, layout) for fault in FAULTS for layout in LAYOUTS]
TRANSIENT = [case for case in CASES if FAULTS[case[0]].lasts is not None]
FINAL = [case for case in CASES if FAULTS[case[0]].lasts is None]


def add_row(fault: str, layout: str, *cells: str) -> None:
    if "HOSTS_TABLE" in os.environ:
        with open(os.environ["HOSTS_TABLE"], "a", encoding="utf-8") as file:
            file.write(f"| {fault} | {layout} | {' | '.join(cells)} |\n")


class Runs:
    """Runs of one test on the same data."""

    def __init__(self, folder: Path, data: str, vocab_file: str) -> None:
        self.folder = folder
        self._inputs = (data, vocab_file)

    def start(self, net: Lab, layout: str) -> list[Rank]:
        return start_gpt2(net, self.folder, f"{STEPS} {LAYOUTS[layout]}", *self._inputs, PACE)

    def complete(self, layout: str) -> dict[int, tuple[float, float]]:
        """Start a run, or resume it, and wait for its end; return iteration -> (loss, gradient norm)."""
        with lab(2) as net:
            for end in [rank.end(60) for rank in self.start(net, layout)]:
                assert end.code == 0, end.stderr
        return results_of(self.folder / "run")


_undisturbed: dict[str, dict[int, tuple[float, float]]] = {}


@pytest.fixture
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, tiny_data: str, vocab_file: str
) -> Callable[[str], dict[int, tuple[float, float]]]:
    """Function layout -> results of an undisturbed run."""

    def results(layout: str) -> dict[int, tuple[float, float]]:
        if layout not in _undisturbed:
            folder = tmp_path_factory.mktemp("undisturbed")
            _undisturbed[layout] = Runs(folder, tiny_data, vocab_file).complete(layout)
        return _undisturbed[layout]

    return results


@pytest.fixture
def runs(tmp_path: Path, tiny_data: str, vocab_file: str) -> Runs:
    return Runs(tmp_path, tiny_data, vocab_file)


@needs_hosts
@pytest.mark.parametrize(("fault", "layout"), covering(TRANSIENT, lambda case: case in CHOSEN, several=True))
def test_transient_faults_change_no_number(
    fault: str, layout: str, runs: Runs, undisturbed: Callable[[str], object]
) -> None:
    what = FAULTS[fault]
    assert what.end is not None and what.lasts is not None
    with lab(2) as net:
        ranks = runs.start(net, layout)
        wait_for_iteration(runs.folder / "run", 6, ranks)
        what.begin(net, ranks)
        time.sleep(what.lasts)
        what.end(net, ranks)
        ends = [rank.end(120) for rank in ranks]
    assert [end.code for end in ends] == [0, 0], ends
    assert results_of(runs.folder / "run") == undisturbed(layout)
    add_row(fault, layout, "none ended", "", "", "equal")


@needs_hosts
@pytest.mark.parametrize(("fault", "layout"), covering(FINAL, lambda case: case in CHOSEN, several=True))
def test_other_faults_end_all_ranks_and_the_run_resumes(
    fault: str, layout: str, runs: Runs, undisturbed: Callable[[str], object]
) -> None:
    what = FAULTS[fault]
    run_dir = runs.folder / "run"
    with lab(2) as net:
        ranks = runs.start(net, layout)
        wait_for_iteration(run_dir, 10, ranks)
        what.begin(net, ranks)
        begin = time.monotonic()
        ends = [rank.end(LASTING) for number, rank in enumerate(ranks) if number not in what.dead]
        seconds = time.monotonic() - begin
    assert all(end.code == 1 for end in ends), ends
    said = [line for end in ends for line in end.stderr.splitlines() if " stopped: " in line]
    assert said and any(host in said[0] for host in ("node1", "node2")), ends
    checkpoint = find_checkpoint(str(run_dir))
    reader = CheckpointReader(checkpoint)
    reader.verify()
    assert reader.state["iteration"] in (8, 12)
    assert runs.complete(layout) == undisturbed(layout)
    add_row(fault, layout, f"{seconds:.0f}", said[0].partition(" stopped: ")[2], f"intact, {checkpoint.name}", "equal")
