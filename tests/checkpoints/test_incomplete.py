"""After a checkpoint could not be written, no incomplete checkpoint is visible, and earlier checkpoints remain."""

import contextlib
import io
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron import mpu
from megatron.checkpointing import (
    CheckpointError,
    CheckpointReader,
    TrainState,
    find_checkpoint,
    load_checkpoint,
    prune,
)
from megatron.checkpointing import save as save_module
from megatron.checkpointing.share import Share
from megatron.checkpointing.stream import StreamWriter
from megatron.checkpointing.whole import check_complete, is_complete
from megatron.config.command_line import parse
from megatron.ranks.errors import RunError
from megatron.training import start_engine
from megatron.training.loop import train
from tds import optimizer_state as zero_state
from tests.conformance.engines import remembered_groups
from tests.sentences import SENTENCES
from tests.support import on_ranks
from tests.text_task import TextTask

from .runs import Start, make, whole_tensors


def _memory(*_: Any, **__: Any) -> Any:
    raise MemoryError


_HONEST = torch.Tensor.to


def _no_copy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return _memory() if kwargs.get("copy") else _HONEST(self, *args, **kwargs)


_CPU = torch.Tensor.cpu


def _no_host_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Fail in a background save only: in this fault, the rank stops before it has read all values."""
    caller = sys._getframe(1).f_code.co_filename
    return _memory() if Path(caller).name == "background.py" else _CPU(self, *args, **kwargs)


_VALUES = save_module.written_values


def _unreadable(*given: Any) -> Iterator[tuple[str, torch.Tensor]]:
    list(_VALUES(*given))  # reading is a collective
    yield _memory()


def _thread(*_: Any, **__: Any) -> Any:
    raise RuntimeError("can't start new thread")


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing, to simulate a writer that writes no file and raises no error."""


class _NoThread(threading.Thread):
    start = _thread


FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "memory in a thread": (StreamWriter, "add", _memory, "rank 1: MemoryError"),
    "no thread to hash": (ThreadPoolExecutor, "submit", _thread, "rank 1: RuntimeError can't start new thread"),
    "no thread to write": (threading, "Thread", _NoThread, "rank 1: RuntimeError can't start new thread"),
    "memory to read": (save_module, "written_values", _unreadable, "rank 1: MemoryError"),
    "memory for the copy": (torch.Tensor, "to", _no_copy, "rank 1: MemoryError"),
    "memory of the host": (torch.Tensor, "cpu", _no_host_memory, "rank 1: MemoryError"),
    "no word": (Share, "write", _nothing, "no rank has written"),
}


@contextlib.contextmanager
def _struck(target: Any, name: str, by: Any) -> Iterator[None]:
    honest = getattr(target, name)
    setattr(target, name, by)
    try:
        yield
    finally:
        setattr(target, name, honest)


def _break_saves(folder: str, data: str, vocab_file: str) -> dict[str, str]:
    """For each fault in FAULTS, save while rank 1 has this fault; return fault -> the error that this rank raises."""
    told = {}
    with remembered_groups() as begin, contextlib.redirect_stdout(io.StringIO()):
        begin()
        flags = "--precision fp32 --batch-size 2 --train-iters 1 --async-save --keep-last 1 --zero-stage 1"
        run = make(Start("gpt2", Path(folder), flags), data, vocab_file)
        train(run)
        run.__exit__()
        later = TrainState(iteration=2)
        for name, (target, attribute, by, _) in FAULTS.items():
            with _struck(target, attribute, by) if dist.get_rank() == 1 else contextlib.nullcontext():
                run.saver.saver.begin(later)
                if run.saver.saver._thread is not None:
                    run.saver.saver._thread.join()
            with pytest.raises(RunError) as error:
                run.saver.saver.finish()
            told[name] = str(error.value)
        weight = next(p for p in run.engine.deepspeed.module.parameters() if p.dim() == 1)
        zero_state.set_weight(weight, torch.full_like(weight, float("nan")))
        with pytest.raises(RunError) as error:
            run.saver.save(later, wait=True)
        told["nan"] = str(error.value)
    return told


def test_every_error_of_a_writer_ends_the_save_and_nothing_else(
    tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    for told in on_ranks(2, _break_saves, str(tmp_path), tiny_data, vocab_file):
        for name, (*_, words) in FAULTS.items():
            assert f"could not save {tmp_path}/checkpoints/iter_0000002: {words}" in told[name], name
            assert told[name].endswith("earlier checkpoints are unchanged"), name
        assert "is not finite" in told["nan"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["iter_0000001", "latest"]
    CheckpointReader(find_checkpoint(str(tmp_path))).verify()


@pytest.fixture
def three(tmp_path: Path, tiny_data: str, vocab_file: str) -> Path:
    on_ranks(1, _three, str(tmp_path), tiny_data, vocab_file)
    return tmp_path / "checkpoints"


def _three(folder: str, data: str, vocab_file: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        flags = "--precision fp32 --batch-size 2 --train-iters 3 --save-interval 1"
        run = make(Start("gpt2", Path(folder), flags), data, vocab_file)
        train(run)
        run.__exit__()


def test_the_newest_whole_checkpoint_stays(three: Path) -> None:
    """Pruning keeps the newest complete checkpoint if newer ones are damaged."""
    for name in ("iter_0000002", "iter_0000003"):
        assert is_complete(three / name)
    index = json.loads((three / "iter_0000003" / "checkpoint.json").read_text())
    check_complete(three / "iter_0000003", index["tensors"])
    key, entry = next((k, e) for k, e in index["tensors"].items() if e["shape"][0] > 4)
    entry["pieces"][0]["end"] -= 1
    with pytest.raises(CheckpointError, match=SENTENCES["does_not_hold"]):
        check_complete(three / "iter_0000003", index["tensors"])
    entry["pieces"] = []
    with pytest.raises(CheckpointError, match=f"no rank has written rows 0 and later of '{key}'"):
        check_complete(three / "iter_0000003", index["tensors"])
    with pytest.raises(CheckpointError, match=SENTENCES["no_rank_has_written_weight_x"]):
        check_complete(three / "iter_0000003", {}, {"weight.x": [1]})
    for file in (three / "iter_0000003").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-4])
    next((three / "iter_0000002").glob("*.safetensors")).unlink()
    prune(three, 1, None)
    assert sorted(path.name for path in three.iterdir()) == ["iter_0000001", "iter_0000003", "latest"]
    shutil.rmtree(three / "iter_0000003")
    (three / "latest").write_text("iter_0000001\n")
    CheckpointReader(find_checkpoint(str(three))).verify()


PADDED = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 65 --batch-size 2 "
    "--precision fp32"
)


def _small_vocabulary(folder: str, ranks: int, save: bool) -> list[dict[str, torch.Tensor]]:
    """Train, save and load with a vocabulary of 65; return this rank's unpadded weights before and after loading.

    With two tensor-parallel ranks, the second has only padding rows of the embedding.
    """
    config = parse(f"{PADDED} --model-parallel-size {ranks}".split())
    text = torch.randint(65, (2, 9), generator=torch.Generator().manual_seed(1))

    def rows(engine: Any) -> dict[str, torch.Tensor]:
        found = {}
        for name, p in engine.deepspeed.module.named_parameters():
            dim, begin, end = mpu.spec_of(p).rows
            found[name] = p.detach().narrow(dim, 0, end - begin).clone()
        return found

    engine = start_engine(TextTask(), config)
    engine.train_batch(iter([{"text": text}]), 1e-2)
    saved = rows(engine)
    if save:
        save_module.save_checkpoint(folder, engine.deepspeed, TrainState(1, 2), config, "")
        engine = start_engine(TextTask(), config)
    load_checkpoint(find_checkpoint(folder), engine.deepspeed, config, "")
    return [saved, rows(engine)]


def test_a_rank_with_padding_alone_saves_and_loads(tmp_path: Path) -> None:
    for rank, (saved, loaded) in enumerate(on_ranks(2, _small_vocabulary, str(tmp_path), 2, True)):
        assert saved["embedding.word_embeddings.weight"].shape == ((65, 0)[rank], 16)
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    whole = whole_tensors(tmp_path / "iter_0000001")
    for _, loaded in on_ranks(1, _small_vocabulary, str(tmp_path), 1, False):
        assert loaded["embedding.word_embeddings.weight"].shape == (65, 16)
        for name, value in loaded.items():
            assert torch.equal(value, torch.from_numpy(whole[f"weight.{name}"])), name
