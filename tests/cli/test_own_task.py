"""A user's task: its losses do not depend on the layout, and a mistake in it is reported in one sentence."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ChainDataset, DataLoader

from megatron import mpu
from megatron.config.command_line import parse
from megatron.training import Task, run, start_engine
from tds.pipe import LayerSpec, PipelineModule, SequentialModule
from tests.sentences import SENTENCES
from tests.support import losses, on_ranks

FLAGS = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 6 --batch-size 2 --precision fp32 --lr "
    "0.05 --warmup 0 --log-interval 1"
)


class Words(nn.Module):
    """Embedding layer: token ids [b, s] -> [b, s, h]."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)  # type: ignore[no-any-return]


class Sum:
    """Loss: the cross-entropy summed over the targets whose mask is 1."""

    def __call__(self, logits: torch.Tensor, targets: Any) -> torch.Tensor:
        words, counts = targets
        found = nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten(), reduction="none")
        return (found * counts.flatten()).sum()

    def count_targets(self, targets: Any) -> torch.Tensor:
        return targets[1].sum(dtype=torch.float64)  # type: ignore[no-any-return]


class Numbers:
    """Dataset whose sample n is an arithmetic sequence of 7 token ids that depends on n."""

    def __getitem__(self, n: int) -> dict[str, torch.Tensor]:
        return {"text": (torch.arange(7) * (n % 5 + 1) + n) % 50}


class Own(Task):
    """A task that predicts the next number; the loss leaves out targets that are divisible by 3."""

    name = "own"

    def datasets(self, config: Any, tokenizer: Any) -> Any:
        return (Numbers(), Numbers(), None), []

    def model(self, config: Any, tokenizer: Any) -> nn.Module:
        h = config.model.hidden_size
        layers = [
            LayerSpec(Words, 50, h), LayerSpec(nn.Linear, h, h), LayerSpec(nn.Tanh), LayerSpec(nn.Linear, h, 50),
        ]  # fmt: skip
        if not config.parallel.pipe_parallel_size:
            return SequentialModule(layers)
        return PipelineModule(layers, topology=mpu.get_topology(), loss_fn=Sum(), partition_method="uniform")

    def batch(self, data: Any, config: Any, tokenizer: Any) -> Any:
        text = mpu.broadcast_data(["text"], data, torch.int64)["text"]
        return text[:, :-1], (text[:, 1:], (text[:, 1:] % 3 > 0).float())

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        return Sum()(model(batch[0]), batch[1])


def _train(task: Task, argv: list[str]) -> None:
    run(task, argv, exit=False)


def _losses(ranks: int, folder: Path, vocab_file: str, flags: str) -> list[float]:
    argv = [*FLAGS.split(), *flags.split(), "--vocab-file", vocab_file, "--run-dir", str(folder), "--eval-iters", "1"]
    on_ranks(ranks, _train, Own(), argv)
    return losses([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])


def test_layouts_show_in_no_number(tmp_path: Path, vocab_file: str) -> None:
    """Losses are equal in all layouts, also after a resume, although micro-batches have different target counts."""
    expected = _losses(1, tmp_path / "one", vocab_file, "--gas 4 --train-iters 4")
    for name, ranks, flags in (
        ("pp2", 2, "--gas 4 --pipe-parallel-size 2"),
        ("dp2", 2, "--gas 2"),
        ("pp1", 1, "--gas 4 --pipe-parallel-size 1"),
    ):
        found = _losses(ranks, tmp_path / name, vocab_file, f"{flags} --train-iters 2 --lr-decay-iters 4")
        assert found == pytest.approx(expected[:2], rel=1e-6)
        again = _losses(1, tmp_path / name, vocab_file, "--gas 4 --train-iters 4")
        assert again == pytest.approx(expected, rel=1e-6)


def _made(**methods: Any) -> Task:
    kind: Any = type("Mine", (Own,), methods)
    return kind()  # type: ignore[no-any-return]


class _Short(Numbers):
    def __getitem__(self, n: int) -> dict[str, torch.Tensor]:
        return [super(_Short, self).__getitem__(i) for i in range(3)][n]


class _Lengths(Numbers):
    def __getitem__(self, n: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(n)
        return {key: value[: len(value) - n % 2] for key, value in sample.items()}


# Name -> (wrong methods of a task, pattern of the error message). Names with "pp 1" run with one pipeline stage.
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "loss of many": (
        {"loss": lambda s, model, batch: model(batch[0])[:, 0, 0]},
        r"^Mine.loss returns a tensor of shape \[2\]: return a tensor of one number",
    ),
    "no loss": ({"loss": lambda s, model, batch: None}, "^Mine.loss returns NoneType: return a tensor of one number"),
    "detached": (
        {"loss": lambda s, model, batch: model(batch[0]).sum().detach()},
        "^the loss does not depend on the model's parameters, or was detached",
    ),
    "counts": (
        {"count_targets": lambda s, batch: batch[1][1]},
        r"^count_targets returns a tensor of shape \[2, 6\]: return one number",
    ),
    "one thing": (
        {"batch": lambda s, data, config, tokenizer: data},
        r"^Mine.batch returns dict: return \(inputs of the first layer, targets\)",
    ),
    "one thing, pp 1": ({"batch": lambda s, data, config, tokenizer: None}, "^Mine.batch returns NoneType: return"),
    "no model": (
        {"model": lambda s, config, tokenizer: None},
        "^the model is NoneType: Mine.model must return an nn.Module",
    ),
    "two": (
        {"datasets": lambda s, config, tokenizer: ((Numbers(), None), [])},
        "^Mine.datasets returns 2 objects as data sets",
    ),
    "a stream": (
        {"datasets": lambda s, config, tokenizer: ((ChainDataset([]), None, None), [])},
        "^Mine.datasets returns a ChainDataset: return data sets with dataset",
    ),
    "a loader": (
        {"datasets": lambda s, config, tokenizer: ((DataLoader(Numbers()), None, None), [])},
        "^Mine.datasets returns a DataLoader: return data sets with dataset",
    ),
    "lengths": (
        {"datasets": lambda s, config, tokenizer: ((_Lengths(), None, None), [])},
        "^the samples of a micro-batch cannot be stacked .*the same shapes for any n",
    ),
    "no notes": (
        {"datasets": lambda s, config, tokenizer: (Numbers(), None, None)},
        "^Mine.datasets returns 3 objects: return two objects",
    ),
    "a note": (
        {"datasets": lambda s, config, tokenizer: ((Numbers(), None, None), "note")},
        "^Mine.datasets returns 2 objects",
    ),
    "no training": (
        {"datasets": lambda s, config, tokenizer: ((None, None, None), [])},
        "^there is no training data set, but --train-iters",
    ),
    "short": (
        {"datasets": lambda s, config, tokenizer: ((_Short(), None, None), [])},
        "^sample 3 of the dataset _Short .*for any n >= 0",
    ),
    "extended": (
        {"extended": lambda s, config, tokenizer: None},
        "^Mine.extended returns NoneType: return a tokenizer",
    ),
    "mean, pp 1": (
        {"count_targets": None},
        "^set count_targets in both Mine and the loss_fn",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake: str, tmp_path: Path, vocab_file: str) -> None:
    message = MISTAKES[mistake][1]
    more = ["--pipe-parallel-size", "1"] if "pp 1" in mistake else []
    argv = [*FLAGS.split(), *more, "--vocab-file", vocab_file, "--run-dir", str(tmp_path / "run"), "--train-iters", "3"]
    ((kind, words),) = on_ranks(1, _said, mistake, argv)
    assert kind in ("ValueError", "RunError")
    assert re.search(message, words), words
    # Only the dataset "short" fails after an iteration; the other mistakes end the run before its first one.
    metrics = tmp_path / "run" / "metrics.jsonl"
    rows = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    splits = {json.loads(row)["split"] for row in rows}
    assert mistake == "short" or splits <= {"end"}


def _said(mistake: str, argv: list[str]) -> tuple[str, str]:
    try:
        run(_made(**MISTAKES[mistake][0]), argv, exit=False)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_what_is_no_task() -> None:
    class Empty(Task):
        pass

    for task, words in (
        (Own, r"not the class Own: run\(Own\(\)\)"), (None, "an object of a subclass of megatron.training.Task, not "
            "NoneType"),
        (Empty(), r"Empty has no datasets\(\); docs/own_model.md shows what a task needs"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            run(task, [], exit=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=SENTENCES["empty_has_no_model"]):
        start_engine(Empty(), parse([]))


class _Broken(nn.Module):
    def __init__(self) -> None:
        raise ValueError("a layer of 7 heads cannot be split over 2 ranks")


class _Stage(Own):
    def model(self, config: Any, tokenizer: Any) -> nn.Module:
        layers = [LayerSpec(Words, 50, 8), LayerSpec(nn.Tanh), LayerSpec(_Broken), LayerSpec(nn.Linear, 8, 50)]
        return PipelineModule(layers, topology=mpu.get_topology(), loss_fn=Sum(), partition_method="uniform")


def _ends(argv: list[str]) -> str:
    try:
        run(_Stage(), argv, exit=False)
    except Exception as error:
        return str(error)
    return ""


def test_a_layer_that_one_stage_cannot_build_ends_all(tmp_path: Path, vocab_file: str) -> None:
    """An error in the constructor of one stage's layer ends all stages, instead of letting the others wait."""
    argv = [*FLAGS.split(), "--pipe-parallel-size", "2", "--vocab-file", vocab_file, "--run-dir", str(tmp_path)]
    said = on_ranks(2, _ends, argv, timeout=90)
    assert all("a layer of 7 heads cannot be split over 2 ranks" in each for each in said), said
