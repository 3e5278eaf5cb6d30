"""Llama, Qwen and Mistral with random weights equal Hugging Face's: logits, losses and gradients."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron import mpu
from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron.model import GPT2Model, global_parameters
from megatron.model.rotary import compute_rotation
from megatron_tools.write.generation import GPT2Stepper
from tests.llama_twins import OF_KIND, VOCAB, Sizes, copy_weights, exact, flags_of, ours_of, theirs

pytest.importorskip("transformers")

SCALINGS: dict[str, tuple[dict[str, Any], str]] = {
    "theta": ({"rope_theta": 500.0}, "--rope-theta 500"),
    "linear": ({"rope_type": "linear", "factor": 3.0}, "--rope-scaling linear --rope-scaling-factor 3"),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 40,
        },
        "--rope-scaling llama3 --rope-scaling-factor 8 --rope-original-length 40",
    ),
    "yarn": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 2.0,
            "beta_slow": 0.25,
        },
        "--rope-scaling yarn --rope-scaling-factor 4 --rope-original-length 16 --rope-beta-fast 2 --rope-beta-slow "
        "0.25",
    ),
    "yarn, factor": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 0.7},
        "--rope-scaling yarn --rope-scaling-factor 4 --rope-original-length 32 --rope-attention-factor 0.7",
    ),
}


def pair(kind: str, flags: str = "", **settings: Any) -> tuple[Any, GPT2Model]:
    sizes = settings.get("sizes", Sizes())
    other = theirs(kind, **settings)
    settings.pop("rope", None)
    ours = GPT2Model(parse(f"{flags_of(kind, **settings)} {flags}".split()), parallel_output=False)
    copy_weights(other, ours, sizes)
    return other, ours


def learned(model: Any, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def check(other: Any, ours: GPT2Model, sizes: Sizes, length: int, tolerance: float, **theirs_too: Any) -> None:
    """Check that the logits and all gradients of `ours` equal those of the Hugging Face model `other`."""
    dice = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(VOCAB, (2, 3, length), generator=dice)
    found, expected = ours(tokens), other(tokens, **theirs_too).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    wanted = ours_of(learned(other, expected, labels), sizes)
    learned(ours, found, labels)
    for name, p in global_parameters(ours):
        assert p.grad is not None and (length == 1 or p.grad.abs().max() > 0), name
        torch.testing.assert_close(p.grad[: len(wanted[name])], wanted[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("unfused", ["", "--reference-ops rope swiglu rms-norm"])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", OF_KIND)
def test_logits_and_gradients_are_hugging_faces(kind: str, groups: int, unfused: str) -> None:
    sizes = Sizes(groups=groups)
    window = 5 if kind == "Mistral" else None
    for length in (1, 5, 23):
        other, ours = pair(kind, unfused, sizes=sizes, tied=groups == 2, window=window)
        check(other, ours, sizes, length, 1e-5)
        check(exact(other), ours.double(), sizes, length, 1e-10)


@pytest.mark.parametrize("name", SCALINGS)
def test_rotary_positions_of_every_kind(name: str) -> None:
    rope, flags = SCALINGS[name]
    sizes = Sizes(head=16)
    other, ours = pair("Llama", flags, sizes=sizes, rope=rope)
    check(exact(other), ours.double(), sizes, 60, 1e-10)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_a_part_of_each_head_is_rotated(share: float) -> None:
    """--rotary-percent rotates the same part of each attention head as StableLM in Hugging Face."""
    import transformers

    config = transformers.StableLmConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, partial_rotary_factor=share, layer_norm_eps=1e-5, max_position_embeddings=64,
        attn_implementation="sdpa", attention_dropout=0.0, hidden_dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(5)
    other = transformers.StableLmForCausalLM(config).eval()
    sizes = Sizes(heads=4, hidden=64, head=16)
    flags = f"{flags_of('Llama', sizes)} --rotary-percent {share} --normalization layernorm"
    ours = GPT2Model(parse(flags.split()), parallel_output=False)
    w = dict(other.named_parameters())
    for p in w.values():
        torch.nn.init.normal_(p, std=0.15)
    found = ours_of(w, sizes)
    for name in dict(global_parameters(ours)):
        if name.endswith("norm.bias"):
            found[name] = w[f"model.{name.replace('final_norm.norm', 'norm')}"]
    with torch.no_grad():
        for name, p in global_parameters(ours):
            p.zero_()[: len(found[name])].copy_(found[name])
    tokens = torch.randint(VOCAB, (3, 40), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(tokens), other(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "sizes", [Sizes(1, 33, 3, 1, 10, 7), Sizes(3, 20, 6, 3, 2, 13), Sizes(2, 16, 1, 1, 18, 5), Sizes(1, 14, 7, 7, 4, 9)]
)
def test_odd_sizes(sizes: Sizes) -> None:
    other, ours = pair("Qwen3", sizes=sizes)
    check(exact(other), ours.double(), sizes, 17, 1e-10)


@pytest.mark.parametrize("kind", OF_KIND)
def test_bf16_is_as_near_to_fp32_as_hugging_faces(kind: str) -> None:
    other, ours = pair(kind)
    tokens = torch.randint(VOCAB, (4, 24), generator=torch.Generator().manual_seed(2))
    exact = other(tokens).logits
    found, expected = ours.bfloat16()(tokens).float(), other.bfloat16()(tokens).logits.float()
    assert (found - exact).norm() < 1.2 * (expected - exact).norm()
    assert (found - expected).norm() < 1.5 * (expected - exact).norm()


def documents(length: int) -> tuple[Tensor, Tensor]:
    """Return document ids [2, s] and positions [2, s]; the positions restart in each document."""
    ids = torch.tensor([[0] * 4 + [1] * (length - 4), [0] * 9 + [1] * 3 + [2] * (length - 12)])
    first = torch.tensor([[0] * 4 + [4] * (length - 4), [0] * 9 + [9] * 3 + [12] * (length - 12)])
    return ids, torch.arange(length).expand(2, -1) - first


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("restart", [False, True])
def test_documents(restart: bool, apart: bool, window: int | None) -> None:
    """Logits equal Hugging Face's if positions restart at documents, attention stays within documents, or both."""
    flags = ("--reset-position-ids " if restart else "") + ("--reset-attention-mask" if apart else "")
    other, ours = pair("Mistral", flags, window=window)
    ids, positions = documents(21)
    place = torch.arange(21)
    allowed = (place[:, None] >= place).expand(2, 21, 21)
    if window:
        allowed = allowed & (place[:, None] - place < window)
    if apart:
        allowed = allowed & (ids[:, :, None] == ids[:, None, :])
    mask = torch.zeros(2, 1, 21, 21).masked_fill(~allowed[:, None], torch.finfo(torch.float32).min)
    tokens = torch.randint(VOCAB, (2, 21), generator=torch.Generator().manual_seed(3))
    where = positions if restart else place.expand(2, -1)
    expected = other(tokens, position_ids=where, attention_mask=mask).logits
    found = ours(tokens, where, ids.int() if apart else None)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_document_ids_that_contradict_the_flags() -> None:
    _, ours = pair("Llama", "--reset-position-ids")
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="--reset-position-ids.*--reset-attention-mask"):
        ours(tokens, document_ids=tokens)


def test_models_that_are_given_the_same_ids_have_their_own_angles() -> None:
    """Models that share one tensor of document ids, as in distillation, each use their own rotary angles."""
    tokens, ids = torch.randint(VOCAB, (2, 60)), torch.ones(2, 60, dtype=torch.int32)
    kinds: list[tuple[dict[str, Any], str]] = [({}, ""), *SCALINGS.values()]
    for sizes in (Sizes(head=16), Sizes(head=8)):
        for rope, flags in kinds:
            other, ours = pair("Llama", f"--reset-attention-mask {flags}", sizes=sizes, rope=rope)
            torch.testing.assert_close(ours(tokens, None, ids), other(tokens).logits, rtol=1e-5, atol=1e-5, msg=flags)


def test_a_rank_of_a_context_has_its_own_angles() -> None:
    """A context-parallel rank uses the rotary angles of its own positions, not those cached for the whole sequence."""
    m, ids = parse(flags_of("Llama").split()).model, torch.ones(1, 8, dtype=torch.int32)
    for axis, place in (
        (mpu.TRIVIAL_AXIS, range(8)),
        (mpu.Axis(None, (0, 1), 1), range(2, 6)),
        (mpu.Axis(None, (0, 1), 0), (0, 1, 6, 7)),
    ):
        turn = compute_rotation(m, ids, 8, context=axis)
        torch.testing.assert_close(turn.cos[:, 0, 0, 0], torch.tensor([math.cos(p) for p in place]))


def test_a_text_may_grow_longer_than_the_samples_were() -> None:
    """Generation beyond the training length, up to --max-position-embeddings, equals Hugging Face's."""
    other, ours = pair("Mistral", window=30)
    config = parse(flags_of("Mistral", window=30).split())
    assert (config.data.seq_length, config.positions) == (24, 64)
    tokens = torch.randint(VOCAB, (1, 64), generator=torch.Generator().manual_seed(4))
    stepper = GPT2Stepper(ours, tokens[0, :20].tolist(), config.positions)
    found = [stepper.first(1), *(stepper.next(tokens[:, i]) for i in range(20, 64))]
    torch.testing.assert_close(torch.cat(found), other(tokens).logits[0, 19:], rtol=1e-5, atol=1e-5)


def test_rotations_are_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.model import rotary

    made = []
    monkeypatch.setattr(
        rotary,
        "inverse_frequencies",
        lambda m, device, real=rotary.inverse_frequencies: made.append(1) or real(m, device),
    )
    _, ours = pair("Llama", sizes=Sizes(layers=3))
    ours(torch.zeros(1, 8, dtype=torch.int64))
    assert len(made) == 1


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--num-key-value-heads 3", "--num-attention-heads 8 must be a multiple of --num-key-value-heads 3"),
        ("--kv-hidden-size 5", "must be an even number of dimensions, not 5"),
        ("--rotary-percent 0", "must be an even number of dimensions, not 0"),
        # A product of floats, 0.29 x 100, is just below 29.
        ("--kv-hidden-size 100 --rotary-percent 0.29", "must be an even number of dimensions, not 29"),
        ("--rope-scaling yarn --rope-scaling-factor 2", "--rope-scaling yarn needs --rope-original-length"),
        ("--rope-scaling-factor 2", "--rope-scaling-factor: not used by --rope-scaling (none)"),
        ("--rope-scaling linear --rope-beta-fast 2", "--rope-beta-fast: not used by --rope-scaling linear"),
        (
            "--rope-scaling llama3 --rope-original-length 8 --rope-low-freq-factor 4",
            "--rope-high-freq-factor 4 must be more than --rope-low-freq-factor 4",
        ),
        (
            "--rope-scaling yarn --rope-original-length 8 --rope-beta-slow 40",
            "--rope-beta-fast 32 must be more than --rope-beta-slow 40",
        ),
        (
            "--rope-scaling llama3 --rope-original-length 8 --rope-low-freq-factor 0",
            "--rope-low-freq-factor 0.0 must be more than 0",
        ),
        (
            "--rope-scaling yarn --rope-original-length 8 --rope-theta 1",
            "--rope-theta 1 must be more than 1 with --rope-scaling yarn",
        ),
        ("--rope-scaling dynamic", "--rope-scaling dynamic must be one of linear, llama3, yarn, or none"),
        ("--sliding-window 0", "--sliding-window 0 must be at least 1, or none"),
        ("--position-embedding learned", "--position-embedding learned: a llama has rope positions"),
        ("--model-parallel-size 4 --num-key-value-heads 8 --num-attention-heads 8 --kv-hidden-size 4", ""),
        (
            "--model-parallel-size 2 --num-attention-heads 6 --num-key-value-heads 3",
            "one must be a multiple of the other",
        ),
        ("--enc-seq-length 8", "--enc-seq-length (used by t5 only)"),
    ],
)
def test_settings_that_cannot_be(flags: str, sentence: str) -> None:
    argv = f"{flags_of('Llama')} --hidden-size 32 {flags}".split()
    if not sentence:
        parse(argv)
        return
    with pytest.raises(ConfigError) as refused:
        parse(argv)
    assert sentence in str(refused.value)


def test_gpt2_reads_none_of_them() -> None:
    with pytest.raises(ConfigError, match="--num-key-value-heads.*--qk-norm"):
        parse(["--family", "gpt2", "--num-key-value-heads", "2", "--qk-norm"])
    with pytest.raises(ConfigError, match="--position-embedding"):
        parse(["--family", "gpt2", "--position-embedding", "rope"])
