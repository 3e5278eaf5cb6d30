"""The output layer and cross-entropy, fused in chunks of tokens, have torch's gradients and need less memory."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tds
from megatron import mpu
from megatron.config.command_line import parse
from megatron.model import T5Model
from megatron.model.extra_losses import loss_per_token
from megatron.model.loss import TokenLoss
from megatron.model.pipe import GPT2ModelPipe
from megatron.mpu.linear_cross_entropy import DeferredLogits, _add_matmul
from megatron.ranks.initialize import initialize_megatron
from tests.support import covering, on_ranks

SEQ, BATCH, HIDDEN, VOCAB = 8, 3, 6, 29  # the vocabulary is padded to 32, so the last rank has padding rows


def _draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class _Case:
    """The inputs of a test: hidden states, a weight, targets and a mask, and this rank's shards of these tensors."""

    def __init__(self, ranks: int, sequence: bool, dtype: torch.dtype, onednn: bool = False) -> None:
        mpu.initialize_model_parallel(ranks, options=mpu.Options(sequence_parallel=sequence, onednn=onednn))
        self.axis, self.stretch = mpu.get_mesh().model, mpu.sequence_axis()
        layer = mpu.VocabParallelEmbedding(VOCAB, HIDDEN, multiple=4).to(dtype)
        self.layer, rows = layer, layer.rows * ranks
        self.hidden, self.weight = (
            _draw(SEQ, BATCH, HIDDEN, seed=1, dtype=dtype),
            _draw(rows, HIDDEN, seed=2, dtype=dtype),
        )
        with torch.no_grad():
            layer.weight.copy_(self.weight.chunk(ranks)[self.axis.rank])
            layer.weight[max(0, VOCAB - layer.first_row) :] = (
                9.0  # A softmax over padding would be wrong for these large values.
            )
        dice = torch.Generator().manual_seed(3)
        self.labels = torch.randint(VOCAB, (BATCH, SEQ), generator=dice)
        self.mask = torch.randint(2, (BATCH, SEQ), generator=dice).float()
        self.mask[1] = 0.0
        self.own = mpu.local_shard(self.hidden).clone().requires_grad_()
        self.loss = TokenLoss(VOCAB)

    def ours(self, chunk: int, factor: float) -> list[Tensor]:
        """Return the summed loss and this rank's shards of the gradients of hidden states and weight.

        chunk: tokens whose logits are computed at once; 0: all logits. factor: multiplies the loss.
        """
        self.own.grad = self.layer.weight.grad = None
        logits: Any = self.layer.deferred_logits(self.own, chunk) if chunk else self.layer.logits(self.own)
        total = self.loss(logits, (self.labels, self.mask))
        (total * factor).backward()
        assert self.own.grad is not None and self.layer.weight.grad is not None
        return [total.detach(), self.own.grad, self.layer.weight.grad]

    def plain(self, factor: float, dtype: torch.dtype) -> list[Tensor]:
        """Return what `ours` should return, computed by torch from all logits in `dtype`."""
        hidden, weight = (x.to(dtype).requires_grad_() for x in (self.hidden, self.weight))
        logits = (hidden @ weight[:VOCAB].t()).permute(1, 2, 0)
        total = (F.cross_entropy(logits, self.labels, reduction="none") * self.mask).sum()
        (total * factor).backward()
        assert hidden.grad is not None and weight.grad is not None
        own = weight.grad.chunk(self.axis.size)[self.axis.rank]
        return [total.detach(), mpu.local_shard(hidden.grad), own]


CHUNKS = (1, 5, 8, 24, 100)  # chunk sizes for the 24 tokens; 5 leaves a remainder


def _equals(ranks: int, sequence: bool, precise: bool) -> None:
    dtype = torch.float64 if precise else torch.float32
    tolerance: dict[str, float] = {"rtol": 1e-10, "atol": 1e-12} if precise else {"rtol": 2e-5, "atol": 1e-5}
    case = _Case(ranks, sequence, dtype)
    expected = case.plain(0.37, torch.float64)
    for chunk in CHUNKS:
        for found, wanted in zip(case.ours(chunk, 0.37), expected, strict=True):
            assert found.dtype == dtype
            torch.testing.assert_close(found.double(), wanted, **tolerance)
    logits = case.layer.deferred_logits(case.own, 5)
    losses = F.cross_entropy(
        (case.hidden.double() @ case.weight.double()[:VOCAB].t()).permute(1, 2, 0), case.labels, reduction="none"
    )
    # Check the loss per token with gradients enabled, then, below, under no_grad.
    torch.testing.assert_close(loss_per_token(case.loss, logits, case.labels).double(), losses, **tolerance)
    case.loss = TokenLoss(VOCAB, is_text=lambda labels: labels % 2 == 0)
    with torch.no_grad():
        whole = loss_per_token(case.loss, logits.in_full(), case.labels), case.loss.aux
        torch.testing.assert_close(loss_per_token(case.loss, logits, case.labels).double(), losses, **tolerance)
        torch.testing.assert_close((loss_per_token(case.loss, logits, case.labels), case.loss.aux), whole)
        torch.testing.assert_close(case.loss(logits, (case.labels, case.mask)).double(), expected[0], **tolerance)


@pytest.mark.parametrize("precise", [True, False], ids=["fp64", "fp32"])
@pytest.mark.parametrize(
    ("ranks", "sequence"),
    covering([(1, False), (2, False), (4, False), (2, True), (4, True)], lambda c: c != (2, False), several=True),
)
def test_equals_torch(ranks: int, sequence: bool, precise: bool) -> None:
    on_ranks(ranks, _equals, ranks, sequence, precise)


Z = 0.05  # z-loss coefficient, so large that the gradient of the z-loss exceeds rounding errors


def _z_loss(ranks: int, sequence: bool) -> None:
    """Check that z-loss adds to the gradients, but is reported separately instead of as a part of the loss."""
    case = _Case(ranks, sequence, torch.float64)
    hidden, weight = (x.clone().requires_grad_() for x in (case.hidden, case.weight))
    logits = (hidden @ weight[:VOCAB].t()).permute(1, 2, 0)
    cross_entropy = (F.cross_entropy(logits, case.labels, reduction="none") * case.mask).sum()
    z = Z * (torch.logsumexp(logits, 1) ** 2 * case.mask).sum()
    ((cross_entropy + z) * 0.37).backward()
    assert hidden.grad is not None and weight.grad is not None
    own = weight.grad.chunk(ranks)[case.axis.rank]
    expected = [cross_entropy.detach(), mpu.local_shard(hidden.grad), own]
    for fused, chunk in ((True, 0), (True, 1), (True, 5), (True, 100), (False, 0)):
        case.loss = TokenLoss(VOCAB, fused, z_loss=Z)
        found = case.ours(chunk, 0.37)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(case.loss.aux, {"z_loss": z.detach()}, rtol=1e-10, atol=0)
        own_logits: Any = case.layer.deferred_logits(case.own, chunk) if chunk else case.layer.logits(case.own)
        with torch.no_grad():  # evaluation ignores z-loss
            total = case.loss(own_logits, (case.labels, case.mask))
        torch.testing.assert_close(total, expected[0], rtol=1e-10, atol=0)
        assert case.loss.aux == {}


@pytest.mark.parametrize(
    ("ranks", "sequence"), covering([(1, False), (2, False), (2, True), (4, True)], lambda c: c[0] < 4, several=True)
)
def test_z_loss_equals_torch(ranks: int, sequence: bool) -> None:
    on_ranks(ranks, _z_loss, ranks, sequence)


def _half(dtype: torch.dtype, factor: float) -> None:
    """Check that rounding errors of gradients in `dtype` are hardly larger with chunks than with all logits at once.

    Errors are deviations from gradients in fp32, computed from the same rounded inputs.
    """
    case = _Case(1, False, dtype)
    expected = case.plain(factor, torch.float32)

    def errors(chunk: int) -> list[float]:
        found = case.ours(chunk, factor)
        assert found[0].dtype == torch.float32 and found[1].dtype == found[2].dtype == dtype
        return [((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]

    whole = errors(0)
    for chunk in CHUNKS:
        # Allow one more rounding: with chunks, the gradient is rounded before `factor` multiplies it.
        rounding = torch.finfo(dtype).eps / 2
        for found, known in zip(errors(chunk), whole, strict=True):
            assert found <= math.hypot(known, rounding), (chunk, found, known)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 0.37), (torch.float16, 0.37), (torch.float16, 1024.0)])
def test_half_precision_is_as_close_to_fp32_as_whole_logits(dtype: torch.dtype, factor: float) -> None:
    on_ranks(1, _half, dtype, factor)


def test_small_probabilities_and_large_sums_stay_in_the_range_of_fp16() -> None:
    """fp16 gradients neither underflow for probabilities of 1/90,001 nor overflow in sums over 1024 tokens."""
    hidden = torch.full((1024, 1, 8), 4.0, dtype=torch.float16, requires_grad=True)
    layer = mpu.VocabParallelEmbedding(90001, 8, multiple=1).half()
    torch.nn.init.zeros_(layer.weight)
    targets = torch.zeros(1, 1024, dtype=torch.int64), torch.ones(1, 1024)
    total = TokenLoss(90001)(layer.deferred_logits(hidden, 512), targets)
    (total / 64).backward()
    assert layer.weight.grad is not None
    expected = torch.full_like(layer.weight, 1024 / 64 * 4 / 90001)
    expected[0] = 1024 / 64 * 4 * (1 / 90001 - 1)
    torch.testing.assert_close(layer.weight.grad, expected)  # torch's tolerance for fp16


def test_which_gradients_are_wanted() -> None:
    """Gradients of hidden states and weight are right, no matter whether one call computes both or only one of them.

    Pipeline schedules with a split backward pass need one call for each gradient.
    """
    hidden, weight = _draw(SEQ, BATCH, HIDDEN, seed=1), _draw(VOCAB, HIDDEN, seed=2)
    labels, mask = torch.randint(VOCAB, (BATCH, SEQ)), torch.ones(BATCH, SEQ)

    def total(x: Tensor, w: Tensor) -> Tensor:
        put_off = DeferredLogits(x, w, mpu.get_mesh().model, mpu.Options(), 5)
        return TokenLoss(VOCAB)(put_off, (labels, mask))

    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    both = torch.autograd.grad(total(x, w), [x, w])
    loss = total(x, w)
    loss.backward(inputs=[x], retain_graph=True)
    assert w.grad is None
    loss.backward(inputs=[w], retain_graph=True)
    torch.testing.assert_close([x.grad, w.grad], list(both))
    with pytest.raises(RuntimeError, match="--logits-chunk-size"):
        loss.backward()
    torch.testing.assert_close(torch.autograd.grad(total(x, weight), x)[0], both[0])
    torch.testing.assert_close(torch.autograd.grad(total(hidden, w), w)[0], both[1])


def test_autocast_decides_where_the_output_layer_stands() -> None:
    """A loss that computes the logits uses the autocast dtype that was set at the call of the output layer."""
    layer = mpu.VocabParallelEmbedding(VOCAB, HIDDEN, multiple=1)
    hidden = _draw(SEQ, BATCH, HIDDEN, seed=1, dtype=torch.float32).requires_grad_()
    targets = torch.zeros(BATCH, SEQ, dtype=torch.int64), torch.ones(BATCH, SEQ)
    with torch.autocast("cpu", torch.bfloat16):
        whole, put_off = layer.logits(hidden), layer.deferred_logits(hidden, 24)
    loss = TokenLoss(VOCAB)
    found, expected = loss(put_off, targets), loss(whole, targets)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    found.backward()
    assert hidden.grad is not None and layer.weight.grad is not None
    assert hidden.grad.dtype == layer.weight.grad.dtype == torch.float32


def test_onednn_gives_the_same() -> None:
    if not mpu.onednn_is_there():
        pytest.skip("this build of torch has no oneDNN")
    on_ranks(1, _onednn)


def _onednn() -> None:
    case = _Case(1, False, torch.float32, onednn=True)
    case.hidden = case.hidden.repeat(3, 1, 1)  # 72 tokens; oneDNN leaves matmuls with fewer than 32 rows to torch
    case.labels, case.mask = case.labels.repeat(1, 3), case.mask.repeat(1, 3)
    case.own = case.hidden.clone().requires_grad_()
    for found, wanted in zip(case.ours(40, 0.37), case.plain(0.37, torch.float64), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=1e-5)


class _Largest(TorchDispatchMode):
    """Records in `numbers` the number of elements of the largest tensor that any operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


@pytest.mark.parametrize("learns", [True, False])
def test_no_more_logits_exist_than_those_of_a_chunk(learns: bool) -> None:
    tokens, vocab, width = 64, 100, 4
    layer = mpu.VocabParallelEmbedding(vocab, width, multiple=1)
    hidden = torch.randn(tokens // 2, 2, width, requires_grad=True)
    targets = torch.zeros(2, tokens // 2, dtype=torch.int64), torch.ones(2, tokens // 2)
    found = {}
    for chunk in (0, 8):
        with torch.set_grad_enabled(learns), _Largest() as largest:
            logits: Any = layer.deferred_logits(hidden, chunk) if chunk else layer.logits(hidden)
            loss = TokenLoss(vocab)(logits, targets)
            if learns:
                loss.backward()
        found[chunk] = largest.numbers
    assert found == {0: tokens * vocab, 8: 8 * vocab}


T5_FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --family t5 --enc-seq-length 12 --dec-seq-length 6 "
    "--vocab-size 50 "
    "--make-vocab-size-divisible-by 4 --hidden-dropout 0 --attention-dropout 0 --scale-tied-logits "
    "--model-parallel-size 2"
)


def _scaled(flags: str) -> dict[str, Tensor]:
    config = parse(f"{T5_FLAGS} {flags}".split())
    initialize_megatron(config)
    model = T5Model(config).double()
    dice = torch.Generator().manual_seed(1)
    encoder, decoder = torch.randint(50, (3, 12), generator=dice), torch.randint(50, (3, 7), generator=dice)
    before, labels = decoder[:, :-1], decoder[:, 1:]
    total = model(encoder, before, labels=labels, loss_mask=torch.ones(3, 6))
    names = {type(node).__name__ for node, _ in total.grad_fn.next_functions} | {type(total.grad_fn).__name__}
    assert ("_LinearCrossEntropyBackward" in names) == (
        "--logits-chunk-size 7" in flags and "--reference-ops" not in flags
    )
    total.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"total": total.detach(), "logits": model(encoder, before).detach(), **found}


@pytest.mark.parametrize("more", ["", " --z-loss 0.05"])
def test_scaled_logits_of_a_tied_matrix_and_the_textbook_form(more: str) -> None:
    whole = on_ranks(2, _scaled, f"--logits-chunk-size 0{more}")
    for flags in ("--logits-chunk-size 7", "--logits-chunk-size 7 --reference-ops cross-entropy"):
        torch.testing.assert_close(on_ranks(2, _scaled, flags + more), whole, rtol=1e-10, atol=1e-12)


GPT2_FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --family gpt2 --seq-length 8 --vocab-size 50 "
    "--batch-size 3 "
    "--pipe-parallel-size 1 --hidden-dropout 0 --attention-dropout 0 --make-vocab-size-divisible-by 4"
)


def _logits_of_a_pipeline(chunk: int) -> list[Tensor]:
    """Return loss and logits of eval_batch(return_logits=True), and the result of eval_batch(compute_loss=False)."""
    config = parse(f"{GPT2_FLAGS} --logits-chunk-size {chunk}".split())
    initialize_megatron(config)
    model = GPT2ModelPipe(config)
    engine, *_ = tds.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1},
    )
    text = torch.randint(50, (3, 9), generator=torch.Generator().manual_seed(1))
    inputs = text[:, :-1], torch.arange(8).expand(3, 8).contiguous(), torch.zeros(0, dtype=torch.int32)
    batch = inputs, (text[:, 1:], torch.ones(3, 8))
    loss, logits = engine.eval_batch(iter([batch]), return_logits=True)
    return [loss, logits, engine.eval_batch(iter([batch]), compute_loss=False)]


def test_an_evaluation_gives_logits_where_they_are_asked_for() -> None:
    ((loss, logits, outputs),), ((wanted, expected, _),) = (on_ranks(1, _logits_of_a_pipeline, n) for n in (5, 0))
    assert logits.shape == (8, 3, 52)
    torch.testing.assert_close([loss, logits, outputs], [wanted, expected, expected])


@pytest.mark.parametrize("second_kernel", [False, True])
def test_the_gradient_of_a_weight_in_bf16_is_summed_in_fp32(second_kernel: bool) -> None:
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    total = None
    for _ in range(300):  # bf16 has no 257
        total = _add_matmul(total, one, one, second_kernel)
    assert total is not None and total.item() == 300
