"""A run killed with SIGKILL at any moment can be resumed and ends with the state of an uninterrupted run."""

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from blake3 import blake3

from tests import support
from tests.sentences import SENTENCES
from tests.support import FULL, on_ranks

from .runs import Start, losses_of, run_all, whole_tensors

ITERATIONS = 24
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
WAYS = {
    "gpt2-fp32-pipe-async-workers": ("gpt2", "--pipe-parallel-size 2 --precision fp32 --async-save --num-workers 1"),
    "t5-fp16-zero1-async": ("t5-v1.1", "--zero-stage 1 --precision fp16 --async-save"),
    "gpt2-bf16-zero2": ("gpt2", "--zero-stage 2 --precision bf16"),
    "t5-bf16-pipe-workers": ("t5-cpm", "--pipe-parallel-size 2 --zero-stage 1 --precision bf16 --num-workers 1"),
}
MOMENTS = ("time", "read", "step", "write", "files", "prune")


class Kill(NamedTuple):
    """A planned kill of one or all ranks.

    moment: the operation at which a rank kills itself, e.g. a sync or rename of a file ("files"). At the moment "time",
    the test kills the ranks after a random delay. count: how many such operations the rank reaches before it dies.
    """

    moment: str
    count: int
    rank: int | None  # None: all ranks


def _die_at(count: int, target: Any, name: str) -> None:
    """Make this process kill itself at the count-th call of `target`'s function `name`."""
    honest, calls = getattr(target, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return honest(*args, **kwargs)

    setattr(target, name, call)


def victim(kill: Kill, start: Start, data: str, vocab_file: str) -> None:
    """Train on this rank; if `kill` names the rank, it kills itself at the planned moment."""
    from megatron.checkpointing import foreign, stream
    from megatron.training import loop

    if kill.rank in (None, int(os.environ["RANK"])):
        if kill.moment == "read":  # kill the rank after it reads a batch and before it trains on the batch
            honest = loop.read_batches

            def broken(*args: Any) -> Any:
                batches = honest(*args)
                if batches is None:
                    return None
                reads = enumerate(batches)
                return (os.kill(os.getpid(), signal.SIGKILL) if n == kill.count else batch for n, batch in reads)

            loop.read_batches = broken  # type: ignore[assignment]
        elif kill.moment == "step":  # kill the rank after a step and before the iteration is counted
            _die_at(kill.count, loop, "_advance_state")
        elif kill.moment == "write":  # kill the rank while it writes a checkpoint file
            _die_at(kill.count * 7, stream.StreamWriter, "add")
        elif kill.moment == "files":  # kill the rank before it syncs or renames a file or folder
            for name in ("fsync", "rename", "replace"):
                _die_at(kill.count, os, name)
        elif kill.moment == "prune":
            _die_at(kill.count, foreign, "delete_own_files")
    run_all([start], data, vocab_file)


def _killed(kill: Kill, start: Start, dice: random.Random, *args: str) -> bool:
    """Start two ranks and wait until one ends; return whether the kill happened before the run finished."""
    rows = _rows(start.run_dir)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            support._context.Process(target=support._rank_main, args=(rank, 2, folder, victim, (kill, start, *args)))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + support.TIMEOUT
        if kill.moment == "time":
            while _rows(start.run_dir) == rows and any(p.is_alive() for p in ranks) and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(dice.uniform(0, 0.4))
            for rank, process in enumerate(ranks):
                if kill.rank in (None, rank):
                    process.kill()
        while all(p.is_alive() for p in ranks):
            assert time.monotonic() < deadline, f"{kill} did not happen"
            time.sleep(0.01)
        time.sleep(0.3)
        done = all(p.exitcode == 0 for p in ranks)
        for process in ranks:
            process.kill()  # a launcher also kills the other ranks if one dies
            process.join()
        errors = [path.read_text() for path in Path(folder).glob("error*")]
    # Surviving ranks may report a lost connection, but no other error.
    assert all("onnection" in error or SENTENCES["closed_by_peer"] in error or "gloo" in error for error in errors), (
        errors
    )
    return not done


def _rows(run_dir: Path) -> bytes:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes() if path.exists() else b""


def _check_latest(folder: Path) -> None:
    """Check the checksum of every file of the checkpoint that `latest` names."""
    if not (folder / "latest").exists():
        return
    checkpoint = folder / (folder / "latest").read_text().split()[0]
    for line in (checkpoint / "BLAKE3SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert blake3((checkpoint / name).read_bytes()).hexdigest() == digest, (checkpoint, name)


def _end(run_dir: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    checkpoint = run_dir / "checkpoints" / f"iter_{ITERATIONS:07d}"
    index = json.loads((checkpoint / "checkpoint.json").read_text())
    tensors = {key: value.tobytes() for key, value in whole_tensors(checkpoint).items()}
    return {**index["state"], **index["optimizer"]}, tensors


def drill(
    way: str, kills: int, seed: int, folder: Path, data: str, vocab_file: str, reading: Sequence[str] = MOMENTS
) -> None:
    """reading: the moments of the kills for which a run with --num-workers has its workers, which take seconds."""
    model, flags = WAYS[way]
    alone = flags.replace("--num-workers 1", "")
    saving = f"--save-interval 2 --keep-last 2 --train-iters {ITERATIONS} --batch-size 2"
    whole, cut = (Start(model, folder / name, f"{alone} {DROPOUT} {saving}") for name in ("whole", "cut"))
    on_ranks(2, run_all, [whole], data, vocab_file)
    dice = random.Random(f"{way} {seed}")
    done = 0
    for trial in range(4 * kills):
        kill = Kill(MOMENTS[trial % len(MOMENTS)], dice.randint(1, 5), dice.choice([0, 1, None]))
        if kill.moment in ("read", "prune"):
            kill = kill._replace(rank=dice.choice([0, None]))  # only rank 0 prunes checkpoints
        start = cut._replace(flags=f"{flags} {DROPOUT} {saving}") if kill.moment in reading else cut
        if _killed(kill, start, dice, data, vocab_file):
            done += 1
        else:  # the run finished before the kill, so start it again from scratch
            shutil.rmtree(cut.run_dir)
        _check_latest(cut.run_dir / "checkpoints")
        if done == kills:
            break
    assert done == kills
    on_ranks(2, run_all, [cut], data, vocab_file)
    assert losses_of(cut.run_dir) == losses_of(whole.run_dir)
    assert _end(cut.run_dir) == _end(whole.run_dir)
    left = sorted(path.name for path in (cut.run_dir / "checkpoints").iterdir())
    assert left == [f"iter_{ITERATIONS - 2:07d}", f"iter_{ITERATIONS:07d}", "latest"]


def test_a_few_kills(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """A run with asynchronous saves survives one kill in each phase of a run; while it reads, it has loader workers."""
    drill(next(iter(WAYS)), 6, 0, tmp_path, tiny_data, vocab_file, reading=("time", "read"))


@FULL
@pytest.mark.parametrize("way", WAYS)
def test_many_kills(way: str, tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """Runs survive 12 kills in each configuration of WAYS."""
    drill(way, 12, 1, tmp_path, tiny_data, vocab_file)
