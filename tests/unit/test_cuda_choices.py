"""Settings that choose kernels on CUDA devices: what they switch on, and which devices and settings they refuse."""

from collections.abc import Iterator

import pytest
import torch

from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron.ranks import device
from megatron.ranks.initialize import initialize_megatron
from tests.support import on_ranks

SIZES = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8"
CUDA = torch.device("cuda")


@pytest.fixture
def cudnn() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_version_of_flash_attention_is_activated_instead_of_cudnn(
    cudnn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    activated: list[str] = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    torch.backends.cuda.enable_cudnn_sdp(True)
    device.use_flash_attention("FA3", CUDA)
    assert activated == ["FA3"]
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_version_that_cannot_be_activated_is_refused(cudnn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the flag, and the package, the unknown version or the version of torch."""
    with pytest.raises(ValueError, match="--flash-attention-impl FA3 .*cpu"):
        device.use_flash_attention("FA3", torch.device("cpu"))
    with pytest.raises(ValueError, match="--flash-attention-impl FA3 .*flash_attn_interface"):
        device.use_flash_attention("FA3", CUDA)
    with pytest.raises(ValueError, match="--flash-attention-impl FA9 "):
        device.use_flash_attention("FA9", CUDA)
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
    with pytest.raises(ValueError, match=f"--flash-attention-impl FA3.*{torch.__version__.split('+')[0]}"):
        device.use_flash_attention("FA3", CUDA)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--tp-comm-overlap", "--model-parallel-size"),
        ("--tp-comm-overlap --model-parallel-size 2 --no-sequence-parallel", "--sequence-parallel"),
        ("--tp-comm-overlap --model-parallel-size 2 --precision fp8", "--precision fp8"),
        ("--tp-comm-overlap --model-parallel-size 2 --compile", "--compile"),
    ],
)
def test_overlap_is_refused_where_it_has_no_kernels(flags: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse([*SIZES.split(), *flags.split()])


def _start(problem: str | None, flags: str) -> None:
    if problem is None:
        device.symmetric_memory_problem = lambda *_: None  # type: ignore[assignment]
    initialize_megatron(parse(f"{SIZES} --tp-comm-overlap --model-parallel-size 2 {flags}".split()))


def _refused(problem: str | None, flags: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        _start(problem, flags)


def test_overlap_needs_devices_that_share_memory_and_sequence_parallelism() -> None:
    on_ranks(2, _refused, "", "--sequence-parallel", "--tp-comm-overlap .*cpu")
    on_ranks(2, _refused, None, "", "--sequence-parallel")
    on_ranks(2, _start, None, "--sequence-parallel")
