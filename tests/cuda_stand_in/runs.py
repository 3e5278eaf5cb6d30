"""Runs of a case on the stand-in and on the CPU, and what the case requires of them."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.materials import SAMPLE
from tests.support import free_port

from .build import ROOT
from .cases import Case
from .deadlocks import find_deadlock
from .waits import is_in_deepspeed

GRACE = 10.0  # seconds in which the other ranks may end after one has failed


class RunFailed(Exception):
    """Raised if a command fails or does not end in time; the message has the end of its output."""


@dataclass
class Outcome:
    """What the commands of a case have left: losses by split and iteration, outputs of tools, and reports of ranks.

    reports: for each command, the report of each rank (worker.py); empty on the CPU.
    warnings: lines of all ranks.
    """

    losses: dict[tuple[str, int, str], float]
    outputs: list[str] = field(default_factory=list)
    reports: list[list[dict[str, Any]]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Materials:
    """What all cases read: the library, the prefix of a corpus, and the path of its tokenizer."""

    library: str
    data: str
    tokenizer: str


def problems_of(case: Case, materials: Materials) -> list[str]:
    """Run a case; return sentences about what is wrong."""
    try:
        on_stand_in = run_case(case, materials, on_cpu=False)
        on_cpu = run_case(case, materials, on_cpu=True)
    except RunFailed as error:
        return [str(error)]
    problems = different_losses(on_stand_in.losses, on_cpu.losses, case.tolerance)
    if on_stand_in.outputs != on_cpu.outputs:
        problems.append(f"output {on_stand_in.outputs} instead of {on_cpu.outputs} on the CPU")
    only_there = [line for line in on_stand_in.warnings if line not in on_cpu.warnings]
    problems += [f"a warning: {line[:200]}" for line in only_there]
    if any(len(report["waits"]) < 2 for report in on_stand_in.reports[0]):
        problems.append("the waits of no step were counted")
    for reports in on_stand_in.reports:
        problems += sorted({sentence for report in reports for sentence in report["refused"]})
        problems += find_deadlock([report["events"] for report in reports])
        problems += too_many_waits(reports, case.waits, case.deepspeed_waits)
    return problems


def different_losses(
    found: dict[tuple[str, int, str], float], expected: dict[tuple[str, int, str], float], tolerance: float
) -> list[str]:
    """Return a sentence if losses are missing or differ by more than the tolerance."""
    if found.keys() != expected.keys() or not expected:
        return [f"there are losses of {sorted(found)}, but on the CPU of {sorted(expected)}"]
    for key, loss in expected.items():
        if not abs(found[key] - loss) <= tolerance:
            return [f"{key[2]} of {key[0]} at iteration {key[1]} is {found[key]:.6f}, but {loss:.6f} on the CPU"]
    return []


def too_many_waits(reports: Sequence[dict[str, Any]], waits: int, deepspeed_waits: int = 0) -> list[str]:
    """Return a sentence for each rank whose host waits more often in a step than allowed.

    waits: the most waits in this project's code. deepspeed_waits: the most in DeepSpeed's.
    The first step is not counted: in it, the optimizer creates its state, and groups are connected.
    """
    problems = []
    for rank, report in enumerate(reports):
        for number, step in enumerate(report["waits"][1:], 2):
            of_deepspeed = {place: count for place, count in step.items() if is_in_deepspeed(place)}
            own = {place: count for place, count in step.items() if place not in of_deepspeed}
            excess = [_excess(own, waits, "this project"), _excess(of_deepspeed, deepspeed_waits, "DeepSpeed")]
            if any(excess):
                problems.append(f"rank {rank} waits in step {number} {' and '.join(filter(None, excess))}")
                break
    return problems


def _excess(places: dict[str, int], allowed: int, owner: str) -> str:
    """Return how often a host waits at these places, "" if it is allowed."""
    total = sum(places.values())
    if total <= allowed:
        return ""
    listed = ", ".join(f"{count} x {place}" for place, count in places.items())
    return f"{total} times in code of {owner}, {allowed} allowed: {listed}"


def run_case(case: Case, materials: Materials, on_cpu: bool) -> Outcome:
    """Run the commands of a case on the stand-in or on the CPU. Raises RunFailed."""
    outcome = Outcome({})
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        training = case.command(materials.data, materials.tokenizer, str(run))
        commands = [training]
        for each in case.then:
            words = [word.format(run=run, text=SAMPLE) for word in each.split()]
            commands.append(words if words[0].endswith(".py") else [*training, *words])
        for number, command in enumerate(commands):
            place = Path(folder) / f"command{number}"
            place.mkdir()
            output = run_ranks(command, case.ranks, place, None if on_cpu else materials.library, case.timeout)
            if command[0].endswith(".py"):
                outcome.outputs.append(output)
            outcome.warnings += read_warnings([place / f"err{rank}" for rank in range(case.ranks)])
            if not on_cpu:
                files = [place / f"rank{rank}.json" for rank in range(case.ranks)]
                outcome.reports.append([json.loads(file.read_text()) for file in files])
        outcome.losses = read_losses(run / "metrics.jsonl")
    return outcome


def read_warnings(files: Sequence[Path]) -> list[str]:
    """Return the different lines with warnings in the errors of ranks."""
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines()]
    return list(dict.fromkeys(line for line in lines if "Warning" in line))


def read_losses(path: Path) -> dict[tuple[str, int, str], float]:
    """Return the losses in metrics.jsonl by split, iteration and name."""
    losses = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if re.search(r"loss$", name) and isinstance(value, float):
                losses[row["split"], row["iteration"], name] = value
    return losses


def run_ranks(command: list[str], ranks: int, folder: Path, library_path: str | None, timeout: float) -> str:
    """Run a command on several ranks; return what rank 0 has printed. Raises RunFailed."""
    (folder / "command.json").write_text(json.dumps(command))
    rendezvous = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = [sys.executable, "-m", "tests.cuda_stand_in.worker", str(folder)]
    if library_path:
        arguments.append(library_path)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
            environment = {**os.environ, **rendezvous, **places, "OMP_NUM_THREADS": "1"}
            group = processes[0].pid if processes else 0  # one process group, which can be killed at once
            with (folder / f"out{rank}").open("wb") as out, (folder / f"err{rank}").open("wb") as err:
                processes.append(
                    subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=out, stderr=err, process_group=group)
                )
        late = not _ended(processes, timeout)
    finally:
        _kill(processes)
    codes = [process.returncode for process in processes]
    if late or any(codes):
        raise RunFailed(_failure(folder, codes, timeout))
    return (folder / "out0").read_text(errors="replace")


def _ended(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> bool:
    """Wait for the processes; return whether all end in time. After a failure, the others have `GRACE` seconds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes):
            return True
        if any(codes):
            deadline = min(deadline, time.monotonic() + GRACE)
            timeout = GRACE
        time.sleep(0.05)
    return False


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill the group of these processes, with their helpers, such as data workers."""
    if processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(processes[0].pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def _failure(folder: Path, codes: Sequence[int | None], timeout: float) -> str:
    """Return a sentence about a failed command, with the last error of a rank that failed."""
    for rank, code in enumerate(codes):
        lines = (folder / f"err{rank}").read_text(errors="replace").strip().splitlines()
        if code and code != -signal.SIGKILL:
            return f"rank {rank} ends with code {code}: {_last_error(lines) if lines else 'it has said nothing'}"
    return f"not finished after {timeout:.0f} s"


def _last_error(lines: Sequence[str]) -> str:
    """Return the last line that names an error, and the line of code above it."""
    errors = [
        number for number, line in enumerate(lines) if re.match(r"(\[rank\d+\]: ?)?\w[\w.]*(Error|Exception)\b", line)
    ]
    last = errors[-1] if errors else len(lines) - 1
    places = [line.strip() for line in lines[:last] if line.lstrip().startswith("File ")]
    return " ".join([*places[-1:], lines[last][:500]])
