"""What must hold on an accelerator. Each check runs short trainings in processes of their own and returns what it found.

Without an accelerator "here" is the CPU, and the checks still run: that is their dry run.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron import device

ROOT = Path(__file__).resolve().parent.parent.parent

GPT2 = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 40 --vocab-size 64 --batch-size 4 --lr 3e-3 "
    "--warmup 0 --lr-decay-style constant --make-vocab-size-divisible-by 64"
)
T5 = (
    f"{GPT2} --enc-seq-length 40 --dec-seq-length 20 --normalization rmsnorm --position-embedding relative "
    "--no-scale-attention --no-hidden-bias --activation gated-gelu --no-tie-embeddings"
)
DRY = "--hidden-dropout 0 --attention-dropout 0"
NO_DEVICE = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


class Impossible(Exception):
    """This machine lacks what the check needs; the message says what."""


def train(flags: str, on_cpu: bool = False, **more: Any) -> dict[str, Any]:
    """See worker.train. Raises RuntimeError with the end of what it said, if it fails."""
    return json.loads(_train(flags, on_cpu or not device.available(), json.dumps(more)))  # type: ignore[no-any-return]


@functools.cache
def _train(flags: str, on_cpu: bool, more: str) -> str:
    """What a worker prints; the same training is done once, but those that begin or end at files."""
    command = [sys.executable, "-m", "tests.gpu.worker", json.dumps({"flags": flags, **json.loads(more)})]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(NO_DEVICE if on_cpu else {})}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{flags}: {done.stderr.strip()[-1500:]}")
    return done.stdout.splitlines()[-1]


def close(found: list[float], wanted: list[float], tolerance: float) -> str:
    worst = float(np.abs(np.array(found) / np.array(wanted) - 1).max())
    assert worst <= tolerance, f"off by {worst:.1e}, more than {tolerance:g}: {found} against {wanted}"
    return f"within {worst:.1e} (at most {tolerance:g})"


def fp32_equals_the_cpu() -> str:
    return "; ".join(
        f"{name} {close(train(f'{flags} {DRY} --precision fp32')['losses'], train(f'{flags} {DRY} --precision fp32', True)['losses'], 1e-3)}"
        for name, flags in (("GPT-2", GPT2), ("T5", T5))
    )


def bf16_follows_the_cpu_in_fp32() -> str:
    """bf16 keeps 8 bits: losses may leave fp32's by the rounding of activations."""
    return "; ".join(
        f"{name} {close(train(f'{flags} {DRY} --precision bf16')['losses'], train(f'{flags} {DRY} --precision fp32', True)['losses'], 3e-2)}"
        for name, flags in (("GPT-2", GPT2), ("T5", T5))
    )


def flash_equals_math() -> str:
    """torch's fused attention kernels against its plain one, causal, with gradients."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    here = device.current()
    dice = torch.Generator().manual_seed(1)
    inputs = [torch.randn(2, 4, 64, 32, generator=dice).to(here, torch.bfloat16).requires_grad_() for _ in range(3)]

    def run(backend: SDPBackend) -> list[torch.Tensor]:
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
        return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]

    worst = 0.0
    for flash, math in zip(run(SDPBackend.FLASH_ATTENTION), run(SDPBackend.MATH), strict=True):
        torch.testing.assert_close(flash, math, rtol=3e-2, atol=3e-2)
        worst = max(worst, (flash - math).abs().max().item())
    return f"largest difference {worst:.1e} in bf16"


def fp16_finds_its_scale() -> str:
    """The scale begins far too high: steps are skipped and it falls, then the loss does."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}, file)
        file.flush()
        found = train(f"{GPT2} {DRY} --precision fp16 --deepspeed-config {file.name}", steps=30)
    skipped, scales = sum(found["skipped"]), found["loss_scales"]
    assert skipped, f"no step was skipped at a scale of 2**24: {scales}"
    assert scales[-1] < 2**24
    assert found["losses"][-1] < found["losses"][0] - 0.5
    return f"{skipped} steps skipped, scale {scales[-1]:g}, loss {found['losses'][0]:.2f} to {found['losses'][-1]:.2f}"


def recomputation_and_offloading_change_nothing() -> str:
    flags = f"{GPT2} --hidden-dropout 0.1 --attention-dropout 0.1 --precision fp32"
    kept = train(flags)["losses"]
    whole = close(train(f"{flags} --checkpoint-activations")["losses"], kept, 1e-5)
    away = close(train(f"{flags} --offload-activations")["losses"], kept, 1e-5)
    return f"offloaded {away}, whole layers {whole}, attention {close(train(f'{flags} --checkpoint-attention')['losses'], kept, 1e-5)}"


def checkpoints_go_both_ways() -> str:
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise Impossible("safetensors is not installed") from None
    flags = f"{GPT2} {DRY} --precision fp32"
    said = []
    for first_on_cpu in (False, True) if device.available() else (True,):
        with tempfile.TemporaryDirectory() as folder:
            written = train(flags, first_on_cpu, save=folder)
            read = train(flags, not first_on_cpu, load=folder, steps=0)
            assert read["weights"] == written["weights"], "weights changed on their way"
            with_other = train(flags, not first_on_cpu, load=folder, steps=4)
            with_same = train(flags, first_on_cpu, load=folder, steps=4)
        said.append(close(with_other["losses"], with_same["losses"], 1e-3))
    return f"weights the same; going on from the other's: {', '.join(said)}"


def an_offloaded_optimizer_agrees() -> str:
    """bf16 gradients are rounded once more on their way to the CPU."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, file)
        file.flush()
        away = train(f"{GPT2} {DRY} --precision bf16 --deepspeed-config {file.name}")
    here = train(f"{GPT2} {DRY} --precision bf16")
    return f"{close(away['losses'], here['losses'], 1e-2)}, {away['peak_mb']:,.0f} of {here['peak_mb']:,.0f} MB"


def compiled_layers_agree() -> str:
    flags = f"{GPT2} {DRY} --precision fp32"
    return close(train(f"{flags} --compile")["losses"], train(flags)["losses"], 1e-4)


def recomputation_saves_memory() -> str:
    flags = f"{GPT2} --num-layers 8 --seq-length 512 --batch-size 8 --precision bf16 --attention-dropout 0.1"
    if not device.available():
        raise Impossible("the peak of a CPU process is not that of its tensors")
    kept = train(flags, steps=2)
    peaks = {
        name: train(f"{flags} {name}", steps=2)["peak_mb"]
        for name in ("--checkpoint-attention", "--checkpoint-activations", "--offload-activations")
    }
    assert peaks["--offload-activations"] < kept["peak_mb"]
    assert peaks["--checkpoint-activations"] < peaks["--checkpoint-attention"] < kept["peak_mb"]
    return f"{kept['peak_mb']:,.0f} MB; " + ", ".join(f"{name} {mb:,.0f} MB" for name, mb in peaks.items())


CHECKS: dict[str, Callable[[], str]] = {
    check.__name__: check
    for check in (
        fp32_equals_the_cpu, bf16_follows_the_cpu_in_fp32, flash_equals_math, fp16_finds_its_scale,
        recomputation_and_offloading_change_nothing, checkpoints_go_both_ways, an_offloaded_optimizer_agrees,
        compiled_layers_agree, recomputation_saves_memory,
    )
}  # fmt: skip
