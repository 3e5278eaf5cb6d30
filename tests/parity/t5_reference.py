"""T5 training in one process of plain torch, for the variants of T5 and of CPM-2.

Only initial weights and samples come from the code under test. In shapes, b is the batch size, k the number of encoder
tokens and q the number of decoder tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a T5, and its variant.

    t5 is true for T5 v1.1: relative positions, RMS norms, gated GELU, unscaled attention scores, untied output, and no
    biases. It is false for CPM-2: learned positions, LayerNorms, GELU, scaled attention scores, tied output, biases.
    """

    encoder_layers: int
    decoder_layers: int
    heads: int
    t5: bool
    buckets: int = 8
    furthest: int = 20


def norm(w: Weights, name: str, x: Tensor, t5: bool) -> Tensor:
    if t5:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w[f"{name}.weight"]
    return F.layer_norm(x, (x.shape[-1],), w[f"{name}.weight"], w[f"{name}.bias"])


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def gelu(y: Tensor) -> Tensor:
    return 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))


def bias(w: Weights, stack: str, layer: int, length: int, shape: Shape, causal: bool) -> Tensor:
    """Return the relative-position bias [n, s, s], computed by loops; a UMT5 has a table for each layer."""
    own = w.get(f"{stack}.relative_positions.{layer}.weight")
    table, rows = w[f"{stack}.relative_positions.weight"] if own is None else own, []
    for query in range(length):
        for key in range(length):
            distance, count, at = key - query, shape.buckets, 0
            if causal:
                distance = max(-distance, 0)
            else:
                count //= 2
                at = count if distance > 0 else 0
                distance = abs(distance)
            exact = count // 2
            if distance < exact:
                at += distance
            else:
                far = math.log(distance / exact) / math.log(shape.furthest / exact) * (count - exact)
                at += min(exact + int(far), count - 1)
            rows.append(at)
    return table[torch.tensor(rows)].view(length, length, -1).permute(2, 0, 1)


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, added: Tensor | None, scaled: bool) -> Tensor:
    """Return the attention output [b, q, n * d] for queries [b, q, n, d], keys and values [b, k, n, d].

    allowed: bool [b, q, k], True where a query attends to a key. added: a bias [n, q, k] of the scores.
    """
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) / (math.sqrt(q.shape[-1]) if scaled else 1.0)
    if added is not None:
        scores = scores + added
    weights = scores.masked_fill(~allowed[:, None], -1e30).softmax(-1)
    return torch.einsum("bnqk,bknd->bqnd", weights, v).flatten(2)


def layer(
    w: Weights, p: str, x: Tensor, own: Tensor, added: Tensor | None, cross: tuple[Tensor, Tensor] | None, s: Shape
) -> Tensor:
    b, length, _ = x.shape
    y = linear(w, f"{p}.attention.query_key_value", norm(w, f"{p}.input_layernorm", x, s.t5))
    q, k, v = y.view(b, length, s.heads, 3, -1).unbind(3)
    x = x + linear(w, f"{p}.attention.dense", attend(q, k, v, own, added, not s.t5))
    if cross is not None:
        encoded, allowed = cross
        q = linear(w, f"{p}.cross_attention.query", norm(w, f"{p}.cross_layernorm", x, s.t5)).view(
            b, length, s.heads, -1
        )
        k, v = linear(w, f"{p}.cross_attention.key_value", encoded).view(b, encoded.shape[1], s.heads, 2, -1).unbind(3)
        x = x + linear(w, f"{p}.cross_attention.dense", attend(q, k, v, allowed, None, not s.t5))
    y = linear(w, f"{p}.mlp.dense_h_to_4h", norm(w, f"{p}.post_attention_layernorm", x, s.t5))
    y = gelu(y[..., 0::2]) * y[..., 1::2] if s.t5 else gelu(y)
    return x + linear(w, f"{p}.mlp.dense_4h_to_h", y)


def logits(w: Weights, source: Tensor, target: Tensor, encoder_ids: Tensor, decoder_ids: Tensor, s: Shape) -> Tensor:
    """Return logits [b, q, v]. The encoder's tokens and document ids are [b, k], the decoder's [b, q]."""
    table = w["embedding.word_embeddings.weight"]
    x, y = table[source], table[target]
    if not s.t5:
        x = x + w["encoder.start.weight"][: source.shape[1]]
        y = y + w["decoder.start.weight"][: target.shape[1]]
    same = encoder_ids[:, :, None] == encoder_ids[:, None, :]
    for i in range(s.encoder_layers):
        added = bias(w, "encoder", i, source.shape[1], s, False) if s.t5 else None
        x = layer(w, f"encoder.layers.{i}", x, same, added, None, s)
    x = norm(w, "encoder.final_norm.norm", x, s.t5)
    past = (decoder_ids[:, :, None] == decoder_ids[:, None, :]).tril()
    for i in range(s.decoder_layers):
        added = bias(w, "decoder", i, target.shape[1], s, True) if s.t5 else None
        y = layer(w, f"decoder.layers.{i}", y, past, added, (x, decoder_ids[:, :, None] == encoder_ids[:, None, :]), s)
    y = norm(w, "decoder.final_norm.norm", y, s.t5)
    return y @ (w["head.word_embeddings.weight"] if s.t5 else table).T


def train(
    weights: Weights, batches: Sequence[Mapping[str, Tensor]], s: Shape, documents: bool, dtype: torch.dtype
) -> list[float]:
    """Train on global batches by SGD with momentum and gradient clipping; return each step's loss.

    documents: whether tokens attend only within their document.
    """
    w = {name: value.detach().to(dtype).clone().requires_grad_() for name, value in weights.items()}
    decay, other = ([p for p in w.values() if (p.dim() > 1) == matrix] for matrix in (True, False))
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": other, "weight_decay": 0.0}]
    steps = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    found = []
    for batch in batches:
        encoder_ids, decoder_ids = batch["encoder_document_ids"], batch["decoder_document_ids"]
        if not documents:
            encoder_ids, decoder_ids = encoder_ids.clamp(max=1), decoder_ids.clamp(max=1)
        out = logits(w, batch["encoder"], batch["decoder"], encoder_ids, decoder_ids, s)
        each = F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        mask = batch["loss_mask"].flatten().to(dtype)
        loss = (each * mask).sum() / mask.sum()
        steps.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(w.values()), 1.0)
        steps.step()
        found.append(loss.item())
    return found
