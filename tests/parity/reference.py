"""GPT-2 training in one process of plain torch.

Only initial weights and samples come from the code under test; model, loss, optimizer and clipping are independent.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]
Settings = Mapping[str, float] | None  # lr_factor and AdamW's settings of a weight; None if frozen
Multiply = Callable[[Tensor, Tensor], Tensor]  # the product of x [..., i] and the transpose of a weight [o, i]


def in_fp8(x: Tensor) -> Tensor:
    """Round the rows of x [n, i] to multiples of a scale that e4m3 can represent, and return these multiples."""
    largest = x.abs().amax(-1, keepdim=True).double()
    scale = torch.exp2(torch.ceil(torch.log2(largest.clamp(min=1e-30) / 448))).to(x.dtype)
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


class Fp8Product(torch.autograd.Function):
    """The matmul of `--precision fp8`: output and input gradient from rounded rows, weight gradient unrounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return in_fp8(x) @ in_fp8(weight).T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        return in_fp8(grad) @ in_fp8(weight.T).T, flat.T @ x.flatten(0, -2)


class Scales(NamedTuple):
    """Factors of attention scores, of logits and of the residual branches."""

    attention: float
    logits: float = 1.0
    branch: float = 1.0


def default_settings(name: str) -> Settings:
    """Return no settings: the learning rate of the run, and weight decay for matrices."""
    return {}


def rejects_nothing(loss: float, norm: float) -> bool:
    """Return False for each step."""
    return False


def plain_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return the unrounded product."""
    return x @ weight.T


def logits(
    w: Mapping[str, Tensor],
    tokens: Tensor,
    positions: Tensor,
    allowed: Tensor,
    layers: int,
    heads: int,
    multiply: Multiply = plain_product,
    scales: Scales | None = None,
) -> Tensor:
    """Return logits [b, s, v] from tokens and positions [b, s].

    allowed: bool [b, s, s], True where a query (second dimension) attends to a key. multiply: matmul of the linear
    layers.
    """
    b, s = tokens.shape
    x = w["embedding.word_embeddings.weight"][tokens] + w["position_embedding.weight"][positions]
    h = x.shape[-1]
    scales = scales or Scales(1 / math.sqrt(h // heads))
    for i in range(layers):
        p = f"layers.{i}."
        y = F.layer_norm(x, (h,), w[p + "input_layernorm.weight"], w[p + "input_layernorm.bias"])
        qkv = multiply(y, w[p + "attention.query_key_value.weight"]) + w[p + "attention.query_key_value.bias"]
        q, k, v = (each.transpose(1, 2) for each in qkv.view(b, s, heads, 3, -1).unbind(3))  # [b, n, s, d]
        scores = q @ k.transpose(2, 3) * scales.attention
        weights = scores.masked_fill(~allowed[:, None], -math.inf).softmax(-1)
        context = (weights @ v).transpose(1, 2).reshape(b, s, -1)
        x = x + (multiply(context, w[p + "attention.dense.weight"]) + w[p + "attention.dense.bias"]) * scales.branch
        y = F.layer_norm(x, (h,), w[p + "post_attention_layernorm.weight"], w[p + "post_attention_layernorm.bias"])
        y = multiply(y, w[p + "mlp.dense_h_to_4h.weight"]) + w[p + "mlp.dense_h_to_4h.bias"]
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + (multiply(y, w[p + "mlp.dense_4h_to_h.weight"]) + w[p + "mlp.dense_4h_to_h.bias"]) * scales.branch
    x = F.layer_norm(x, (h,), w["final_norm.norm.weight"], w["final_norm.norm.bias"])
    return x @ w["embedding.word_embeddings.weight"].T * scales.logits


def masks(tokens: Tensor, eod: int, by_document: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return (positions [b, s], attention mask [b, s, s], loss mask [b, s]), computed with plain Python loops.

    by_document: restart the positions in each document, attend only within documents, ignore the loss at EOD tokens.
    """
    b, s = tokens.shape
    positions, allowed, loss = (
        torch.zeros(b, s, dtype=torch.long),
        torch.zeros(b, s, s, dtype=torch.bool),
        torch.ones(b, s),
    )
    for row in range(b):
        begin = 0
        for i in range(s):
            positions[row, i] = i - begin
            allowed[row, i, begin : i + 1] = True
            if by_document and tokens[row, i] == eod:
                loss[row, i] = 0
                begin = i + 1
    return positions, allowed, loss


def train(
    weights: Mapping[str, Tensor],
    batches: list[np.ndarray],
    *,
    layers: int,
    heads: int,
    eod: int,
    by_document: bool,
    lr: float,
    optimizer: str,
    clip: float,
    dtype: torch.dtype,
    learn: Callable[..., list[float]],
    z_loss: float = 0.0,
    multiply: Multiply = plain_product,
    scales: Scales | None = None,
) -> list[float]:
    """Train on global batches [b, s + 1] at a constant learning rate; return each step's loss, without z-loss.

    learn: the function `learn` below, or one with the same arguments.
    """

    def loss_of(batch: np.ndarray, w: Weights) -> Tensor:
        text = torch.from_numpy(batch)
        tokens, labels = text[:, :-1], text[:, 1:]
        positions, allowed, loss_mask = masks(tokens, eod, by_document)
        out = logits(w, tokens, positions, allowed, layers, heads, multiply, scales)
        each = F.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="none")
        z = z_loss * out.flatten(0, 1).logsumexp(-1) ** 2
        return ((each + (z - z.detach())) * loss_mask.flatten()).sum() / loss_mask.sum()

    return learn(weights, [partial(loss_of, batch) for batch in batches], lr, optimizer, clip, dtype)


def learn(
    weights: Weights,
    losses: Iterable[Callable[[Weights], Tensor]],
    lr: float,
    optimizer: str,
    clip: float,
    dtype: torch.dtype,
    settings: Callable[[str], Settings] = default_settings,
    rejects: Callable[[float, float], bool] = rejects_nothing,
    watch: Callable[[Weights], None] | None = None,
) -> list[float]:
    """Make one optimizer step for each function in `losses`; return the values of the losses.

    losses: functions from the weights to a scalar loss. lr: constant learning rate. clip: largest gradient norm.
    settings: settings of a weight by its name; None freezes the weight. rejects: (loss, gradient norm) -> whether to
    skip the step. watch: called with the initial weights, and after each step that is not skipped.
    """
    w = {name: value.detach().to(dtype).clone() for name, value in weights.items()}
    groups: list[dict[str, Any]] = []
    for name, p in w.items():
        found_settings = settings(name)
        if found_settings is not None:
            p.requires_grad_()
            decay = 0.01 if p.dim() > 1 else 0.0
            groups.append({"params": [p], "lr": lr, "weight_decay": decay})
            groups[-1] |= {key: found_settings[key] for key in found_settings if key != "lr_factor"}
            groups[-1]["lr"] *= found_settings.get("lr_factor", 1.0)
    learning = [p for p in w.values() if p.requires_grad]
    if optimizer == "sgd":
        steps: torch.optim.Optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9)
    else:
        steps = torch.optim.AdamW(groups, lr=lr, foreach=False)
    found = []
    watch = watch or (lambda _: None)
    watch(w)
    for loss_of in losses:
        loss = loss_of(w)
        steps.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(learning, clip)
        if not rejects(loss.item(), norm.item()):
            steps.step()
            watch(w)
        found.append(loss.item())
    return found
