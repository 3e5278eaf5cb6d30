"""Average losses are right if replicas return losses of different names, or evaluate different micro-batch counts."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tds
from megatron.engines.without_pipeline import _nonzero_counts, _num_targets
from megatron.mpu.sequence import Pending
from megatron.training.evaluation import _evaluation_row
from tds.losses import Losses
from tests.checkpoints.runs import Start, make, run_all
from tests.conformance.engines import remembered_groups
from tests.support import on_ranks

CONFIG = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "steps_per_print": 10**9}


def _engine(loss_fn: Any, stages: int) -> Any:
    torch.manual_seed(0)
    net = tds.PipelineModule(
        [nn.Linear(2, 2), nn.Linear(2, 2)], num_stages=stages, loss_fn=loss_fn, partition_method="uniform"
    )
    config = {**CONFIG, "pipeline": {"timeout": 60}}
    return tds.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=config)[0]


def _images_and_text(out: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the losses of a micro-batch by its label: 0 gives `text`, 1 gives `image`, 2 gives both."""
    kind, named = int(labels[0, 0]), {}
    if kind:
        named["image"] = 0 * out.sum() + 100.0
    if kind != 1:
        named["text"] = 0 * out.sum() + 1.0
    return named


def _named(steps: list[list[list[int]]], stages: int) -> list[dict[str, float]]:
    """Return the named losses of each step.

    steps[step][replica] is a list with the label of each micro-batch: 0 text, 1 image, 2 both.
    """
    engine, found = _engine(_images_and_text, stages), []
    for kinds in steps:
        mine = kinds[engine.grid.data_parallel_id]
        engine.train_batch(iter([(torch.ones(1, 2), torch.full((1, 2), float(kind))) for kind in mine]))
        found.append({name: value.item() for name, value in engine.named_losses.items()})
    return found


def test_replicas_that_name_other_losses() -> None:
    steps = [
        [[2, 0], [0, 2]],  # replicas name the losses in different order
        [[1, 1], [0, 0]],  # each replica returns only one of the two losses, a different one per replica
        [[0, 0], [0, 0]],  # no replica names `image`, although earlier steps did
        [[0, 0], [0, 2]],
        [[2, 2], [2, 2]],
    ]
    expected = [
        {"image": 50.0, "text": 1.0},
        {"image": 50.0, "text": 0.5},
        {"text": 1.0},
        {"text": 1.0, "image": 25.0},
        {"text": 1.0, "image": 100.0},
    ]
    for stages in (1, 2):
        for found in on_ranks(2 * stages, _named, steps, stages):
            assert found == expected


def _in_order() -> list[list[str]]:
    """Return the names of the losses of two steps, as `named_losses` orders them."""
    engine, found = _engine(lambda out, labels: {"z": out.sum(), "a": 0 * out.sum()}, 2), []
    for _ in range(2):
        engine.train_batch(iter([(torch.ones(1, 2), torch.ones(1, 2))] * 2))
        found.append(list(engine.named_losses))
    return found


def test_losses_have_the_order_in_which_the_loss_function_names_them() -> None:
    assert on_ranks(2, _in_order) == [[["z", "a"]] * 2] * 2


def _label(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 0 * out.sum() + labels.mean()


def _evaluated(stages: int) -> tuple[float, float]:
    """Return the loss of eval_batch, and the error of its mean output, or 0 on a rank that gets no output."""
    engine = _engine(_label, stages)
    count = 1 if engine.grid.data_parallel_id == 0 else 3
    batches = [(torch.full((1, 2), float(count)), torch.full((1, 2), 6.0 + count)) for _ in range(count)]
    loss = engine.eval_batch(iter(batches), num_micro_batches=count).item()
    mean = engine.eval_batch(iter(batches), num_micro_batches=count, compute_loss=False)
    if mean is None or stages > 1:
        return loss, 0.0
    with torch.no_grad():
        right = engine.module(torch.tensor([[1.0, 1.0]] + [[3.0, 3.0]] * 3)).mean(0, keepdim=True)
    return loss, (mean - right).abs().max().item()


def test_replicas_that_evaluate_more_or_fewer_micro_batches() -> None:
    """Evaluation averages over micro-batches, not replicas: losses 7 on one replica and 9, 9, 9 on another give 8.5."""
    for stages in (1, 2):
        for loss, distance in on_ranks(2 * stages, _evaluated, stages):
            assert loss == 8.5 and distance < 1e-6


class _Sum:
    """A loss that sums over the targets and records the `mean_targets` that the engine sets."""

    mean_targets: Any = None

    def __call__(self, out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return out.sum()

    def count_targets(self, labels: torch.Tensor) -> torch.Tensor:
        return torch.tensor([float(labels.numel()), 1.0 + labels[0, 0]])


def _mean_targets() -> tuple[list[float], list[float]]:
    """Return `mean_targets` of an evaluation with 1 and 3 micro-batches on the replicas, and of a training step."""
    loss_fn = _Sum()
    engine = _engine(loss_fn, 1)
    replica = engine.grid.data_parallel_id
    batch = (torch.ones(1, 2), torch.full((1, 2), float(replica)))
    engine.eval_batch(iter([batch] * 3), num_micro_batches=1 + 2 * replica)
    evaluated = loss_fn.mean_targets.tolist()
    engine.train_batch(iter([batch] * 2))
    return evaluated, loss_fn.mean_targets.tolist()


def test_mean_targets_are_those_of_the_micro_batches_of_all_replicas() -> None:
    """Micro-batches have 2 targets; of the second count, 1 on the first replica and 2 on the other."""
    right = ([2.0, (1 + 3 * 2) / 4], [2.0, (2 * 1 + 2 * 2) / 4])
    assert on_ranks(2, _mean_targets) == [right, right]


@pytest.mark.parametrize(
    ("counts", "divisor", "means"), [([0.1, 0.0], 0.4, [0.1, 0.0]), ([0.0, 0.5], 1.0, [0.25, 0.5])]
)
def test_the_number_of_targets_may_be_any_number_but_0(
    counts: list[float], divisor: float, means: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four micro-batches with 0.1 targets each have 0.4. A step without targets counts as one target."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)  # there is one replica
    of_a_batch = torch.tensor(counts, dtype=torch.float64)
    losses = Losses(torch.device("cpu"))
    losses.begin(4, 1)
    losses.count(lambda _: of_a_batch, [None] * 4, None)
    assert losses.divisor.item() == pytest.approx(divisor)
    assert losses.mean_counts is not None and losses.mean_counts.tolist() == pytest.approx(means)
    without_pipeline = Pending(None, 4 * of_a_batch)
    assert _num_targets(without_pipeline).item() == pytest.approx(divisor)
    assert (_nonzero_counts(without_pipeline) / 4).tolist() == pytest.approx(means)


def _additional() -> float:
    engine = _engine(_label, 1)
    numbers = iter([0.5, 1])
    engine.module.get_additional_losses = lambda: {"accuracy": next(numbers)}
    engine.train_batch(iter([(torch.ones(1, 2), torch.ones(1, 2))] * 2))
    return float(engine.additional_losses["accuracy"])


def test_an_additional_loss_may_be_a_number() -> None:
    assert on_ranks(1, _additional) == [0.75]


def _half_mean() -> tuple[str, list[list[float]]]:
    torch.manual_seed(0)
    net = tds.PipelineModule([nn.Linear(2, 2)], num_stages=1, loss_fn=_label)
    config = {**CONFIG, "fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    engine = tds.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=0.0), config=config)[0]
    with torch.no_grad():
        engine.module.forward_funcs[0].weight.fill_(0)
        engine.module.forward_funcs[0].bias.fill_(30_000.0)
    batch = (torch.ones(1, 2).half(), torch.zeros(1, 2).half())
    mean = engine.eval_batch(iter([batch] * 3), num_micro_batches=3, compute_loss=False)
    return str(mean.dtype), mean.float().tolist()


def test_the_mean_of_fp16_outputs_is_finite_if_their_sum_is_not() -> None:
    """Three outputs of 30000 have a sum above 65504, the largest number of fp16."""
    assert on_ranks(1, _half_mean) == [("torch.float16", [[30_000.0, 30_000.0]])]


def _monitored(folder: str) -> None:
    def loss_fn(out: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"text": 0 * out.sum() + labels.mean(), "aux": 0 * out.sum() + 1.0}

    net = tds.PipelineModule([nn.Linear(2, 2)], num_stages=1, loss_fn=loss_fn)
    config = {**CONFIG, "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"}}
    engine = tds.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=config)[0]
    for _ in range(2):
        engine.train_batch(iter([(torch.ones(1, 2), torch.full((1, 2), 3.0))] * 2))
        engine.eval_batch(iter([(torch.ones(1, 2), torch.full((1, 2), 50.0))] * 2))


def test_the_named_losses_of_training_and_evaluation_are_monitored_apart(tmp_path: Path) -> None:
    on_ranks(1, _monitored, str(tmp_path))
    values = {}
    for path in tmp_path.rglob("Train_Samples_*.csv"):
        lines = path.read_text().splitlines()[1:]
        values[path.stem.removeprefix("Train_Samples_")] = [float(line.split(",")[1]) for line in lines]
    assert values["train_loss"] == [4.0, 4.0]
    assert values["text"] == [3.0, 3.0]
    assert values["eval_loss"] == [51.0, 51.0]
    assert values["eval_text"] == [50.0, 50.0]
    assert values["aux"] == values["eval_aux"] == [1.0, 1.0]


def _resumed(folder: str, data: str, vocab_file: str) -> None:
    settings = Path(folder) / "ds_config.json"
    monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"}}
    settings.write_text(json.dumps(monitor))
    flags = (
        f"--deepspeed-config {settings} --pipe-parallel-size 1 --context-parallel-size 2 --precision fp32 "
        "--batch-size 2 --gas 2 --train-iters 6 --save-interval 2 --exit-interval 3 --skip-iterations 2 5"
    )
    start = Start("gpt2", Path(folder) / "run", flags)
    run_all([start, start], data, vocab_file)


def test_deepspeeds_monitors_go_on_counting_samples_after_a_resume_and_skipped_iterations(
    tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """The axis counts each sample once for each context-parallel rank. Iterations 2 and 5 are skipped by a flag."""
    on_ranks(2, _resumed, str(tmp_path), tiny_data, vocab_file)
    lines = (tmp_path / "run" / "Train_Samples_train_loss.csv").read_text().splitlines()
    values = [line.split(",")[0] for line in lines if line[0].isdigit()]
    assert values == ["8", "24", "32", "48"]


def _evaluated_targets(folder: str, data: str, vocab_file: str) -> list[dict[str, float]]:
    """Return the results of an evaluation without a target, and of one with 24, in two stages and in two replicas."""
    results = []
    with remembered_groups() as begin:
        for stages in (2, 0):
            begin()
            flags = f"--pipe-parallel-size {stages} --batch-size 1 --gas 1 --eod-mask-loss --precision fp32"
            with make(Start("gpt2", Path(folder) / str(stages), flags), data, vocab_file) as run:
                text = torch.full((1, 25), run.tokenizer.eod)
                for tokens in (text, 0 * text):
                    results.append(run.engine.eval_batch(iter([{"text": tokens}])))
    return results


def test_an_evaluation_without_a_target_counts_none(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """Sums over global batches are divided by the sum of their targets, so a batch without one adds nothing."""
    for found in on_ranks(2, _evaluated_targets, str(tmp_path), tiny_data, vocab_file):
        assert [each["targets"] for each in found] == [0.0, 24.0, 0.0, 48.0]
        assert found[0]["loss"] == found[2]["loss"] == 0.0 < found[1]["loss"] < found[3]["loss"]
    assert math.isnan(_evaluation_row({"loss": 0.0, "targets": 0.0}, "valid", 1)["lm_loss"])
