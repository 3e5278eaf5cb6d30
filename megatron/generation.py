"""Writing text with a trained model, one token at a time: keys and values of what was read are kept, not computed again.

Shapes: b batch, s tokens so far, v vocabulary.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron import mpu
from megatron.model import GPT2Model, T5Model
from megatron.model.block import Caches, TransformerLayer
from megatron.model.layers import Layer
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


class Stages:
    """A model whose layers are cut over pipeline stages; all of them follow the text together.

    Each stage tells all others what comes out of its layers: a token's states are small, and so
    every rank can choose the next token by itself.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.line = mpu.get_mesh().pipe
        blocks = [i for i, layer in enumerate(layers) if layer.repeated]
        size = self.line.size
        if len(blocks) < size:
            raise ValueError(f"--pipe-parallel-size {size} is more than the {len(blocks)} layers of the model")
        cuts = [0, *(blocks[len(blocks) * i // size] for i in range(1, size)), len(layers)]
        self.stretches = [range(a, b) for a, b in itertools.pairwise(cuts)]

    @property
    def own(self) -> range:
        """The layers of this stage."""
        return self.stretches[self.line.rank]

    def from_stage(self, stage: int, outputs: tuple[Tensor, ...] | Tensor) -> Any:
        """What that stage has got, on all of them."""
        source, group = self.line.ranks[stage], self.line.group
        if group is None:
            return outputs
        mine = stage == self.line.rank
        tensors = list(outputs) if isinstance(outputs, tuple) else [outputs]
        about: list[Any] = [([(t.shape, t.dtype) for t in tensors], isinstance(outputs, tuple)) if mine else None]
        dist.broadcast_object_list(about, source, group)
        shapes, several = about[0]
        if not mine:
            device = tensors[0].device
            tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        for i, tensor in enumerate(tensors):
            tensors[i] = tensor.contiguous()
            if tensor.numel():
                dist.broadcast(tensors[i], source, group)
        return tuple(tensors) if several else tensors[0]


class _Stepper:
    """What the steppers of both models share: the tokens so far, and what the layers keep of them."""

    model: GPT2Model | T5Model
    tokens: Tensor
    caches: dict[str, Caches]
    stages: "Stages | None" = None

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

    def _run(self, inputs: tuple[Tensor, ...], seen: int, begin: int = 0, end: int | None = None) -> tuple[Tensor, ...]:
        """The layers `begin` to `end` for new tokens behind `seen` others, each layer with what it keeps."""
        end = len(self.model.steps) if end is None else end
        if self.stages is None:
            return _run(self.model, inputs, self.caches, seen, begin, end)
        for stage, own in enumerate(self.stages.stretches):
            low, high = max(begin, own.start), min(end, own.stop)
            if low < high:
                if stage == self.stages.line.rank:
                    inputs = _run(self.model, inputs, self.caches, seen, low, high)
                inputs = self.stages.from_stage(stage, inputs)
        return inputs


class GPT2Stepper(_Stepper):
    """Continues a prompt. Behind the last learned position the window slides, which has to be computed anew each time."""

    def __init__(
        self,
        model: GPT2Model,
        prompt: list[int],
        positions: int,
        cached: bool = True,
        stages: "Stages | None" = None,
    ) -> None:
        self.model, self.prompt, self.positions, self.cached = model, prompt, positions, cached
        self.stages = stages

    def first(self, batch: int) -> Tensor:
        self.tokens = torch.tensor([self.prompt] * batch, device=next(self.model.parameters()).device)
        self.caches = _caches(self.model)
        return self._logits(self.tokens)

    def _logits(self, new: Tensor) -> Tensor:
        length = self.tokens.shape[1]
        if not self.cached:
            logits: Tensor = self.model(self.tokens[:, -self.positions :])[:, -1]
            return logits
        if length > self.positions:
            self.caches = _caches(self.model)
            new = self.tokens[:, -self.positions :]
            length = new.shape[1]
        seen = length - new.shape[1]
        place = torch.arange(seen, length, device=new.device).expand_as(new)
        return _whole(self.model, self._run((new, place, no_documents(new.device)), seen))


class ModelStepper:
    """Continues a prompt with any model of yours, which reads the whole text again for each token.

    logits: tokens [b, s] -> [b, s, v], the same on all ranks. positions: the longest text that it reads; of a longer
    one it gets the end.
    """

    def __init__(self, logits: Callable[[Tensor], Tensor], prompt: list[int], positions: int) -> None:
        self.logits, self.prompt, self.positions = logits, prompt, positions

    def first(self, batch: int) -> Tensor:
        self.tokens = torch.tensor([self.prompt] * batch)
        return self._last()

    def next(self, tokens: Tensor) -> Tensor:
        self.tokens = torch.cat([self.tokens, tokens.unsqueeze(1).to(self.tokens.device)], dim=1)
        return self._last()

    def reorder(self, rows: Tensor) -> None:
        self.tokens = self.tokens[rows]

    def _last(self) -> Tensor:
        return self.logits(self.tokens[:, -self.positions :])[:, -1]


class T5Stepper(_Stepper):
    """Writes the decoder's side of a source text. start: the token that the decoder begins with."""

    def __init__(
        self,
        model: T5Model,
        source: list[int],
        start: int,
        cached: bool = True,
        stages: "Stages | None" = None,
    ) -> None:
        self.model, self.source, self.start, self.cached = model, source, start, cached
        self.stages = stages

    def first(self, batch: int) -> Tensor:
        device = next(self.model.parameters()).device
        self.encoder_tokens = torch.tensor([self.source] * batch, device=device)
        self.tokens = torch.full((batch, 1), self.start, device=device)
        self.caches = _caches(self.model)
        names = [layer.name for layer, _ in self.model.steps]
        self.cut = names.index("decoder.embedding")
        empty = no_documents(device)
        self.encoded = self._run((self.encoder_tokens, self.tokens, empty, empty), 0, end=self.cut)[0]
        return self._logits(self.tokens)

    def _logits(self, new: Tensor) -> Tensor:
        if not self.cached:
            logits: Tensor = self.model(self.encoder_tokens, self.tokens)[:, -1]
            return logits
        empty = no_documents(new.device)
        inputs = (self.encoded, new, empty, empty)
        return _whole(self.model, self._run(inputs, self.tokens.shape[1] - new.shape[1], begin=self.cut))


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
    seen: int,
    begin: int,
    end: int,
) -> tuple[Tensor, ...]:
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
    stepper: Stepper,
    batch: int,
    max_new_tokens: int,
    end: int,
    sampling: Sampling,
    seed: int,
    heard: Callable[[list[int]], None] | None = None,
) -> list[list[int]]:
    """`batch` continuations, each ended by the token `end`, which is its last, or after `max_new_tokens`.

    heard: called with each new token of all continuations, to show a text while it is written.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = stepper.first(batch)
    ended = torch.zeros(batch, dtype=torch.bool)
    found: list[Tensor] = []
    while len(found) < max_new_tokens:
        found.append(choose(logits.float().cpu(), sampling, generator).masked_fill(ended, end))
        if heard is not None:
            heard(found[-1].tolist())
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
