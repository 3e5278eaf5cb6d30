"""Simulated SLURM on one machine: `sbatch`, `srun`, `scontrol` and `scancel` start and signal real local processes.

It follows SLURM's manual where the tests depend on it. sbatch runs a copy of the script. At the time limit, only the
batch shell gets a signal (`--signal=B:`). `scancel --signal` reaches every process of every job step, including
data-loader workers. srun kills its tasks when it gets SIGTERM. A requeued job is killed and started again with
SLURM_RESTART_COUNT increased. Nodes are loopback addresses, 127.0.0.1 and so on.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

OPTIONS = {  # option of sbatch or srun -> whether it takes a value
    "nodes": True,
    "ntasks": True,
    "ntasks-per-node": True,
    "cpus-per-task": True,
    "gpus-per-node": True,
    "time": True,
    "chdir": True,
    "job-name": True,
    "output": True,
    "open-mode": True,
    "signal": True,
    "requeue": False,
    "kill-on-bad-exit": True,
    "wait": True,
}
JOB = "4242"
PATIENCE = 60.0  # seconds between the signal at the time limit and the kill


def install(folder: Path) -> str:
    """Write the commands sbatch, srun, scontrol and scancel into `folder`; return a PATH that starts with it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("sbatch", "srun", "scontrol", "scancel"):
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -S {Path(__file__).resolve()} {name} "$@"\n')
        path.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def _options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split a command line into (options at its start, the remaining words), as getopt_long does.

    Raises ValueError for an option that is not in OPTIONS.
    """
    found = dict[str, str]()
    while words and words[0].startswith("--"):
        name, _, value = words.pop(0)[2:].partition("=")
        if name not in OPTIONS:
            raise ValueError(f"unrecognized option '--{name}'")
        found[name] = value if value or not OPTIONS[name] else words.pop(0)
    return found, words


def _processes(step: bool) -> list[int]:
    """Return the ids of the job's processes, found by their environment. step: only processes that srun started."""
    wanted, here = f"FAKE_SLURM={os.environ['FAKE_SLURM']}".encode(), os.getpid()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != here:
            try:
                known = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if (
                wanted in known
                and f"SLURM_JOB_ID={JOB}".encode() in known
                and (not step or b"SLURM_STEP_ID=0" in known)
            ):
                found.append(int(folder.name))
    return found


def _tell(number: int, step: bool) -> None:
    for pid in _processes(step):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def sbatch(words: list[str]) -> int:
    """Act as `sbatch --wait`: run the job to its end, restart it if it is requeued, and print its outcome."""
    given, (script, *argv) = _options(words)
    text = Path(script).read_text(encoding="utf-8")
    head = [word for line in re.findall(r"^#SBATCH (.*)$", text, flags=re.MULTILINE) for word in line.split()]
    options = {"nodes": "1", **_options(head)[0], **given}
    state = Path(os.environ["FAKE_SLURM"])
    log = state / "log"
    nodes = int(options["nodes"])
    hosts = "127.0.0.1" if nodes == 1 else f"127.0.0.[1-{nodes}]"
    env = {**os.environ, "SLURM_JOB_ID": JOB, "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": hosts}
    env["SLURM_SUBMIT_DIR"] = os.getcwd()
    for name in ("ntasks-per-node", "cpus-per-task"):
        if name in options:
            env[f"SLURM_{name.upper().replace('-', '_')}"] = options[name]
    where, number = re.fullmatch(r"(B:)?(\w+)@\d+", options["signal"]).groups()  # type: ignore[union-attr]
    limit = os.environ.get("FAKE_SLURM_LIMIT")  # the first start reaches its time limit once its log matches this regex
    for start in range(5):
        if start:
            env["SLURM_RESTART_COUNT"] = str(start)
        copy = state / "spool" / "slurm_script"
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(text, encoding="utf-8")
        (state / "requeued").unlink(missing_ok=True)
        with log.open("a" if options.get("open-mode") == "append" or not start else "w") as file:
            job = subprocess.Popen(
                ["bash", str(copy), *argv],
                cwd=options.get("chdir"),
                env=env,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        end = None
        while job.poll() is None and not (state / "requeued").exists():
            time.sleep(0.05)
            if limit and not start and end is None and re.search(limit, log.read_text(encoding="utf-8")):
                end = time.monotonic() + PATIENCE
                os.kill(job.pid, getattr(signal, f"SIG{number}")) if where else _tell(15, step=True)
            if end is not None and time.monotonic() > end:
                print(f"job {JOB} TIMEOUT")
                end = 0.0
                break
        _tell(signal.SIGKILL, step=False)
        code = job.wait()
        if not (state / "requeued").exists():
            break
    print(f"job {JOB} ended with {code} after {start} requeues")
    return code


def srun(words: list[str]) -> int:
    """Act as `srun`: run the tasks and return the largest exit code, 128 + n for a task killed by signal n."""
    options, command = _options(words)
    nodes = int(options["nodes"])
    tasks, each = int(options["ntasks"]), int(options["ntasks-per-node"])
    if tasks != nodes * each or nodes != int(os.environ["SLURM_JOB_NUM_NODES"]):
        raise ValueError(f"{tasks} tasks do not fit {nodes} nodes of {each}")
    if (options.get("kill-on-bad-exit"), options.get("wait")) != ("0", "0"):
        raise ValueError("tasks that end later would be killed")
    running = []
    for rank in range(tasks):
        own = {
            "SLURM_PROCID": rank,
            "SLURM_NODEID": rank // each,
            "SLURM_LOCALID": rank % each,
            "SLURM_STEP_ID": 0,
            "SLURM_NTASKS": tasks,
        }
        env = {**os.environ, **{name: str(value) for name, value in own.items()}}
        running.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True))
    signal.signal(signal.SIGTERM, lambda *_: _tell(signal.SIGKILL, step=True))
    codes = [task.wait() for task in running]
    return max(code if code >= 0 else 128 - code for code in codes)


def scontrol(words: list[str]) -> int:
    """Act as `scontrol show hostnames LIST` or `scontrol requeue JOB`."""
    if words[:2] == ["show", "hostnames"]:
        head, first, last = re.fullmatch(r"([^\[]*)(?:\[(\d+)-(\d+)\])?", words[2]).groups()  # type: ignore[union-attr]
        print("\n".join([head] if first is None else [f"{head}{n}" for n in range(int(first), int(last) + 1)]))
        return 0
    if words != ["requeue", JOB]:
        raise ValueError(f"scontrol {words}")
    Path(os.environ["FAKE_SLURM"], "requeued").touch()
    time.sleep(30)  # before 30 s are over, sbatch kills the job including this command
    return 1


def scancel(words: list[str]) -> int:
    """Act as `scancel --signal=NAME JOB`: signal all processes of all steps, but not the batch shell."""
    (number, job) = words
    if job != JOB:
        raise ValueError(f"Invalid job id {job}")
    with (Path(os.environ["FAKE_SLURM"]) / "signals").open("a") as file:
        file.write(number.removeprefix("--signal=") + "\n")
    _tell(getattr(signal, f"SIG{number.removeprefix('--signal=')}"), step=True)
    return 0


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    try:
        sys.exit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol, "scancel": scancel}[name](rest))
    except ValueError as error:
        sys.exit(f"{name}: {error}")
