"""Writing text with a trained model, one token at a time: keys and values of what was read are kept, not computed again.

Shapes: b batch, s tokens so far, v vocabulary.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron import mpu
from megatron.model import GPT2Model, T5Model
from megatron.model.block import Caches, TransformerLayer
from megatron.model.masks import no_documents
from megatron.model.t5 import StackStart


class Sampling(NamedTuple):
    """temperature 0 takes the likeliest. top_k keeps the k likeliest (0: all), top_p the fewest that reach p (Holtzman et al. 2020)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


class Stepper(Protocol):
    """A model that has read something and goes on token by token."""

    def first(self, batch: int) -> Tensor:
        """Start `batch` equal continuations: logits [b, v] of their first token."""
        ...

    def next(self, tokens: Tensor) -> Tensor:
        """Append tokens [b]: logits [b, v] of the next."""
        ...

    def reorder(self, rows: Tensor) -> None:
        """Continuation i goes on from where rows[i] stands."""
        ...


class _Stepper:
    """What the steppers of both models share: the tokens so far, and what the layers keep of them."""

    tokens: Tensor
    caches: dict[str, Caches]

    def next(self, tokens: Tensor) -> Tensor:
        self.tokens = torch.cat([self.tokens, tokens.unsqueeze(1)], dim=1)
        return self._logits(tokens.unsqueeze(1))

    def reorder(self, rows: Tensor) -> None:
        self.tokens = self.tokens[rows]
        for each in self.caches.values():
            each.own.reorder(rows)
            each.cross.reorder(rows)

    def _logits(self, new: Tensor) -> Tensor:
        raise NotImplementedError


class GPT2Stepper(_Stepper):
    """Continues a prompt. Behind the last learned position the window slides, which has to be computed anew each time."""

    def __init__(self, model: GPT2Model, prompt: list[int], positions: int, cached: bool = True) -> None:
        self.model, self.prompt, self.positions, self.cached = model, prompt, positions, cached

    def first(self, batch: int) -> Tensor:
        self.tokens = torch.tensor([self.prompt] * batch, device=next(self.model.parameters()).device)
        self.caches = _caches(self.model)
        return self._logits(self.tokens)

    def _logits(self, new: Tensor) -> Tensor:
        length = self.tokens.shape[1]
        if not self.cached or length > self.positions:
            logits: Tensor = self.model(self.tokens[:, -self.positions :])[:, -1]
            return logits
        place = torch.arange(length - new.shape[1], length, device=new.device).expand_as(new)
        return _whole(self.model, _run(self.model, (new, place, no_documents(new.device)), self.caches))


class T5Stepper(_Stepper):
    """Writes the decoder's side of a source text. start: the token that the decoder begins with."""

    def __init__(self, model: T5Model, source: list[int], start: int, cached: bool = True) -> None:
        self.model, self.source, self.start, self.cached = model, source, start, cached

    def first(self, batch: int) -> Tensor:
        device = next(self.model.parameters()).device
        self.encoder_tokens = torch.tensor([self.source] * batch, device=device)
        self.tokens = torch.full((batch, 1), self.start, device=device)
        self.caches = _caches(self.model)
        names = [layer.name for layer, _ in self.model.steps]
        self.cut = names.index("decoder.embedding")
        empty = no_documents(device)
        self.encoded = _run(self.model, (self.encoder_tokens, self.tokens, empty, empty), self.caches, end=self.cut)[0]
        return self._logits(self.tokens)

    def _logits(self, new: Tensor) -> Tensor:
        if not self.cached:
            logits: Tensor = self.model(self.encoder_tokens, self.tokens)[:, -1]
            return logits
        empty = no_documents(new.device)
        inputs = (self.encoded, new, empty, empty)
        return _whole(self.model, _run(self.model, inputs, self.caches, begin=self.cut))


def _caches(model: GPT2Model | T5Model) -> dict[str, Caches]:
    """For the layers that see their tokens one by one; an encoder reads them all at once."""
    return {
        name: Caches()
        for name, module in model.named_layers()
        if isinstance(module, TransformerLayer) and module.causal
    }


def _run(
    model: GPT2Model | T5Model,
    inputs: tuple[Tensor, ...],
    caches: dict[str, Caches],
    begin: int = 0,
    end: int | None = None,
) -> tuple[Tensor, ...]:
    """The layers `begin` to `end` for new tokens alone, each with what it keeps."""
    seen = next((c.own.key.shape[2] for c in caches.values() if c.own.key is not None), 0)
    for layer, call in model.steps[begin:end]:
        if layer.name in caches:
            inputs = call(inputs, caches[layer.name])
        elif isinstance(call, StackStart):
            inputs = call(inputs, seen)
        else:
            inputs = call(inputs)
    return inputs


def _whole(model: GPT2Model | T5Model, logits: object) -> Tensor:
    """[s, b, v/t] of the padded vocabulary -> [b, v] of the newest token."""
    assert isinstance(logits, Tensor)
    return mpu.gather_from_model_parallel_region(logits[-1])[..., : model.vocab_size]


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """[b, v] logits -> [b] tokens."""
    temperature, top_k, top_p = sampling
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter(
            -1, order, ordered.masked_fill(before >= top_p, -torch.inf)
        )
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(-1)


@torch.no_grad()
def sample(
    stepper: Stepper, batch: int, max_new_tokens: int, end: int, sampling: Sampling, seed: int
) -> list[list[int]]:
    """`batch` continuations, each ended by the token `end`, which is its last, or after `max_new_tokens`."""
    generator = torch.Generator().manual_seed(seed)
    logits = stepper.first(batch)
    ended = torch.zeros(batch, dtype=torch.bool)
    found: list[Tensor] = []
    while len(found) < max_new_tokens:
        found.append(choose(logits.float().cpu(), sampling, generator).masked_fill(ended, end))
        ended |= found[-1] == end
        if ended.all() or len(found) == max_new_tokens:
            break
        logits = stepper.next(found[-1].to(logits.device))
    rows = torch.stack(found, dim=1).tolist() if found else [[] for _ in range(batch)]
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


@torch.no_grad()
def beam_search(
    stepper: Stepper, beams: int, max_new_tokens: int, end: int, length_penalty: float = 1.0
) -> list[tuple[float, list[int]]]:
    """The `beams` best continuations, best first: (log-probability / length ** length_penalty, tokens).

    A continuation that `end` ends leaves the beam; the search stops when none that is left can
    overtake the worst of as many finished ones (as in Hugging Face with early_stopping=False).
    """
    scores = stepper.first(beams).float().cpu().log_softmax(-1)
    total = torch.tensor([0.0] + [-torch.inf] * (beams - 1))  # all start alike: one counts
    rows: list[list[int]] = [[] for _ in range(beams)]
    done: list[tuple[float, list[int]]] = []
    for length in range(1, max_new_tokens + 1):
        best, at = (total.unsqueeze(1) + scores).flatten().topk(2 * beams)
        kept: list[tuple[float, int, int]] = []
        for rank, (score, flat) in enumerate(zip(best.tolist(), at.tolist(), strict=True)):
            row, token = divmod(flat, scores.shape[1])
            if token == end and rank < beams:
                done.append((score / length**length_penalty, [*rows[row], token]))
            elif token != end and len(kept) < beams:
                kept.append((score, row, token))
        done = sorted(done, reverse=True)[:beams]
        if length == max_new_tokens or (len(done) == beams and done[-1][0] >= kept[0][0] / length**length_penalty):
            break
        total = torch.tensor([score for score, _, _ in kept])
        order, new = torch.tensor([row for _, row, _ in kept]), torch.tensor([token for _, _, token in kept])
        rows = [[*rows[row], token] for _, row, token in kept]
        stepper.reorder(order)
        scores = stepper.next(new).float().cpu().log_softmax(-1)
    else:
        kept = []
    unfinished = [(score / length**length_penalty, [*rows[row], token]) for score, row, token in kept]
    return sorted([*done, *unfinished], reverse=True)[:beams]
