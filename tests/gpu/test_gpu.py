"""The checks of `python -m tests.gpu` pass on an accelerator, or on the CPU as a dry run if there is none."""

from pathlib import Path

import pytest

from megatron.ranks import device
from tests.support import FULL, command, covering

from .checks import CHECKS, Impossible

# Checks that run without an accelerator only with --full, since other tests cover their features on a CPU.
SEEN_ELSEWHERE = {
    "recomputation_and_offloading_change_nothing",
    "compiled_layers_agree",
    "whole_runs_train_and_resume",
    "kernels_of_a_step",
    "fused_functions_agree",
    "bf16_follows_the_cpu_in_fp32",
    "fp32_equals_the_cpu",
    "experts_muon_and_fp8_follow_the_cpu",
    "checkpoints_go_both_ways",
    "fp16_finds_its_scale",
    "an_offloaded_optimizer_agrees",
}
BY_DEFAULT = set(CHECKS) - (set() if device.has_accelerator() else SEEN_ELSEWHERE)


@pytest.mark.parametrize("name", covering(list(CHECKS), BY_DEFAULT.__contains__))
def test_check(name: str) -> None:
    try:
        assert CHECKS[name]()
    except Impossible as error:
        pytest.skip(str(error))


@FULL
def test_the_benchmark_runs(tmp_path: Path) -> None:
    """The benchmark runs a tiny model on any device and prints a full table and a profile."""
    flags = "--dry-run --no-compile --models t5_base llama_8b_4_layers --rounds 1 --steps 1 --profile"
    done = command("python", "benchmarks/gpu.py", *flags.split(), str(tmp_path / "profile.txt"))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if "ours |" in line or "Hugging Face |" in line]
    assert len(rows) == 4
    assert "failed" not in done.stdout
    assert "scaled_dot_product" in (tmp_path / "profile.txt").read_text()


def test_the_checks_need_torch_deepspeed_and_numpy_alone() -> None:
    """The checks import nothing besides torch, DeepSpeed and numpy, so a GPU machine needs no other packages."""
    others = "safetensors sentencepiece jieba rjieba tokenizers regex zstandard tensorboard matplotlib"
    code = (
        f"import sys; sys.modules.update(dict.fromkeys('{others}'.split())); import tests.gpu.worker, tests.gpu.checks"
    )
    done = command("python", "-c", code)
    assert done.returncode == 0, done.stderr[-1000:]
