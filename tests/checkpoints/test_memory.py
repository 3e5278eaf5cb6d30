"""A save needs memory for one tensor; a background save needs memory for all tensors that the rank writes."""

import ctypes
import resource
import threading
from pathlib import Path

import pytest
import torch

from megatron.checkpointing import Saver, TrainState
from megatron.config.command_line import parse
from megatron.training import start_engine
from tests.support import on_ranks
from tests.text_task import TextTask

FLAGS = (
    "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --seq-length 8 --vocab-size 20000 --batch-size 1 "
    "--precision fp32"
)
M_MMAP_THRESHOLD = -3  # of malloc.h


def _body(folder: str, background: bool) -> tuple[float, float, float]:
    """Save twice; return three sizes in MB: the largest tensor, a checkpoint, and the memory that the saves added."""
    # With a fixed threshold, glibc returns every freed tensor to the system. Otherwise the heap may keep the first
    # save's copies of tensors below 32 MB while the second save makes its own. glibc reads the variable for it when a
    # process starts, which is too late for a rank that is forked from a running process.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    config = parse(FLAGS.split())
    engine = start_engine(TextTask(), config)
    engine.train_batch(iter([{"text": torch.zeros(1, 9, dtype=torch.int64)}]), 1e-4)
    largest = max(p.numel() for p in engine.deepspeed.module.parameters())
    total = sum(p.numel() for p in engine.deepspeed.module.parameters())
    saver = Saver(folder, engine.deepspeed, config, "", background)
    before, seen, done = _resident(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            seen[0] = max(seen[0], _resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for iteration in (1, 2):
        saver.save(TrainState(iteration=iteration), wait=True)
    done.set()
    watcher.join()
    return 4 * largest / 1e6, 12 * total / 1e6, seen[0] - before


def _resident() -> float:
    """Return the resident memory of this process in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc/self/statm")
@pytest.mark.parametrize("background", [False, True])
def test_memory_of_a_save(background: bool, tmp_path: Path) -> None:
    ((largest, whole, rise),) = on_ranks(1, _body, str(tmp_path), background)
    assert whole > 180, "too small for a copy to be noticed"
    if background:
        assert 0.8 * whole < rise < 1.2 * whole, (whole, rise)
    else:
        assert rise < 1.5 * largest, (largest, rise)
