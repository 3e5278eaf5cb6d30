"""A GPT-2 in the style of nanoGPT: plain torch, fused attention, tied embeddings, suited to torch.compile."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, split_qkv: bool) -> None:
        super().__init__()
        self.heads, self.split_qkv = heads, split_qkv
        self.before_attention, self.before_mlp = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        if split_qkv:  # DTensor cannot shard a fused QKV projection by heads
            self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))
        else:
            self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        y = self.before_attention(x)
        parts = (self.q(y), self.k(y), self.v(y)) if self.split_qkv else self.qkv(y).split(h, dim=-1)
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.before_mlp(x)), approximate="tanh"))


class _Embedding(nn.Module):
    def __init__(self, vocab: int, positions: int, hidden: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, hidden), nn.Embedding(positions, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.places(torch.arange(tokens.shape[1]))  # type: ignore[no-any-return]


def nano_layers(vocab: int, positions: int, hidden: int, layers: int, heads: int) -> list[nn.Module]:
    """Return a nanoGPT-style GPT-2 as a list of layers for pipelines, from tokens [b, s] to logits [b, s, vocab].

    Embeddings are untied, as torch's pipelines require.
    """
    scores = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False))
    return [_Embedding(vocab, positions, hidden), *(_Layer(hidden, heads, False) for _ in range(layers)), scores]


class Nano(nn.Module):
    """GPT-2 in the style of nanoGPT; maps tokens [b, s + 1] to their mean loss, a scalar."""

    def __init__(
        self, vocab: int, positions: int, hidden: int, layers: int, heads: int, split_qkv: bool = False
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, hidden), nn.Embedding(positions, hidden)
        self.layers = nn.ModuleList(_Layer(hidden, heads, split_qkv) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        logits = self.logits(text[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits [b, s, vocab] of tokens [b, s]."""
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.words.weight)
