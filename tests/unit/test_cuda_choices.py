"""Settings that choose kernels on CUDA devices: what they switch on, and which devices and settings they refuse."""

from collections.abc import Iterator

import pytest
import torch

from megatron.ranks import device

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
