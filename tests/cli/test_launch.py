"""tools/launch.py forwards signals to the ranks and lets them save; a second signal kills them at once."""

import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.run import parse_args

import tds
from megatron.ranks import errors, signals
from megatron.ranks.signals import StopSignal, StopSignals, restored_signals
from megatron_tools import launch
from tds.parent_death import start_time_of
from tests import support
from tests.sentences import SENTENCES
from tests.support import FULL, ROOT, on_ranks

# A simulated rank, which handles signals like a real one but does not import torch.
RANK = """
import os, signal, sys, time
kind, folder = sys.argv[1:3]
def note(word):
    with open(f"{folder}/rank{os.environ['RANK']}", "a") as file: file.write(word + "\\n")
def save(*_):
    note("saves")
    if kind == "saves":
        time.sleep(0.5)
        note("saved")
        sys.exit(0)
note(f"importing {os.getpid()}")
time.sleep(1)
signal.signal(signal.SIGUSR1, lambda *_: note("usr1"))
signal.signal(signal.SIGTERM, save)
note("trains")
if kind == "fails" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0": sys.exit(3)
if kind == "fails": note("again"); sys.exit(0)
end = time.monotonic() + 60
while time.monotonic() < end: time.sleep(0.1)
"""


class Launcher:
    def __init__(self, folder: Path, kind: str, *argv: str) -> None:
        self.folder = folder
        (folder / "rank.py").write_text(RANK)
        words = ["tools/launch.py", "--standalone", "--nproc-per-node", "2", *argv, str(folder / "rank.py"), kind]
        self.process: BaseProcess = support._context.Process(
            target=support._script_main, args=([*words, str(folder)], dict(os.environ), str(folder)), daemon=True
        )
        self.process.start()

    def of(self, rank: int) -> list[str]:
        path = self.folder / f"rank{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def until(self, what: Callable[[list[str]], bool]) -> None:
        deadline = time.monotonic() + 60
        while not all(what(self.of(rank)) for rank in range(2)):
            assert time.monotonic() < deadline, [self.of(0), self.of(1), self.said()]
            time.sleep(0.05)

    def tell(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> int | None:
        self.process.join(30)
        self.process.kill()
        return self.process.exitcode

    def said(self) -> list[str]:
        return (self.folder / "stderr").read_text().splitlines()

    def living(self) -> list[int]:
        pids = [int(self.of(rank)[0].split()[1]) for rank in range(2)]
        return [pid for pid in pids if start_time_of(pid) is not None]


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_ranks_save_and_end(tmp_path: Path, number: int, name: str) -> None:
    launcher = Launcher(tmp_path, "saves", "--shutdown-timeout", "50")
    launcher.until(lambda words: len(words) == 1)
    launcher.tell(signal.SIGUSR1)  # must not kill the ranks, which have no signal handler yet
    launcher.until(lambda words: "trains" in words)
    launcher.tell(signal.SIGUSR1)
    launcher.until(lambda words: words[-1] == "usr1")
    launcher.tell(number)
    assert launcher.end() == 128 + number
    for rank in range(2):
        assert launcher.of(rank)[1:] == ["trains", "usr1", "saves", "saved"]
    (line,) = launcher.said()
    assert line.startswith(f"launch.py: {name}: ") and "50 s" in line and "(--shutdown-timeout)" in line


@pytest.mark.parametrize("how", ["again", "late"])
def test_ranks_that_do_not_end_are_ended(tmp_path: Path, how: str) -> None:
    launcher = Launcher(tmp_path, "never ends", "--shutdown-timeout", "1" if how == "late" else "50")
    launcher.until(lambda words: "trains" in words)
    launcher.tell(signal.SIGINT)
    launcher.until(lambda words: words[-1] == "saves")
    if how == "again":
        time.sleep(0.6)  # a second signal within 0.5 s would count as part of the first request
        launcher.tell(signal.SIGINT)
    assert launcher.end() == 130
    deadline = time.monotonic() + 5  # a busy machine takes its time to end killed processes
    while launcher.living() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert launcher.living() == []
    first, second = launcher.said()
    assert second.startswith("launch.py: ") and ("Ctrl-C again" if how == "again" else "(--shutdown-timeout)") in second


def test_ctrl_c_in_a_process_started_by_hand(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    left: list[int] = []
    monkeypatch.setattr(signals, "exit_now", left.append)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with restored_signals():
        os.kill(os.getpid(), signal.SIGUSR1)  # has no effect, since training has not begun
        with StopSignals(None, torch.device("cpu")) as heard:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)  # still the first request: terminal and launcher may each send Ctrl-C
            assert heard.agree() == (StopSignal.SAVE_AND_STOP, False)
            monkeypatch.setattr(signals, "ONE_REQUEST_SECONDS", 0)
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # simulates a signal that arrives during the final save
    assert left == [130]
    assert [line.split(": ", 1)[1] for line in capfd.readouterr().err.splitlines()] == [
        "Ctrl-C: the run saves after this iteration and ends; press Ctrl-C again to end at once",
        "second Ctrl-C: the run ends at once, without saving",
    ]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before


def test_an_exit_is_not_interrupted_by_the_ends_of_killed_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's handler of SIGCHLD raises an error in the main thread for each data worker that is killed."""
    codes: list[int] = []
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))

    def leave(code: int) -> None:
        worker.join(10)
        codes.append(code)

    def raise_error(*_: object) -> None:
        raise RuntimeError("DataLoader worker is killed")

    monkeypatch.setattr(errors, "flush_and_exit", leave)
    worker.start()
    before = signal.signal(signal.SIGCHLD, raise_error)
    try:
        errors.exit_now(130)
    finally:
        signal.signal(signal.SIGCHLD, before)
        worker.kill()
    in_thread = threading.Thread(target=errors.exit_now, args=(1,))  # where Python cannot set a handler
    in_thread.start()
    in_thread.join()
    assert codes == [130, 1] and not worker.is_alive()


@pytest.mark.parametrize("method", ["agree", "ask"])
def test_no_request_is_lost_whenever_its_signal_comes(method: str) -> None:
    """Ask for a stop before each operation of a method in turn, as the handler of a signal may."""
    code = getattr(StopSignals, method).__code__
    arguments = [StopSignal.SAVE] if method == "ask" else []
    for place in itertools.count(1):
        heard = StopSignals(None, torch.device("cpu"))
        operations = 0

        def trace(frame: FrameType, event: str, _: object, place: int = place, heard: StopSignals = heard) -> Any:
            nonlocal operations
            if frame.f_code is not code:
                return None
            frame.f_trace_opcodes = True
            operations += event == "opcode"
            if event == "opcode" and operations == place:
                heard.ask(StopSignal.SAVE_AND_STOP)
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            first = getattr(heard, method)(*arguments)
        finally:
            sys.settrace(before)
        if operations < place:
            break
        assert (StopSignal.SAVE_AND_STOP, False) in (first, heard.agree()), place
    assert place > 5


def test_the_time_of_a_run_begins_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000.0  # long after the process has imported the module
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now))
    for _ in ("the first run of the process", "the second one"):
        with restored_signals():
            heard = StopSignals(10, torch.device("cpu"))
            now += 9 * 60
            assert heard.agree()[0] is StopSignal.NOTHING
            now += 2 * 60
            assert heard.agree()[0] is StopSignal.SAVE_AND_STOP


def test_after_an_error_a_launcher_can_end_the_process() -> None:
    """After an error in training, SIGTERM has its default effect again: it ends the rank without a save."""
    before = signal.getsignal(signal.SIGTERM)
    with restored_signals():
        with pytest.raises(ValueError), StopSignals(None, torch.device("cpu")):
            raise ValueError
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == before


def _second_attempt() -> None:
    """Initialise a restarted rank; check that it ignores keys that the first attempt has left in the TCPStore."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    store.set("tds/fault", '["rank 0 fell over", false]')
    os.environ.update(
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="1",
        MASTER_PORT=str(store.port),
    )
    tds.init_distributed("gloo", auto_mpi_discovery=False)
    ours = dist.distributed_c10d._get_default_store()
    ours.set("key", "value")
    assert not ours.check(["tds/fault"])
    assert not store.check(["default_pg/0//key"])
    assert store.check(["attempt1/default_pg/0//key"]) or store.num_keys() > 2


def test_a_new_attempt_does_not_read_what_the_one_before_has_left() -> None:
    on_ranks(1, _second_attempt)


MEETS = """
import os, sys
from datetime import timedelta
import tds
attempt = os.environ["RANK"] + os.environ["TORCHELASTIC_RESTART_COUNT"]
if attempt == "10": sys.exit(1)  # rank 1 fails once before it meets rank 0
tds.init_distributed("gloo", auto_mpi_discovery=False, timeout=timedelta(seconds=60))
tds.comm.barrier()
print("met in", attempt, flush=True)
os._exit(0)
"""


def test_nodes_meet_whose_launchers_have_restarted_their_ranks_at_different_times(tmp_path: Path) -> None:
    (tmp_path / "meets.py").write_text(MEETS)
    nodes = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(support.free_port())]
    words = ["tools/launch.py", *nodes, "--nproc-per-node", "1", "--max-restarts", "2", "--monitor-interval", "0.1"]
    commands = []
    for number in "01":
        argv = [sys.executable, *words, "--node-rank", number, str(tmp_path / "meets.py")]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        commands.append(subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True))
    said = [command.communicate(timeout=120)[0] for command in commands]
    assert ["met in 00" in said[0], "met in 11" in said[1]] == [True, True], said


@FULL
def test_a_run_goes_on_by_itself(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """A run with --max-restarts restarts and resumes if a rank is killed, with and without a pipeline."""
    code = """
import os, signal, sys, megatron.training.log as t
from megatron.tasks import GPT2
from megatron.training import run
honest = t.TrainingLog.after_step
def add(self, *args):
    honest(self, *args)
    if self.run.state.iteration == 3 and os.environ["RANK"] + os.environ["TORCHELASTIC_RESTART_COUNT"] == "10":
        os.kill(os.getpid(), signal.SIGKILL)
t.TrainingLog.after_step = add
run(GPT2())
"""
    (tmp_path / "train.py").write_text(code)
    for stages in "02":
        words = (
            f"tools/launch.py --standalone --nproc-per-node 2 --max-restarts 1 {tmp_path}/train.py --run-dir "
            f"{tmp_path}/run{stages} "
            f"--pipe-parallel-size {stages} --data-path {tiny_data} --vocab-file {vocab_file} --split 1 --num-layers 2 "
            "--hidden-size 16 --num-attention-heads 2 --seq-length 16 --log-interval 1 --precision fp32 --eval-iters 0 "
            "--no-tensorboard --save-interval 2 --train-iters 4"
        )
        done = support.command("python", *words.split(), env={"PYTHONPATH": str(support.ROOT)})
        assert done.returncode == 0, done.stderr
        assert SENTENCES["resumed_at_iteration_2"] in done.stdout, done.stdout
        assert (tmp_path / f"run{stages}" / "checkpoints" / "iter_0000004").is_dir()


def test_refused_arguments_are_not_tried_again(tmp_path: Path) -> None:
    done = support.command("python", "tools/launch.py", "rank.py", env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "'soon' (check the numbers of the launcher's arguments and TORCH_ELASTIC_SHUTDOWN_TIMEOUT)" in done.stderr
    done = support.command("python", "tools/launch.py", "--nproc-per-node", "0", "rank.py")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in done.stderr, "a refusal that names its flag needs no further advice"
    script = tmp_path / "rank.py"
    for code, attempts in ((2, 1), (1, 3)):
        # The ranks of one machine meet without its name, which may not resolve.
        script.write_text(
            "import os, sys\nsys.stderr.write('ended\\n')\n"
            f"sys.exit({code} if os.environ['MASTER_ADDR'] == '127.0.0.1' else 7)\n"
        )
        done = support.command(
            "python", "tools/launch.py", "--standalone", "--nproc-per-node", "1", "--max-restarts", "2", str(script)
        )
        assert (done.returncode, done.stderr.count("ended")) == (code, attempts), done.stderr


def test_a_port_in_use_and_a_missing_node_are_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text("")
    base = ["python", "tools/launch.py", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port"]
    with socket.socket() as taken:
        port = str(support.free_port())
        taken.bind(("127.0.0.1", int(port)))
        taken.listen()
        done = support.command(*base, port, str(tmp_path / "rank.py"))
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f"launch.py: port {port} " in done.stderr and "--master-port (MASTER_PORT=)" in done.stderr
    more = ["--nnodes", "2", "--node-rank", "0", "--rdzv-conf", "timeout=1", str(tmp_path / "rank.py")]
    done = support.command(*base, port, *more)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        f"launch.py: node 0 of 2 did not reach the other nodes at 127.0.0.1:{port} (Timed out after"
    )
    assert done.stderr.count("\n") == 2


def test_a_node_that_does_not_come_is_waited_for_as_long_as_is_said(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("")
    port = str(support.free_port())
    nodes = [
        "--nnodes",
        "2",
        "--node-rank",
        "0",
        "--nproc-per-node",
        "1",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        port,
    ]
    argv = [sys.executable, "tools/launch.py", *nodes, str(script), "--startup-timeout-minutes", "0.02"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    first, last = done.stderr.strip().splitlines()
    assert first == f"launch.py: node 0 of 2 waits for the other nodes at 127.0.0.1:{port}"
    assert "did not reach the other nodes" in last and "--master-addr and --master-port" in last
    strange = [word.replace("127.0.0.1", "no-such-host.invalid") for word in argv]
    strange[strange.index("--node-rank") + 1] = "1"
    done = support.command("python", *strange[1:], timeout=100)
    assert SENTENCES["no_such_host_invalid"] in done.stderr and "--master-addr (MASTER_ADDR=)" in done.stderr
    argv[-1] = "10"
    waiting = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert waiting.stderr and "waits for the other nodes" in waiting.stderr.readline()
    time.sleep(0.5)
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(timeout=20)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--nproc-per-node two", "nproc_per_node value: two"),
        ("--nproc-per-node 0", "--nproc-per-node 0 must be at least 1"),
        ("--standalone --nproc-per-node -1", "--nproc-per-node -1 must be at least 1"),
        ("--max-restarts -1", "max_restarts must be >= 0"),
        ("--nnodes 0", "min_nodes must be > 0"),
        ("--nnodes two", "invalid literal for int() with base 10: 'two'"),
        ("--nnodes 2 --node-rank 2", "--node-rank 2 must be below --nnodes 2: nodes are counted from 0"),
        ("--master-port 99999", "--master-port 99999 must lie between 1 and 65535"),
        ("--master-port 0", "--master-port 0 must lie between 1 and 65535"),
    ],
)
def test_wrong_numbers_are_refused_at_once(flags: str, words: str) -> None:
    with pytest.raises((ValueError, AssertionError), match=re.escape(words)):
        launch.check_numbers(parse_args([*flags.split(), "rank.py"]))


@pytest.mark.parametrize(
    ("port", "endpoint", "where"),
    [(None, "", "127.0.0.2:29500"), (6000, "", "127.0.0.2:6000"), (None, "[::1]:7000", "[::1]:7000")],
)
def test_the_place_where_nodes_meet_is_named(
    port: int | None, endpoint: str, where: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    args = SimpleNamespace(nnodes="2", node_rank=1, rdzv_backend="static", rdzv_conf="timeout=1")
    args.master_addr = "127.0.0.2"
    args.master_port = port
    args.rdzv_endpoint = endpoint
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    launch.prepare_rendezvous(args)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(f" {where}")
    assert where in launch.describe_rendezvous_error(RuntimeError("Timed out"), args)
    for error in ("Timed out", "EADDRINUSE"):  # if it is given, --rdzv-endpoint decides, and not --master-port
        assert "--rdzv-endpoint" in launch.describe_rendezvous_error(RuntimeError(error), args)


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [
        ("", 30 * 60),
        ("--rdzv-conf join_timeout=9", 30 * 60),
        ("--config FILE", 45 * 60),
        ("--config FILE --startup-timeout-minutes 5", 5 * 60),
        ("--startup-timeout-minutes=0.5 --flag-of-the-script x", 30),
        ("--startup-timeout-minutes soon", 30 * 60),  # the ranks will refuse it
    ],
)
def test_the_launcher_waits_for_other_nodes_as_long_as_the_settings_say(
    flags: str, seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"parallel": {"startup_timeout_minutes": 45}}))
    args = SimpleNamespace(nnodes="2", node_rank=1, rdzv_backend="static", rdzv_conf="", rdzv_endpoint="")
    args.master_addr = "127.0.0.1"
    args.master_port = None
    words = flags.replace("FILE", str(path)).split()
    if words[:1] == ["--rdzv-conf"]:
        args.rdzv_conf = words[1]
        words = words[2:]
    args.training_script_args = words
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    launch.prepare_rendezvous(args)
    assert f"timeout={seconds}" in args.rdzv_conf.split(",")


def test_nodes_of_an_elastic_run_wait_as_long_as_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29400 rank.py --startup-timeout-minutes 5"
    args = parse_args(flags.split())
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    launch.prepare_rendezvous(args)
    assert args.rdzv_conf == "join_timeout=300"


def test_ranks_of_any_launcher_print_no_stacks_of_cpp() -> None:
    """Launchers such as DeepSpeed's do not pass TORCH_CPP_LOG_LEVEL on."""
    body = (
        "import megatron, datetime, torch.distributed as dist\n"
        "try: dist.TCPStore('127.0.0.1', int(__import__('sys').argv[1]), 1, False, datetime.timedelta(seconds=1))\n"
        "except dist.DistError: pass"
    )
    env = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    argv = [sys.executable, "-c", body, str(support.free_port())]
    for more, quiet in (({"RANK": "0"}, True), ({"RANK": "0", "TORCH_CPP_LOG_LEVEL": "INFO"}, False)):
        done = subprocess.run(argv, env={**env, **more}, cwd=ROOT, capture_output=True, text=True, check=True)
        assert (done.stderr == "") == quiet, done.stderr


def test_a_signal_to_a_rank_that_has_ended_is_no_error(tmp_path: Path) -> None:
    """torchrun's agent would print a traceback if a rank ended just before the agent signals it."""
    code = (
        "import signal, subprocess, types; from megatron import _torch; _torch.ignore_ended_ranks()\n"
        "from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler\n"
        "ended = subprocess.Popen(['true'], start_new_session=True); ended.wait()\n"
        "SubprocessHandler.close(types.SimpleNamespace(proc=ended, _stdout=None, _stderr=None), signal.SIGTERM)"
    )
    (tmp_path / "ended.py").write_text(code)
    done = support.command("python", str(tmp_path / "ended.py"), timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
