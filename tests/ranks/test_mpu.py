"""On 1, 2 and 4 ranks, mpu's layers and losses equal plain torch in fp64; broadcasts and random streams are right."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from megatron.config import Config, ModelConfig
from megatron.config.sections import DataConfig, ParallelConfig
from megatron.model import GPT2Model
from megatron.mpu import cross_entropy
from megatron.mpu.mappings import local_part
from tests.sentences import SENTENCES
from tests.support import covering, on_ranks

MODEL_OF_TWO = Config(
    model=ModelConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, vocab_size=64, max_position_embeddings=16,
        make_vocab_size_divisible_by=8, hidden_dropout=0.0, attention_dropout=0.0,
    ),
    data=DataConfig(seq_length=8),
    parallel=ParallelConfig(checkpoint_activations=True),
)  # fmt: skip
RANKS = pytest.mark.parametrize("ranks", [1, 2, 4])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def start(ranks: int, **options: bool) -> mpu.Axis:
    mpu.initialize_model_parallel(ranks, options=mpu.Options(**options))
    return mpu.get_mesh().model


def _linear(ranks: int, skip: bool, onednn: bool) -> None:
    axis = start(ranks, onednn=onednn)
    dtype = torch.float32 if onednn else torch.float64
    column = mpu.ColumnParallelLinear(8, 16, gather_output=False, skip_bias_add=skip).to(dtype)
    row = mpu.RowParallelLinear(16, 4, input_is_parallel=True, skip_bias_add=skip).to(dtype)
    w1, b1, w2, b2 = (draw(*shape, seed=i).to(dtype) for i, shape in enumerate([(16, 8), (16,), (4, 16), (4,)], 1))
    with torch.no_grad():
        for parameter, whole, dim in (
            (column.weight, w1, 0),
            (column.bias, b1, 0),
            (row.weight, w2, 1),
            (row.bias, b2, None),
        ):
            parameter.copy_(whole if dim is None else whole.chunk(axis.size, dim)[axis.rank])
    # 33 rows, since oneDNN leaves matmuls with fewer than 32 rows to torch.
    x = draw(11, 3, 8).to(dtype).requires_grad_()
    y, bias = column(x)
    assert (bias is not None) == skip
    z, bias2 = row(torch.tanh(y if bias is None else y + bias))
    z = z if bias2 is None else z + bias2
    z.square().sum().backward()

    plain = [t.clone().requires_grad_() for t in (x.detach(), w1, b1, w2, b2)]
    expected = F.linear(torch.tanh(F.linear(plain[0], plain[1], plain[2])), plain[3], plain[4])
    expected.square().sum().backward()
    torch.testing.assert_close(z, expected)
    torch.testing.assert_close(x.grad, plain[0].grad)
    torch.testing.assert_close(column.weight.grad, plain[1].grad.chunk(axis.size)[axis.rank])
    torch.testing.assert_close(column.bias.grad, plain[2].grad.chunk(axis.size)[axis.rank])
    torch.testing.assert_close(row.weight.grad, plain[3].grad.chunk(axis.size, 1)[axis.rank])
    torch.testing.assert_close(row.bias.grad, plain[4].grad)


@RANKS
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("onednn", [False, True])
def test_column_then_row_equals_two_linears(ranks: int, skip: bool, onednn: bool) -> None:
    if onednn and not mpu.onednn_is_there():
        pytest.skip("this build of torch has no oneDNN")
    on_ranks(ranks, _linear, ranks, skip, onednn)


def _autocast(ranks: int) -> None:
    axis = start(ranks)
    column = mpu.ColumnParallelLinear(8, 16, bias=False)
    table = mpu.VocabParallelEmbedding(16, 16)
    w, e = draw(16, 8, seed=1).float(), draw(16, 16, seed=2).float()
    with torch.no_grad():
        column.weight.copy_(w.chunk(axis.size)[axis.rank])
        table.weight.copy_(e.chunk(axis.size)[axis.rank])
    x, plain_x = draw(40, 8).float().requires_grad_(), draw(40, 8).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        ours = table.logits(column(x)[0])
        plain = F.linear(F.linear(plain_x, w), e)
    assert ours.dtype == plain.dtype == torch.bfloat16
    ours.float().square().sum().backward()
    plain.float().square().sum().backward()
    assert x.grad.dtype == column.weight.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad, plain_x.grad, rtol=0.05, atol=0.05 * float(plain_x.grad.abs().max()))


@RANKS
def test_layers_under_autocast_are_torchs(ranks: int) -> None:
    on_ranks(ranks, _autocast, ranks)


def test_second_derivatives_are_refused() -> None:
    logits = draw(3, 5).requires_grad_()
    loss = mpu.vocab_parallel_cross_entropy(logits, torch.tensor([1, 0, 3])).sum()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(loss, logits, create_graph=True)


def _gathered(ranks: int) -> None:
    axis = start(ranks)
    column = mpu.ColumnParallelLinear(8, 16, bias=False).double()
    row = mpu.RowParallelLinear(16, 4, bias=False).double()
    w1, w2 = draw(16, 8, seed=1), draw(4, 16, seed=3)
    with torch.no_grad():
        column.weight.copy_(w1.chunk(axis.size)[axis.rank])
        row.weight.copy_(w2.chunk(axis.size, 1)[axis.rank])
    x = draw(5, 8).requires_grad_()
    y, _ = column(x)
    torch.testing.assert_close(y, F.linear(x, w1))
    z, _ = row(y)
    z.sum().backward()
    torch.testing.assert_close(z, F.linear(F.linear(x, w1), w2))
    torch.testing.assert_close(x.grad, (torch.ones(5, 4, dtype=torch.float64) @ w2 @ w1))


@RANKS
def test_gathered_output_and_whole_input(ranks: int) -> None:
    on_ranks(ranks, _gathered, ranks)


def _mappings(ranks: int) -> None:
    axis = start(ranks)
    x = draw(3, 8).requires_grad_()
    y = mpu.gather_from_model_parallel_region(mpu.scatter_to_model_parallel_region(x))
    torch.testing.assert_close(y, x)
    (y * draw(3, 8, seed=5)).sum().backward()
    torch.testing.assert_close(x.grad, draw(3, 8, seed=5))
    part = draw(3, 4, seed=10 + axis.rank).requires_grad_()
    total = mpu.reduce_from_model_parallel_region(part)
    torch.testing.assert_close(total, sum(draw(3, 4, seed=10 + r) for r in range(axis.size)))
    total.sum().backward()
    torch.testing.assert_close(part.grad, torch.ones_like(part))
    copy = draw(3, 4).requires_grad_()
    (mpu.copy_to_model_parallel_region(copy) * (axis.rank + 1)).sum().backward()
    torch.testing.assert_close(copy.grad, torch.full_like(copy, sum(range(1, axis.size + 1))))
    if axis.size > 1:
        with pytest.raises(ValueError, match=SENTENCES["last_dimension_of_7_cannot_be"]):
            local_part(draw(2, 7), axis)
        with pytest.raises(ValueError, match=SENTENCES["output_size_of_7_cannot_be"]):
            mpu.ColumnParallelLinear(4, 7)


@RANKS
def test_mappings_and_their_mirror_images(ranks: int) -> None:
    on_ranks(ranks, _mappings, ranks)


def _embedding(ranks: int) -> None:
    axis = start(ranks)
    layer = mpu.VocabParallelEmbedding(50, 6, multiple=8).double()
    assert layer.rows * axis.size == mpu.padded_vocab_size(50, 8, axis.size)
    whole = draw(layer.rows * axis.size, 6)
    whole[50:] = 0
    with torch.no_grad():
        layer.weight.copy_(whole.chunk(axis.size)[axis.rank])
    ids = torch.randint(50, (4, 7), generator=torch.Generator().manual_seed(0))
    ids[0, 0], ids[0, 1] = 0, 49
    for strange in (-5, 50, 10**6):  # row 50 of the weight is only padding
        with pytest.raises(IndexError, match=f"the token id {strange} is outside of the vocabulary of 50"):
            layer(torch.tensor([[3, strange]]))
    out = layer(ids)
    plain = whole.clone().requires_grad_()
    expected = F.embedding(ids, plain)
    torch.testing.assert_close(out, expected)
    hidden = draw(4, 7, 6, seed=3)
    ((out * hidden).sum() + layer.logits(hidden).square().sum()).backward()
    ((expected * hidden).sum() + (hidden @ plain.T).square().sum()).backward()
    torch.testing.assert_close(layer.weight.grad, plain.grad.chunk(axis.size)[axis.rank])


@RANKS
def test_vocab_parallel_embedding_and_its_logits(ranks: int) -> None:
    on_ranks(ranks, _embedding, ranks)


FUSED = pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])  # the functions of CUDA


def _choose_functions(fused: bool) -> None:
    cross_entropy.uses_fused_loss = lambda _: fused


def _cross_entropy(ranks: int, smoothing: float, fused: bool) -> None:
    axis = start(ranks)
    _choose_functions(fused)
    rows, vocab = 16 // ranks, 13  # logits 13 to 15 are padding
    target = torch.randint(vocab, (4, 5), generator=torch.Generator().manual_seed(0))
    weight = draw(4, 5, seed=9)
    for dtype in (torch.float32, torch.bfloat16):
        whole = draw(4, 5, 16).mul(3).to(dtype)
        whole[..., vocab:] = 50.0  # A softmax over padding would be wrong for these large values.
        logits = whole.chunk(axis.size, -1)[axis.rank].clone().requires_grad_()
        before = logits.detach().clone()
        loss = mpu.vocab_parallel_cross_entropy(logits, target, vocab, smoothing)
        (loss * weight).sum().backward()
        plain = whole.float().requires_grad_()
        expected = F.cross_entropy(
            plain[..., :vocab].flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smoothing
        ).view(4, 5)
        (expected * weight).sum().backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(logits.grad, plain.grad[..., axis.rank * rows : (axis.rank + 1) * rows].to(dtype))
        assert torch.equal(logits, before)


@RANKS
@FUSED
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_equals_torch(ranks: int, smoothing: float, fused: bool) -> None:
    on_ranks(ranks, _cross_entropy, ranks, smoothing, fused)


def _losses_and_gradient(ranks: int, fused: bool, whole: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses of the tokens and the gradient of their sum with respect to this rank's logits."""
    axis = start(ranks)
    _choose_functions(fused)
    logits = local_part(whole, axis).clone().requires_grad_()
    loss = mpu.vocab_parallel_cross_entropy(logits, target)
    loss.sum().backward()
    return loss.detach(), logits.grad


@RANKS
@FUSED
def test_a_rank_whose_logits_are_all_masked_contributes_nothing(ranks: int, fused: bool) -> None:
    whole = draw(4, 16)
    whole[:3, 8:] = -torch.inf
    target = torch.tensor([0, 3, 7, 12])
    plain = whole.clone().requires_grad_()
    expected = F.cross_entropy(plain, target, reduction="none")
    expected.sum().backward()
    found = on_ranks(ranks, _losses_and_gradient, ranks, fused, whole, target)
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(torch.cat([gradient for _, gradient in found], -1), plain.grad)


@RANKS
@FUSED
@pytest.mark.parametrize("first", [0.0, -1e9, -torch.inf])
def test_the_loss_of_a_target_outside_the_vocabulary_is_log_z_in_every_layout(
    ranks: int, fused: bool, first: float
) -> None:
    """Also if the first logit is masked, as that of a padding token."""
    whole = draw(4, 16)
    whole[:, 0] = first
    found = on_ranks(ranks, _losses_and_gradient, ranks, fused, whole, torch.tensor([-100, 16, -1, 3]))
    expected = whole.logsumexp(-1)
    expected[3] -= whole[3, 3]
    expected_gradient = whole.softmax(-1)
    expected_gradient[3, 3] -= 1.0
    for loss, _ in found:
        torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in found], -1), expected_gradient)


def _overwritten(ranks: int, dtype: torch.dtype, fused: bool) -> None:
    """Check that the logits' gradient equals torch's and is stored in the logits' memory.

    A backward pass that reads the overwritten logits again must raise an error.
    """
    axis = start(ranks)
    _choose_functions(fused)
    rows, vocab = 16 // ranks, 13
    whole = draw(4, 5, 16).mul(3).to(dtype)
    part = whole.chunk(axis.size, -1)[axis.rank].clone().requires_grad_()
    target = torch.randint(vocab, (4, 5), generator=torch.Generator().manual_seed(0))
    weight = draw(4, 5, seed=9).float()

    def loss_of(logits: Tensor) -> Tensor:
        found, _ = mpu.vocab_parallel_losses(logits, target, vocab, overwrite=True)
        return (found * weight).sum()

    seen: list[Tensor] = []
    logits = part * 1
    logits.register_hook(seen.append)
    total = loss_of(logits)
    total.backward(retain_graph=True)
    assert seen[0].data_ptr() == logits.data_ptr()
    plain = whole.detach().clone().requires_grad_()
    wide = plain[..., :vocab].flatten(0, 1).to(torch.promote_types(dtype, torch.float32))
    expected = F.cross_entropy(wide, target.flatten(), reduction="none").view(4, 5)
    (expected * weight).sum().backward()
    torch.testing.assert_close(part.grad, plain.grad[..., axis.rank * rows : (axis.rank + 1) * rows])
    with pytest.raises(RuntimeError, match=SENTENCES["was_differentiated_before"]):
        total.backward()
    logits = part * 1
    both = logits.square().sum() + loss_of(logits)  # square's backward reads the logits, which loss_of overwrites
    with pytest.raises(RuntimeError, match=SENTENCES["modified_by_an_inplace_operation"]):
        both.backward()


@RANKS
@FUSED
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_written_over_its_logits_equals_torchs(ranks: int, dtype: torch.dtype, fused: bool) -> None:
    on_ranks(ranks, _overwritten, ranks, dtype, fused)


def _whole_vocabulary(fused: bool, vocab_size: int | None) -> None:
    """Check that logits of the whole vocabulary are refused on every rank, however they were made."""
    axis = start(2)
    _choose_functions(fused)
    shard = draw(4, 5, 8, seed=axis.rank).bfloat16().requires_grad_()
    gathered = mpu.gather_from_model_parallel_region(shard)
    with_zeros = torch.cat([draw(4, 5, 13), torch.zeros(4, 5, 3)], -1)
    target = torch.zeros(4, 5, dtype=torch.int64)
    for logits in (gathered, gathered.float(), with_zeros, with_zeros[..., :13]):
        for function in (mpu.vocab_parallel_cross_entropy, mpu.vocab_parallel_losses, mpu.vocab_parallel_right):
            with pytest.raises(ValueError, match="16|13"):
                function(logits, target, vocab_size)
    zeros = mpu.vocab_parallel_cross_entropy(torch.zeros(4, 5, 8), target, vocab_size)
    torch.testing.assert_close(zeros, torch.full((4, 5), float(vocab_size or 16)).log())


@FUSED
@pytest.mark.parametrize("vocab_size", [None, 13])
def test_gathered_logits_are_refused(fused: bool, vocab_size: int | None) -> None:
    on_ranks(2, _whole_vocabulary, fused, vocab_size)


def _not_a_number(ranks: int) -> list[bool]:
    axis = start(ranks)
    whole = draw(4, 16)
    target = torch.tensor([3, 12, 0, 5])
    whole[torch.arange(4), target] = 9.0
    whole[0, 15] = whole[1, 1] = whole[2, 0] = torch.nan
    return mpu.vocab_parallel_right(local_part(whole, axis), target).tolist()


def _flat_targets(ranks: int) -> None:
    axis = start(ranks)
    whole = draw(2, 3, 16)
    target = whole.argmax(-1)
    target[0, 1] += 1
    logits = local_part(whole, axis)
    expected = torch.tensor([[True, False, True], [True, True, True]])
    assert torch.equal(mpu.vocab_parallel_right(logits, target), expected)
    assert torch.equal(mpu.vocab_parallel_right(logits, target.flatten()), expected.flatten())


def test_targets_may_be_flat() -> None:
    for ranks in (1, 2):
        on_ranks(ranks, _flat_targets, ranks)


def test_a_token_with_a_logit_that_is_no_number_is_wrong() -> None:
    for ranks in (1, 2):
        assert on_ranks(ranks, _not_a_number, ranks) == [[False, False, False, True]] * ranks


def _other_tokens() -> None:
    start(1)
    for tokens, targets in (((4, 6), (6, 4)), ((8, 6), (4, 6)), ((24,), (4, 5))):
        for function in (mpu.vocab_parallel_cross_entropy, mpu.vocab_parallel_right):
            with pytest.raises(ValueError, match=str(list(targets))[1:-1]):
                function(draw(*tokens, 8), torch.zeros(targets, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"pass label_smoothing=0\.1"):  # Megatron-LM's third argument
        mpu.vocab_parallel_cross_entropy(draw(4, 8), torch.zeros(4).long(), 0.1)  # type: ignore[arg-type]
    flat = mpu.vocab_parallel_cross_entropy(draw(24, 8), torch.zeros(4, 6, dtype=torch.int64))
    torch.testing.assert_close(flat.flatten(), F.cross_entropy(draw(24, 8), torch.zeros(24).long(), reduction="none"))


def test_logits_and_targets_of_other_tokens_are_refused() -> None:
    on_ranks(1, _other_tokens)


def _half(ranks: int) -> None:
    axis = start(ranks)
    whole = draw(64, 16).to(torch.bfloat16)
    logits = whole.chunk(axis.size, -1)[axis.rank].clone().requires_grad_()
    target = torch.randint(16, (64,), generator=torch.Generator().manual_seed(0))
    loss = mpu.vocab_parallel_cross_entropy(logits, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(whole.float(), target, reduction="none"))
    loss.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_cross_entropy_of_bf16_logits_is_summed_in_fp32() -> None:
    on_ranks(2, _half, 2)


def _broadcast() -> None:
    axis = start(2)
    data = None
    if axis.rank == 0:
        data = {"text": torch.arange(12).view(3, 4), "length": torch.tensor([5]), "empty": torch.empty(0, 2).long()}
    found = mpu.broadcast_data(["text", "length", "empty"], data, torch.int64)
    assert found["text"].tolist() == torch.arange(12).view(3, 4).tolist()
    assert found["length"].tolist() == [5]
    assert found["empty"].shape == (0, 2)
    for keys, wrong, message in (
        (["other"], data, "no 'other' in the data|has no valid data"),
        (["text"], {"text": torch.zeros(2)}, "is torch.float32, expected torch.int64|has no valid data"),
        (["text"], None, "must be given data|has no valid data"),
        (["text"], {"text": [1, 2]}, "'text' is a list, expected a tensor|has no valid data"),
    ):
        with pytest.raises(ValueError, match=message):
            mpu.broadcast_data(keys, wrong if axis.rank == 0 else None, torch.int64)
    short = torch.tensor([-3, 300], dtype=torch.int16)  # a dtype that gloo cannot send
    assert torch.equal(mpu.broadcast_data(["text"], {"text": short}, torch.int16)["text"], short)
    sizes = {"text": (3, 4), "length": [1]}
    sent, honest = [], dist.broadcast
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", lambda *args, **more: (sent.append(1), honest(*args, **more)))
        known = mpu.broadcast_data(["text", "length"], data, torch.int64, sizes=sizes)
    assert len(sent) == 1, "no sizes are sent"
    assert torch.equal(known["text"], found["text"]) and torch.equal(known["length"], found["length"])
    with pytest.raises(ValueError, match=r"'text' is \[3, 4\], expected \[3, 5\]|has no valid data"):
        mpu.broadcast_data(["text"], data, torch.int64, sizes={"text": (3, 5)})


def test_broadcast_data_and_its_errors_reach_every_rank() -> None:
    on_ranks(2, _broadcast)


def _streams() -> list[list[float]]:
    mpu.initialize_model_parallel(2, seed=5)
    rng = mpu.get_rng()
    rng.begin(3)
    cpu = torch.device("cpu")
    torch.manual_seed(0)
    outside = torch.rand(1).item()

    def numbers(name: str, split: bool) -> list[float]:
        with rng.fork(name, cpu, split):
            return torch.rand(4).tolist()

    torch.manual_seed(0)
    found = [numbers("a", False), numbers("a", True), numbers("b", False), numbers("a", False)]
    assert torch.rand(1).item() == outside  # forks do not affect torch's default generator
    rng.begin(3)
    assert numbers("b", False) == found[2]
    assert numbers("a", False) == found[0]
    rng.begin(4)
    assert numbers("a", False) != found[0]
    return found


def test_streams_agree_where_replicated_and_differ_where_split() -> None:
    """Without `split`, random streams differ between replicas and agree on the tensor-parallel ranks of a replica."""
    a, b, c, d = on_ranks(4, _streams)
    assert a[0] == b[0] != c[0] == d[0]  # a, b: ranks of one replica; c, d: ranks of the other
    assert a[2] == b[2]
    first_draws = [tuple(each[2]) for each in (a, c)] + [tuple(a[0]), tuple(c[0])]
    assert len(set(first_draws)) == 4


def _split_streams() -> list[float]:
    mpu.initialize_model_parallel(2, seed=5)
    with mpu.get_rng().fork("attention", torch.device("cpu"), split=True):
        return torch.rand(4).tolist()


def test_split_streams_differ_between_model_parallel_ranks() -> None:
    a, b = on_ranks(2, _split_streams)
    assert a != b


def test_checkpointing_replays_dropout_even_after_later_draws() -> None:
    rng = mpu.get_rng()
    rng.begin(0)
    x = draw(64, 8).requires_grad_()

    def block(inputs: Tensor) -> Tensor:
        with rng.fork("d", inputs.device):
            return F.dropout(inputs, 0.5) * inputs

    first = mpu.checkpoint(block, x, rng=rng)
    second = mpu.checkpoint(block, x, rng=rng)  # advances the random stream before `first` is recomputed
    kept = first.detach() != 0
    assert not torch.equal(kept, second.detach() != 0)
    for _ in range(2):  # a user may differentiate several losses
        (grad,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
        torch.testing.assert_close(grad, torch.where(kept, 4 * x, 0.0).detach())


def _norm(shape: tuple[int, int, int]) -> None:
    pipe, data, model = shape
    mesh = mpu.initialize_model_parallel(model, pipe)
    stage, part = mesh.pipe.rank, mesh.model.rank
    split, copied, tied = (nn.Parameter(torch.zeros(8, dtype=torch.float64)) for _ in range(3))
    mpu.declare(split, dim=0, full_size=8 * model, axis=mesh.model)
    mpu.declare(copied)
    mpu.declare(tied)
    tied.ds_pipe_replicated = stage > 0
    whole = (
        [draw(8 * model, seed=20 + s) for s in range(pipe)],
        [draw(8, seed=40 + s) for s in range(pipe)],
        draw(8, seed=60),
    )
    split.grad = whole[0][stage].chunk(model)[part].clone()
    copied.grad, tied.grad = whole[1][stage].clone(), whole[2].clone()
    everything = torch.cat([*whole[0], *whole[1], whole[2]])
    norm = mpu.clip_grad_norm([split, copied, tied], 0.5)
    torch.testing.assert_close(norm, everything.norm())
    factor = 0.5 / (everything.norm() + 1e-6)
    torch.testing.assert_close(copied.grad, whole[1][stage] * factor)
    torch.testing.assert_close(split.grad, whole[0][stage].chunk(model)[part] * factor)
    torch.testing.assert_close(mpu.clip_grad_norm([split, copied, tied], 0.0), torch.tensor(0.5, dtype=torch.float64))


@pytest.mark.parametrize("third", [0.0, 1j])
def test_a_single_tensor_is_clipped_as_by_torch(third: complex) -> None:
    grad = torch.tensor([3.0, 4.0, third])
    parameters = [nn.Parameter(torch.ones_like(grad)) for _ in range(2)]
    for p in parameters:
        p.grad = grad.clone()
    norm = mpu.clip_grad_norm(parameters[0], 1.0, 2)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(parameters[1], 1.0))
    torch.testing.assert_close(parameters[0].grad, parameters[1].grad)
    torch.testing.assert_close(mpu.grad_norm(parameters[1]), torch.tensor(1.0))
    with pytest.raises(ValueError, match="norm_type=1 is not supported"):
        mpu.clip_grad_norm(parameters[0], 1.0, norm_type=1)


SHAPES = [(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1), (2, 2, 2)]


@pytest.mark.parametrize("shape", covering(SHAPES, [(1, 1, 1), (1, 2, 2), (2, 2, 1)].__contains__), ids=str)
def test_the_norm_counts_every_parameter_once(shape: tuple[int, int, int]) -> None:
    on_ranks(shape[0] * shape[1] * shape[2], _norm, shape)


def _grid() -> tuple[int, ...]:
    mesh = mpu.initialize_model_parallel(2, 2)
    x = torch.ones(1)
    dist.all_reduce(x, group=mpu.get_model_parallel_group())
    assert x.item() == 2
    assert dist.get_world_size(mpu.get_data_parallel_group()) == 2
    return (mesh.pipe.rank, mesh.data.rank, mesh.model.rank, mpu.get_model_parallel_src_rank(), *mesh.pipe.ranks)


def test_the_grid_on_eight_ranks() -> None:
    found = on_ranks(8, _grid)
    assert found[0] == (0, 0, 0, 0, 0, 4)
    assert found[5] == (1, 0, 1, 4, 1, 5)
    assert found[7] == (1, 1, 1, 6, 3, 7)


def _refused() -> None:
    with pytest.raises(ValueError, match=SENTENCES["3_ranks_cannot_be_laid_out"]):
        mpu.initialize_model_parallel(2)


def _attributes() -> dict[str, list[int]]:
    mpu.initialize_model_parallel(2)
    words = mpu.VocabParallelEmbedding(7, 4, multiple=2)
    column = mpu.ColumnParallelLinear(4, 6)
    row = mpu.RowParallelLinear(6, 4)
    return {
        "words": [words.num_embeddings, words.embedding_dim, words.num_embeddings_per_partition],
        "range": [words.vocab_start_index, words.vocab_end_index],
        "column": [column.input_size, column.output_size, column.output_size_per_partition],
        "row": [row.input_size, row.output_size, row.input_size_per_partition],
    }


def test_layers_have_the_attributes_of_megatron_lm() -> None:
    """Attributes that Megatron-LM's scripts read; `vocab_end_index` includes padding, as in Megatron-core."""
    for rank, found in enumerate(on_ranks(2, _attributes)):
        expected = {"words": [7, 4, 4], "range": [4 * rank, 4 * rank + 4], "column": [4, 6, 3], "row": [6, 4, 3]}
        assert found == expected


def test_a_grid_that_does_not_fit_is_refused() -> None:
    on_ranks(3, _refused)


def _two_meshes() -> None:
    """Check that one process can run a tensor-parallel model and a model without parallelism, each on its own mesh.

    The two models must have the same losses, gradients and logits.
    """
    grids = {
        "split": (mpu.Mesh.build(mpu.Topology(model=2)), mpu.Options(sequence_parallel=True)),
        "single": (mpu.Mesh.build(mpu.Topology(data=2)), mpu.Options()),
    }
    models: dict[str, GPT2Model] = {}
    for name, (mesh, options) in grids.items():
        with mpu.built_with(mesh, options, seed=3):
            assert mpu.get_mesh() is mesh and mpu.get_options() is options
            models[name] = GPT2Model(MODEL_OF_TWO).double()
    mpu.initialize_model_parallel(1)  # sets another current mesh, which must not affect the models above
    split, single = models["split"], models["single"]
    assert split.steps[2][1].attention.heads * 2 == single.steps[2][1].attention.heads
    tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(4))
    losses = [model(tokens[:, :-1], labels=tokens[:, 1:]).mean() for model in (split, single)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    whole = dict(single.named_parameters())
    for name, parameter in split.named_parameters():
        spec, grad = mpu.spec_of(parameter), whole[name].grad
        expected = grad.narrow(spec.rows.dim, spec.rows.begin, spec.rows.end - spec.rows.begin)
        torch.testing.assert_close(spec.without_padding(parameter.grad), expected)
    for model in (split, single):
        model.parallel_output = False
    torch.testing.assert_close(split(tokens[:, :-1]), single(tokens[:, :-1]), msg="gathered logits")


def test_two_models_on_two_meshes_in_one_process() -> None:
    on_ranks(2, _two_meshes)


def _data_axis() -> tuple[int, ...]:
    mpu.initialize_model_parallel(1, 1, context_parallel_size=2)
    size = mpu.get_data_parallel_world_size
    rank = mpu.get_data_parallel_rank
    return size(), rank(), size(with_context_parallel=False), rank(with_context_parallel=False)


def test_the_data_axis_with_and_without_context_ranks() -> None:
    """Megatron-core's argument: without it, context ranks count, as DeepSpeed needs."""
    assert on_ranks(4, _data_axis) == [(4, 0, 2, 0), (4, 1, 2, 0), (4, 2, 2, 1), (4, 3, 2, 1)]
