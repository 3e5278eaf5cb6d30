"""Soak test: a long run with random faults must end with the losses of an undisturbed run.

    python -m tests.drills.soak --iterations 2000 --every 100

It trains GPT-2 on two pipeline stages and T5 on two replicas. tools/launch.py starts each run and restarts dead ranks.
Faults are drawn at random from FAULTS. If a fault also ends the launcher, the soak test starts the same command again,
as a user would do.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.materials import random_corpus, small_tokenizer
from tests.support import ROOT

SIZES = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --batch-size 2 --gas 2"
RUN = (
    "--log-interval 1 --save-interval 20 --keep-last 2 --eval-iters 0 --warmup 0.01 --lr 1e-3 --precision fp32 "
    "--no-tensorboard"
)
MODELS = {
    "gpt2, pp 2": ("pretrain_gpt2.py", "--pipe-parallel-size 2 --pipeline-timeout 30"),
    "t5, dp 2": (
        "pretrain_t5.py",
        "--enc-seq-length 32 --num-sentinels 20 --distributed-timeout-minutes 0.5 --async-save",
    ),
}


class Seen(NamedTuple):
    """An observation of a run: its iteration, and the memory in MiB and the number of open files of all its ranks."""

    iteration: int
    megabytes: float
    descriptors: int


class Soak:
    """The run of one model: its launcher, its ranks, and observations of their memory and open files."""

    def __init__(self, argv: list[str], run_dir: Path) -> None:
        self.argv, self.run_dir = argv, run_dir
        self.launcher: subprocess.Popen[bytes] | None = None
        self.starts, self.seen = 0, list[Seen]()

    def start(self) -> None:
        self.starts += 1
        log = open(self.run_dir.with_suffix(".log"), "ab")  # noqa: SIM115  # stays open for the child process
        self.launcher = subprocess.Popen(self.argv, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    def ranks(self) -> list[psutil.Process]:
        """Return the training processes; data-loader workers are left out, since their command lines differ."""
        return [p for p in self.processes() if any("pretrain_" in word for word in p.info["cmdline"][:4])]

    def processes(self) -> Iterator[Any]:
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if str(self.run_dir) in line and "tools/launch.py" not in line:
                yield process

    def iteration(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        with contextlib.suppress(ValueError):
            return int(json.loads(lines[-1])["iteration"]) if lines else 0
        return 0

    def look(self) -> None:
        with contextlib.suppress(psutil.Error):
            ranks = self.ranks()
            if ranks:
                memory = sum(p.memory_info().rss for p in ranks) / 2**20
                self.seen.append(Seen(self.iteration(), memory, sum(p.num_fds() for p in ranks)))

    def losses(self) -> dict[int, float]:
        rows = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        return {row["iteration"]: row["lm_loss"] for row in rows if row["split"] == "train"}


def _one_rank(number: int) -> Callable[[Soak, random.Random], None]:
    def act(soak: Soak, dice: random.Random) -> None:
        ranks = soak.ranks()
        if ranks:
            dice.choice(ranks).send_signal(number)

    return act


def _launcher(number: int) -> Callable[[Soak, random.Random], None]:
    def act(soak: Soak, dice: random.Random) -> None:
        assert soak.launcher is not None
        soak.launcher.send_signal(number)

    return act


FAULTS: dict[str, Callable[[Soak, random.Random], None]] = {
    "a rank is killed": _one_rank(signal.SIGKILL),
    "a rank gets SIGTERM": _one_rank(signal.SIGTERM),
    "a rank freezes": _one_rank(signal.SIGSTOP),  # the other ranks time out while they wait
    "the launcher is killed": _launcher(signal.SIGKILL),
    "the launcher gets SIGTERM": _launcher(signal.SIGTERM),
    "the launcher gets SIGUSR1": _launcher(signal.SIGUSR1),
    "Ctrl-C": _launcher(signal.SIGINT),
}


def run(soak: Soak, iterations: int, every: int | None, dice: random.Random, patience: float) -> Counter[str]:
    """Run to the last iteration, with a random fault about every `every` iterations (None: no faults).

    Returns how often each fault occurred.
    Raises RuntimeError if the run makes no progress for `patience` seconds, or if the command is refused.
    """
    done: Counter[str] = Counter()
    soak.start()
    assert soak.launcher is not None
    due, moved, before = every or iterations + 1, time.monotonic(), 0
    while True:
        time.sleep(0.2)
        now = soak.iteration()
        if now != before:
            before, moved = now, time.monotonic()
            if every is None:
                soak.look()
        code = soak.launcher.poll()
        if code == 2:
            raise RuntimeError(f"the command rejected its arguments; see {soak.run_dir}.log")
        if code is not None and now >= iterations:
            return done
        if code is not None:
            soak.start()  # starting the same command again resumes the run
            moved = time.monotonic()
        elif now >= due and now < iterations:
            what = dice.choice(list(FAULTS))
            done[what] += 1
            print(f"  iteration {now}: {what}", flush=True)
            FAULTS[what](soak, dice)
            due = now + int(every * dice.uniform(0.7, 1.3)) if every else iterations + 1
        if time.monotonic() - moved > patience:
            raise RuntimeError(f"no progress for {patience:.0f} s after iteration {now}; see {soak.run_dir}.log")


def command(model: str, run_dir: Path, data: str, vocab_file: str, iterations: int) -> list[str]:
    script, flags = MODELS[model]
    return [
        sys.executable, "tools/launch.py", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1000", script,
        *SIZES.split(), *RUN.split(), *flags.split(), "--train-iters", str(iterations), "--split", "1",
        "--run-dir", str(run_dir), "--data-path", data, "--vocab-file", vocab_file,
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=2000, help="iterations of each run (default: 2000)")
    parser.add_argument("--every", type=int, default=100, help="average iterations between faults (default: 100)")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="models to train (default: all)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults (default: 0)")
    parser.add_argument(
        "--patience", type=float, default=300.0, help="seconds without progress that count as a failure (default: 300)"
    )
    parser.add_argument("--folder", type=Path, help="folder of runs and logs (default: a temporary folder)")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = args.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    vocab_file = small_tokenizer(folder)
    data = random_corpus(folder, vocab_file)
    bad = 0
    for model in args.models:
        dice, name = random.Random(args.seed), model.split(",")[0]
        whole, hurt = (
            Soak(
                command(model, folder / f"{name}-{kind}", data, vocab_file, args.iterations), folder / f"{name}-{kind}"
            )
            for kind in ("whole", "hurt")
        )
        print(f"{model}: undisturbed", flush=True)
        run(whole, args.iterations, None, dice, args.patience)
        print(f"{model}: with faults", flush=True)
        begin = time.monotonic()
        done = run(hurt, args.iterations, args.every, dice, args.patience)
        time.sleep(2)
        left = [*whole.processes(), *hurt.processes()]
        expected, found = whole.losses(), hurt.losses()
        equal = found == expected
        quarter = [seen for seen in whole.seen if seen.iteration >= args.iterations // 4] or whole.seen
        bad += not equal or bool(left)
        print(
            f"{model}: {sum(done.values())} faults ({', '.join(f'{n} x {w}' for w, n in done.items())}), "
            f"{hurt.starts} commands, {time.monotonic() - begin:.0f} s\n"
            f"  losses: {len(expected)} lines, {'bit-equal' if equal else 'NOT EQUAL'}; "
            f"the last {found.get(args.iterations)} and {expected.get(args.iterations)}\n"
            f"  memory of the undisturbed ranks: {quarter[0].megabytes:.0f} MB after a quarter, "
            f"{quarter[-1].megabytes:.0f} MB at the end; descriptors {quarter[0].descriptors} and "
            f"{quarter[-1].descriptors}\n"
            f"  processes left: {len(left)}",
            flush=True,
        )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
