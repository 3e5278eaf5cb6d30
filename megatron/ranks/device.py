"""The device of this process. No other module queries torch about accelerators."""

import ctypes
import os
import re
import resource
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from .._torch import has_amx_tiles, scaled_matmul


def has_accelerator() -> bool:
    """Return whether torch can use an accelerator (CUDA, ROCm, NPU, XPU) on this machine."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type not in ("cpu", "mps")


def current_device() -> torch.device:
    """Return this rank's device: the accelerator with the index LOCAL_RANK, or the CPU."""
    if not has_accelerator():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def supported_accelerator() -> str | None:
    """Return the kind of accelerator that this build of torch supports, None for a CPU-only build."""
    version = torch.version
    if version.cuda:
        return f"CUDA {version.cuda}"
    if version.hip:
        return f"ROCm {version.hip}"
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type in ("cpu", "mps"):
        return None
    return accelerator.type


def default_backend(device: torch.device) -> str:
    """Return the torch.distributed backend for `device`."""
    return "gloo" if device.type == "cpu" else torch.distributed.get_default_backend_for_device(device)


def has_fast_bf16(device: torch.device) -> bool:
    """Return whether bf16 is faster than fp32 on `device` for models of any size.

    Of CPUs, this is true for those with AMX tiles. On CPUs with AVX512_BF16 but without AMX, bf16 is faster only for
    large models (docs/benchmarks.md). On CPUs without AVX512_BF16 and AMX, bf16 is never faster.
    """
    if device.type == "cpu":
        return has_amx_tiles()
    if device.type != "cuda":
        return True
    # V100 and T4 only emulate bf16, which is slow.
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def fp8_problem(device: torch.device) -> str | None:
    """Return why `device` cannot multiply in fp8 with one scale per row, or None if it can."""
    if device.type == "cuda" and not torch.version.hip:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            return f"its compute capability is {capability[0]}.{capability[1]}, and fp8 needs 8.9 or higher"
    try:
        x = torch.zeros(16, 16, device=device).to(torch.float8_e4m3fn)
        scales = torch.ones(16, 1, device=device)
        scaled_matmul(x, x, scales, scales, None)  # only to see whether it fails
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        return f"this build of torch has no such kernel for it ({str(error).splitlines()[0]})"
    return None


def use_flash_attention(impl: str, device: torch.device) -> None:
    """Make torch's attention use a version of FlashAttention, such as FA3, instead of cuDNN and FlashAttention 2.

    Raises ValueError if the device, this version of torch or the installed packages do not support the version.
    """
    if device.type != "cuda":
        raise ValueError(f"--flash-attention-impl {impl} is for CUDA devices, not for a {device.type}; leave it out")
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if activate is None:
        raise ValueError(f"--flash-attention-impl {impl}: torch {torch.__version__} cannot activate it; update torch")
    try:
        activate(impl)
    except (ImportError, RuntimeError, ValueError) as error:
        raise ValueError(f"--flash-attention-impl {impl} cannot be used: {str(error).splitlines()[0]}") from None
    torch.backends.cuda.enable_cudnn_sdp(False)  # on Hopper, torch would prefer cuDNN's kernel


def precision_note(device: torch.device, precision: str) -> str | None:
    """Return a note for the user if fp32 matmuls run without the TF32 that this CUDA device has, else None."""
    if precision != "fp32" or device.type != "cuda":
        return None
    matmul = torch.backends.cuda.matmul
    try:
        has_tf32 = matmul.allow_tf32
    except RuntimeError:  # the user's script has set torch's newer setting
        has_tf32 = matmul.fp32_precision == "tf32"
    if has_tf32 or not has_fast_bf16(device):  # devices without fast bf16, before Ampere, do not have TF32 either
        return None
    return (
        "fp32 matmuls run without TF32, which would be several times as fast; TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 turns "
        "TF32 on (10 instead of 23 mantissa bits), --precision bf16 is faster still"
    )


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def start_copy_to_host(x: Tensor) -> Callable[[], list[int]]:
    """Queue a copy of x [n], a tensor on an accelerator, to the host; return a function that returns the values.

    The returned function waits only until the device has made the copy.
    """
    host = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
    event = torch.Event(x.device)
    event.record()

    def read() -> list[int]:
        event.synchronize()
        return host.tolist()

    return read


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak memory of this process in MB (10^6 bytes): allocated on the accelerator, or resident in RAM."""
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6  # bytes on macOS, KiB on Linux
    return torch.accelerator.max_memory_allocated(device) / 1e6


def total_memory(device: torch.device) -> float | None:
    """Return the memory size in bytes: of the accelerator, or of RAM plus swap on a CPU; None if unknown."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        if not hasattr(module, "mem_get_info"):
            return None
        _, total = module.mem_get_info(device)
        return float(total)
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            meminfo = dict(line.split(":", 1) for line in file)
        kib = [float(meminfo[name].split()[0]) for name in ("MemTotal", "SwapTotal")]
        return 1024.0 * sum(kib)
    except (OSError, KeyError, ValueError):
        return None


def keep_freed_memory(device: torch.device) -> None:
    """Keep glibc from returning freed memory to the kernel, which zeroes every page before the next use.

    This saves time because every step allocates and frees its activations and logits. Only the CPU needs this: for
    accelerators, torch has a caching allocator.
    """
    if device.type != "cpu" or not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):  # only glibc has both functions
        libc.malloc_trim(0)  # give back what the start of the process has left
        libc.mallopt(_M_MMAP_MAX, 0)  # no allocation by mmap, which is unmapped as soon as it is freed
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)  # keep up to 2 GiB, the largest value, at the end of the heap


_M_MMAP_MAX = -4  # constants of mallopt, from malloc.h
_M_TRIM_THRESHOLD = -1

# Words of the device's name -> peak dense bf16 TFLOP/s (V100: fp16) from the vendors' data sheets, None if unknown. The
# first words that occur in the name count. On other devices, no MFU is reported.
PEAK_TFLOPS = {
    "MIG": None, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H200 NVL": 835.0, "H800 PCIe": 756.0, "H800 NVL": None,
    "V100-PCIE": 112.0, "V100-FHHL": None, "GB200": 2500.0, "B200": 2250.0, "GH200": 989.0, "H200": 989.0,
    "H100": 989.0, "A100": 312.0, "A800": 312.0, "H800": 989.0, "V100S": 130.0, "V100": 125.0,
}  # fmt: skip


def peak_tflops(device: torch.device) -> float | None:
    """Return the peak bf16 (V100: fp16) TFLOP/s of the device, None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    # The first match counts: "H100 PCIe" comes before "H100". Whole words match, so "A100X" is not "A100".
    for words, peak in PEAK_TFLOPS.items():
        if re.search(rf"\b{words}\b", name):
            return peak
    return None
