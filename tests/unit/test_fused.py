"""Functions that CUDA runs compiled equal their eager definitions and torch; some are compiled for the CPU here."""

import pytest
import torch
import torch.nn.functional as F

from megatron import mpu
from megatron.mpu import cross_entropy
from tds import buckets
from tests.gpu.fused import FUNCTIONS, PADDED, TOKENS, VOCAB, changed_weights, compiled_equals_eager, draw


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 0.05])
@pytest.mark.parametrize("fused", [False, True])
def test_losses_and_gradient_equal_torch(
    fused: bool, z_loss: float, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "on_cuda", lambda _: fused)
    values, weight = draw(TOKENS, PADDED).mul(3), draw(TOKENS, seed=1)
    target = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(2))
    logits, plain = values.clone().requires_grad_(), values.clone().requires_grad_()
    loss, z = mpu.vocab_parallel_losses(logits, target, VOCAB, smoothing, z_loss, mpu.ALONE)
    (loss * weight).sum().backward()
    real = plain[:, :VOCAB]
    expected = F.cross_entropy(real, target, reduction="none", label_smoothing=smoothing)
    of_z = z_loss * real.logsumexp(-1).square()
    ((expected + of_z) * weight).sum().backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(z, of_z)
    torch.testing.assert_close(logits.grad, plain.grad)
    assert torch.equal(logits.detach(), values)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_equals_eager(name: str) -> None:
    compiled_equals_eager(name, torch.device("cpu"))


def testchanged_weights_replace_their_exact_values() -> None:
    exact, seen = changed_weights()
    before = exact.clone()
    buckets.adopt_changes(exact, seen)
    changed = torch.zeros(1000, dtype=torch.bool)
    changed[[3, 500, 999]] = True
    assert torch.equal(exact[~changed], before[~changed])
    assert torch.equal(exact[changed], seen[changed].float())
