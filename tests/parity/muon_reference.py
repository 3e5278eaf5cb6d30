"""Training with torch.optim.Muon and AdamW in one process of plain torch, each matrix a separate parameter."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .reference import Weights

HIDDEN = ("query_key_value.weight", "query.weight", "key_value.weight", "dense.weight", "dense_h_to_4h.weight",
          "dense_4h_to_h.weight")  # fmt: skip


@contextmanager
def exact_iterations() -> Iterator[None]:
    """Let torch.optim.Muon orthogonalise in the dtype of the weights instead of bf16."""
    real = Tensor.bfloat16
    real_to = Tensor.to

    def to(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        return tensor.clone() if options.get("dtype") is torch.bfloat16 else real_to(tensor, *args, **options)

    Tensor.bfloat16 = lambda tensor: tensor.clone()  # type: ignore[assignment, method-assign, misc]
    Tensor.to = to  # type: ignore[assignment, method-assign]  # torch 2.15 calls it instead
    try:
        yield
    finally:
        Tensor.bfloat16 = real  # type: ignore[method-assign]
        Tensor.to = real_to  # type: ignore[method-assign]


def separate(name: str, weight: Tensor, model: Any) -> list[Tensor]:
    """Return the matrices of a weight as Hugging Face stores them: q, k, v or gate, up; [weight] for other weights."""
    width, h = model.head_size, weight.shape[-1]
    if name.endswith("query_key_value.weight"):
        by_group = weight.view(model.key_value_heads, -1, width, h)
        return [x.reshape(-1, h) for x in (by_group[:, :-2], by_group[:, -2], by_group[:, -1])]
    if name.endswith("key_value.weight"):
        by_head = weight.view(model.num_attention_heads, 2, width, h)
        return [by_head[:, 0].reshape(-1, h), by_head[:, 1].reshape(-1, h)]
    if name.endswith("dense_h_to_4h.weight") and model.is_gated:
        return [weight[::2], weight[1::2]]
    return [weight]


def joined(name: str, parts: list[Tensor], model: Any) -> Tensor:
    """Return the weight whose matrices are `parts`; the inverse of `separate`."""
    if len(parts) == 1:
        return parts[0]
    if name.endswith("dense_h_to_4h.weight"):
        return torch.stack(parts, 1).flatten(0, 1)
    groups = model.key_value_heads if name.endswith("query_key_value.weight") else model.num_attention_heads
    return torch.cat([part.view(groups, -1, part.shape[-1]) for part in parts], 1).flatten(0, 1)


def learn(
    weights: Weights,
    losses: Iterable[Callable[[Weights], Tensor]],
    lr: float,
    optimizer: str,
    clip: float,
    dtype: torch.dtype,
    model: Any,
) -> list[float]:
    """Make one step for each function in `losses`, as `reference.learn` does; model: the settings of the model."""
    assert optimizer == "muon"
    leaves = {
        name: [part.detach().to(dtype).clone().requires_grad_() for part in separate(name, value, model)]
        for name, value in weights.items()
    }
    hidden = [p for name, parts in leaves.items() if name.endswith(HIDDEN) for p in parts]
    rest = [p for name, parts in leaves.items() if not name.endswith(HIDDEN) for p in parts]
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
    ]
    muon = torch.optim.Muon(hidden, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(groups, lr=lr, foreach=False)
    found = []
    for loss_of in losses:
        loss = loss_of({name: joined(name, parts, model) for name, parts in leaves.items()})
        muon.zero_grad()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*hidden, *rest], clip)
        with exact_iterations():
            muon.step()
        adam.step()
        found.append(loss.item())
    return found
