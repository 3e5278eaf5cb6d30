"""Mixtures of experts in one process: equal to the dense MLP and to a loop over tokens, and refused settings."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron import mpu
from megatron.config.command_line import parse, with_values
from megatron.config.fields import ConfigError
from megatron.model import GPT2Model, T5Model
from megatron.model import mixture as mixture_module
from megatron.model.extra_losses import scale_router_loss
from megatron.model.loss import count_targets
from megatron.model.mixture import Mixture
from megatron.model.router import Router, update_routers
from megatron.model.text_tokens import Text, text_tokens

COMMON = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --ff-hidden-size 24 --seq-length 12 --hidden-dropout 0 "
    "--attention-dropout 0 --init-method-std 0.2"
)
FAMILIES = {
    "gpt2": f"--family gpt2 {COMMON}",
    "llama": f"--family llama {COMMON} --normalization rmsnorm --activation swiglu --position-embedding rope "
    "--no-hidden-bias",
    "t5": f"--family t5 {COMMON} --num-decoder-layers 2 --enc-seq-length 12 --position-embedding relative "
    "--activation gated-gelu --dec-seq-length 12",
}
VOCAB = 40


def _model(family: str, more: str = "") -> nn.Module:
    config = with_values(parse(f"{FAMILIES[family]} {more}".split()), {"vocab_size": VOCAB})
    return (T5Model if family == "t5" else GPT2Model)(config).double().train()


def _loss(model: nn.Module, family: str) -> Tensor:
    tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    inputs = (tokens, tokens) if family == "t5" else (tokens,)
    found: Tensor = model(*inputs, labels=tokens, loss_mask=torch.ones(tokens.shape))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_one_expert_is_the_dense_model(family: str) -> None:
    dense, mixture = _model(family), _model(family, "--num-experts 1 --experts-per-token 1")
    weights = {name.replace(".mlp.", ".mlp.experts.0."): p for name, p in dense.state_dict().items()}
    missing, unexpected = mixture.load_state_dict(weights, strict=False)
    assert not unexpected and all(".router." in name for name in missing)
    losses = [_loss(model, family) for model in (dense, mixture)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    grads = dict(mixture.named_parameters())
    for name, p in dense.named_parameters():
        torch.testing.assert_close(grads[name.replace(".mlp.", ".mlp.experts.0.")].grad, p.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("balance", ["aux-loss", "bias"])
def test_a_mixture_is_a_loop_over_tokens(score: str, normalize: bool, balance: str) -> None:
    flags = f"--router-score {score} --router-balance {balance} --num-shared-experts 2 --shared-expert-gate"
    flags += " --normalize-expert-weights" if normalize else " --no-normalize-expert-weights"
    model = _model("llama", f"--num-experts 5 --experts-per-token 3 --router-bias-rate 0.5 {flags}")
    mixture = next(module for module in model.modules() if isinstance(module, Mixture))
    mixture.router.bias_steps += torch.tensor([2, -1, 0, 1, -2])
    hidden = torch.randn(3, 2, 16, dtype=torch.float64)
    found, bias, loss = mixture(hidden)
    assert bias is None
    expected, probabilities = torch.zeros_like(hidden), torch.zeros(5, dtype=torch.float64)
    for at in [(s, b) for s in range(3) for b in range(2)]:
        x = hidden[at]
        logits = mixture.router.weight @ x
        scores = logits.softmax(0) if score == "softmax" else logits.sigmoid()
        liked = scores + (0.5 * mixture.router.bias_steps if balance == "bias" else 0)
        chosen = sorted(range(5), key=lambda e: -liked[e].item())[:3]
        total = sum(scores[e] for e in chosen) if normalize else 1.0
        for e in chosen:
            expected[at] += scores[e] / total * mixture.experts[str(e)](x.view(1, -1))[0]
        shared = mixture.shared_expert(x.view(1, -1))[0]
        expected[at] += torch.sigmoid(mixture.shared_gate[0] @ x) * shared
        probabilities += scores / scores.sum()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    if balance == "aux-loss":  # before the first step all shares are 1 / 5
        torch.testing.assert_close(loss, 0.01 * 5 * (probabilities / 5).sum().view(1) / 6)


@pytest.mark.parametrize("normalize", [True, False])
def test_a_token_without_a_likely_expert_is_finite(normalize: bool) -> None:
    """Sigmoids below the range of fp32 are 0; like DeepSeek-V3, the router does not divide 0 by 0."""
    flags = "" if normalize else "--no-normalize-expert-weights"
    model = _model("llama", f"--num-experts 4 --experts-per-token 2 --router-score sigmoid {flags}").float()
    mixture = next(module for module in model.modules() if isinstance(module, Mixture))
    nn.init.constant_(mixture.router.weight, -2.0)
    out, _, loss = mixture(torch.full((3, 2, 16), 4.0))  # logits of -128
    (out.sum() + loss).backward()
    assert not out.any() and loss.isfinite()
    assert all(p.grad.isfinite().all() for p in mixture.parameters())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_under_autocast_experts_run_in_bf16_and_the_router_in_fp32(family: str) -> None:
    torch.manual_seed(1)
    model = _model(family, "--num-experts 4 --experts-per-token 2").float()
    mixture = next(module for module in model.modules() if isinstance(module, Mixture))
    routed: list[Any] = []
    mixture.router.register_forward_hook(lambda module, inputs, out: routed.append(list(out)))
    hidden = torch.randn(12, 2, 16)
    grads = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled):
            out, _, _ = mixture(hidden)
        out.float().square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in mixture.parameters()]))
        mixture.zero_grad()
    torch.testing.assert_close(routed[0], routed[1], rtol=0, atol=0)
    assert (grads[0] - grads[1]).norm() < 0.02 * grads[0].norm()  # bf16 has 8 significant bits


class Operations(TorchDispatchMode):
    """Names of the operations that run in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_grouped_matmul_equals_a_loop_over_experts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are equal, also of an expert without tokens, and no stack of weights waits for the backward pass."""
    model = _model("llama", "--num-experts 5 --experts-per-token 2 --router-balance bias").to(dtype)
    mixture = next(module for module in model.modules() if isinstance(module, Mixture))
    mixture.router.bias_steps[3] = -(10**6)
    product, saved, of_weights = F.grouped_mm, set[int](), []

    def without_empty_sums(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        found = product(a, b, offs=offs)
        if b.dim() == 2:
            of_weights.append(found)
            found[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return found

    monkeypatch.setattr(F, "grouped_mm", without_empty_sums)
    monkeypatch.setattr(mixture_module, "_skips_empty_sums", lambda _: True)
    found = []
    for grouped in (False, True):
        monkeypatch.setattr(mixture_module, "can_group_matmuls", lambda *_, grouped=grouped: grouped)
        hidden = torch.randn(9, 2, 16, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        operations = Operations()
        with operations, torch.autograd.graph.saved_tensors_hooks(lambda x: saved.add(x.numel()) or x, lambda x: x):
            output = mixture(hidden)[0]
        # For each of these, a host waits for its device: bincount reads the smallest and the largest number.
        assert not operations.names & {"bincount", "nonzero", "_local_scalar_dense"}
        torch.autograd.grad(output.sum(), hidden, retain_graph=True)
        assert not of_weights  # a pipeline may ask for these gradients later
        output.float().square().sum().backward()
        weights = [p for name, p in mixture.named_parameters() if "experts" in name]
        found.append([output, hidden.grad, *(p.grad for p in weights)])
        mixture.zero_grad()
    assert any(not weight.any() for weight in found[0][2:])
    assert not saved & {5 * weight.numel() for weight in weights}
    for loop, grouped in zip(*found, strict=True):
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(grouped, loop, rtol=tolerance, atol=tolerance * float(loop.detach().abs().max()))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_router_in_bf16_rounds_no_score(score: str) -> None:
    flags = f"{FAMILIES['llama']} --num-experts 5 --experts-per-token 2 --router-score {score}"
    config = parse(flags.split()).model
    router = Router(config, "router").bfloat16().eval()
    hidden = torch.randn(9, 2, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits = hidden.double() @ router.weight.double().t()
    found = (logits.softmax(-1) if score == "softmax" else logits.sigmoid()).topk(2)
    expected = found.values / found.values.sum(-1, keepdim=True) if config.normalize_expert_weights else found.values
    experts, weights, _ = router(hidden)
    assert torch.equal(experts, found.indices)
    torch.testing.assert_close(weights, expected.float())


@pytest.mark.parametrize(("width", "grouped"), [(24, True), (20, False)])
def test_only_widths_that_the_grouped_matmul_supports_use_it(width: int, grouped: bool) -> None:
    flags = f"{FAMILIES['llama']} --hidden-size 16 --num-experts 2 --no-hidden-bias --expert-ff-hidden-size {width}"
    mixture = Mixture(parse(flags.split()).model, "layers.0.mlp", 0.02).bfloat16()
    rows: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    experts: Any = list(mixture.experts.values())
    assert mixture_module.can_group_matmuls(rows, experts) is grouped
    experts[0].dense_h_to_4h.weight.ds_shape = (48, 16)  # ZeRO 3 shards it, though it may be whole at times
    assert not mixture_module.can_group_matmuls(rows, experts)


def test_the_auxiliary_loss_uses_the_shares_of_the_previous_step() -> None:
    model = _model("llama", "--num-experts 4 --router-aux-loss 1 --router-z-loss 0.5")
    router = next(module for module in model.modules() if isinstance(module, Router))
    hidden = torch.randn(6, 1, 16, dtype=torch.float64, requires_grad=True)
    router(hidden)
    update_routers(model)
    assert router.tokens.sum() == 12 and not router.step_tokens.any()
    logits = hidden[:, 0] @ router.weight.t()
    shares = router.tokens / 12
    expected = 4 * (logits.softmax(-1) * shares).sum(1).mean() + 0.5 * logits.logsumexp(-1).square().mean()
    (own,) = torch.autograd.grad(router(hidden).loss.sum(), hidden)
    (theirs,) = torch.autograd.grad(expected, hidden)
    torch.testing.assert_close(own, theirs)


def test_a_bias_and_an_auxiliary_loss_balance_together() -> None:
    flags = "--num-experts 4 --router-balance bias-and-aux-loss --router-aux-loss 1 --router-bias-rate 0.5"
    model = _model("llama", flags)
    router = next(module for module in model.modules() if isinstance(module, Router))
    router.bias_steps += torch.tensor([3, -1, 0, -2])
    hidden = torch.randn(6, 1, 16, dtype=torch.float64, requires_grad=True)
    chosen = router(hidden).experts
    probabilities = (hidden[:, 0] @ router.weight.t()).softmax(-1)
    expected = (probabilities + 0.5 * torch.tensor([3, -1, 0, -2])).topk(2).indices
    assert torch.equal(chosen[:, 0], expected)
    update_routers(model)
    counts = torch.tensor([(expected == expert).sum() for expert in range(4)])
    assert torch.equal(router.tokens, counts)
    assert torch.equal(router.bias_steps, torch.tensor([3, -1, 0, -2]) + (3 - counts).sign())  # 12 / 4 is the mean
    (own,) = torch.autograd.grad(router(hidden).loss.sum(), hidden)
    (theirs,) = torch.autograd.grad(4 * (probabilities * counts / 12).sum(1).mean(), hidden)
    torch.testing.assert_close(own, theirs)
    assert own.any()


def test_the_loss_of_the_routers_does_not_depend_on_the_number_of_targets() -> None:
    """Divided by the number of targets, the loss of the routers is a mean over tokens, with and without a mask."""
    model = _model("llama", "--num-experts 4 --router-z-loss 0.5 --router-aux-loss 0")
    tokens = torch.randint(0, VOCAB, (2, 12))
    losses: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda module, args, result: losses.append(result.loss))
    model(tokens)
    expected = torch.cat(losses).sum()
    gradients = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    for number in (24, 3):
        mask = torch.zeros(24).scatter(0, torch.arange(number), 1.0).view(2, 12)
        plain = _model("llama", "--num-experts 4 --router-aux-loss 0")
        plain.load_state_dict(model.state_dict())
        for each in (model, plain):
            each.zero_grad()
            (each(tokens, labels=tokens, loss_mask=mask) / number).backward()
        found = model.get_additional_losses()["router_loss"] / number  # type: ignore[operator]
        torch.testing.assert_close(found, expected)
        for ours, without, wanted in zip(model.parameters(), plain.parameters(), gradients, strict=True):
            if wanted is not None:
                assert ours.grad is not None and without.grad is not None
                torch.testing.assert_close(ours.grad - without.grad, wanted, atol=1e-9, rtol=1e-6)


def test_a_bias_rises_for_experts_with_few_tokens() -> None:
    model = _model("llama", "--num-experts 4 --router-balance bias")
    router = next(module for module in model.modules() if isinstance(module, Router))
    router.end_step(torch.tensor([10, 2, 4, 0]))
    assert router.bias_steps.tolist() == [-1, 1, 0, 1]


def test_a_frozen_router_keeps_its_bias() -> None:
    model = _model("llama", "--num-experts 4 --router-balance bias")
    router = next(module for module in model.modules() if isinstance(module, Router))
    router.weight.requires_grad_(False)
    router.end_step(torch.tensor([10, 2, 4, 0]))
    assert router.bias_steps.tolist() == [0, 0, 0, 0]
    assert router.tokens.tolist() == [10, 2, 4, 0]


def test_evaluation_counts_no_tokens_and_returns_only_logits() -> None:
    model = _model("gpt2", "--num-experts 4").eval()
    assert isinstance(model(torch.zeros(1, 5, dtype=torch.int64)), Tensor)
    assert not any(module.step_tokens.any() for module in model.modules() if isinstance(module, Router))


@pytest.mark.parametrize("balance", ["aux-loss", "bias", "bias-and-aux-loss"])
def test_balancing_evens_the_shares(balance: str) -> None:
    """A router without preferences, which sends all tokens to the same two experts, learns to use all of them."""
    model = _model("llama", f"--num-experts 4 --router-balance {balance} --router-aux-loss 1 --router-bias-rate 0.05")
    routers = [module for module in model.modules() if isinstance(module, Router)]
    with torch.no_grad():
        for router in routers:
            router.weight.zero_()
    optimizer = torch.optim.Adam([p for router in routers for p in router.parameters()], lr=0.05)
    largest = []
    for step in range(60):
        tokens = torch.randint(0, VOCAB, (8, 12), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(tokens, labels=tokens, loss_mask=torch.ones(tokens.shape)).div(tokens.numel()).backward()
        optimizer.step()
        update_routers(model)
        largest.append(max(float(router.tokens.max() / router.tokens.sum()) for router in routers))
    assert largest[0] > 0.4 and sum(largest[-10:]) / 10 < 0.36, largest


REFUSED = [
    ("--num-experts 2 --experts-per-token 3", "--experts-per-token"),
    ("--num-shared-experts 1", "--num-experts"),
    ("--experts-per-token 3", "--num-experts"),
    ("--expert-ff-hidden-size 8", "--num-experts"),
    ("--router-balance bias", "--num-experts"),
    ("--num-experts 2 --router-balance bias --router-bias-rate inf", "--router-bias-rate"),
    ("--num-experts 2 --moe-layer-frequency 0 0", "--moe-layer-frequency"),
    ("--num-experts 2 --moe-router-dtype fp64", "--moe-router-dtype"),
    ("--num-experts 2 --shared-expert-gate", "--num-shared-experts"),
    ("--num-experts 2 --moe-layer-frequency 0", "--moe-layer-frequency"),
    ("--num-experts 2 --moe-layer-frequency 00", "--moe-layer-frequency"),
    ("--num-experts 2 --moe-layer-frequency 1 0 1", "--moe-layer-frequency"),
    ("--num-experts 2 --moe-layer-frequency 2 1", "--moe-layer-frequency"),
    ("--num-experts 3 --expert-parallel-size 2", "--num-experts"),
    ("--expert-parallel-size 2", "--num-experts"),
    ("--num-experts 4 --expert-ff-hidden-size 5 --model-parallel-size 2", "--expert-ff-hidden-size"),
    ("--num-experts 4 --compile", "--num-experts"),
    ("--num-experts 4 --precision fp8", "--num-experts"),
]


@pytest.mark.parametrize(("flags", "named"), REFUSED)
def test_refused(flags: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(f"{FAMILIES['llama']} {flags}".split())


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--experts-per-token 1", "--no-normalize-expert-weights"),
        ("--experts-per-token 1 --no-normalize-expert-weights", None),
        ("--router-balance none --router-aux-loss 1", "--router-aux-loss"),
        ("--router-bias-rate 0.1", "--router-bias-rate"),
        ("--router-balance bias --router-bias-rate 0.1", None),
    ],
)
def test_notes(flags: str, named: str | None) -> None:
    notes: list[str] = []
    parse(f"{FAMILIES['llama']} --num-experts 4 {flags}".split(), notify=notes.append)
    assert len(notes) == (named is not None) and all(str(named) in note for note in notes)


# ------------------------------------------------------- padding

DOCUMENTS = (7, 5, 3, 9, 4, 8, 6, 6)  # lengths; two of them fill a window of 12 tokens


def _windows(length: int) -> tuple[Tensor, Tensor]:
    """Return tokens and document ids, [4, length] each: two documents a window, then padding."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.full((4, length), 1)
    ids = torch.zeros(4, length, dtype=torch.int32)
    for number, size in enumerate(DOCUMENTS):
        window = number // 2
        begin = 0 if number % 2 == 0 else DOCUMENTS[number - 1]
        here = slice(begin, begin + size)
        tokens[window, here] = torch.randint(2, VOCAB, (size,), generator=generator)
        ids[window, here] = number % 2 + 1
    return tokens, ids


def _with_padding(family: str, length: int, balance: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return gradients and the routers' counts of one micro-batch with windows of `length` tokens."""
    model = _model(family, f"--objective sft --num-experts 4 --router-z-loss 0.1 --router-balance {balance}")
    tokens, ids = _windows(length)
    model(tokens, None, ids, labels=tokens, loss_mask=(ids != 0).double()).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return grads, {name: module.step_tokens for name, module in model.named_modules() if isinstance(module, Router)}


@pytest.mark.parametrize("balance", ["aux-loss", "bias"])
def test_padding_does_not_change_what_routers_learn_and_count(balance: str) -> None:
    grads, counts = _with_padding("llama", 12, balance)
    padded_grads, padded_counts = _with_padding("llama", 29, balance)
    assert grads.keys() == padded_grads.keys() and len(counts) == 2
    for name, grad in grads.items():
        torch.testing.assert_close(padded_grads[name], grad, rtol=1e-10, atol=1e-13, msg=name)
    for name, seen in counts.items():
        assert seen.sum() == 2 * sum(DOCUMENTS) and torch.equal(padded_counts[name], seen)


def test_the_auxiliary_loss_of_padded_windows_is_that_of_transformers() -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    settings = f"{FAMILIES['llama']} --num-experts 4 --router-aux-loss 0.5 --init-method-std 1"
    router = Router(parse(settings.split()).model, "router").train()
    hidden = torch.randn(29, 4, 16, generator=torch.Generator().manual_seed(3))
    ids = _windows(29)[1]
    text = text_tokens(ids, mpu.TRIVIAL_AXIS, mpu.TRIVIAL_AXIS)
    router(hidden, text)
    router.end_step(router.step_tokens)  # The next loss uses the shares of this step, as that of transformers does.
    found = router(hidden, text).loss
    logits = (hidden @ router.weight.t()).transpose(0, 1).flatten(0, 1)
    expected = mixtral.load_balancing_loss_func((logits,), 4, 2, (ids != 0).long())
    torch.testing.assert_close(found, 0.5 * expected.view(1) / 2)  # transformers sums the shares over the two choices


def test_less_than_one_token_of_text_for_a_rank_counts_as_it_is() -> None:
    """With two context-parallel ranks, a single token of text counts as half a token on each."""
    router = Router(parse(f"{FAMILIES['llama']} --num-experts 4 --router-z-loss 0.1".split()).model, "router").train()
    hidden = torch.randn(2, 1, 16)
    mask = torch.tensor([[True], [False]])
    losses = [router(hidden, Text(mask, torch.tensor(total, dtype=torch.float64))).loss for total in (1.0, 0.5, 0.0)]
    torch.testing.assert_close(losses[1], 2 * losses[0])
    assert losses[2].isfinite()
    targets = torch.tensor([3.0, 0.5], dtype=torch.float64)
    of_half = scale_router_loss(losses[0], targets, targets)
    torch.testing.assert_close(of_half, 3 * losses[0].sum())


def test_micro_batches_with_more_text_count_more() -> None:
    """A step of two micro-batches has the router's gradient of one micro-batch with the same samples."""
    tokens, ids = _windows(29)
    ids[0, 5:] = 0
    whole = {}
    for parts in (1, 2):
        model = _model("llama", "--objective sft --num-experts 4 --router-z-loss 0.1 --router-aux-loss 0.5")
        targets = [
            (t, (i != 0).double(), {"text": (i != 0).sum().double().view(1)})
            for t, i in zip(tokens.chunk(parts), ids.chunk(parts), strict=True)
        ]
        counts = [count_targets(each) for each in targets]
        model.loss_fn.mean_targets = sum(counts) / parts  # type: ignore[union-attr]
        for (t, mask, others), i in zip(targets, ids.chunk(parts), strict=True):
            loss = model(t, None, i, labels=t, loss_mask=mask, **others)
            (loss / sum(counts)[0]).backward()
        whole[parts] = {name: p.grad for name, p in model.named_parameters()}
    for name, grad in whole[1].items():
        torch.testing.assert_close(whole[2][name], grad, rtol=1e-10, atol=1e-13, msg=name)
