"""Rarely used functions of Megatron-LM and CPM-Pretrain work, e.g. activation checkpointing with dropout."""

import contextlib
import io
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import get_args, mpu, print_rank_0
from megatron.data.gpt2_dataset import build_train_valid_test_datasets
from megatron.training import pretrain
from tds.pipe import PipelineModule
from tests.sentences import SENTENCES
from tests.support import on_ranks

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --batch-size 2 --gas 1 --train-iters 2 "
    "--precision fp32 --eval-iters 0 --save-interval 0 --no-save-at-end --no-tensorboard --log-interval 1"
)


class Dropped(nn.Module):
    """A layer that records its random masks, one drawn within the RNG tracker's `fork()` and one outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.drawn: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        with mpu.get_cuda_rng_tracker().fork():
            inside = torch.rand(16)
        outside = torch.rand(16)
        self.drawn.append(torch.stack([inside, outside]))
        return hidden * self.weight * inside * outside


def datasets() -> Any:
    args = get_args()
    return build_train_valid_test_datasets(args.data_path, args.split, args.seq_length, args.seed)[0]


def _masks(function: str, argv: list[str]) -> list[list[Tensor]]:
    import deepspeed

    layer = Dropped()
    functions = {"default": {}, "mpu": {"activation_checkpoint_func": mpu.checkpoint}}
    functions["deepspeed"] = {"activation_checkpoint_func": deepspeed.checkpointing.checkpoint}

    def model_provider() -> Any:
        embedding, head = nn.Embedding(3000, 16), nn.Linear(16, 3000)
        model: Any = PipelineModule(
            [embedding, layer, head],
            topology=mpu.get_topology(),
            loss_fn=lambda logits, labels: nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            activation_checkpoint_interval=1,
            **functions[function],
        )
        model._megatron_batch_fn = lambda data: (data["text"][:, :-1], data["text"][:, 1:])
        return model

    with contextlib.redirect_stdout(io.StringIO()):
        pretrain(datasets, model_provider, argv=[*argv, "--pipe-parallel-size", "1"], exit=False)
    return [list(pair) for pair in zip(layer.drawn[::2], layer.drawn[1::2], strict=True)]


@pytest.mark.parametrize("function", ["default", "mpu", "deepspeed"])
def test_a_repeated_forward_pass_draws_the_same_masks(
    tmp_path: Path, tiny_data: str, vocab_file: str, function: str
) -> None:
    argv = [*FLAGS.split(), "--data-path", tiny_data, "--vocab-file", vocab_file, "--run-dir", str(tmp_path)]
    (pairs,) = on_ranks(1, _masks, function, argv)
    assert len(pairs) == 2
    for first, again in pairs:
        assert torch.equal(first, again)
    assert not torch.equal(pairs[0][0], pairs[1][0])


def _layers() -> None:
    mpu.initialize_model_parallel(1)
    column = mpu.ColumnParallelLinear(4, 12, True, False, nn.init.ones_, 1, False, True)
    output, bias = column(torch.ones(2, 4))
    assert torch.equal(output, torch.full((2, 12), 4.0)) and bias is column.bias
    row = mpu.RowParallelLinear(12, 4, False, True, nn.init.ones_)
    assert torch.equal(row(output)[0], torch.full((2, 4), 48.0)) and row.bias is None
    table = mpu.VocabParallelEmbedding(100, 4, nn.init.ones_)
    assert table.weight.shape == (100, 4), "without padding, a uniform guess costs log(100)"
    losses = mpu.vocab_parallel_cross_entropy(table.logits(torch.zeros(3, 4)), torch.tensor([1, 2, 3]))
    assert losses.tolist() == pytest.approx([torch.tensor(100.0).log().item()] * 3)
    for layer in (mpu.ColumnParallelLinear, mpu.RowParallelLinear):
        with pytest.raises(ValueError, match="stride=3"):
            layer(4, 12, stride=3)
        with pytest.raises(ValueError, match="keep_master_weight_for_test"):
            layer(4, 12, keep_master_weight_for_test=True)
    print_rank_0({"any": "object"})


def test_layers_take_arguments_by_position() -> None:
    on_ranks(1, _layers)


def _plain(argv: list[str], twice: bool, where: str | None = None) -> str:
    said = io.StringIO()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(3000, 8)
            self.head = nn.Linear(8, 3000)

        def forward(self, text: Tensor) -> Tensor:
            logits = self.head(self.table(text[:, :-1]))
            return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    def forward_step(batches: Any, model: Any) -> Any:
        loss = model(next(batches)["text"])
        if twice:
            next(batches)
        return loss, {"lm loss": loss, "entropy": loss}

    with contextlib.redirect_stdout(said):
        pretrain(datasets, Model, forward_step, argv=argv, exit=False)
    return said.getvalue()


def test_one_folder_to_save_and_to_load_begins_a_run_and_continues_it(
    tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """One folder for --save and --load, as in Megatron-LM's scripts, starts a run and later resumes it.

    forward_step also returns a value besides the loss; the run prints one note about this, not one per step.
    """
    folder = str(tmp_path / "saved")
    flags = FLAGS.replace("--no-save-at-end", "").split()
    argv = [*flags, "--data-path", tiny_data, "--vocab-file", vocab_file, "--save", folder, "--load", folder]
    (said,) = on_ranks(1, _plain, argv, False)
    assert "holds no checkpoint yet" in said
    assert said.count("forward_step returns entropy") == 1
    (said,) = on_ranks(1, _plain, [*argv, "--train-iters", "3"], False)
    assert "resumed at iteration 2" in said


def _with_own_flags(argv: list[str]) -> list[float]:
    found: list[float] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            found.append(get_args().head_scale)
            self.table = nn.Embedding(3000, 8)

        def forward(self, text: Tensor) -> Tensor:
            return self.table(text).square().mean()

    def forward_step(batches: Any, model: Any) -> Any:
        loss = model(next(batches)["text"])
        return loss, {"lm loss": loss}

    def add(parser: ArgumentParser) -> ArgumentParser:
        parser.add_argument("--head-scale", type=float)
        return parser

    with contextlib.redirect_stdout(io.StringIO()):
        pretrain(datasets, Model, forward_step, add, argv=argv, exit=False)
    return found


def test_a_model_reads_flags_of_the_script(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    argv = [*FLAGS.split(), "--data-path", tiny_data, "--vocab-file", vocab_file, "--run-dir", str(tmp_path)]
    assert on_ranks(1, _with_own_flags, [*argv, "--head-scale", "2.5"]) == [[2.5]]


def test_a_second_batch_in_one_call_is_named(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    argv = [*FLAGS.split(), "--data-path", tiny_data, "--vocab-file", vocab_file, "--run-dir", str(tmp_path)]
    with pytest.raises(Exception, match=SENTENCES["forward_step_reads_a_second_batch"]):
        on_ranks(1, _plain, argv, True)
