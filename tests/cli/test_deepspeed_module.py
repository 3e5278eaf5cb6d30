"""pretrain() with a model from DeepSpeed's tutorial, `from deepspeed.pipe import PipelineModule, LayerSpec`."""

import json
from pathlib import Path

import pytest

from tests.support import ROOT, command

SCRIPT = """
import torch
from torch import nn
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from megatron import get_args
from megatron.training import pretrain
import tests.tutorial_gpt2 as gpt2


class Words(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(vocab, hidden)
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, inputs):
        return self.table(inputs[0])


def scores(words, hidden):
    return nn.functional.linear(hidden, words.table.weight)


class Block(nn.Module):
    def __init__(self, number, hidden):
        super().__init__()
        torch.manual_seed(2 + number)
        self.layer = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.ReLU(inplace=True))

    def forward(self, hidden):
        return hidden + self.layer(hidden)


def loss_fn(logits, labels):
    words, mask = labels
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


def model_provider():
    args = get_args()
    tie = dict(tied_weight_attr=["table.weight"])
    words = args.padded_vocab_size if hasattr(args, "padded_vocab_size") else args.vocab_size
    model = PipelineModule(
        [TiedLayerSpec("words", Words, words, args.hidden_size, **tie),
         *[LayerSpec(Block, i, args.hidden_size) for i in range(args.num_layers)],
         TiedLayerSpec("words", Words, words, args.hidden_size, forward_fn=scores, **tie)],
        num_stages=max(args.pipe_parallel_size, 1), loss_fn=loss_fn, partition_method="uniform")
    model._megatron_batch_fn = gpt2.get_batch_pipe
    return model


pretrain(gpt2.train_valid_test_datasets_provider, model_provider, gpt2.forward_step, name="own")
"""


def _run(folder: Path, run: str, stages: int, iterations: int, data: str, vocab: str) -> "tuple[int, str, list[float]]":
    script = folder / "own.py"
    script.write_text(SCRIPT)
    done = command(
        "python",
        "tools/launch.py",
        "--standalone",
        "--nproc-per-node",
        str(max(stages, 1)),
        str(script),
        "--data-path",
        data,
        "--vocab-file",
        vocab,
        "--run-dir",
        str(folder / run),
        "--pipe-parallel-size",
        str(stages),
        "--num-layers",
        "4",
        "--hidden-size",
        "16",
        "--num-attention-heads",
        "2",
        "--seq-length",
        "16",
        "--batch-size",
        "2",
        "--gas",
        "4",
        "--lr",
        "0.01",
        "--train-iters",
        str(iterations),
        "--lr-decay-iters",
        "8",
        "--save-interval",
        "4",
        "--log-interval",
        "1",
        "--split",
        "90,10,0",
        "--precision",
        "fp32",
        env={"PYTHONPATH": str(ROOT)},
    )
    metrics = folder / run / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return done.returncode, done.stderr, [row["lm_loss"] for row in rows if row["split"] == "train"]


def test_it_trains_and_resumes_over_stages_as_in_one_process(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    given = tiny_data, vocab_file
    code, words, expected = _run(tmp_path, "one", 1, 8, *given)
    assert code == 0, words
    assert expected[-1] < expected[0]
    for iterations in (4, 8):
        code, words, found = _run(tmp_path, "two", 2, iterations, *given)
        assert code == 0, words
        assert "autograd kernel" not in words  # torch would warn if tied gradients were reduced without no_grad
        assert found == pytest.approx(expected[:iterations], rel=1e-5)


def test_a_pipeline_without_stages_is_refused(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    code, words, _ = _run(tmp_path, "none", 0, 8, tiny_data, vocab_file)
    assert code == 1
    assert words == (
        "own.py: the model is a PipelineModule of 1 stages, but --pipe-parallel-size is 0: build it with "
        "topology=mpu.get_topology(); for --pipe-parallel-size 0, build a plain module\n"
    )
