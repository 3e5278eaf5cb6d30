"""Each rank reads only the corpora and checkpoint elements that it needs; weights that it loads are not initialised."""

import argparse
import math
import os
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron import mpu
from megatron.checkpointing import CheckpointReader
from megatron.data.checked import reuse_checks
from megatron.data.indexed_dataset import IndexedDataset
from megatron.mpu.parameters import ParamSpec
from megatron.tasks import GPT2
from megatron.training import Feature
from megatron.training.data_ranks import reads_data
from megatron.training.loop import train
from megatron.training.remote_datasets import RemoteDataset, t5_lengths
from megatron.training.task import Task
from megatron_tools.write.prompts import read_prompts
from tests.checkpoints.runs import Start, losses_of, make, whole_tensors
from tests.conformance.engines import remembered_groups
from tests.support import covering, on_ranks

FLAGS = (
    "--batch-size 1 --gas 4 --train-iters {} --precision {} --zero-stage {} --pipe-parallel-size {} "
    "--model-parallel-size {}"
)


def _count(calls: Counter[str], owner: Any, name: str, key: Any) -> None:
    """Replace method `name` of `owner` by one that also counts its calls in `calls[key(*args)]`."""
    honest = getattr(owner, name)

    def counted(*args: Any) -> Any:
        calls[key(*args)] += 1
        return honest(*args)

    setattr(owner, name, counted)


def _trains(
    model: str, layout: tuple[int, int], folder: str, data: str, vocab_file: str
) -> tuple[bool, Counter[str], bool]:
    """Train; return (whether this rank reads data, counts of calls, whether its validation data is a placeholder).

    The count "opened" tells how often the rank opens a corpus, and "checked" how often it checks a corpus's index.
    """
    calls: Counter[str] = Counter()
    _count(calls, IndexedDataset, "_open", lambda *_: "opened")
    _count(calls, IndexedDataset, "_check_index", lambda *_: "checked")
    flags = FLAGS.format(2, "fp32", 0, *layout) + " --split 8,2 --eval-iters 1 --num-workers 1"
    with make(Start(model, Path(folder), flags), data, vocab_file) as run:
        train(run)
        return reads_data(), calls, isinstance(run.datasets[1], RemoteDataset)


@pytest.mark.parametrize(
    ("model", "layout"),
    covering([("gpt2", (3, 2)), ("t5-cpm", (3, 2)), ("gpt2", (0, 2))], lambda case: case[0] == "t5-cpm", True),
)
def test_only_ranks_that_read_open_the_corpus(
    model: str, layout: tuple[int, int], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """Only ranks that read data open the corpus, and only rank 0 checks its index.

    In each stage that needs data, only one of the tensor-parallel ranks reads it.
    """
    told = on_ranks(6, _trains, model, layout, str(tmp_path), tiny_data, vocab_file)
    for rank, (read_here, calls, elsewhere) in enumerate(told):
        stage, last = (rank // 2, 2) if layout[0] else (0, 0)
        assert read_here == (rank % 2 == 0 and stage in (0, last))
        assert elsewhere != read_here
        assert bool(calls["opened"]) == read_here
        assert calls["checked"] == (rank == 0)
    assert len(losses_of(tmp_path)) == 2


def _of_all(folder: str, data: str, vocab_file: str) -> int:
    """Train a task with `reads_alone = False`; return how often this rank builds datasets.

    Such a task builds datasets collectively on all ranks, as Megatron-LM's dataset builders do.
    """
    honest = GPT2.datasets
    opened = []

    def datasets(task: Task, config: Any, tokenizer: Any) -> Any:
        opened.append(1)
        dist.barrier()
        return honest(task, config, tokenizer)  # type: ignore[arg-type]

    GPT2.datasets, GPT2.reads_alone = datasets, False  # type: ignore[method-assign,assignment]
    with make(Start("gpt2", Path(folder), FLAGS.format(1, "fp32", 0, 2, 1)), data, vocab_file) as run:
        train(run)
        assert not isinstance(run.datasets[0], RemoteDataset)
    return len(opened)


def test_a_task_of_ones_own_is_asked_on_all_ranks_at_once(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    assert not Task.reads_alone
    assert on_ranks(3 * 2, _of_all, str(tmp_path), tiny_data, vocab_file) == [1] * 6


class _Plan:
    """A `plan` attribute of a user's dataset that cannot be pickled."""

    def __init__(self) -> None:
        self.encoder = lambda: 3


def test_the_lengths_of_a_plan() -> None:
    assert t5_lengths(SimpleNamespace(plan=SimpleNamespace(encoder=3, decoder=2))) == (3, 2)
    assert t5_lengths(SimpleNamespace(plan=_Plan())) is None and t5_lengths(object()) is None


def test_what_one_process_has_checked_others_take_over(tiny_data: str) -> None:
    found: dict[str, bool] = {}
    with reuse_checks(found):
        first = IndexedDataset(tiny_data)
    assert found == {tiny_data: True}
    with reuse_checks({tiny_data: False}):
        other = IndexedDataset(tiny_data)
    assert (
        not other._one_sequence_each
        and other.document_sizes(range(5)).tolist() == first.document_sizes(range(5)).tolist()
    )


def _resumes(first: Start, second: Start, data: str, vocab_file: str) -> tuple[int, int, int]:
    """Train and resume; return (elements read on resuming, parameters initialised at the start, and on resuming)."""
    calls: Counter[str] = Counter()
    numbers = [0]
    honest = CheckpointReader._open_piece

    def piece(reader: CheckpointReader, key: str, each: dict[str, Any]) -> Any:
        numbers[0] += math.prod(honest(reader, key, each).get_shape())
        return honest(reader, key, each)

    def spec_of(seed: Any) -> str:
        return "drawn" if not mpu.parallel_context().skip_init else "left as it was"

    _count(calls, ParamSpec, "fill", lambda spec, parameter, seed=None: spec_of(seed))
    with remembered_groups() as begin:
        begin()
        with make(first, data, vocab_file) as run:
            train(run)
        drawn = calls["drawn"]
        CheckpointReader._open_piece = piece  # type: ignore[method-assign]
        begin()
        with make(second, data, vocab_file) as run:
            again, read = calls["drawn"] - drawn, numbers[0]
            train(run)
    return read, drawn, again


def _resumes_on_one_machine(*given: Any) -> tuple[int, int, int]:
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    return _resumes(*given)


def _same_on_one_machine(folder: Path, told: list[Any], first: Start, second: Start, *given: str) -> None:
    """Check that ranks on one machine have the losses of ranks on several machines.

    On one machine, each rank itself reads all elements that it needs. The ranks together read at least twice as many
    elements as on several machines, where each element is read once and sent to the other ranks.
    """
    losses = losses_of(folder)
    shutil.rmtree(folder / "checkpoints")
    (folder / "metrics.jsonl").unlink()
    again = on_ranks(4, _resumes_on_one_machine, first, second, *given)
    assert losses_of(folder) == losses
    assert sum(read for read, _, _ in again) >= 2 * sum(read for read, _, _ in told)


@pytest.mark.parametrize(
    ("model", "precision", "zero", "pipe"),
    covering(
        [("gpt2", "fp32", 0, 2), ("t5-cpm", "bf16", 1, 0), ("gpt2", "fp32", 3, 0)], lambda case: case[3] == 2, True
    ),
)
def test_each_number_of_a_checkpoint_is_read_once(
    model: str, precision: str, zero: int, pipe: int, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """When a run on several machines resumes, its ranks together read each element of the checkpoint once.

    Weights that will be loaded are not initialised.
    """
    first, second = (Start(model, tmp_path, FLAGS.format(n, precision, zero, pipe, 1), n == 3) for n in (2, 3))
    told = on_ranks(4, _resumes, first, second, tiny_data, vocab_file)
    _same_on_one_machine(tmp_path, told, first, second, tiny_data, vocab_file)
    whole = whole_tensors(tmp_path / "checkpoints" / "iter_0000002")
    held = sum(tensor.size for tensor in whole.values())
    tied = sum(tensor.size for key, tensor in whole.items() if "word_embeddings" in key) if pipe else 0
    assert held <= sum(read for read, _, _ in told) <= held + tied, "tied embeddings are read by two stages"
    assert all(drawn and not again for _, drawn, again in told)
    assert all(torch.tensor(losses_of(tmp_path)).isfinite())


class Codes(Feature):
    """Feature that gives the model a frozen parameter of small integers."""

    def __init__(self, value: int) -> None:
        self.value = value

    def model(self, model: nn.Module, plan: Any) -> None:
        codes = torch.full((3,), self.value, dtype=torch.int16)
        self.codes = nn.Parameter(codes, requires_grad=False)
        model.register_parameter("codes", self.codes)


def _codes(folder: Path, data: str, vocab_file: str) -> list[int]:
    with remembered_groups() as begin:
        for value, iterations in ((300, 1), (0, 2)):
            begin()
            feature = Codes(value)
            flags = f"--train-iters {iterations} --batch-size 1 --precision fp32"
            with make(Start("gpt2", folder, flags), data, vocab_file, [feature]) as run:
                train(run)
        return feature.codes.tolist()  # type: ignore[no-any-return]


def test_ranks_get_integers_from_the_rank_that_reads_them(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """gloo and NCCL send no int16."""
    assert on_ranks(2, _codes, tmp_path, tiny_data, vocab_file) == [[300] * 3] * 2


def _prompts(path: str) -> list[Any]:
    return list(read_prompts(argparse.Namespace(input=path, chat=False)))


def test_ranks_get_the_prompts_of_a_pipe_alike(tmp_path: Path) -> None:
    """A pipe has its lines once, so one rank reads them for all."""
    pipe = tmp_path / "prompts"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(pipe.write_text, "a\nb\n")
        assert on_ranks(2, _prompts, str(pipe)) == [["a", "b"], ["a", "b"]]
        assert written.result() == 4
