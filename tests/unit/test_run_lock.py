"""Only one run at a time can use a run directory, and a refused run leaves it unchanged."""

import dataclasses
import errno
import io
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing import find_checkpoint
from megatron.config.command_line import parse
from megatron.locks import run_lock
from megatron.locks.run_lock import Holder, RunLock, RunLockedError
from megatron.storage import to_path
from megatron.training.run_folder import lock, refuse_other_checkpoints, release, write_first_files
from tests.sentences import SENTENCES
from tests.support import ROOT


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "PATIENCE", 0.3)


@pytest.fixture
def neighbour() -> "Iterator[subprocess.Popen[str]]":
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], text=True)
    yield process
    process.kill()
    process.wait()


def held_by(folder: Path, **changes: object) -> Path:
    path = folder / run_lock.LOCK_FILE
    path.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(Holder.here(), **changes))))  # type: ignore[arg-type]
    return path


def test_a_lock_is_taken_and_released_and_an_empty_directory_goes_with_it(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "a" / "b")
    assert json.loads(lock.path.read_text())["pid"] == os.getpid()
    lock.release()
    assert list(tmp_path.iterdir()) == []
    lock = RunLock(tmp_path / "a" / "b")
    lock.keep_folders()
    lock.release()
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_run_that_lives_keeps_its_directory(tmp_path: Path, neighbour: "subprocess.Popen[str]") -> None:
    path = held_by(tmp_path, pid=neighbour.pid, started=run_lock.start_time_of(neighbour.pid), since="noon")
    before = path.read_text()
    with pytest.raises(RunLockedError, match=rf"is in use by process {neighbour.pid} on \S+ since noon: end it, or"):
        RunLock(tmp_path)
    assert path.read_text() == before
    with pytest.raises(RunLockedError, match="in use"):
        RunLock(tmp_path, override=True)  # --override-lock has no effect if the process is known to be alive


@pytest.mark.parametrize("why", ["ended", "zombie", "another process has its number"])
def test_what_a_crash_left_is_taken_over_with_a_note(
    tmp_path: Path, neighbour: "subprocess.Popen[str]", why: str
) -> None:
    held_by(tmp_path, pid=neighbour.pid, started="1" if why[0] == "a" else run_lock.start_time_of(neighbour.pid))
    if why != "another process has its number":
        neighbour.kill()
    if why == "ended":
        neighbour.wait()
    lock = RunLock(tmp_path)
    assert lock.notes[0].startswith(f"took over {tmp_path} from process {neighbour.pid} on ")
    assert json.loads(lock.path.read_text())["pid"] == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == [run_lock.LOCK_FILE]


def test_of_another_machine_nobody_knows(tmp_path: Path) -> None:
    held_by(tmp_path, host="elsewhere", pid=1)
    with pytest.raises(RunLockedError, match="--override-lock"):
        RunLock(tmp_path)
    assert "may still run (--override-lock)" in RunLock(tmp_path, override=True).notes[0]


CONTAINER = [
    "unshare",
    *([] if os.getuid() == 0 else ["--user", "--map-root-user"]),
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
]
HOLD = """
import sys, time, types
from pathlib import Path
sys.modules["tds"] = package = types.ModuleType("tds")  # without its __init__, whose imports take seconds
package.__path__ = ["tds"]
from megatron.locks import run_lock
run_lock.PATIENCE = 0.3
try:
    lock = run_lock.RunLock(Path(sys.argv[1]), override="override" in sys.argv)
    print("taken", *lock.notes, flush=True)
except run_lock.RunLockedError as error:
    print("refused", error, flush=True)
time.sleep(60 if "stay" in sys.argv else 0)
"""


@pytest.fixture
def container() -> "Iterator[Callable[..., subprocess.Popen[str]]]":
    """A function that runs the script `HOLD` in a new PID namespace, as in a container with the host's hostname."""
    if subprocess.run([*CONTAINER, "true"], capture_output=True).returncode:
        pytest.skip("no PID namespaces here")
    begun: list[subprocess.Popen[str]] = []

    def start(*words: str) -> "subprocess.Popen[str]":
        argv = [*CONTAINER, sys.executable, "-c", HOLD, *words]
        begun.append(subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.wait()


@pytest.mark.parametrize("asks", ["another container", "the host"])
def test_a_run_in_a_container_keeps_its_directory(
    tmp_path: Path, container: "Callable[..., subprocess.Popen[str]]", asks: str
) -> None:
    """A run in a container keeps its lock, although other PID namespaces cannot look up its process id."""

    def ask(*words: str) -> str:
        if asks == "another container":
            return container(str(tmp_path), *words).communicate(timeout=60)[0]
        try:
            lock = RunLock(tmp_path, override="override" in words)
        except RunLockedError as error:
            return f"refused {error}"
        lock.release()
        return " ".join(("taken", *lock.notes))

    first = container(str(tmp_path), "stay")
    assert first.stdout and first.stdout.readline() == "taken\n"
    assert ask().startswith(f"refused {tmp_path} is in use by process 1 on ")
    assert ask("override").startswith("refused"), "its advisory lock says that it lives"
    first.kill()
    first.wait()
    assert ask().startswith(f"taken took over {tmp_path} from process 1 on "), "the kernel has dropped its lock"


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("has_lock", [True, False])
def test_a_lock_from_before_a_restart_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool, has_lock: bool
) -> None:
    """A lock file from before a reboot is taken over only if its run used an advisory lock on a local file system.

    If this advisory lock is free now, the run has ended. On other file systems, some processes may not see the lock.
    """
    monkeypatch.setattr(run_lock.advisory, "is_local", lambda path: local)
    held_by(tmp_path, table="another-boot pid:[4026531836]", pid=os.getpid(), advisory=has_lock)
    if local and has_lock:
        assert "took over" in RunLock(tmp_path).notes[0]
        return
    with pytest.raises(RunLockedError, match="--override-lock"):
        RunLock(tmp_path)
    assert "took over" in RunLock(tmp_path, override=True).notes[0]


def _start_at_once(folder: str, barrier: Any) -> None:
    barrier.wait()
    try:
        lock = RunLock(Path(folder))
    except RunLockedError:
        return
    time.sleep(60)  # hold the lock until the test kills this process
    lock.release()


@pytest.mark.parametrize("table", ["the same", "of another container"])
def test_of_several_that_start_at_once_one_takes_a_stale_lock_over(tmp_path: Path, table: str) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(6)
    here = Holder.here().table
    held_by(tmp_path, pid=2**22 - 1, table=here if table == "the same" else here.split()[0] + " pid:[1]", advisory=True)
    started = [context.Process(target=_start_at_once, args=(str(tmp_path), barrier)) for _ in range(6)]
    for each in started:
        each.start()
    deadline = time.monotonic() + 20
    while sum(each.is_alive() for each in started) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    found = [each.is_alive() for each in started]
    for each in started:
        each.kill()
        each.join()
    assert found.count(True) == 1, "one holds it, the others were refused"


def test_a_lock_of_an_older_version_is_read(tmp_path: Path) -> None:
    """A lock file of an older version is respected: it records no PID namespace, so its run may still be alive."""
    old = {"host": socket.gethostname(), "pid": 2**22 - 1, "started": "1", "since": "noon", "job": ""}
    (tmp_path / run_lock.LOCK_FILE).write_text(json.dumps(old))
    with pytest.raises(RunLockedError, match=f"process {2**22 - 1} on .* since noon.*--override-lock"):
        RunLock(tmp_path)
    assert "took over" in RunLock(tmp_path, override=True).notes[0]


def test_a_forked_worker_does_not_keep_the_advisory_lock(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    assert run_lock.advisory.is_held(lock.path)
    worker = os.fork()
    if not worker:
        time.sleep(30)
        os._exit(0)
    assert lock._handle is not None
    run_lock.advisory.drop(lock._handle)
    lock._handle = None
    deadline = time.monotonic() + 10  # the forked worker soon closes its copy of the lock file
    while run_lock.advisory.is_held(lock.path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert run_lock.advisory.is_held(lock.path) is False
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    lock.release()


def test_temporary_names_differ_between_processes_of_one_number(tmp_path: Path) -> None:
    """Temporary file names differ even between processes with the same id, as in two containers."""
    code = (
        "import os; os.getpid = lambda: 1; from megatron.atomic import temporary_name as t; "
        "print(t(__import__('pathlib').Path('x')))"
    )
    names = {subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) for _ in range(2)}
    assert len(names) == 2


def test_an_earlier_start_of_this_slurm_job_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run takes over the lock of an earlier start of its own SLURM job, on any node, and respects other locks."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for job in ("", "7 start 0", "771 start 0", "77 start 1"):
        held_by(tmp_path, host="elsewhere", pid=1, job=job)
        with pytest.raises(RunLockedError, match=SENTENCES["process_1_on_elsewhere"]):
            RunLock(tmp_path)
    held_by(tmp_path, host="elsewhere", pid=1, job="77 start 0")
    assert "took over" in RunLock(tmp_path).notes[0]


def test_a_lock_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / run_lock.LOCK_FILE).write_text("{")
    with pytest.raises(RunLockedError, match=SENTENCES["run_lock_is_damaged_delete_it"]):
        RunLock(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=SENTENCES["cannot_write_to_the_run_directory"]):
        RunLock(tmp_path / "file" / "run")


def test_a_lock_that_is_a_link_to_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "PATIENCE", 0.2)
    (tmp_path / run_lock.LOCK_FILE).symlink_to(tmp_path / "nowhere")
    with pytest.raises(RunLockedError, match=SENTENCES["run_lock_is_a_broken_link"]):
        RunLock(tmp_path)


def test_who_is_faster_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two runs to replace a stale lock gets the run directory, and the other run is refused."""
    held_by(tmp_path, pid=2**22 - 1, started="1")
    honest = RunLock._remove

    def late(self: RunLock, judged: str | None, force: bool) -> bool:
        held_by(tmp_path, host="elsewhere")
        return honest(self, judged, force)

    monkeypatch.setattr(RunLock, "_remove", late)
    with pytest.raises(RunLockedError, match=SENTENCES["in_use_by_process_on_elsewhere"]):
        RunLock(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [run_lock.LOCK_FILE]


def test_checkpoints_elsewhere_are_held_too(tmp_path: Path, neighbour: "subprocess.Popen[str]") -> None:
    (tmp_path / "there").mkdir()
    held_by(tmp_path / "there", pid=neighbour.pid, started=run_lock.start_time_of(neighbour.pid))
    with pytest.raises(RunLockedError, match=SENTENCES["there_is_in_use"]):
        lock(parse(["--save", str(tmp_path / "there")]), tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_another_run_may_not_name_the_checkpoints_of_one_that_lives(
    tmp_path: Path, neighbour: "subprocess.Popen[str]"
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    held = lock(parse([]), a)
    assert sorted(path.relative_to(a).as_posix() for path in a.rglob("*")) == [
        "checkpoints",
        "checkpoints/run.lock",
        "run.lock",
    ]
    for folder in (a, a / "checkpoints"):
        held_by(folder, pid=neighbour.pid, started=run_lock.start_time_of(neighbour.pid))
    with pytest.raises(RunLockedError, match="--save"):
        lock(parse(["--save", str(a / "checkpoints")]), b)
    assert not b.exists()
    neighbour.kill()
    neighbour.wait()
    again = lock(parse([]), a)
    assert len([note for each in again for note in each.notes]) == 1, "of one crash one note"
    release(again)
    release(held)
    assert not a.exists()
    held = lock(parse([]), a)
    held[0].keep_folders()
    release(held)
    assert list(a.iterdir()) == [], "nothing was saved"


def test_a_folder_of_checkpoints_that_cannot_be_written_is_no_fault_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = RunLock._create

    def create(self: RunLock) -> bool:
        if self.path.parent.name == "checkpoints":
            raise OSError(errno.EROFS, "Read-only file system")
        return honest(self)

    monkeypatch.setattr(RunLock, "_create", create)
    held = lock(parse([]), tmp_path)
    assert [each.path.parent for each in held] == [tmp_path]
    release(held)


def test_a_forgotten_save_is_noticed(tmp_path: Path) -> None:
    there, run = tmp_path / "there", tmp_path / "run"
    there.mkdir()
    run.mkdir()
    (there / "latest").write_text("iter_0000004\n")
    (run / "metrics.jsonl").write_text('{"iteration": 4}\n')
    first = parse(["--save", str(there)])
    refuse_other_checkpoints(first, run, 0)  # accepted: without config.json, the run counts as new
    (run / "config.json").write_text(json.dumps(first.to_dict()))
    refuse_other_checkpoints(first, run, 0)
    # A new --save is accepted if --load names the run's old checkpoint folder, since the run then resumes from it.
    refuse_other_checkpoints(parse(["--save", str(tmp_path / "new"), "--load", str(there)]), run, 4)
    with pytest.raises(ValueError, match="iter_0000004.*--save"):
        refuse_other_checkpoints(parse([]), run, 0)


def test_a_run_that_begins_again_keeps_the_lines_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").touch()
    config = parse(["--vocab-file", str(tmp_path / "vocab.txt")])
    for n in (1, 2):
        (tmp_path / "metrics.jsonl").write_text(f"{n}")
        assert write_first_files(config, tmp_path, 0) == [
            "this run begins at iteration 0: the metrics of the previous run were moved to "
            f"{tmp_path}/metrics-{n}.jsonl"
        ]
        assert (tmp_path / f"metrics-{n}.jsonl").read_text() == f"{n}"
    (tmp_path / "metrics.jsonl").write_text("3")
    assert write_first_files(config, tmp_path, 5) == []
    assert (tmp_path / "metrics.jsonl").read_text() == "3"


def test_nothing_of_an_earlier_tokenizer_stays_in_object_storage(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    save = f"memory://bucket/{tmp_path.name}"
    for folder, names in (("old", ("tokenizer.json", "merges.txt")), ("new", ("tokenizer.model",))):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(name)
    for run, folder in (("first", "old"), ("second", "new")):
        (tmp_path / run).mkdir()
        flags = ["--vocab-file", str(tmp_path / folder), "--save", save, "--run-dir", str(tmp_path / run)]
        write_first_files(parse(flags), tmp_path / run, 0)
    assert [path.name for path in to_path(f"{save}/tokenizer").glob("*")] == ["tokenizer.model"]


@pytest.mark.parametrize("name", ["data", "my data", "数据", "全角　空格", "nel\x85", "back\\slash"])
def test_the_file_system_of_a_mount_with_any_name_is_known(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel escapes only blanks, tabs, line feeds, backslashes and number signs of a mount point."""
    mount = str(tmp_path / name).replace("\\", "\\134").replace(" ", "\\040")
    table = (
        f"21 1 8:1 / / rw - ext4 /dev/sda1 rw\n36 21 0:50 / {mount} rw shared:1 - nfs4 server:/x rw,local_lock=all\n"
    )
    monkeypatch.setattr(run_lock.advisory, "open", lambda *_: io.BytesIO(table.encode()), raising=False)
    assert not run_lock.advisory.is_local(tmp_path / name / "run" / run_lock.LOCK_FILE)
    assert run_lock.advisory.is_local(tmp_path / "beside")


def test_the_checkpoints_of_the_last_save_folder_are_the_newest(tmp_path: Path) -> None:
    """A run that began without --save and went on with it has its newest checkpoint in the folder of --save."""
    run, save = tmp_path / "run", tmp_path / "save"
    for folder, name in ((run / "checkpoints", "iter_0000100"), (save, "iter_0000200"), (run / "own", "iter_0000300")):
        (folder / name).mkdir(parents=True)
        (folder / "latest").write_text(f"{name}\n")

    def newest(*flags: str) -> Path:
        (run / "config.json").write_text(json.dumps(parse(list(flags)).to_dict()))
        return find_checkpoint(str(run))

    assert newest().name == "iter_0000100"
    assert newest("--save", str(tmp_path / "nothing")).name == "iter_0000100", "no checkpoint was saved there yet"
    assert newest("--save", str(save), "--run-dir", str(run)).name == "iter_0000200"
    before = tmp_path / "before"  # where the run directory was once
    assert newest("--save", str(before / "own"), "--run-dir", str(before)) == run / "own" / "iter_0000300"
