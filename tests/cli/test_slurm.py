"""A job of scripts/run_slurm.sh saves at its time limit, is requeued and resumes; tests/slurm.py simulates SLURM."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.sentences import SENTENCES
from tests.slurm import JOB, install
from tests.support import FULL, ROOT, losses, train

# A program that simulates a launcher or a rank: it records its arguments and signals, and exits as they do.
RANK = """
import os, signal, sys, time
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
launcher = sys.argv[0].endswith("launch.py")
start = os.environ.get("SLURM_RESTART_COUNT", "0")
with open(f"{os.environ['FAKE_SLURM']}/task{start}.{os.environ['SLURM_PROCID']}", "w") as file:
    file.write(" ".join(sys.argv[1:7] if launcher else [f"{name}={os.environ.get(name)}" for name in names]))
def stop(*_):
    time.sleep(0.3 * int(os.environ["SLURM_PROCID"]))
    sys.exit(143 if launcher else 0)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGUSR1, lambda *_: None)
print("trains", flush=True)
if start == "0": time.sleep(60)
"""


def checkout(folder: Path) -> Path:
    """Create a checkout in which `RANK` replaces the launcher and the training script; return its folder."""
    (folder / "tools").mkdir(parents=True)
    for name in (
        "scripts",
        "configs",
        "corpus",
        "megatron",
        "megatron_compat",
        "megatron_tools",
        "tds",
        "data_utils",
        ".venv",
        "requirements.txt",
    ):
        (folder / name).symlink_to(ROOT / name)
    for name in ("pretrain_gpt2.py", "tools/launch.py"):
        (folder / name).write_text(RANK)
    for name in ("report", "generate"):
        (folder / "tools" / f"{name}.py").write_text(f"print('{name}')")
    return folder


def submit(folder: Path, where: Path, *words: str, **env: str) -> tuple[int, str, str]:
    """Run `sbatch` with these arguments in `where`; return the job's exit code, its log, and sbatch's output."""
    state = folder / "slurm"
    state.mkdir()
    env = {"PATH": install(folder / "bin"), "FAKE_SLURM": str(state), "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(
        ["sbatch", *words], cwd=where, env={**os.environ, **env}, capture_output=True, text=True, timeout=400
    )
    log = state / "log"
    return done.returncode, log.read_text() if log.exists() else "", done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["a launcher on each node", "a task for each rank"])
def test_what_the_tasks_are_given_and_what_happens_at_the_time_limit(kind: str, tmp_path: Path) -> None:
    per_rank = "rank" in kind
    here = checkout(tmp_path / "checkout")
    (here / "data.idx").touch()  # for prepared data, the script leaves the checks that import torch to the run
    words = [
        "--nodes",
        "2",
        *(["--ntasks-per-node", "2"] if per_rank else []),
        "scripts/run_slurm.sh",
        "gpt2",
        "--lr",
        "0.01",
    ]
    env = {
        "GPUS_PER_NODE": "2",
        "DATA_PATH": "data",
        "VOCAB_FILE": str(here / "requirements.txt"),  # the simulated ranks only need a file that exists
        "FAKE_SLURM_LIMIT": r"(trains\s+){4}" if per_rank else r"(trains\s+){2}",
    }
    code, log, said = submit(tmp_path, here, *words, RUN_DIR=str(tmp_path / "run"), **env)
    assert (code, said.splitlines()[-1]) == (0, f"job {JOB} ended with 0 after 1 requeues"), log
    state = tmp_path / "slurm"
    port = str(20000 + int(JOB))
    for start in "01":
        for rank in range(4 if per_rank else 2):
            task = (state / f"task{start}.{rank}").read_text()
            assert task == (
                f"RANK={rank} LOCAL_RANK={rank % 2} WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 "
                f"MASTER_PORT={port} OMP_NUM_THREADS=1"
                if per_rank
                else f"--nnodes 2 --node-rank {rank} --nproc-per-node 2"
            )
    assert (state / "signals").read_text() == "TERM\n"  # one signal only; a second would kill the ranks at once
    assert f"run_slurm.sh: job {JOB}, start 0: 2 nodes (127.0.0.1 127.0.0.2), rank 0 at 127.0.0.1:{port}" in log
    assert f"job {JOB} reached its time limit" in log
    assert f"run_slurm.sh: job {JOB}, start 1" in log
    assert log.count("loss curve") == 1  # printed at the end of training, but not before a requeue


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (["run_slurm.sh", "bert"], {}, "must be gpt2, llama or t5, not 'bert'"),
        (
            ["run_slurm.sh", "gpt2", "--hidden-sise", "3"],
            {},
            "unknown argument --hidden-sise; did you mean --hidden-size?",
        ),
        (
            ["run_slurm.sh", "t5"],
            {"MODEL_SIZE": "9b"},
            "t5 has no MODEL_SIZE=9b; choose one of 11b 3b base large small tiny",
        ),
        (
            ["--ntasks-per-node", "4", "run_slurm.sh", "gpt2"],
            {"GPUS_PER_NODE": "2"},
            "GPUS_PER_NODE=2 differs from --ntasks-per-node 4",
        ),
        (["--chdir", "/", "run_slurm.sh", "gpt2"], {}, "/ is not the checkout"),
    ],
)
def test_a_mistake_ends_the_job_before_anything_is_prepared(
    words: list[str], env: dict[str, str], said: str, tmp_path: Path
) -> None:
    words = [word.replace("run_slurm.sh", f"{ROOT}/scripts/run_slurm.sh") for word in words]
    code, log, printed = submit(tmp_path, ROOT, *words, **{"RUN_DIR": str(tmp_path / "run"), **env})
    assert (code, printed) == (2, f"job {JOB} ended with 2 after 0 requeues\n")
    assert said in log
    assert not (tmp_path / "run").exists() and not (tmp_path / "slurm" / "requeued").exists()


def test_without_slurm_it_says_how_it_is_used() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(["bash", "scripts/run_slurm.sh", "gpt2"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert SENTENCES["start_it_as_sbatch"] in done.stderr
    shown = subprocess.run(
        ["bash", "scripts/run_slurm.sh", "--help"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert shown.returncode == 0 and "sbatch --nodes 4" in shown.stdout and SENTENCES["gpus_per_node"] in shown.stdout


SMALL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --log-interval 1 --eval-iters 0 --no-tensorboard "
    "--precision fp32 --num-workers 1"
)
LENGTH = {
    "gpt2": "--seq-length 16",
    "llama": "--seq-length 16 --num-key-value-heads 2",
    "t5": "--enc-seq-length 16 --dec-seq-length 16",
}


@FULL  # 20 to 40 seconds each; another test covers requeueing with simulated ranks
@pytest.mark.parametrize(("name", "each"), [("gpt2", 1), ("llama", 2), ("t5", 2)])
def test_a_requeued_run_has_the_losses_of_an_undisturbed_one(
    name: str, each: int, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """A run that was requeued at its time limit has the losses of an uninterrupted one.

    gpt2 and llama run with one launcher per node, t5 with one SLURM task per rank.
    """
    argv = [*SMALL.split(), *LENGTH[name].split(), "--train-iters", "60", "--lr-decay-iters", "60"]
    env = {
        "NNODES": "2",
        "DATA_PATH": tiny_data,
        "VOCAB_FILE": vocab_file,
        "RUN_DIR": str(tmp_path / "run"),
        "GPUS_PER_NODE": str(each),
    }
    words = [
        "--nodes",
        "2",
        *(["--ntasks-per-node", str(each)] if name == "t5" else []),
        "scripts/run_slurm.sh",
        name,
        *argv,
    ]
    code, log, _ = submit(tmp_path, ROOT, *words, FAKE_SLURM_LIMIT=r"iteration +4/60", **env)
    assert code == 0, log
    stopped = int(re.findall(r"resumed at iteration (\d+)", log)[0])
    assert 4 <= stopped < 60 and "start 1" in log
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    settings = tmp_path / "settings.json"
    del config["checkpoint"], config["log"]
    settings.write_text(json.dumps(config))
    more = ["--config", str(settings), "--log-interval", "1", "--no-tensorboard", "--no-save-at-end"]
    expected = losses(train(name, 2 * each, tmp_path / "whole", *more))
    assert losses(rows) == expected and len(expected) == 60
