"""Checks of training and generation on an accelerator, each of which returns its findings as text.

Each training run is short and has its own process. Without an accelerator, the checks run on the CPU, as a dry run.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.ranks import device

from .attention import context_kernels_agree, packed_attention_agrees
from .fused import FUNCTIONS, compiled_equals_eager

ROOT = Path(__file__).resolve().parent.parent.parent

GPT2 = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 40 --vocab-size 64 --batch-size 4 --lr 3e-3 "
    "--warmup 0 --lr-decay-style constant --make-vocab-size-divisible-by 64 --no-compile"
)
T5 = (
    f"{GPT2} --family t5 --enc-seq-length 40 --dec-seq-length 20 --normalization rmsnorm --position-embedding relative "
    "--no-scale-attention --no-hidden-bias --activation gated-gelu --no-tie-embeddings"
)
LLAMA = (
    f"{GPT2} --family llama --num-key-value-heads 2 --position-embedding rope --normalization rmsnorm "
    "--activation swiglu --qk-norm --no-hidden-bias --no-tie-embeddings --sliding-window 24"
)
RECOMPUTE = "--recompute-modules norm qkv activation"
DRY = "--hidden-dropout 0 --attention-dropout 0"
SECONDS = 300  # time limit of one training run
NO_DEVICE = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


class Impossible(Exception):
    """Raised by a check that this machine cannot do; the message names what is missing."""


_one_at_a_time: dict[Any, threading.Lock] = defaultdict(threading.Lock)  # `train`'s arguments -> lock


def train(flags: str, on_cpu: bool = False, **more: Any) -> dict[str, Any]:
    """Return the result of `worker.train(flags, **more)` in a new process; equal calls share one process.

    Raises RuntimeError with the end of the process's output if the process fails or times out.
    """
    key = flags, on_cpu or not device.has_accelerator(), json.dumps(more)
    with _one_at_a_time[key]:
        return json.loads(_train(*key))  # type: ignore[no-any-return]


@functools.cache
def _train(flags: str, on_cpu: bool, more: str) -> str:
    """Run a worker process; return the last line of its output, which is the worker's result as JSON."""
    given = {**({"flags": flags} if flags else {}), **json.loads(more)}
    command = [sys.executable, "-m", "tests.gpu.worker", json.dumps(given)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(NO_DEVICE if on_cpu else {})}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        output = (error.stderr or b"").decode(errors="replace").strip()
        raise RuntimeError(f"{flags}: not finished after {SECONDS} s; last output: {output[-500:]}") from None
    if done.returncode:
        raise RuntimeError(f"{flags}: {done.stderr.strip()[-1500:]}")
    return done.stdout.splitlines()[-1]


def compare_losses(found: list[float], wanted: list[float], tolerance: float) -> str:
    worst = float(np.abs(np.array(found) / np.array(wanted) - 1).max())
    assert worst <= tolerance, f"off by {worst:.1e}, more than {tolerance:g}: {found}, expected {wanted}"
    return f"within {worst:.1e} (at most {tolerance:g})"


def _like_the_cpu(flags: str, precision: str, tolerance: float) -> str:
    """Compare the losses in `precision` on this device with those in fp32 on the CPU; return a report."""
    found = train(f"{flags} {DRY} --precision {precision}")["losses"]
    wanted = train(f"{flags} {DRY} --precision fp32", True)["losses"]
    return compare_losses(found, wanted, tolerance)


def _families_like_the_cpu(precision: str, tolerance: float) -> str:
    models = (("GPT-2", GPT2), ("Llama", LLAMA), ("T5", T5))
    return "; ".join(f"{name} {_like_the_cpu(flags, precision, tolerance)}" for name, flags in models)


def fp32_equals_the_cpu() -> str:
    return _families_like_the_cpu("fp32", 1e-3)


def bf16_follows_the_cpu_in_fp32() -> str:
    """Check that bf16 losses equal fp32 losses on the CPU, up to the rounding of activations to bf16."""
    return _families_like_the_cpu("bf16", 3e-2)


EXPERTS = f"{LLAMA} --num-experts 4 --experts-per-token 2"


def experts_muon_and_fp8_follow_the_cpu() -> str:
    """Compare losses with those in fp32 on the CPU: experts, whose matmuls are grouped in bf16 on CUDA, Muon, and fp8.

    The result says why fp8 was not run if this device has no kernel for it.
    """
    findings = []
    for name, flags, precision, tolerance in (
        ("experts", EXPERTS, "fp32", 1e-3),
        ("experts", EXPERTS, "bf16", 3e-2),
        ("Muon", f"{GPT2} --optimizer muon", "fp32", 1e-3),
        ("Muon", f"{GPT2} --optimizer muon", "bf16", 3e-2),
        ("GPT-2", GPT2, "fp8", 5e-2),
    ):
        if precision == "fp8" and (problem := device.fp8_problem(device.current_device())):
            findings.append(f"fp8 not run: {problem}")
        else:
            findings.append(f"{name} in {precision} {_like_the_cpu(flags, precision, tolerance)}")
    return "; ".join(findings)


def fused_functions_agree() -> str:
    """Check the functions that CUDA runs compiled against their eager definitions on this device."""
    for name in FUNCTIONS:
        compiled_equals_eager(name, device.current_device())
    return ", ".join(FUNCTIONS)


def attention_kernels_agree() -> str:
    """Check that torch's attention kernels give the outputs and gradients of attention computed in fp32.

    If cuDNN's kernel gets a mask or bias, wrong values are only reported, since `select_sdpa_kernels` never selects it
    then.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from megatron.model.attention_kernels import select_sdpa_kernels

    here, dice = device.current_device(), torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=dice).to(here, torch.bfloat16).requires_grad_()

    findings = []
    for length in (64, 192, 256):  # one multiple of 128, and two lengths that are 64 modulo 128
        documents = (torch.arange(length) // 48).to(here)
        mask = (documents[:, None] == documents[None]) & torch.ones(length, length, device=here).tril().bool()
        inputs, bias = [draw(2, 4, length, 64) for _ in range(3)], draw(1, 4, length, length)
        for form, given in (("causal", {"is_causal": True}), ("documents", {"attn_mask": mask[None, None]}),
                            ("bias", {"attn_mask": bias})):  # fmt: skip
            learns = [*inputs, bias] if form == "bias" else inputs
            wanted = _attend(
                [t.float() for t in inputs], {k: v.float() if v is bias else v for k, v in given.items()}, learns
            )
            names = "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"
            choices: dict[str, Any] = {b: functools.partial(sdpa_kernel, getattr(SDPBackend, b)) for b in names}
            choices["ours"] = functools.partial(select_sdpa_kernels, inputs[0], given.get("attn_mask"))
            for name, choice in choices.items():
                try:
                    with choice():
                        found = _attend(inputs, given, learns)
                except RuntimeError:
                    continue  # this device lacks this kernel for this kind of mask
                worst = max((f.float() - w.float()).abs().max().item() for f, w in zip(found, wanted, strict=True))
                if name == "CUDNN_ATTENTION" and form != "causal":
                    findings.append(f"{name} {form} {length}: {worst:.1e}, never selected")
                else:
                    assert worst <= 0.1, f"{name} with {form} of {length}: off by {worst:.1e}"
                    if length == 192:
                        findings.append(f"{name} {form}: {worst:.1e}")
    return "; ".join(findings)


def _attend(inputs: list[torch.Tensor], given: dict[str, Any], learns: list[torch.Tensor]) -> list[torch.Tensor]:
    out = torch.nn.functional.scaled_dot_product_attention(*inputs, **given)
    return [out, *torch.autograd.grad(out.float().square().mean() * 100, learns)]


def fp16_finds_its_scale() -> str:
    """Check that an fp16 run with an initial loss scale of 2^24 skips steps, lowers the scale and then learns."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}, file)
        file.flush()
        found = train(f"{GPT2} {DRY} --precision fp16 --deepspeed-config {file.name}", steps=30)
    skipped, scales = sum(found["skipped"]), found["loss_scales"]
    assert skipped, f"no step was skipped at an initial loss scale of 2**24; scales: {scales}"
    assert scales[-1] < 2**24
    assert found["losses"][-1] < found["losses"][0] - 0.5
    return f"{skipped} steps skipped, scale {scales[-1]:g}, loss {found['losses'][0]:.2f} to {found['losses'][-1]:.2f}"


# A model with at least 1 MiB of activations in each layer, since smaller activations are not offloaded.
LARGE = f"{GPT2} --hidden-size 128 --seq-length 512 --batch-size 8"


def recomputation_and_offloading_change_nothing() -> str:
    flags = f"{LARGE} --hidden-dropout 0.1 --attention-dropout 0.1 --precision fp32"
    kept = train(flags, steps=3)["losses"]
    return ", ".join(
        f"{name} {compare_losses(train(f'{flags} {name}', steps=3)['losses'], kept, 1e-5)}"
        for name in ("--checkpoint-activations", "--checkpoint-attention", "--offload-activations", RECOMPUTE)
    )


def checkpoints_go_both_ways() -> str:
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise Impossible("safetensors is not installed") from None
    flags = f"{GPT2} {DRY} --precision fp32"
    findings = []
    for first_on_cpu in (False, True) if device.has_accelerator() else (True,):
        with tempfile.TemporaryDirectory() as folder:
            written = train(flags, first_on_cpu, save=folder)
            read = train(flags, not first_on_cpu, load=folder, steps=0)
            assert read["weights"] == written["weights"], "weights differ after a save and a load"
            with_other = train(flags, not first_on_cpu, load=folder, steps=4)
            with_same = train(flags, first_on_cpu, load=folder, steps=4)
        findings.append(compare_losses(with_other["losses"], with_same["losses"], 1e-3))
    return f"weights equal; losses after resuming on the other device: {', '.join(findings)}"


def an_offloaded_optimizer_agrees() -> str:
    """Check that offloading the optimizer changes losses by at most 1%, due to one more rounding of bf16 gradients."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, file)
        file.flush()
        away = train(f"{GPT2} {DRY} --precision bf16 --deepspeed-config {file.name}")
    here = train(f"{GPT2} {DRY} --precision bf16")
    return (
        f"{compare_losses(away['losses'], here['losses'], 1e-2)}, {away['peak_mb']:,.0f} of {here['peak_mb']:,.0f} MB"
    )


# Names of attention kernels on CUDA (flash, memory-efficient, cuDNN) and of attention operations on a CPU.
ATTENTION = re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE)


def compiled_layers_agree() -> str:
    """Check that compiled layers give the losses of eager ones, in fp32 for GPT-2 and in bf16 for each family."""
    findings = []
    for name, flags, precision, tolerance in (
        ("GPT-2 in fp32", GPT2, "fp32", 1e-4),
        ("GPT-2", GPT2, "bf16", 1e-2),
        ("Llama", LLAMA, "bf16", 1e-2),
        ("T5", T5, "bf16", 1e-2),
    ):
        given = f"{flags} {DRY} --precision {precision}"
        found, eager = train(f"{given} --compile"), train(given)
        assert found["compiled_layers"] and not eager["compiled_layers"], f"{name}: {found}, {eager}"
        assert not found["graph_breaks"], f"{name}: {found['graph_breaks']} graph breaks"
        findings.append(f"{name} {compare_losses(found['losses'], eager['losses'], tolerance)}")
    return f"{'; '.join(findings)}; no graph breaks"


def whole_runs_train_and_resume() -> str:
    """Check runs with all that `run` does, and their resumes; layers are compiled where that is the default."""
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise Impossible("safetensors is not installed") from None
    for name, flags in (("GPT-2", GPT2), ("Llama", LLAMA), ("T5", T5)):
        found = train(f"{flags} {DRY}".replace("--no-compile", ""), whole=True)
        losses = found["through"]
        assert len(losses) == 8 and losses[-1] < losses[0] - 0.1, f"{name}: {found}"
        assert found["halves"] == losses, f"{name}: a resumed run differs: {found}"
    return "GPT-2, Llama and T5; resumes bit for bit"


def kernels_of_a_step() -> str:
    """Return the kernels of an eager and a compiled bf16 step of each family that take most of the time."""
    findings = []
    for name, flags in (("GPT-2", GPT2), ("Llama", LLAMA), ("T5", T5)):
        for compiled in ("--no-compile", "--compile"):
            found = train(f"{flags} {DRY} --precision bf16 {compiled}", kernels=True)["kernels"]
            attention = [kernel for kernel in found if ATTENTION.search(kernel)]
            assert attention, f"{name} {compiled}: none of these kernels computes attention: {found}"
            chosen = dict.fromkeys([*attention, *found[:6]])
            findings.append(f"\n    {name} {compiled}: {', '.join(kernel[:60] for kernel in chosen)}")
    return "".join(findings)


def groups_work_in_a_world_of_one() -> str:
    """Check the collectives of a run on each of its groups, with NCCL on CUDA, in a world of one rank."""
    found = train("", groups=True)
    return f"{found['backend']}, groups {'split off the world' if found['split'] else 'created one by one'}"


def texts_equal_the_cpu() -> str:
    """Check that greedy decoding, sampling and beam search give the same tokens on this device and the CPU in fp32."""
    from megatron.config.command_line import parse
    from megatron.model import GPT2Model, T5Model
    from megatron_tools.write.generation import GPT2Stepper, Sampling, Stepper, T5Stepper, beam_searches, sample

    prompts = torch.randint(64, (3, 9), generator=torch.Generator().manual_seed(2)).tolist()

    def written(flags: str, where: torch.device) -> list[list[int]]:
        config = parse(f"{flags} --init-method-std 0.2 --kernels torch".split())
        model: Any = (T5Model if config.is_t5 else GPT2Model)(config, parallel_output=False).eval().to(where)

        def reader() -> Stepper:
            return T5Stepper(model, prompts, 0) if config.is_t5 else GPT2Stepper(model, prompts, 40)

        found = [row for s in (Sampling(0), Sampling(0.8, 20, 0.9)) for row in sample(reader(), 2, 18, 63, s, seed=1)]
        return found + [ids for best in beam_searches(reader(), 3, 12, 63) for _, ids in best]

    for flags in (GPT2, T5):
        assert written(flags, device.current_device()) == written(flags, torch.device("cpu")), "texts differ from a CPU"
    return "GPT-2 and T5, 21 texts each"


def recomputation_saves_memory() -> str:
    flags = f"{GPT2} --num-layers 8 --seq-length 512 --batch-size 8 --precision bf16 --attention-dropout 0.1"
    if not device.has_accelerator():
        raise Impossible("the peak memory of tensors is known on accelerators only")
    kept = train(flags, steps=2)
    peaks = {
        name: train(f"{flags} {name}", steps=2)["peak_mb"]
        for name in ("--checkpoint-attention", "--checkpoint-activations", "--offload-activations", RECOMPUTE)
    }
    assert peaks["--offload-activations"] < kept["peak_mb"] and peaks[RECOMPUTE] < kept["peak_mb"]
    assert peaks["--checkpoint-activations"] < peaks["--checkpoint-attention"] < kept["peak_mb"]
    return f"{kept['peak_mb']:,.0f} MB; " + ", ".join(f"{name} {mb:,.0f} MB" for name, mb in peaks.items())


CHECKS: dict[str, Callable[[], str]] = {
    check.__name__: check
    for check in (
        fp32_equals_the_cpu, bf16_follows_the_cpu_in_fp32, experts_muon_and_fp8_follow_the_cpu,
        fused_functions_agree, attention_kernels_agree, fp16_finds_its_scale,
        recomputation_and_offloading_change_nothing, checkpoints_go_both_ways, an_offloaded_optimizer_agrees,
        compiled_layers_agree, whole_runs_train_and_resume, kernels_of_a_step,
        packed_attention_agrees, context_kernels_agree,
        groups_work_in_a_world_of_one, texts_equal_the_cpu, recomputation_saves_memory,
    )
}  # fmt: skip
