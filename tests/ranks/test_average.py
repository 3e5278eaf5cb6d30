"""The moving average of the weights is that of torch's AveragedModel in every engine and after a change of layout."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megatron.training.loop import train
from tds import optimizer_state as zero_state
from tests.checkpoints.runs import Start, make, run_all, whole_tensors
from tests.conformance.engines import remembered_groups
from tests.ranks.test_bad_gradients import NORM, spoil
from tests.support import covering, on_ranks

DECAY = 0.7
FLAGS = f"--num-layers 2 --batch-size 2 --ema-decay {DECAY}"
BAD = 2  # the iteration whose gradient is NaN, counted from 0
LAYOUTS = {
    "dp2": "--precision fp32",
    "dp2-sgd": "--precision fp32 --optimizer sgd",
    "dp2-zero1": "--precision fp32 --zero-stage 1",
    "dp2-zero1-bf16": "--precision bf16 --zero-stage 1",
    "dp2-zero2-bf16": "--precision bf16 --zero-stage 2",
    "dp2-zero3": "--precision fp32 --zero-stage 3",
    "dp2-zero2-fp16": "--deepspeed-config {folder}/fp16.json --zero-stage 2",
    "dp2-zero1-offload": "--deepspeed-config {folder}/offload.json --precision fp32",
    "dp2-zero3-bf16": "--precision bf16 --zero-stage 3",
    "pp2": "--precision fp32 --pipe-parallel-size 2",
    "pp2-zero1-bf16": "--precision bf16 --pipe-parallel-size 2",
    "pp2-zero1": "--precision fp32 --pipe-parallel-size 2 --zero-stage 1",
    "tp2": "--precision fp32 --model-parallel-size 2",
    "dp2-muon": "--precision fp32 --optimizer muon",
    "dp2-muon-zero1": "--precision bf16 --optimizer muon --zero-stage 1",
    "dp2-guard-offload": "--deepspeed-config {folder}/offload.json --precision fp32 --optimizer sgd "
    "--skip-step-sigma 20 --skip-step-window 4",
    "dp2-guard": "--precision fp32 --optimizer sgd --skip-step-sigma 20 --skip-step-window 4",
    "dp2-guard-bf16": "--precision bf16 --zero-stage 2 --skip-step-sigma 20 --skip-step-window 4",
}
IN_CI = ["dp2-zero1-bf16", "dp2-zero3", "pp2", "dp2-guard-bf16"]
T5 = "t5-v1.1"


def _watched(starts: dict[str, Start], data: str, vocab_file: str) -> dict[str, float]:
    """Train each run; return its largest relative difference from AveragedModel over the same weights."""
    worst = {}
    with remembered_groups() as begin:
        for name, start in starts.items():
            begin()
            with contextlib.redirect_stdout(io.StringIO()):
                run = make(start, data, vocab_file)
                engine: Any = run.engine.deepspeed
                spoil(run, NORM, [BAD])
                if "guard" in name:
                    spoil(run, NORM, [6], 500.0)
                weights = [p for p in engine.module.parameters() if p.requires_grad]

                def masters(weights: list[Any] = weights) -> torch.nn.ParameterList:
                    return torch.nn.ParameterList(zero_state.get_weight(p).detach().clone() for p in weights)

                model = AveragedModel(masters(), multi_avg_fn=get_ema_multi_avg_fn(DECAY))
                model.update_parameters(masters())
                honest = run.engine.train_batch

                def train_batch(*args: Any, honest: Any = honest, model: Any = model, masters: Any = masters) -> Any:
                    step = honest(*args)
                    if not step.skipped and torch.as_tensor(step.grad_norm).isfinite():
                        model.update_parameters(masters())
                    return step

                run.engine.train_batch = train_batch  # type: ignore[method-assign]
                train(run)
                assert model.n_averaged == (7 if "guard" in name else 8), name
                found = [zero_state.get_moment(engine, p, "ema") for p in weights]
                run.__exit__()
            pairs = zip(found, (p.detach() for p in model.module.parameters()), strict=True)
            worst[name] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return worst


@pytest.mark.parametrize(
    "names", covering([IN_CI, [n for n in LAYOUTS if n not in IN_CI]], lambda names: names is IN_CI)
)
def test_the_average_is_that_of_torch(names: list[str], tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """Neither a step with NaN nor one that the spike guard skips changes the average."""
    (tmp_path / "fp16.json").write_text(json.dumps({"fp16": {"enabled": True, "initial_scale_power": 4}}))
    offload = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "offload.json").write_text(json.dumps({"zero_optimization": offload}))
    flags = {name: f"{FLAGS} --train-iters 8 {LAYOUTS[name].format(folder=tmp_path)}" for name in names}
    starts = {name: Start("gpt2", tmp_path / name, each) for name, each in flags.items()}
    for worst in on_ranks(2, _watched, starts, tiny_data, vocab_file, timeout=400):
        assert {name for name, each in worst.items() if not each <= 1e-6} == set(), worst


def _averages(checkpoint: Path) -> dict[str, np.ndarray[Any, Any]]:
    return {key: value for key, value in whole_tensors(checkpoint).items() if key.startswith("ema.")}


@pytest.mark.parametrize("model", covering(["gpt2", "llama", T5], lambda model: model == "gpt2"))
def test_the_average_goes_on_in_another_layout(model: str, tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    flags = f"{FLAGS.replace('--num-layers 2', '')} --train-iters 5 --precision fp32"
    first = f"{flags} --exit-interval 3 --pipe-parallel-size 2"
    starts = [
        Start(model, tmp_path / "whole", f"{flags} --gas 2 --pipe-parallel-size 2"),
        Start(model, tmp_path / "again", f"{first} --gas 2"),
        Start(model, tmp_path / "again", f"{flags} --zero-stage 1"),
    ]
    on_ranks(2, run_all, starts, tiny_data, vocab_file, timeout=300)
    whole, again = (_averages(tmp_path / name / "checkpoints/iter_0000005") for name in ("whole", "again"))
    assert whole.keys() == again.keys()
    index = json.loads((tmp_path / "again/checkpoints/iter_0000005/checkpoint.json").read_text())
    assert {key.removeprefix("ema.") for key in whole} == {
        key.removeprefix("weight.") for key in index["tensors"] if key.startswith("weight.")
    }
    for key, value in whole.items():
        np.testing.assert_allclose(again[key], value, rtol=1e-5, atol=1e-7, err_msg=key)
