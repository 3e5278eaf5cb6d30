import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron.config.command_line import parse
from megatron.config.ds_config import Resolved, resolve
from megatron.config.fields import ConfigError
from tds.schedule import find_schedule, register
from tests.support import ROOT


def settle(tmp_path: Path, content: dict[str, Any], *argv: str, world: int = 4, fast_bf16: bool = False) -> Resolved:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    return resolve(parse([*argv, "--deepspeed-config", str(path)]), world, fast_bf16)


def test_batch_sizes_come_from_the_flags(tmp_path: Path) -> None:
    found = settle(
        tmp_path, {"train_batch_size": "auto"}, "--batch-size", "2", "--gas", "3", "--pipe-parallel-size", "2"
    )
    assert found.deepspeed["train_batch_size"] == 2 * 3 * 2
    assert found.deepspeed["train_micro_batch_size_per_gpu"] == 2
    assert found.deepspeed["gradient_accumulation_steps"] == 3


def test_a_contradiction_prints_the_formula(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        settle(tmp_path, {"train_batch_size": 64}, "--batch-size", "2", "--gas", "3", "--pipe-parallel-size", "2")
    text = str(error.value)
    assert "train_batch_size = 64" in text
    assert (
        "train_batch_size 12 = --batch-size 2 x --gas 3 x (4 ranks / --pipe-parallel-size 2 / --model-parallel-size 1)"
        in text
    )


@pytest.mark.parametrize("stages", ["0", "1"])
def test_what_changes_no_number_gives_way_with_a_note(tmp_path: Path, stages: str) -> None:
    """With fewer than two stages, flags override batch sizes and steps_per_print of the ds_config, and notes say so.

    CPM-Pretrain also ignores the batch sizes of ds_config in runs without a pipeline.
    """
    given = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10}
    argv = ["--batch-size", "2", "--gas", "3", "--log-interval", "1", "--pipe-parallel-size", stages]
    found = settle(tmp_path, given, *argv)
    assert found.deepspeed["train_batch_size"] == 2 * 3 * 4
    assert found.log_interval == 1
    named = ("train_batch_size = 64", "train_micro_batch_size_per_gpu = 4", "steps_per_print = 10")
    assert all(any(key in note for note in found.notes) for key in named)
    assert settle(tmp_path, {"steps_per_print": 7}).log_interval == 7
    assert not settle(tmp_path, {"train_batch_size": 24}, *argv).notes


@pytest.mark.parametrize(
    ("content", "argv", "message"),
    [
        ({"fp16": 3}, (), """ds.json: 'fp16' must be an object, such as {"enabled": true}, not 3"""),
        ({"zero_optimization": [1]}, (), """'zero_optimization' must be an object, such as {"stage": 1}, not [1]"""),
        ({"zero_optimization": {"stagee": 1}}, (), "ds.json: in 'zero_optimization', 'stagee' is unknown"),
        ({"fp16": {"enabled": True, "initial_scale": 3}}, (), "ds.json: in 'fp16', 'initial_scale' is unknown"),
        ({"bf16": {"enabled": "perhaps"}}, (), "ds.json: in 'bf16', 'enabled' must be true or false"),
        ({"flops_profiler": {"enable": True}}, (), "ds.json: in 'flops_profiler', 'enable' is unknown"),
        ({"zero_optimization": {"stage": "high"}}, (), "ds.json: in 'zero_optimization', 'stage': Input should be"),
        ({"tensorboard": {"folder": "x"}}, (), "ds.json: in 'tensorboard', 'folder' is unknown"),
        (
            {"gradient_clipping": "much"},
            (),
            """ds.json: 'gradient_clipping' must be a number of at least 0, not "much\"""",
        ),
        ({"gradient_clipping": -1}, (), "'gradient_clipping' must be a number of at least 0, not -1"),
        ({"steps_per_print": math.nan}, (), "'steps_per_print' must be a number of at least 0, not NaN"),
        ({"fp16": {"enabled": True, "initial_scale_power": 65536}}, (), "initial_scale_power 65536 must be at most 62"),
        ({"fp16": {"enabled": True, "hysteresis": 0}}, (), "fp16.hysteresis must be at least 1"),
        ({"zero_optimization": True}, ("--zero-stage", "2"), "ZeRO stage 1, but --zero-stage is 2"),
        ({"train_batchsize": 1}, (), "unknown key 'train_batchsize'; did you mean train_batch_size?"),
        ({"bf16": {"check_grad_overflow": False}}, (), "which would apply NaN or Inf gradients; remove it"),
        ({"optimizer": {}}, (), "'optimizer' has no effect in this project; remove it and use --optimizer, --lr"),
        ({"gradient_clipping": 0.5}, ("--clip-grad", "1"), "gradient_clipping = 0.5, but --clip-grad is 1.0"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, (), "enables both fp16 and bf16"),
        ({"fp16": {"enabled": True}}, ("--precision", "fp32"), "enables fp16, but --precision is fp32"),
        ({"zero_optimization": {"stage": 2}}, ("--zero-stage", "1"), "ZeRO stage 2, but --zero-stage is 1"),
        (
            {"zero_optimization": {"stage": 2}},
            ("--pipe-parallel-size", "2"),
            "ZeRO stage 2 cannot be used with a pipeline",
        ),
        ({"pipeline": {"schedule": "gpipe"}}, (), "pipeline.schedule = gpipe, but --pipeline-schedule is 1f1b"),
        ({"pipeline": {"stages": 2}}, (), "'stages' in 'pipeline' has no effect"),
        ({"pipeline": 3}, (), "'pipeline' must be an object"),
        ({}, ("--precision", "fp16", "--zero-stage", "0"), "fp16 needs fp32 master weights"),
        ({"zero_optimization": {"stage": 0}}, ("--precision", "fp16"), "in the ds_config that sets it"),
        ({}, ("--precision", "fp64", "--zero-stage", "1"), "--precision fp64, a mode for numerical checks"),
        ({}, ("--model-parallel-size", "3"), "4 ranks cannot be divided"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, content: dict[str, Any], argv: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        settle(tmp_path, content, *argv)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "argv", "fast", "precision", "zero"),
    [
        ({}, (), False, "fp32", 0),
        ({}, (), True, "bf16", 1),
        ({"fp16": {"enabled": True}}, (), True, "fp16", 1),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": "auto"}}, ("--precision", "bf16"), False, "bf16", 1),
        ({"zero_optimization": {"stage": "auto"}}, ("--zero-stage", "3"), False, "fp32", 3),
        ({"zero_optimization": {"stage": 2}}, (), True, "bf16", 2),
    ],
)
def test_precision_and_zero_stage(
    tmp_path: Path, content: dict[str, Any], argv: tuple[str, ...], fast: bool, precision: str, zero: int
) -> None:
    found = settle(tmp_path, content, *argv, fast_bf16=fast)
    assert (found.precision, found.zero_stage) == (precision, zero)
    assert found.deepspeed["zero_optimization"]["stage"] == zero
    for name in ("fp16", "bf16"):
        assert (found.deepspeed.get(name, {}).get("enabled") is True) == (name == precision)


def test_the_section_pipeline_may_repeat_the_flags(tmp_path: Path) -> None:
    register("settled", lambda *where: find_schedule({})(*where))
    section = {"schedule": "settled", "extra_warmup": 0, "timeout": "auto"}
    found = settle(tmp_path, {"pipeline": section}, "--pipeline-schedule", "settled")
    assert found.deepspeed["pipeline"]["schedule"] == "settled"


def test_options_of_a_precision_reach_deepspeed(tmp_path: Path) -> None:
    found = settle(tmp_path, {"fp16": {"enabled": True, "initial_scale_power": 8}})
    assert found.deepspeed["fp16"] == {"enabled": True, "initial_scale_power": 8}


def test_the_file_in_the_repository_is_accepted() -> None:
    path = str(ROOT / "configs" / "ds_config_gpt2.json")
    found = resolve(parse(["--deepspeed-config", path]), 2, fast_bf16=False)
    assert (found.precision, found.clip_grad, found.log_interval, found.wall_clock_breakdown) == (
        "fp32",
        1.0,
        10,
        False,
    )


def test_the_file_of_the_original_is_accepted(tmp_path: Path) -> None:
    """The ds_config in CPM-Pretrain's README is accepted together with flags that give the same batch sizes."""
    content = {
        "train_batch_size": 128,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "gradient_clipping": 1.0,
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "initial_scale_power": 16,
        },
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": True,
    }
    argv = ("--batch-size", "4", "--gas", "16", "--pipe-parallel-size", "2", "--model-parallel-size", "2")
    found = settle(tmp_path, content, *argv, world=8)
    assert (found.precision, found.log_interval, found.wall_clock_breakdown) == ("fp16", 10, True)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "models").glob("*.json")), ids=lambda p: p.stem)
def test_model_presets_are_valid(path: Path) -> None:
    assert parse(["--config", str(path)]).model.num_layers > 0


def test_short_forms_mean_what_they_mean_in_deepspeed(tmp_path: Path) -> None:
    found = settle(tmp_path, {"fp16": True, "zero_optimization": True, "bf16": False, "gradient_clipping": None})
    assert (found.precision, found.zero_stage, found.clip_grad) == ("fp16", 1, 1.0)
    found = settle(tmp_path, {"fp16": None, "zero_optimization": False, "bf16": None})
    assert (found.precision, found.zero_stage) == ("fp32", 0)
    found = settle(tmp_path, {"fp16": {"enabled": True, "initial_scale_power": "16"}})
    assert found.precision == "fp16"
    found = settle(tmp_path, {"zero_optimization": {"stage": 1, "contiguous_gradients": None}})
    assert found.zero_stage == 1


@pytest.mark.parametrize(
    "more", [["--precision", "fp16"], ["--zero-stage", "0"], ["--no-overlap-grad-reduce"]], ids=str
)
def test_overlap_param_gather_is_refused_without_the_distributed_optimizer(tmp_path: Path, more: list[str]) -> None:
    argv = ["--overlap-param-gather", "--zero-stage", "1", "--precision", "fp32", "--pipe-parallel-size", "2"]
    assert settle(tmp_path, {}, *argv).distributed_optimizer
    with pytest.raises(ConfigError, match="--overlap-param-gather"):
        settle(tmp_path, {}, *argv, *more)


@pytest.mark.parametrize(
    "more",
    ["--precision fp16", "--zero-stage 2", "--zero-stage 3", "--zero-stage 1 --no-overlap-grad-reduce"],
)
def test_muon_is_refused_where_deepspeed_shards_weights(tmp_path: Path, more: str) -> None:
    for fits in ("--precision fp32", "--precision bf16", "--precision fp64", "--precision fp32 --zero-stage 1"):
        assert settle(tmp_path, {}, "--optimizer", "muon", *fits.split()).clip_grad == 1.0
    with pytest.raises(ConfigError, match="--optimizer muon.*--zero-stage"):
        settle(tmp_path, {}, "--optimizer", "muon", "--precision", "fp32", *more.split())
    file = {"zero_optimization": {"stage": 1, "overlap_comm": True}}
    with pytest.raises(ConfigError, match="--optimizer muon.*--deepspeed-config"):
        settle(tmp_path, file, "--optimizer", "muon", "--precision", "fp32")


def test_values_that_are_auto_count_as_absent(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    zero = {"stage": "auto", "reduce_bucket_size": "auto", "overlap_comm": False}
    path.write_text(json.dumps({"zero_optimization": zero, "fp16": {"enabled": True, "loss_scale": "auto"}}))
    resolved = resolve(parse(["--deepspeed-config", str(path)]), 1, False)
    assert resolved.deepspeed["zero_optimization"] == {"stage": 1, "overlap_comm": False}
    assert resolved.deepspeed["fp16"] == {"enabled": True}
