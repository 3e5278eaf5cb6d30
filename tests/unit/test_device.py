"""Tests of code for GPUs (bf16, attention kernels, TF32, timers) on a CPU, with stand-ins for the GPU."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from megatron.model.attention_kernels import select_sdpa_kernels
from megatron.mpu import TRIVIAL_AXIS
from megatron.mpu.data import default_device
from megatron.ranks import device
from megatron.timers import Timers

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def test_bf16_that_is_emulated_is_not_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """`has_fast_bf16` is false for a GPU that only emulates bf16, such as a V100, although torch reports support."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert not device.has_fast_bf16(CUDA)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert device.has_fast_bf16(CUDA)


def test_cudnn_gets_no_mask() -> None:
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)

    def choice(kind: torch.device, mask: Any) -> set[SDPBackend]:
        with select_sdpa_kernels(SimpleNamespace(device=kind), mask):  # type: ignore[arg-type]
            return set(_cur_sdpa_kernel_backends())

    every = choice(CUDA, None)
    assert SDPBackend.CUDNN_ATTENTION in every
    assert choice(CUDA, mask) == {SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH}
    assert isinstance(select_sdpa_kernels(SimpleNamespace(device=CPU), mask), nullcontext)  # type: ignore[arg-type]
    assert choice(CUDA, None) == every


def test_tf32_is_spoken_of_where_it_could_be_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=False))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1" in (device.precision_note(CUDA, "fp32") or "")
    assert device.precision_note(CUDA, "bf16") is None and device.precision_note(CPU, "fp32") is None
    torch.backends.cuda.matmul.allow_tf32 = True
    assert device.precision_note(CUDA, "fp32") is None


def test_tf32_of_torchs_newer_setting_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Matmul:
        """Settings of matmuls after a script has set the newer one: torch refuses to read the older one."""

        fp32_precision = "tf32"

        @property
        def allow_tf32(self) -> bool:
            raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch.backends.cuda, "matmul", Matmul())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert device.precision_note(CUDA, "fp32") is None
    Matmul.fp32_precision = "ieee"
    assert device.precision_note(CUDA, "fp32") is not None


def test_a_device_before_ampere_is_not_advised_to_use_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """V100 and T4 have neither TF32 nor bf16; torch reports bf16 there only with emulation."""
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=False))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert device.precision_note(CUDA, "fp32") is None


class _Event:
    """A stand-in for torch.Event; each event is reached one second after the event before."""

    reached = 0.0

    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        assert enable_timing
        self.at: float | None = None

    def record(self) -> None:
        _Event.reached += 1000.0
        self.at = _Event.reached

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "_Event") -> float:
        assert self.at is not None and end.at is not None
        return end.at - self.at


def test_timers_take_what_the_device_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", _Event)
    timers = Timers(CUDA)
    for _ in range(2):
        with timers("forward"):
            pass
    with timers("step"), timers("inside"):
        pass
    assert timers.take() == {"forward": 2.0, "inside": 1.0, "step": 3.0}
    assert timers.take() == {}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L4", None),
        ("NVIDIA H200", 989.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA H800 PCIe", 756.0),
        ("NVIDIA H800 NVL", None),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA RTX A1000", None),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("Tesla V100-PCIE-16GB", 112.0),
        ("Tesla V100S-PCIE-32GB", 130.0),
    ],
)
def test_the_peak_is_that_of_the_device_and_its_form(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peaks are those of the vendor's data sheets; cards of one generation differ by form factor."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert device.peak_tflops(CUDA) == peak


@pytest.mark.parametrize(("kind", "expected"), [("mps", "cpu"), ("cuda", "cuda"), (None, "cpu")])
def test_groups_and_runs_compute_on_one_device(
    kind: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on a Mac uses the CPU, so the batches of `broadcast_data` may not go to MPS."""
    accelerator = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: accelerator)
    assert default_device(TRIVIAL_AXIS).type == expected
    assert device.has_accelerator() == (expected != "cpu")
