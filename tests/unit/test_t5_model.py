"""T5 has Hugging Face's logits, losses and gradients with random weights and padding."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.command_line import parse
from megatron.model import T5Model, global_parameters
from megatron.model.layers import init_weights

transformers = pytest.importorskip("transformers")

T5_FLAGS = (
    "--family t5 --num-layers 2 --num-decoder-layers 3 --hidden-size 32 --num-attention-heads 4 --kv-hidden-size 6 "
    "--ff-hidden-size 40 "
    "--no-hidden-bias --normalization rmsnorm --position-embedding relative --relative-attention-max-distance 20 "
    "--relative-attention-num-buckets 8 --no-scale-attention --layernorm-epsilon 1e-6 --hidden-dropout 0 "
    "--attention-dropout 0 --vocab-size 61 --make-vocab-size-divisible-by 16"
)


def hugging_face(activation: str, tied: bool, scaled: bool) -> Any:
    config = transformers.T5Config(
        vocab_size=61, d_model=32, d_kv=6, d_ff=40, num_layers=2, num_decoder_layers=3, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=20, dropout_rate=0.0, layer_norm_epsilon=1e-6,
        feed_forward_proj=activation, tie_word_embeddings=tied, decoder_start_token_id=0, pad_token_id=0,
        **({"scale_decoder_outputs": scaled} if tied else {}),
    )  # fmt: skip
    torch.manual_seed(5)
    model = transformers.T5ForConditionalGeneration(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.15)
    return model


def copy_weights(theirs: Any, ours: T5Model, gated: bool) -> None:
    """Copy Hugging Face's weights into `ours`, which fuses q, k, v (interleaved per head) and gate, value (per row)."""
    w: dict[str, Tensor] = theirs.state_dict()
    heads, width = 4, 6

    def fused(prefix: str, names: str) -> Tensor:
        return torch.stack([w[f"{prefix}.{name}.weight"].view(heads, width, -1) for name in names], 1).flatten(0, 2)

    found = {"embedding.word_embeddings.weight": w["shared.weight"], "head.word_embeddings.weight": w["lm_head.weight"]}
    for stack, layers in (("encoder", 2), ("decoder", 3)):
        b = f"{stack}.block"
        found[f"{stack}.relative_positions.weight"] = w[f"{b}.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        found[f"{stack}.final_norm.norm.weight"] = w[f"{stack}.final_layer_norm.weight"]
        for i in range(layers):
            at, last = f"{stack}.layers.{i}", 2 if stack == "decoder" else 1
            names = {0: "input_layernorm", 1: "cross_layernorm", 2: "post_attention_layernorm"}
            for j in range(last + 1):
                name = names[j] if stack == "decoder" else names[2 * j]
                found[f"{at}.{name}.weight"] = w[f"{b}.{i}.layer.{j}.layer_norm.weight"]
            found[f"{at}.attention.query_key_value.weight"] = fused(f"{b}.{i}.layer.0.SelfAttention", "qkv")
            found[f"{at}.attention.dense.weight"] = w[f"{b}.{i}.layer.0.SelfAttention.o.weight"]
            if stack == "decoder":
                found[f"{at}.cross_attention.query.weight"] = fused(f"{b}.{i}.layer.1.EncDecAttention", "q")
                found[f"{at}.cross_attention.key_value.weight"] = fused(f"{b}.{i}.layer.1.EncDecAttention", "kv")
                found[f"{at}.cross_attention.dense.weight"] = w[f"{b}.{i}.layer.1.EncDecAttention.o.weight"]
            mlp = f"{b}.{i}.layer.{last}.DenseReluDense"
            up = (
                torch.stack([w[f"{mlp}.wi_0.weight"], w[f"{mlp}.wi_1.weight"]], 1).flatten(0, 1)
                if gated
                else w[f"{mlp}.wi.weight"]
            )
            found[f"{at}.mlp.dense_h_to_4h.weight"] = up
            found[f"{at}.mlp.dense_4h_to_h.weight"] = w[f"{mlp}.wo.weight"]
    with torch.no_grad():
        for name, p in global_parameters(ours):
            p.zero_()
            p[: len(found[name])].copy_(found[name])


@pytest.mark.parametrize(
    ("activation", "tied", "scaled"), [("gated-gelu", False, False), ("relu", True, True), ("gated-gelu", True, False)]
)
@pytest.mark.parametrize("padded", [False, True])
def test_logits_and_loss_are_hugging_faces(activation: str, tied: bool, scaled: bool, padded: bool) -> None:
    theirs = hugging_face(activation, tied, scaled)
    flags = [*T5_FLAGS.split(), "--activation", activation, "--tie-embeddings" if tied else "--no-tie-embeddings"]
    ours = T5Model(parse([*flags, *(["--scale-tied-logits"] if scaled else [])]), parallel_output=False).eval()
    copy_weights(theirs, ours, activation == "gated-gelu")
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(1, 61, (3, 29), generator=generator)
    target = torch.randint(1, 61, (3, 13), generator=generator)
    mask, labels = torch.ones_like(source), target.clone()
    documents: tuple[Tensor, ...] = ()
    if padded:
        mask[0, 20:], mask[2, 7:] = 0, 0
        labels[1, 9:] = -100
        documents = mask.short(), (labels != -100).short()
    shifted = torch.cat([torch.zeros(3, 1, dtype=torch.int64), target[:, :-1]], 1)
    expected = theirs(input_ids=source, attention_mask=mask, decoder_input_ids=shifted, labels=labels)
    found = ours(source, shifted, *documents)
    kept = labels != -100
    torch.testing.assert_close(found[kept], expected.logits[kept], rtol=1e-5, atol=1e-5)
    losses = ours(source, shifted, *documents, labels=labels.clamp(min=0))
    torch.testing.assert_close(losses[kept].mean(), expected.loss, rtol=1e-5, atol=1e-5)


def test_padding_changes_nothing_and_makes_no_nan() -> None:
    model = T5Model(parse([*T5_FLAGS.split(), "--activation", "relu"]), parallel_output=False).eval()
    source, target = torch.arange(1, 13).view(1, 12), torch.arange(20, 26).view(1, 6)
    alone = model(source[:, :8], target[:, :4])
    documents = torch.tensor([[1] * 8 + [0] * 4]).short(), torch.tensor([[1] * 4 + [0] * 2]).short()
    found = model(source, target, *documents)
    torch.testing.assert_close(found[:, :4], alone)
    assert torch.isfinite(found).all()
    only = model(source, target, torch.ones(1, 12).short(), documents[1])  # only the decoder has padding
    assert torch.isfinite(only).all()


def test_documents_do_not_see_each_other() -> None:
    """Two documents in one sample have the logits that each has alone if positions restart at each document."""
    flags = (
        "--family t5 --num-layers 2 --hidden-size 16 --num-attention-heads 2 --vocab-size 50 --seq-length 16 "
        "--reset-position-ids --reset-attention-mask"
    )
    model = T5Model(parse(flags.split()), parallel_output=False).eval()
    source, target = torch.arange(14).view(1, 14), torch.arange(20, 30).view(1, 10)
    theirs, ours = torch.tensor([[1] * 9 + [2] * 5]).short(), torch.tensor([[1] * 4 + [2] * 6]).short()
    both = model(source, target, theirs, ours)
    torch.testing.assert_close(both[:, :4], model(source[:, :9], target[:, :4]))
    torch.testing.assert_close(both[:, 4:], model(source[:, 9:], target[:, 4:]))


def test_unscaled_attention_starts_with_smaller_queries() -> None:
    model = T5Model(parse([*T5_FLAGS.split(), "--init-method-std", "0.1"]))
    weights = dict(global_parameters(model))
    init_weights(model, 3)
    fused = weights["encoder.layers.0.attention.query_key_value.weight"].view(4, 3, 6, 32)
    assert fused[:, 0].std().item() == pytest.approx(0.1 / 6**0.5, rel=0.1)
    assert fused[:, 1:].std().item() == pytest.approx(0.1, rel=0.1)
    cross = weights["decoder.layers.2.cross_attention.query.weight"]
    assert cross.std().item() == pytest.approx(0.1 / 6**0.5, rel=0.1)


def test_integers_that_cross_a_border_take_less_than_20_kilobytes() -> None:
    """Stages exchange less than 20 kB of integers at CPM-2's sizes, instead of the 12.1 MB of CPM-Pretrain's masks."""
    flags = "--family t5 --num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 50 --seq-length 1024"
    model = T5Model(parse(flags.split()))
    documents = torch.ones(4, 1024).short(), torch.ones(4, 384).short()
    x: Any = (torch.zeros(4, 1024, dtype=torch.int64), torch.zeros(4, 384, dtype=torch.int32), *documents)
    sizes = {}
    for layer, call in model.steps:
        x = call(x)
        sizes[layer.name] = sum(t.numel() * t.element_size() for t in x if not t.is_floating_point())
    assert sizes["encoder.layers.0"] == 4 * (1024 * 2 + 384 * 2 + 384 * 4) == 17408
    assert sizes["decoder.layers.0"] == 4 * (1024 * 2 + 384 * 2) == 11264
    assert sizes["decoder.final_norm"] == 0
