"""Only one run at a time can use a run directory, and a refused run leaves it unchanged."""

import dataclasses
import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing import find_checkpoint
from megatron.config.command_line import parse
from megatron.locks import run_lock
from megatron.locks.run_lock import Holder, RunLock, RunLockedError
from megatron.storage import to_path
from megatron.training.run_folder import (
    lock,
    refuse_other_checkpoints,
    release,
    write_first_files,
)
from tests.sentences import SENTENCES
from tests.support import ROOT


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "PATIENCE", 0.3)


HOLD = """
import sys, time
from pathlib import Path
from megatron.locks import run_lock
run_lock.PATIENCE = 0.3
try:
    lock = run_lock.RunLock(Path(sys.argv[1]), override="override" in sys.argv)
    print("taken", *lock.notes, flush=True)
except run_lock.RunLockedError as error:
    print("refused", error, flush=True)
time.sleep(60 if "stay" in sys.argv else 0)
"""
CONTAINER = [
    "unshare",
    *([] if os.getuid() == 0 else ["--user", "--map-root-user"]),
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """A function that runs the script `HOLD` in a new process, in this or in a new PID namespace."""
    begun: list[subprocess.Popen[str]] = []

    def start(*words: str, prefix: Sequence[str] = ()) -> "subprocess.Popen[str]":
        argv = [*prefix, sys.executable, "-c", HOLD, *words]
        begun.append(subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.wait()


@pytest.fixture
def run_in(start: Start) -> Start:
    """A function that starts a run, which locks a folder and stays."""

    def begin(folder: Path, **more: Any) -> "subprocess.Popen[str]":
        process = start(str(folder), "stay", **more)
        assert process.stdout and process.stdout.readline() == "taken\n"
        return process

    return begin


def left_in(folder: Path, **changes: Any) -> Path:
    """Write the record of a process whose lock is not seen; return the path of the lock file."""
    path = folder / run_lock.LOCK_FILE
    path.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(Holder.here(), **changes))))
    return path


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all file systems ones on which a machine may not see the locks of other machines."""
    monkeypatch.setattr(run_lock.advisory, "LOCAL", ())


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.advisory.fcntl, "flock", flock)


def test_a_lock_is_taken_and_released_and_an_empty_directory_goes_with_it(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "a" / "b")
    assert json.loads(lock.path.read_text()).keys() == {"host", "pid", "since", "job"}
    assert run_lock.read_holder(lock.path) == run_lock.living_holder(lock.path) == lock._me
    lock.release()
    assert list(tmp_path.iterdir()) == []
    lock = RunLock(tmp_path / "a" / "b")
    lock.keep_folders()
    lock.release()
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_process_may_lock_a_folder_twice(tmp_path: Path) -> None:
    first = RunLock(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    second = RunLock(tmp_path / "link")
    assert second.notes == [] and not second.is_lost()
    second.release()
    assert first.path.exists() and not first.is_lost()
    first.release()
    assert not first.path.exists()


def test_a_run_that_lives_keeps_its_directory(tmp_path: Path, run_in: Start) -> None:
    pid = run_in(tmp_path).pid
    path = tmp_path / run_lock.LOCK_FILE
    before = path.read_text()
    for override in (False, True):  # --override-lock has no effect on a lock that is held
        with pytest.raises(
            RunLockedError, match=rf"is in use by process {pid} on \S+ since .*: end it, or give"
        ) as error:
            RunLock(tmp_path, override)
        # Without --run-dir, --save names the run directory.
        assert "another --run-dir" in str(error.value) and "another --save" in str(error.value)
    assert path.read_text() == before
    path.write_text("{")
    with pytest.raises(RunLockedError, match=SENTENCES["in_use_by_another_process"]):
        RunLock(tmp_path)


@pytest.mark.parametrize("is_reaped", [True, False])
def test_what_a_crash_left_is_taken_over_with_a_note(tmp_path: Path, run_in: Start, is_reaped: bool) -> None:
    """A process that has ended holds no lock, even as a zombie."""
    crashed = run_in(tmp_path)
    crashed.kill()
    if is_reaped:
        crashed.wait()
    lock = RunLock(tmp_path)
    assert lock.notes[0].startswith(f"took over {tmp_path} from process {crashed.pid} on ")
    assert json.loads(lock.path.read_text())["pid"] == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == [run_lock.LOCK_FILE]
    lock.release()


@pytest.mark.usefixtures("remote")
def test_a_lock_of_another_machine_may_be_invisible(tmp_path: Path) -> None:
    """On some shared file systems, a machine does not see the locks of others, so their records count."""
    left_in(tmp_path, host="elsewhere", pid=1)
    with pytest.raises(RunLockedError, match=SENTENCES["process_1_on_elsewhere_override"]):
        RunLock(tmp_path)
    lock = RunLock(tmp_path, override=True)
    assert "from process 1 on elsewhere" in lock.notes[0]
    lock.release()
    left_in(tmp_path, pid=1)  # of this machine, whose locks are seen
    RunLock(tmp_path).release()


def test_a_lock_on_a_local_disk_is_seen_by_every_process(tmp_path: Path) -> None:
    """A run in a container ends, and a new container with another host name uses its folder."""
    left_in(tmp_path, host="elsewhere", pid=1)
    if not run_lock.advisory.is_local(tmp_path):
        pytest.skip("the temporary folder is not on a local disk")
    assert run_lock.living_holder(tmp_path / run_lock.LOCK_FILE) is None
    lock = RunLock(tmp_path)
    assert "from process 1 on elsewhere" in lock.notes[0]
    lock.release()


def test_the_file_system_of_proc_is_not_local() -> None:
    assert not run_lock.advisory.is_local(Path("/proc"))


@pytest.mark.usefixtures("no_locks")
def test_without_locks_the_record_decides(tmp_path: Path) -> None:
    for record in ({"pid": os.getppid()}, {"pid": 2**22 - 1, "host": "elsewhere"}):
        left_in(tmp_path, **record)
        with pytest.raises(RunLockedError, match=f"process {record['pid']} on .*--override-lock"):
            RunLock(tmp_path)
        assert RunLock(tmp_path, override=True).notes
    left_in(tmp_path, pid=2**22 - 1)
    lock = RunLock(tmp_path)
    assert f"from process {2**22 - 1}" in lock.notes[0], "no process of this machine has this id"
    assert RunLock(tmp_path).notes == [], "this process holds it"
    lock.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("asks", ["another container", "the host"])
def test_a_run_in_a_container_keeps_its_directory(tmp_path: Path, start: Start, run_in: Start, asks: str) -> None:
    """A run in a container keeps its lock, although other PID namespaces cannot look up its process id."""
    if subprocess.run([*CONTAINER, "true"], capture_output=True).returncode:
        pytest.skip("no PID namespaces here")
    prefix = CONTAINER if asks == "another container" else []

    def ask(*words: str) -> str:
        return start(str(tmp_path), *words, prefix=prefix).communicate(timeout=60)[0]

    first = run_in(tmp_path, prefix=CONTAINER)
    assert ask().startswith(f"refused {tmp_path} is in use by process 1 on ")
    assert ask("override").startswith("refused")
    first.kill()
    first.wait()
    assert ask().startswith(f"taken took over {tmp_path} from process 1 on ")


def _start_at_once(folder: str, barrier: Any) -> None:
    barrier.wait()
    try:
        lock = RunLock(Path(folder))
    except RunLockedError:
        return
    time.sleep(60)  # hold the lock until the test kills this process
    lock.release()


@pytest.mark.parametrize("is_stale", [False, True])
def test_of_several_that_start_at_once_one_takes_the_lock(tmp_path: Path, is_stale: bool) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(6)
    if is_stale:
        left_in(tmp_path, pid=2**22 - 1)
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


@pytest.mark.parametrize("is_fast", [False, True])
def test_who_is_faster_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fast: bool) -> None:
    """A run that has opened the file of a run that ends, and removes it, takes a new file; a faster run keeps it."""
    honest = run_lock.advisory.open_locked
    removed: list[Path] = []
    others: list[Any] = []

    def open_late(path: Path) -> Any:
        file = honest(path)
        if not removed:
            removed.append(path)
            path.unlink()
            if is_fast:
                others.append(honest(left_in(tmp_path, host="elsewhere")))
        return file

    monkeypatch.setattr(run_lock.advisory, "open_locked", open_late)
    if is_fast:
        with pytest.raises(RunLockedError, match=SENTENCES["in_use_by_process_on_elsewhere"]):
            RunLock(tmp_path)
    else:
        lock = RunLock(tmp_path)
        assert run_lock.advisory.is_held(lock.path)
    assert [path.name for path in tmp_path.iterdir()] == [run_lock.LOCK_FILE]


@pytest.mark.usefixtures("remote")
def test_a_lock_of_another_version_is_read(tmp_path: Path) -> None:
    """Fields that this version does not know are ignored, and a field of newer versions may be missing."""
    old = {"host": "elsewhere", "pid": 7, "since": "noon", "started": "1", "table": "boot pid:[1]", "advisory": True}
    (tmp_path / run_lock.LOCK_FILE).write_text(json.dumps(old))
    with pytest.raises(RunLockedError, match=SENTENCES["process_7_since_noon"]):
        RunLock(tmp_path)


def test_a_forked_worker_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    worker = os.fork()
    if not worker:
        time.sleep(30)
        os._exit(0)
    assert lock._file is not None
    lock._file.close()
    lock._file = None
    deadline = time.monotonic() + 10  # the forked worker soon closes its copy of the lock file
    while run_lock.advisory.is_held(lock.path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert run_lock.advisory.is_held(lock.path) is False
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    lock.release()


def test_a_lost_lock_is_taken_back_only_in_a_folder_without_another_run(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").touch()
    lock.path.unlink()
    assert lock.is_lost() and lock.take_back() == ""
    assert not lock.is_lost() and run_lock.advisory.is_held(lock.path)
    (tmp_path / "run").rename(tmp_path / "aside")
    assert lock.is_lost() and lock.take_back() == "", "a new folder"
    (tmp_path / "run" / run_lock.LOCK_FILE).unlink()
    left_in(tmp_path / "run", pid=7, since="noon")
    assert lock.is_lost() and lock.take_back().startswith("is in use by process 7 on ")
    lock.path.unlink()
    (tmp_path / "run").rename(tmp_path / "aside_2")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert lock.is_lost() and lock.take_back() == "has files of another run"
    lock.release()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_temporary_names_differ_between_processes_of_one_number(tmp_path: Path) -> None:
    """Temporary file names differ even between processes with the same id, as in two containers."""
    code = (
        "import os; os.getpid = lambda: 1; from megatron.atomic import temporary_name as t; "
        "print(t(__import__('pathlib').Path('x')))"
    )
    names = {subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) for _ in range(2)}
    assert len(names) == 2


@pytest.mark.usefixtures("remote")
def test_an_earlier_start_of_this_slurm_job_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run takes over the lock of an earlier start of its own SLURM job, on any node, and respects other locks."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    for job in ("", "7", "771"):
        left_in(tmp_path, host="elsewhere", pid=1, job=job)
        with pytest.raises(RunLockedError, match=SENTENCES["process_1_on_elsewhere_override"]):
            RunLock(tmp_path)
    left_in(tmp_path, host="elsewhere", pid=1, job="77")
    lock = RunLock(tmp_path)
    assert "took over" in lock.notes[0]
    lock.release()


@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize("text", ["{", "[]", "7", '{"host": "elsewhere"}', "\xff"])
def test_a_record_that_cannot_be_read_may_be_of_a_run_elsewhere(tmp_path: Path, text: str) -> None:
    path = tmp_path / run_lock.LOCK_FILE
    path.write_text(text, encoding="latin-1")
    with pytest.raises(RunLockedError, match=SENTENCES["in_use_by_another_process"]):
        RunLock(tmp_path)
    path.write_text("")  # of a process that has ended before it could write its record
    assert run_lock.living_holder(path) is None
    lock = RunLock(tmp_path)
    assert lock.notes == []
    lock.release()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=SENTENCES["cannot_write_to_the_run_directory"]):
        RunLock(tmp_path / "file" / "run")


def test_a_lock_that_is_a_link_is_named(tmp_path: Path) -> None:
    (tmp_path / run_lock.LOCK_FILE).symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=SENTENCES["run_lock_is_a_link"]):
        RunLock(tmp_path)
    assert not (tmp_path / "nowhere").exists()


def test_checkpoints_elsewhere_are_held_too(tmp_path: Path, run_in: Start) -> None:
    run_in(tmp_path / "there")
    with pytest.raises(RunLockedError, match=SENTENCES["there_is_in_use"]):
        lock(parse(["--save", str(tmp_path / "there")]), tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_another_run_may_not_name_the_checkpoints_of_one_that_lives(tmp_path: Path, run_in: Start) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    held = lock(parse([]), a)
    assert sorted(path.relative_to(a).as_posix() for path in a.rglob("*")) == [
        "checkpoints",
        "checkpoints/run.lock",
        "run.lock",
    ]
    held[0].keep_folders()
    release(held)
    assert list(a.iterdir()) == [], "nothing was saved"
    others = [run_in(a), run_in(a / "checkpoints")]
    with pytest.raises(RunLockedError, match="--save"):
        lock(parse(["--save", str(a / "checkpoints")]), b)
    assert not b.exists()
    for other in others:
        other.kill()
        other.wait()
    again = lock(parse([]), a)
    assert len([note for each in again for note in each.notes]) == 1, "of one crash one note"
    release(again)


def test_a_folder_of_checkpoints_that_cannot_be_written_is_no_fault_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = run_lock.advisory.open_locked

    def open_locked(path: Path) -> Any:
        if path.parent.name == "checkpoints":
            raise OSError(errno.EROFS, "Read-only file system")
        return honest(path)

    monkeypatch.setattr(run_lock.advisory, "open_locked", open_locked)
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


def test_a_tokenizer_that_cannot_be_read_is_not_only_blamed_on_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "chat_template.jinja")

    monkeypatch.setattr("megatron.training.run_folder.copy_tokenizer", refuse)
    with pytest.raises(ValueError, match="tokenizer: Permission denied: chat_template.jinja"):
        write_first_files(parse(["--vocab-file", "x.model"]), tmp_path, 0)


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
