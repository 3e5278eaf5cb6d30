"""Functions that CUDA runs compiled equal their eager definitions and torch; some are compiled for the CPU here."""

import pytest
import torch
import torch.nn.functional as F

from megatron import mpu
from megatron.mpu import cross_entropy
from tds import buckets
from tests.gpu.fused import FUNCTIONS, PADDED, TOKENS, VOCAB, changed_weights, compiled_equals_eager, draw
from tests.support import covering


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 0.05])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradient_equal_torch(
    dtype: torch.dtype, fused: bool, z_loss: float, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "uses_fused_loss", lambda _: fused)
    values, weight = draw(TOKENS, PADDED).mul(3).to(dtype), draw(TOKENS, seed=1)
    target = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(2))
    logits, plain = values.clone().requires_grad_(), values.float().requires_grad_()
    loss, z = mpu.vocab_parallel_losses(logits, target, VOCAB, smoothing, z_loss, mpu.TRIVIAL_AXIS)
    (loss * weight).sum().backward()
    real = plain[:, :VOCAB]
    expected = F.cross_entropy(real, target, reduction="none", label_smoothing=smoothing)
    of_z = z_loss * real.logsumexp(-1).square()
    ((expected + of_z) * weight).sum().backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(z, of_z)
    torch.testing.assert_close(logits.grad, plain.grad.to(dtype))
    assert torch.equal(logits.detach(), values)


@pytest.mark.parametrize("name", covering(list(FUNCTIONS), lambda name: not name.startswith("gradient_of")))
def test_compiled_equals_eager(name: str) -> None:
    compiled_equals_eager(name, torch.device("cpu"))


def test_the_loss_of_a_sure_token_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest logit is subtracted before anything is rounded, so large logits do no harm."""
    monkeypatch.setattr(cross_entropy, "uses_fused_loss", lambda _: True)
    logits = torch.tensor([[1000.0, 990.0], [-1000.0, -1010.0]])
    loss, _ = mpu.vocab_parallel_losses(logits, torch.tensor([0, 0]), axis=mpu.TRIVIAL_AXIS)
    torch.testing.assert_close(loss, F.cross_entropy(logits.double(), torch.tensor([0, 0]), reduction="none").float())


def test_no_tokens_have_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "uses_fused_loss", lambda _: True)
    logits = torch.zeros(0, 5, requires_grad=True)
    mpu.vocab_parallel_cross_entropy(logits, torch.zeros(0, dtype=torch.int64), axis=mpu.TRIVIAL_AXIS).sum().backward()
    assert logits.grad is not None and logits.grad.shape == (0, 5)


def test_changed_weights_replace_their_exact_values() -> None:
    exact, seen = changed_weights()
    before = exact.clone()
    buckets.copy_changed_elements(exact, seen)
    changed = torch.zeros(1000, dtype=torch.bool)
    changed[[3, 500, 999]] = True
    assert torch.equal(exact[~changed], before[~changed])
    assert torch.equal(exact[changed], seen[changed].float())
