import math
from typing import Any

import pytest
import torch

from megatron.config import Config
from megatron.config.command_line import parse
from megatron.model import GPT2Model, Layer, LayerStack, global_parameters
from megatron.model.layers import global_names, init_weights
from megatron.utils import get_ltor_documents_and_position_ids, get_ltor_masks_and_position_ids
from tests.parity import reference
from tests.sentences import SENTENCES

EOD = 1


def config(*argv: str) -> Config:
    small = [
        "--num-layers",
        "3",
        "--hidden-size",
        "32",
        "--num-attention-heads",
        "4",
        "--seq-length",
        "24",
        "--vocab-size",
        "100",
    ]
    return parse([*small, "--hidden-dropout", "0", "--attention-dropout", "0", *argv])


def randomize(model: torch.nn.Module) -> None:
    """Randomise all parameters, since initial biases of 0 and norm weights of 1 would hide mistakes."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)


def test_logits_equal_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    model = GPT2Model(config("--make-vocab-size-divisible-by", "1"), parallel_output=False).eval()
    randomize(model)
    w = dict(global_parameters(model))
    their_config = transformers.GPT2Config(
        vocab_size=100, n_positions=24, n_embd=32, n_layer=3, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    theirs = transformers.GPT2LMHeadModel(their_config).eval()

    def interleaved_to_stacked(rows: torch.Tensor) -> torch.Tensor:
        """Convert the rows of a QKV weight from (q, k, v) per head to all q, all k, all v."""
        return rows.view(4, 3, 8, *rows.shape[1:]).transpose(0, 1).reshape(96, *rows.shape[1:])

    state: dict[str, Any] = {
        "transformer.wte.weight": w["embedding.word_embeddings.weight"],
        "lm_head.weight": w["embedding.word_embeddings.weight"],
        "transformer.wpe.weight": w["position_embedding.weight"],
        "transformer.ln_f.weight": w["final_norm.norm.weight"],
        "transformer.ln_f.bias": w["final_norm.norm.bias"],
    }
    for i in range(3):
        for ours, its in (
            ("input_layernorm", "ln_1"),
            ("post_attention_layernorm", "ln_2"),
            ("attention.query_key_value", "attn.c_attn"),
            ("attention.dense", "attn.c_proj"),
            ("mlp.dense_h_to_4h", "mlp.c_fc"),
            ("mlp.dense_4h_to_h", "mlp.c_proj"),
        ):
            for kind in ("weight", "bias"):
                value = w[f"layers.{i}.{ours}.{kind}"]
                if ours.endswith("query_key_value"):
                    value = interleaved_to_stacked(value)
                state[f"transformer.h.{i}.{its}.{kind}"] = value.T if "c_" in its and kind == "weight" else value
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected
    assert all("attn.bias" in name or "masked_bias" in name for name in missing)
    tokens = torch.randint(100, (3, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by_document", [False, True])
def test_logits_and_masks_equal_the_plain_reference(by_document: bool) -> None:
    model = GPT2Model(config(), parallel_output=False).double().eval()
    randomize(model)
    tokens = torch.randint(2, 100, (3, 24), generator=torch.Generator().manual_seed(1))
    tokens[0, [3, 4, 23]] = EOD
    tokens[1, 0] = EOD
    document_ids, loss_mask, position_ids = get_ltor_documents_and_position_ids(tokens, EOD, *[by_document] * 3)
    positions, allowed, expected_loss_mask = reference.masks(tokens, EOD, by_document)
    assert torch.equal(position_ids, positions)
    assert torch.equal(loss_mask, expected_loss_mask)
    weights = {name: p[:100] if name.startswith("embedding") else p for name, p in global_parameters(model)}
    expected = reference.logits(weights, tokens, positions, allowed, layers=3, heads=4)
    torch.testing.assert_close(model(tokens, position_ids, document_ids), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("flags", [(p, a, e) for p in (False, True) for a in (False, True) for e in (False, True)])
def test_the_masks_of_the_original_say_where_nobody_may_look(flags: tuple[bool, bool, bool]) -> None:
    tokens = torch.randint(2, 100, (3, 12), generator=torch.Generator().manual_seed(1))
    tokens[0, [3, 4, 11]] = EOD
    tokens[1, 0] = EOD
    mask, loss_mask, position_ids = get_ltor_masks_and_position_ids(tokens, EOD, *flags)
    by_position, by_document, mask_loss = flags
    assert mask.dtype == torch.bool and mask.shape == (3 if by_document else 1, 1, 12, 12)
    for b, row in enumerate(tokens.tolist()):
        document = [sum(t == EOD for t in row[:i]) for i in range(12)]
        for q in range(12):
            for k in range(12):
                hidden = k > q or (by_document and document[q] != document[k])
                assert mask[b if by_document else 0, 0, q, k] == hidden
        begin = [document.index(document[i]) if by_position else 0 for i in range(12)]
        assert position_ids[b].tolist() == [i - at for i, at in enumerate(begin)]
        assert loss_mask[b].tolist() == [0.0 if mask_loss and t == EOD else 1.0 for t in row]


@pytest.mark.parametrize("recompute", [[], ["--checkpoint-activations"]])
def test_a_mask_in_the_place_of_document_ids(recompute: list[str]) -> None:
    """In place of document ids, GPT2Model accepts a causal mask, which changes nothing, and refuses other masks."""
    model = GPT2Model(config(*recompute)).eval()
    tokens = torch.zeros(2, 5, dtype=torch.long)
    mask, _, position_ids = get_ltor_masks_and_position_ids(tokens, EOD, False, False, False)
    assert torch.equal(model(tokens, position_ids, mask), model(tokens, position_ids))
    for wrong in (~mask, mask.float(), torch.ones(2, 5, dtype=torch.bool)):
        with pytest.raises(ValueError, match="get_ltor_documents_and_position_ids"):
            model(tokens, position_ids, wrong)


def test_without_flags_no_mask_is_made() -> None:
    document_ids, _, _ = get_ltor_documents_and_position_ids(
        torch.zeros(2, 5, dtype=torch.long), EOD, True, False, True
    )
    assert document_ids.numel() == 0


@pytest.mark.parametrize(
    ("flags", "name", "shape"),
    [
        ([], "layers.0.attention.query_key_value.weight", (96, 32)),
        (["--kv-hidden-size", "16"], "layers.0.attention.query_key_value.weight", (3 * 4 * 16, 32)),
        (["--kv-hidden-size", "16"], "layers.0.attention.dense.weight", (32, 64)),
        (["--ff-hidden-size", "40"], "layers.2.mlp.dense_h_to_4h.weight", (40, 32)),
        (["--max-position-embeddings", "64"], "position_embedding.weight", (64, 32)),
        ([], "embedding.word_embeddings.weight", (128, 32)),
    ],
)
def test_sizes_are_honoured(flags: list[str], name: str, shape: tuple[int, ...]) -> None:
    model = GPT2Model(config(*flags))
    assert dict(global_parameters(model))[name].shape == shape
    assert model(torch.zeros(1, 24, dtype=torch.long)).shape == (1, 24, 128)


def test_no_hidden_bias_leaves_no_bias_but_those_of_norms() -> None:
    names = [name for name, _ in global_parameters(GPT2Model(config("--no-hidden-bias"))) if name.endswith("bias")]
    assert names
    assert all("norm" in name for name in names)


def test_state_dict_has_the_global_names() -> None:
    model = GPT2Model(config())
    assert sorted(model.state_dict()) == sorted(name for name, _ in global_parameters(model))


def test_initial_weights_follow_seed_and_name() -> None:
    a, b, c = (dict(global_parameters(GPT2Model(config("--seed", seed)))) for seed in ("1", "1", "2"))
    name = "layers.1.mlp.dense_h_to_4h.weight"
    assert torch.equal(a[name], b[name])
    assert not torch.equal(a[name], c[name])
    assert not torch.equal(a[name], a["layers.2.mlp.dense_h_to_4h.weight"])
    assert a[name].std().item() == pytest.approx(0.02, rel=0.05)
    assert a["layers.1.mlp.dense_4h_to_h.weight"].std().item() == pytest.approx(0.02 / math.sqrt(6), rel=0.05)
    assert torch.equal(a["final_norm.norm.weight"], torch.ones(32))
    assert a["embedding.word_embeddings.weight"][100:].abs().max() == 0


def test_a_sequence_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match=SENTENCES["25_tokens_is_longer_than_the"]):
        GPT2Model(config())(torch.zeros(1, 25, dtype=torch.long))


def test_causal() -> None:
    """Changing tokens from position 15 on leaves all earlier logits unchanged."""
    model = GPT2Model(config(), parallel_output=False).eval()
    randomize(model)
    tokens = torch.randint(100, (1, 24), generator=torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[0, 15:] = (other[0, 15:] + 1) % 100
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[:, :15], model(other)[:, :15])
        assert not torch.allclose(model(tokens)[:, 15:], model(other)[:, 15:])


def test_init_can_be_repeated() -> None:
    model = GPT2Model(config())
    before = {name: p.detach().clone() for name, p in global_parameters(model)}
    randomize(model)
    init_weights(model, 1234)
    assert all(torch.equal(p, before[name]) for name, p in global_parameters(model))


def test_two_modules_with_one_name_are_refused() -> None:
    first = Layer("step", torch.nn.Identity)
    shared = Layer("step", torch.nn.Identity, tied="key")
    for layers in ([first, Layer("step", torch.nn.Flatten)], [shared, first], [first, shared]):
        with pytest.raises(ValueError, match="'step'"):
            LayerStack(layers, 1)
    assert global_names([shared, Layer("end", torch.nn.Identity, tied="key"), shared]) == ["step"] * 3
