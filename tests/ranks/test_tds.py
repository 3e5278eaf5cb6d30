"""tds accepts the calls of DeepSpeed's users: in the pipeline tutorial, in training loops and for checkpoints.

tests/conformance compares losses with plain torch in more depth.
"""

import argparse
import contextlib
import importlib.util
import io
import itertools
import logging
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.sentences import SENTENCES
from tests.support import FULL, ROOT, RankFailure, ends_of_ranks, on_ranks

WIDTH, MICROS = 6, 4


def layers(count: int = 5) -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def loss_fn(out: Tensor, labels: Tensor) -> Tensor:
    return (out - labels).square().mean()


def batches(rank: int = 0, ranks: int = 1, rows: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    while True:
        x, y = torch.randn(2, rows * ranks, WIDTH, generator=generator)
        yield x.chunk(ranks)[rank], y.chunk(ranks)[rank]


def build(stages: int, module: dict[str, Any] | None = None, **config: Any) -> Any:
    import tds

    model = tds.PipelineModule(
        layers(), num_stages=stages, loss_fn=loss_fn, partition_method="uniform", **(module or {})
    )
    ranks = dist.get_world_size() // stages
    settings = {"train_batch_size": 4 * MICROS * ranks, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return tds.initialize(model=model, optimizer=optimizer, config={**settings, "steps_per_print": 10**9, **config})[0]


# ----------------------------------------------------------- batch size


def _resized() -> tuple[list[int], str]:
    """Return the micro-batches that steps of several batch sizes read, and the error for a size that would hang."""
    from tds.schedule import ScheduleError

    engine, numbers = build(2), []
    for micros in (MICROS, 1, 3, MICROS):
        engine.set_train_batch_size(4 * micros)
        read = [0]
        data = batches()

        def counted(data: Any = data, read: list[int] = read) -> Iterator[Any]:
            for batch in data:
                read[0] += 1
                yield batch

        engine.train_batch(counted())
        numbers.append(read[0])
    original = engine.schedule
    engine.schedule = lambda stage, stages, micros: list(original(stage, stages, micros))[stage:]
    with pytest.raises(ScheduleError) as error:
        engine.set_train_batch_size(4 * 2)
    return numbers, str(error.value)


def test_the_number_of_micro_batches_may_change_if_the_schedule_allows() -> None:
    for numbers, words in on_ranks(2, _resized):
        assert numbers == [MICROS, 1, 3, MICROS]
        assert "stage 1" in words


def _keeps_size() -> tuple[int, int, int]:
    """Return the batch size after a refused one, and the micro-batches that the next step leaves, and its number."""
    engine = build(1)
    original = engine.schedule

    def even(stage: int, stages: int, micros: int) -> Any:
        if micros % 2:
            raise ArithmeticError("an odd number of micro-batches")
        return original(stage, stages, micros)

    engine.schedule = even
    with pytest.raises(ArithmeticError):
        engine.set_train_batch_size(4 * (MICROS + 1))
    data = iter(list(itertools.islice(batches(), 2 * MICROS)))
    engine.train_batch(data)
    return engine.train_batch_size(), len(list(data)), engine.micro_batches


def test_a_refused_batch_size_leaves_the_old_one() -> None:
    assert on_ranks(1, _keeps_size) == [(4 * MICROS, MICROS, MICROS)]


# ------------------------------------------------------------- replicas


def _replicas(stages: int, ranks: int, zero: int) -> list[float]:
    engine = build(
        stages, gradient_clipping=0.05, zero_optimization={"stage": zero}, zero_allow_untested_optimizer=True
    )
    return [engine.train_batch(batches(engine.grid.data_parallel_id, ranks)).item() for _ in range(4)]


BF16 = {
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}


def _copies(config: dict[str, Any]) -> int:
    """Return how often a step calls `engine.flatten`, which copies gradients into one buffer for an all-reduce."""
    engine, copies = build(1, **config), 0
    flatten = engine.flatten

    def counted(tensors: Any) -> Any:
        nonlocal copies
        copies += 1
        return flatten(tensors)

    engine.flatten = counted
    dtype = next(engine.module.parameters()).dtype
    ranks = engine.dp_world_size
    engine.train_batch((x.to(dtype), y.to(dtype)) for x, y in batches(engine.grid.data_parallel_id, ranks))
    return copies


@pytest.mark.parametrize("config", [{}, BF16], ids=["fp32", "bf16"])
def test_without_replicas_no_gradient_is_copied(config: dict[str, Any]) -> None:
    assert on_ranks(1, _copies, config) == [0]
    after = config | {"pipeline": {"overlap_grad_reduce": False}}
    assert min(on_ranks(2, _copies, after)) > 0  # gradients are copied if there are replicas


def _copied_messages(keeps_outputs: bool) -> tuple[int, int]:
    """Train one step; return how many messages this stage copied before it sent them, and how many it sent."""
    import tds

    copied = sent = 0
    join, start = torch.cat, tds.channel.Sender._start_send

    def counting_copies(*args: Any, **kwargs: Any) -> Any:
        nonlocal copied
        copied += "out" in kwargs  # only a message is copied into a buffer of the pool
        return join(*args, **kwargs)

    def counting_messages(self: Any, buffer: Tensor, *group: Any) -> None:
        nonlocal sent
        sent += buffer.numel() * buffer.element_size() == 4 * WIDTH * 4
        start(self, buffer, *group)

    torch.cat = counting_copies  # type: ignore[assignment]
    tds.channel.Sender._start_send = counting_messages  # type: ignore[method-assign]
    last = [nn.Tanh()] if keeps_outputs else []  # Tanh's backward pass needs its output
    stage = [nn.Sequential(nn.Linear(WIDTH, WIDTH), *last) for _ in range(2)]
    model = tds.PipelineModule(stage, num_stages=2, loss_fn=loss_fn, partition_method="uniform")
    config = {"train_batch_size": 4 * MICROS, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10**9}
    tds.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), config=config)[0].train_batch(
        batches()
    )
    return copied, sent


@pytest.mark.parametrize("keeps_outputs", [False, True])
def test_what_nobody_else_holds_is_sent_from_where_it_lies(keeps_outputs: bool) -> None:
    (activations, sent), (gradients, back) = on_ranks(2, _copied_messages, keeps_outputs)
    assert sent == back == MICROS
    assert (activations, gradients) == (MICROS if keeps_outputs else 0, 0)


@pytest.mark.parametrize(
    ("stages", "ranks", "zero"), [(2, 2, 0), (1, 2, 0), (2, 2, 1), *(pytest.param(s, 2, 0, marks=FULL) for s in (3, 4))]
)
def test_replicas_average_and_clip_by_the_global_norm(stages: int, ranks: int, zero: int) -> None:
    model = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    expected = []
    for _ in range(4):
        source = batches(0, 1, 4 * ranks)
        total: Any = sum(loss_fn(model(x), y) for x, y in itertools.islice(source, MICROS)) / MICROS
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        expected.append(total.item())
    for found in on_ranks(stages * ranks, _replicas, stages, ranks, zero):
        assert found == pytest.approx(expected, rel=1e-5)


# ------------------------------------------------------------- refusals


def _ends_early() -> None:
    build(1).train_batch(iter([next(batches())]))


def _after_an_error(kind: str) -> tuple[list[float], list[float]]:
    """Return the weights after one step, in a new engine and in one whose step before ended in an error."""
    import tds

    found = []
    for broken in (False, True):
        torch.manual_seed(0)
        engine = build(1, bf16={"enabled": kind == "bf16"})
        data = [tuple(t.to(torch.bfloat16) if kind == "bf16" else t for t in next(batches())) for _ in range(MICROS)]
        if broken:
            with pytest.raises(tds.DataEnded):
                engine.train_batch(iter(data[: MICROS - 1]))
        engine.train_batch(iter(data))
        found.append([p.double().sum().item() for p in engine.module.parameters()])
    return found[0], found[1]


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_a_step_that_ends_in_an_error_leaves_no_gradient(kind: str) -> None:
    ((expected, found),) = on_ranks(1, _after_an_error, kind)
    assert found == expected


class _Counts:
    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        raise AssertionError("no loss is asked for")

    count_targets = __call__


def _predict() -> Any:
    engine = build(1)
    engine.module.loss_fn = _Counts()
    return engine.eval_batch(iter([next(batches())[:1]] * MICROS), compute_loss=False) is not None


def test_a_prediction_counts_no_targets() -> None:
    assert on_ranks(1, _predict) == [True]


def test_an_iterator_that_ends_says_so() -> None:
    with pytest.raises(RankFailure, match=SENTENCES["data_iterator_of_stage_0_ended"]):
        on_ranks(1, _ends_early)


REFUSED: list[tuple[int, dict[str, Any], dict[str, Any], str]] = [
    (1, {}, {"fp16": {"enabled": True}, "zero_optimization": {"stage": 0}}, "fp16 under a pipeline needs ZeRO stage 1"),
    (2, {}, {"pipeline": {"schedule": "interleaved"}}, "interleaved needs several chunks a stage"),
    (2, {"chunks": 2}, {}, "a model with 2 chunks a stage needs the schedule interleaved, not 1f1b"),
    (2, {"chunks": 3}, {}, "5 layers cannot be cut into 6 groups"),
    (1, {"activation_checkpoint_interval": 1}, {"pipeline": {"schedule": "zb-h1"}}, "recompute activations twice"),
    (1, {"activation_checkpoint_interval": -1}, {}, "activation_checkpoint_interval must be a number of layers"),
    (1, {}, {"pipeline": {"shedule": "zb-h1"}}, "'shedule': 'zb-h1'; its settings are"),
    (1, {}, {"pipeline": {"overlap_grad_reduce": "false"}}, "'overlap_grad_reduce': 'false'; its settings are"),
    (2, {"partition_method": "0,3,4"}, {}, r"the cuts \[0, 3, 4\] do not divide 5 layers into 2 groups"),
    (2, {"partition_method": "evenly"}, {}, "there is no partition_method 'evenly'"),
    (2, {}, {"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast with float16 under a pipeline"),
    (2, {"partition_method": "balanced"}, {}, "'balanced' measures the layers: give `example`"),
]


def _refused(stages: int, module: dict[str, Any], config: dict[str, Any]) -> None:
    import tds

    model = tds.PipelineModule(
        layers(), num_stages=stages, loss_fn=loss_fn, **{"partition_method": "uniform", **module}
    )
    settings = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, **config}
    tds.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=settings)


@pytest.mark.parametrize(("stages", "module", "config", "message"), REFUSED, ids=str)
def test_what_cannot_be_is_refused(stages: int, module: dict[str, Any], config: dict[str, Any], message: str) -> None:
    if "torch_autocast" in config and not importlib.util.find_spec("deepspeed.runtime.torch_autocast"):
        pytest.skip("this version of DeepSpeed has no torch_autocast")
    with pytest.raises(RankFailure, match=message):
        on_ranks(stages, _refused, stages, module, config)


def _differ(count: int, clipping: float) -> None:
    import tds

    stage = torch.distributed.get_rank()
    model = tds.PipelineModule(layers(4 + count * stage), num_stages=2, loss_fn=loss_fn, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0 + clipping * stage}
    tds.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)


@pytest.mark.parametrize(
    ("differences", "message"), [((2, 0.0), "cuts of the layers"), ((0, 1.0), "gradient_clipping")]
)
def test_stages_that_differ_are_refused(differences: tuple[int, float], message: str) -> None:
    with pytest.raises(RankFailure, match=f"stage 1 runs with .*{message}"):
        on_ranks(2, _differ, *differences)


BAD: dict[str, tuple[Any, str]] = {
    "None": (None, "stage 0, inputs of micro-batch 1: tensor 0 is NoneType; only tensors can be sent"),
    "a number": (3.5, "stage 0, inputs of micro-batch 1: tensor 0 is float"),
    "an array": (np.ones((4, WIDTH)), "stage 0, inputs of micro-batch 1: tensor 0 is ndarray"),
    "sparse": (
        torch.ones(4, WIDTH).to_sparse(),
        "stage 0, inputs of micro-batch 1: tensor 0 is torch.sparse_coo; make it dense",
    ),
}


def _bad_input(what: str) -> None:
    good = next(batches())
    build(2).train_batch(iter([good, (BAD[what][0], good[1]), good, good]))


def _bad_output(what: str) -> None:
    import tds

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, BAD[what][0]

    model = tds.PipelineModule([*layers(2), Odd(), *layers(2)], num_stages=2, loss_fn=loss_fn, partition_method="0,3,5")
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4}
    tds.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0].train_batch(
        batches()
    )


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_dense_tensor_is_named(what: str) -> None:
    with pytest.raises(RankFailure, match=BAD[what][1]):
        on_ranks(2, _bad_input, what)
    found = BAD[what][1].split(":")[1].strip().replace("tensor 0", "tensor 1")
    with pytest.raises(RankFailure, match=f"stage 0, outputs: {found}"):
        on_ranks(2, _bad_output, what)


def _frozen_here() -> None:
    import tds

    tie = [tds.pipe.TiedLayerSpec("tie", nn.Linear, WIDTH, WIDTH, tied_weight_attr=["weight"]) for _ in range(2)]
    model = tds.PipelineModule([tie[0], *layers(2), tie[1]], num_stages=2, loss_fn=loss_fn, partition_method="uniform")
    if model.stage_id == 0:
        model.tied_modules["tie"].weight.requires_grad_(False)
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4}
    tds.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0].train_batch(
        batches()
    )


def test_a_tie_is_frozen_everywhere_or_nowhere() -> None:
    with pytest.raises(RankFailure, match=SENTENCES["the_tied_weight_tie_weight_is"]):
        on_ranks(2, _frozen_here)


def _no_optimizer() -> None:
    import tds

    model = tds.PipelineModule(layers(), num_stages=2, loss_fn=loss_fn, partition_method="uniform")
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4}
    given = {} if model.stage_id == 0 else {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    tds.initialize(model=model, config=config, **given)[0].train_batch(batches())


def test_a_stage_without_optimizer_is_named() -> None:
    with pytest.raises(RankFailure, match=SENTENCES["stage_0_has_no_optimizer_give"]):
        on_ranks(2, _no_optimizer)


def _optimizer(name: str, params: dict[str, Any]) -> str:
    import tds

    model = tds.PipelineModule(layers(), num_stages=1, loss_fn=loss_fn, partition_method="uniform")
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": name, "params": params}}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        tds.initialize(model=model, model_parameters=model.parameters(), config=config)
    assert not any(Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("**/*"))  # DeepSpeed must not compile kernels
    return said.getvalue()


def test_an_adam_of_the_ds_config_needs_no_compiler_and_says_so() -> None:
    said = on_ranks(1, _optimizer, "Adam", {"lr": 0.1})[0]
    assert said == "optimizer adam: using torch's fused Adam, because DeepSpeed's must be compiled for this CPU\n"
    assert on_ranks(1, _optimizer, "Adam", {"lr": 0.1, "torch_adam": True})[0] == ""


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("Lamb", {}, "the optimizer lamb of the ds_config runs on GPUs only; on a CPU use Adam, AdamW or Adagrad"),
        ("Lion", {}, "the optimizer lion of the ds_config runs on GPUs only"),
        ("Adam", {"bias_correction": False}, '"bias_correction": false is for GPUs only'),
    ],
)
def test_optimizers_that_only_gpus_have_are_refused(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(RankFailure, match=message):
        on_ranks(1, _optimizer, name, params)


def _talks() -> tuple[str, list[str]]:
    """Return the output, and the warnings, of a layer and an optimizer that print, warn and log to standard output."""
    import tds

    log = logging.getLogger("talks")
    log.setLevel("INFO")

    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            print("built")
            log.addHandler(logging.StreamHandler(sys.stdout))

        def forward(self, x: Tensor) -> Tensor:
            warnings.warn("slow", stacklevel=1)
            return super().forward(x)

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            print("steps")
            super().step(closure)
            log.info("stepped")

    tools = {"flops_profiler": {"enabled": True}, "comms_logger": {"enabled": True}}
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, **tools}
    said = io.StringIO()
    with contextlib.redirect_stdout(said), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        model = tds.PipelineModule([tds.pipe.LayerSpec(Layer)], 1, loss_fn=loss_fn, partition_method="uniform")
        engine = tds.initialize(model=model, optimizer=Optimizer(model.parameters()), config=config)[0]
        for _ in range(2):
            engine.train_batch(batches())
    return said.getvalue(), [str(each.message) for each in warned]


def test_output_of_the_users_code_appears_once_and_that_of_deepspeed_does_not() -> None:
    said, warned = on_ranks(1, _talks)[0]
    assert said.splitlines() == ["built", *["steps", "stepped"] * 2]
    advice = "records no training step of a pipeline: use torch.profiler"
    assert warned == [f"flops_profiler {advice}", f"comms_logger {advice}", "slow"]


def _evaluates(precision: str) -> tuple[float, float]:
    import tds

    model = tds.PipelineModule(layers(), num_stages=2, loss_fn=loss_fn, partition_method="uniform")
    model.requires_grad_(False)
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, precision: {"enabled": True}}
    config |= {"data_types": {"grad_accum_dtype": "fp32"}}
    engine = tds.initialize(model=model, config=config)[0]
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    x, y = (each.to(dtype) for each in next(batches()))
    right = loss_fn(nn.Sequential(*layers()).to(dtype)(x), y)
    return engine.eval_batch(iter([(x, y)])).item(), right.item()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_frozen_model_without_an_optimizer_is_evaluated(precision: str) -> None:
    for found, right in on_ranks(2, _evaluates, precision):
        assert found == pytest.approx(right, rel=1e-3)


def _looks_ahead() -> int:
    """Return the largest number of micro-batches read from the iterator but not yet forwarded."""
    import tds

    read, seen = 0, []

    class Watch(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(read)
            return super().forward(x)

    def counted() -> Iterator[Any]:
        nonlocal read
        for batch in batches():
            read += 1
            yield batch

    model = tds.PipelineModule(
        [Watch(WIDTH, WIDTH), *layers(2)], num_stages=2, loss_fn=loss_fn, partition_method="uniform"
    )
    config = {"train_batch_size": 40, "train_micro_batch_size_per_gpu": 4}
    tds.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0].train_batch(
        counted()
    )
    return max((number - step for step, number in enumerate(seen)), default=0)


def test_the_first_stage_reads_a_step_before_it_computes() -> None:
    """The first stage reads all 10 micro-batches first, since its header says how many of them have equal shapes."""
    assert on_ranks(2, _looks_ahead)[0] == 10


def _auto_cast(schedule: str) -> list[float]:
    """Return the losses of an fp16 pipeline that gets fp32 batches and whose config enables auto_cast."""
    config = {"fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 8}, "zero_optimization": {"stage": 1},
              "zero_allow_untested_optimizer": True, "pipeline": {"schedule": schedule}}  # fmt: skip
    engine = build(2, {"chunks": 2 if schedule == "interleaved" else 1}, **config)
    assert next(engine.module.parameters()).dtype is torch.float16
    data = ((x, y.half()) for x, y in batches())
    return [engine.train_batch(data).item() for _ in range(3)]


def test_auto_cast_reaches_every_chunk() -> None:
    assert on_ranks(2, _auto_cast, "interleaved")[0] == pytest.approx(on_ranks(2, _auto_cast, "1f1b")[0], rel=1e-3)


def _misfit(at_start: bool) -> None:
    import tds
    from tds import Boundary

    model = tds.PipelineModule(layers(), num_stages=2, loss_fn=loss_fn, partition_method="uniform")
    if model.stage_id == 1:
        model.receives = [Boundary("hidden"), Boundary("mask", "bool", grad=False)]
    elif at_start:
        model.boundaries = [Boundary("hidden")]
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4}
    engine, *_ = tds.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    engine.train_batch(batches())


def test_stages_that_do_not_fit_are_found_at_start_on_both() -> None:
    for end in ends_of_ranks(2, _misfit, True):
        assert end.code == 1
        assert SENTENCES["stage_1_expects_2_tensors_hidden"] in end.stderr


def test_what_nobody_declared_is_checked_on_arrival_and_ends_both() -> None:
    ends = ends_of_ranks(2, _misfit, False)
    assert [end.code for end in ends] == [1, 1]
    report = ends[0].stderr
    assert "stage 1, inputs from rank 0: got 1 tensors, but 2 are declared: hidden, mask" in report


# ------------------------------------------------- features that DeepSpeed's users rely on


class Net(nn.Module):
    """A small network in the style of AlexNet, written for one process, as in DeepSpeed's tutorial."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(inplace=True), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Dropout(0.0), nn.Linear(16 * 4, 32), nn.ReLU(inplace=True), nn.Linear(32, classes)
        )


class Pictures(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        label = index % 4
        noise = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
        return noise * 0.3 + label, torch.tensor(label)


def _tutorial(folder: str, schedule: str, stages: int) -> tuple[list[float], list[float], str]:
    """Train as in DeepSpeed's pipeline tutorial; return the losses, the learning rates and the printed output.

    The tutorial gives `training_data` to initialize() and calls train_batch() without arguments.
    """
    import argparse
    import contextlib
    import io
    import json
    import multiprocessing

    import tds as deepspeed
    from tds.pipe import PipelineModule

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # DeepSpeed's loader has workers
    (Path(folder) / "ds.json").write_text(json.dumps({
        "train_batch_size": 32, "train_micro_batch_size_per_gpu": 32 // MICROS // (dist.get_world_size() // stages),
        "steps_per_print": 10, "wall_clock_breakdown": True, "pipeline": {"schedule": schedule},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 3}},
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "csv"},
    }))  # fmt: skip
    dist.barrier()
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", f"{folder}/ds.json"])
    args.local_rank = dist.get_rank()
    torch.manual_seed(1)
    net = Net(classes=4)
    net = PipelineModule(
        layers=[*net.features, lambda x: torch.flatten(x, 1), *net.classifier],
        loss_fn=nn.CrossEntropyLoss(),
        num_stages=stages,
        partition_method="parameters",
        activation_checkpoint_interval=0,
        chunks=2 if schedule == "interleaved" else 1,
    )
    engine, _, _, scheduler = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=Pictures(),
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        found = [engine.train_batch().item() for _ in range(20)]
    assert isinstance(engine, deepspeed.PipelineEngine)
    return found, scheduler.get_last_lr(), printed.getvalue()


@pytest.mark.parametrize(
    ("schedule", "stages", "ranks"),
    [pytest.param("1f1b", 2, 2, marks=FULL), ("interleaved", 2, 1), pytest.param("zb-h1", 3, 1, marks=FULL)],
)
def test_the_pipeline_tutorial(tmp_path: Path, schedule: str, stages: int, ranks: int) -> None:
    """The model of DeepSpeed's pipeline tutorial learns; the run prints progress and times and writes losses to CSV."""
    (found, lr, printed), *others = on_ranks(stages * ranks, _tutorial, str(tmp_path), schedule, stages)
    assert all(other[0] == found for other in others)
    assert found[-1] < 0.6 * found[0]
    assert lr == [pytest.approx(0.01)]
    assert "steps: 20 loss: " in printed
    assert "samples/sec" in printed
    assert "Forward: " in printed
    written = [row.split(",") for row in next(tmp_path.rglob("*train_loss.csv")).read_text().splitlines()[1:]]
    assert [float(row[1]) for row in written] == pytest.approx(found, rel=1e-4)


LOOP = """
import sys, torch, tds as deepspeed
folder, run = sys.argv[1:]
deepspeed.init_distributed(auto_mpi_discovery=False)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}})
begin = 0
if run == "second":
    path, client = engine.load_checkpoint(folder)
    begin = client["step"]
    assert client["note"] == "mine"
data = torch.Generator().manual_seed(1)
for step in range(10):
    x = torch.randn(8, 4, generator=data)
    if step < begin:
        continue
    loss = (engine(x) - x.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
    print(step, loss.item())
    if run == "first" and step == 5:
        engine.save_checkpoint(folder, "after six", client_state={"step": 6, "note": "mine"})
"""


def _alone(folder: Path, script: str, *argv: str) -> str:
    """Run a script in a folder with a copy of tds/ and nothing else of the project; return its output."""
    if not (folder / "tds").exists():
        shutil.copytree(ROOT / "tds", folder / "tds")
    (folder / "train.py").write_text(script)
    rendezvous = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "train.py", *argv], cwd=folder, env={**os.environ, **rendezvous}, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _loop(*argv: str) -> list[str]:
    """Run LOOP as a script with the arguments `argv`; return the lines with losses that it prints."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", ["train.py", *argv])
        exec(LOOP, {})
    return [line for line in printed.getvalue().splitlines() if line[:1].isdigit()]


def test_a_hand_written_loop_with_client_state(tmp_path: Path) -> None:
    ((first,), (second,)) = (on_ranks(1, _loop, str(tmp_path / "saved"), run) for run in ("first", "second"))
    assert len(first) == 10
    assert second == first[6:]


def _checkpoint(folder: str, chunks: int) -> tuple[list[float], list[float]]:
    """Return the losses of an engine after save_checkpoint, and those of a new engine after load_checkpoint.

    The checkpoint has DeepSpeed's pipeline format and a client state.
    """
    pipeline = {"schedule": "interleaved" if chunks > 1 else "1f1b"}
    engine = build(2, {"chunks": chunks}, pipeline=pipeline)
    data = batches()
    for _ in range(2):
        engine.train_batch(data)
    engine.save_checkpoint(folder, "two", client_state={"seen": 8})
    expected = [engine.train_batch(data).item() for _ in range(2)]
    engine = build(2, {"chunks": chunks}, pipeline=pipeline)
    for p in engine.module.parameters():
        nn.init.zeros_(p)
    path, client = engine.load_checkpoint(folder)
    assert path is not None
    assert client["seen"] == 8
    data = batches()
    for _ in range(2 * MICROS):
        next(data)
    return expected, [engine.train_batch(data).item() for _ in range(2)]


@pytest.mark.parametrize("chunks", [1, 2])
def test_deepspeeds_own_checkpoints(tmp_path: Path, chunks: int) -> None:
    for expected, found in on_ranks(2, _checkpoint, str(tmp_path), chunks):
        assert found == expected


def _universal(folder: str, stages: int) -> list[float]:
    """Return the losses after a checkpoint of two stages, or after its universal form on one stage."""
    from deepspeed.checkpoint import ds_to_universal

    import tds

    model = tds.PipelineModule(layers(), num_stages=stages, loss_fn=loss_fn, partition_method="uniform")
    config = {
        "train_batch_size": 4 * MICROS,
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "checkpoint": {"load_universal": stages == 1},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    engine = tds.initialize(model=model, optimizer=optimizer, config=config)[0]
    data = batches()
    if stages == 1:
        engine.load_checkpoint(folder)
        next(itertools.islice(data, 2 * MICROS - 1, None))  # the batches of two steps
    else:
        for _ in range(2):
            engine.train_batch(data)
        state = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
        engine.save_checkpoint(folder, "two", client_state=state)
    if dist.get_rank() == 0 and stages == 2:
        paths = {"input_folder": f"{folder}/two", "output_folder": f"{folder}/two_universal"}
        numbers = {"num_extract_workers": 1, "num_merge_workers": 1}
        switches = {"keep_temp_folder": False, "strict": True, "inject_missing_state": False}
        ds_to_universal.main(argparse.Namespace(**paths, **numbers, **switches))
    return [engine.train_batch(data).item() for _ in range(2)]


def test_a_universal_checkpoint_fits_another_partition(tmp_path: Path) -> None:
    whole, _ = on_ranks(2, _universal, str(tmp_path), 2)
    assert on_ranks(1, _universal, str(tmp_path), 1)[0] == pytest.approx(whole, rel=1e-5)


def _numbered(folder: str) -> tuple[list[str], list[float]]:
    """Return the folders of checkpoints with the tags 0 and 1, and the change of a weight that tag 0 loads."""
    engine = build(1)
    weight = next(engine.module.parameters())
    kept = []
    for epoch in range(2):
        engine.train_batch(batches())
        engine.save_checkpoint(folder, epoch)
        kept.append(weight.detach().clone())
    engine.load_checkpoint(folder, 0)
    distances = [(weight - each).abs().max().item() for each in kept]
    return sorted(each.name for each in Path(folder).iterdir() if each.is_dir()), distances


def test_an_epoch_number_is_a_tag_also_if_it_is_0(tmp_path: Path) -> None:
    (folders, (to_first, to_second)) = on_ranks(1, _numbered, str(tmp_path))[0]
    assert folders == ["0", "1"]
    assert to_first == 0 < to_second


def _evaluate() -> Any:
    engine = build(2)
    loader = [next(batches())] * MICROS
    if engine.is_first_stage() or engine.is_last_stage():
        engine.set_dataloader(loader * 2)
    first = engine.train_batch().item()
    loss, logits = engine.eval_batch(iter(loader), return_logits=True)
    second = engine.train_batch().item()  # reads the next training data, not the evaluation data
    left = len(engine._step.microbatches)
    return first, loss.item(), second, None if logits is None else tuple(logits.shape), left


def test_eval_batch_returns_loss_and_logits_and_keeps_nothing() -> None:
    (first, loss, second, none, left), (*same, logits, kept) = on_ranks(2, _evaluate)
    assert same == [first, loss, second]
    assert loss == pytest.approx(second, rel=1e-6)  # evaluation and step 2 have the same weights and batches
    assert second < first
    assert none is None
    assert logits == (4, WIDTH)  # only the logits of the last micro-batch, as in DeepSpeed
    assert left == kept == 0


def _overridden() -> tuple[list[str], float]:
    """Train two steps with a subclass of the engine; return its calls in step 1, and the loss of step 2.

    A call of `_forward` or `_backward` is returned as "F0" or "B0", where 0 is the number of the micro-batch.
    """
    import tds
    from tds.schedule import Instruction

    seen: list[str] = []

    class Noting(tds.PipelineEngine):
        def _forward(self, instruction: Instruction) -> None:
            seen.append(f"F{instruction.micro}")
            super()._forward(instruction)

        def _backward(self, instruction: Instruction) -> None:
            seen.append(f"B{instruction.micro}")
            super()._backward(instruction)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tds, "PipelineEngine", Noting)
        engine = build(2)
    data = batches()
    engine.train_batch(data)
    order = list(seen)
    return order, engine.train_batch(data).item()


def _left_over() -> str:
    """Return the error of a step whose `_backward` does nothing, so that activations stay in memory."""
    engine = build(1)
    engine.watchdog = None
    engine._backward = lambda instruction: None
    try:
        engine.train_batch(batches())
    except AssertionError as error:
        return str(error)
    return ""


def test_handlers_of_a_subclass_are_called_and_nothing_is_left_after_a_step() -> None:
    (first, loss), (last, same) = on_ranks(2, _overridden)
    assert first == ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]
    assert last == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]
    assert loss == same
    assert "stage 0 still holds tensors of [MicroChunk(micro=0, chunk=0)," in on_ranks(1, _left_over)[0]


def _balanced() -> tuple[list[int], float]:
    import time

    import tds

    class Slow(nn.Module):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.seconds, self.linear = seconds, nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            time.sleep(self.seconds)
            return self.linear(x)  # type: ignore[no-any-return]

    torch.manual_seed(7)
    state = torch.get_rng_state()
    specs = [tds.pipe.LayerSpec(Slow, seconds) for seconds in (0.06, 0.02, 0.02, 0.02, 0.005)]
    example = torch.ones(2, WIDTH)
    model = tds.PipelineModule(specs, num_stages=2, loss_fn=loss_fn, partition_method="balanced", example=example)
    torch.set_rng_state(state)
    return model.cuts, torch.rand(()).item()


def test_balanced_cuts_go_by_measured_time() -> None:
    (cuts, drawn), (same, _) = on_ranks(2, _balanced)
    assert cuts == same == [0, 1, 5]
    torch.manual_seed(7)
    assert drawn == torch.rand(()).item()


def _order() -> list[tuple[str, tuple[int, ...], int, int]]:
    """Train two steps; return this rank's messages in order, each as ("send" or "recv", group, peer, bytes)."""
    import tds

    with pytest.MonkeyPatch.context() as patch:  # create groups as on an accelerator
        patch.setattr(tds.neighbours, "has_message_queues", lambda device: True)
        engine = build(2, {"chunks": 2}, pipeline={"schedule": "interleaved"})
    handed: list[tuple[str, tuple[int, ...], int, int]] = []
    numbers: dict[Any, int] = {}

    def noting(name: str) -> Any:
        function = getattr(dist, name)

        def call(tensor: Tensor, peer: int, group: Any = None) -> Any:
            if tensor.numel() == tds.channel.HEADER_SIZE:  # a header, which goes from host to host
                return function(tensor, peer, group=group)
            number = numbers.setdefault(group, list(_groups(engine)).index(group))
            handed.append((name.removeprefix("i"), (number,), peer, tensor.numel() * tensor.element_size()))
            return function(tensor, peer, group=group)

        return call

    before = {name: getattr(dist, name) for name in ("isend", "irecv", "recv")}
    for name in before:
        setattr(dist, name, noting(name))
    for _ in range(2):
        engine.train_batch(batches())
    for name, function in before.items():
        setattr(dist, name, function)
    return handed


def _groups(engine: Any) -> Iterator[Any]:
    """Yield the process groups of the stage boundaries, in the same order on all ranks."""
    channels = [*engine._neighbours.senders.values(), *engine._neighbours.receivers.values()]
    ends = {channel.link.group.group_name: channel.link.group for channel in channels}
    yield from (ends[name] for name in sorted(ends, key=lambda name: (len(name), name)))


def test_sends_and_receives_are_handed_over_in_the_same_order() -> None:
    """One rank of each process group sends and the other receives, in the same order, as NCCL requires."""
    zero, one = on_ranks(2, _order)
    groups = {each[1] for each in zero}
    assert len(groups) == 4  # two stage boundaries, within a chunk and between chunks, times two directions
    for group in groups:
        ends = [[each for each in handed if each[1] == group] for handed in (zero, one)]
        kinds = [{each[0] for each in end} for end in ends]
        assert sorted(map(tuple, kinds)) == [("recv",), ("send",)]
        assert [each[3] for each in ends[0]] == [each[3] for each in ends[1]]


def _bytes(micros: int) -> list[int]:
    engine = build(3, train_batch_size=4 * micros)
    engine.train_batch(batches())
    return [engine.bytes_sent]


@pytest.mark.parametrize("micros", [4, 9])
def test_bytes_on_the_wire_are_the_tensors_and_one_header(micros: int) -> None:
    """A stage's messages are tensors of 4 x 6 floats, and one header per step to the next stage."""
    from tds.channel import HEADER_SIZE

    message = 4 * WIDTH * 4
    first, middle = micros * message + HEADER_SIZE, 2 * micros * message + HEADER_SIZE
    assert on_ranks(3, _bytes, micros) == [[first], [middle], [micros * message]]


# ------------------------------------------------------------ names that tds passes on from DeepSpeed


def test_everything_else_is_deepspeeds() -> None:
    import deepspeed

    import tds

    for name in ("zero", "comm", "ops", "checkpointing", "add_config_arguments", "DeepSpeedConfig", "__version__"):
        assert getattr(tds, name) is getattr(deepspeed, name)
    with pytest.raises(AttributeError):
        _ = tds.no_such_name


ALONE = """
import torch, tds as deepspeed
from deepspeed.pipe import PipelineModule
deepspeed.init_distributed(auto_mpi_discovery=False)
model = PipelineModule([torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)], num_stages=1,
                       loss_fn=lambda out, y: (out - y).square().mean())
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                                  config_params={"train_batch_size": 2})
x = torch.ones(2, 4), torch.zeros(2, 1)
first = engine.train_batch(iter([x]))
for _ in range(20):
    last = engine.train_batch(iter([x]))
assert type(engine).__module__ == "tds.engine" and last < 0.1 * first, (first, last)
"""


def test_the_folder_works_when_copied_alone(tmp_path: Path) -> None:
    """The folder tds/ works without the rest of the project, for a script with DeepSpeed's old config_params."""
    _alone(tmp_path, ALONE)


def test_the_launcher_is_deepspeeds() -> None:
    import tds

    assert "deepspeed" in tds.launcher.__name__
