"""Token-by-token text generation with a trained model and a key-value cache: sampling and beam search.

Shapes: b batch, s tokens so far, v vocabulary, t model-parallel ranks.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron import mpu
from megatron.model.block import TransformerLayer
from megatron.model.cache import Caches
from megatron.model.gpt2 import GPT2Model
from megatron.model.layers import Layer
from megatron.model.masks import begun_by_prefix, no_documents
from megatron.model.t5 import StackStart, T5Model

Prompts = Sequence[int] | Sequence[Sequence[int]]


class Sampling(NamedTuple):
    """Sampling parameters. temperature 0: greedy. top_k 0: all tokens. top_p: nucleus (Holtzman et al. 2020)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


class Stepper(Protocol):
    """A model that has read one or more prompts of equal length and continues them token by token."""

    def first(self, batch: int) -> Tensor:
        """Start b = prompts * `batch` continuations, grouped by prompt. Return logits [b, v] of their first tokens."""
        ...

    def next(self, tokens: Tensor) -> Tensor:
        """Append a token to each continuation, tokens [b], and return logits [b, v] of the next token."""
        ...

    def reorder(self, rows: Tensor) -> None:
        """Set continuation i to the state of continuation rows[i], for every i."""
        ...


class Stages:
    """The split of a model's layers over pipeline stages, for generation.

    Each stage broadcasts the output of its layers to all other stages. So every rank has the logits and chooses the
    same next token.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.group = mpu.get_mesh().pipe
        blocks = [i for i, layer in enumerate(layers) if layer.repeated]
        size = self.group.size
        if len(blocks) < size:
            raise ValueError(f"--pipe-parallel-size {size} exceeds the model's {len(blocks)} layers")
        cuts = [0, *(blocks[len(blocks) * i // size] for i in range(1, size)), len(layers)]
        self.layer_ranges = [range(a, b) for a, b in itertools.pairwise(cuts)]

    @property
    def own(self) -> range:
        """Indices of the layers on this stage."""
        return self.layer_ranges[self.group.rank]

    def from_stage(self, stage: int, outputs: tuple[Tensor, ...] | Tensor) -> Any:
        """Broadcast the outputs of `stage` to all stages."""
        source, group = self.group.ranks[stage], self.group.group
        if group is None:
            return outputs
        mine = stage == self.group.rank
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
    """Base class of GPT2Stepper and T5Stepper. It holds the text so far as tokens [b, s], and the key-value caches."""

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
        """Run the layers `begin` to `end`, with their caches, on new tokens that follow `seen` tokens."""
        end = len(self.model.steps) if end is None else end
        if self.stages is None:
            return _run(self.model, inputs, self.caches, seen, begin, end)
        for stage, own in enumerate(self.stages.layer_ranges):
            low, high = max(begin, own.start), min(end, own.stop)
            if low < high:
                if stage == self.stages.group.rank:
                    inputs = _run(self.model, inputs, self.caches, seen, low, high)
                inputs = self.stages.from_stage(stage, inputs)
        return inputs


class GPT2Stepper(_Stepper):
    """Stepper of a GPT-2 or Llama. If a text exceeds `positions` tokens, each step reads the last `positions` again."""

    def __init__(
        self,
        model: GPT2Model,
        prompt: Prompts,
        positions: int,
        cached: bool = True,
        stages: "Stages | None" = None,
        prefix: bool = False,
    ) -> None:
        """Prepare to read `prompt`. prefix: bidirectional attention in the prompt, as with --objective prefix-lm."""
        self.model, self.positions, self.cached, self.prefix = model, positions, cached, prefix
        self.prompts = _as_rows(prompt)
        self.stages = stages

    def first(self, batch: int) -> Tensor:
        """Start b = prompts * `batch` continuations, grouped by prompt. Return logits [b, v] of their first tokens."""
        self.tokens = _repeated(self.prompts, batch, next(self.model.parameters()).device)
        self.caches = _caches(self.model)
        return self._logits(self.tokens)

    def _logits(self, new: Tensor) -> Tensor:
        length = self.tokens.shape[1]
        if not self.cached:
            visible = self.tokens[:, -self.positions :]
            return self.model(visible, None, self._documents(visible))[:, -1]  # type: ignore[no-any-return]
        if length > self.positions:
            self.caches = _caches(self.model)
            new = self.tokens[:, -self.positions :]
            length = new.shape[1]
        seen = length - new.shape[1]
        place = torch.arange(seen, length, device=new.device).expand_as(new)
        documents = no_documents(new.device) if seen else self._documents(new)
        return _whole(self.model, self._run((new, place, documents), seen))

    def _documents(self, visible: Tensor) -> Tensor:
        """Return document ids of `visible` [b, s] for bidirectional attention in the prompt; empty without `prefix`."""
        left = len(self.prompts[0]) - self.tokens.shape[1] + visible.shape[1]
        return begun_by_prefix(visible, left) if self.prefix else no_documents(visible.device)


class ModelStepper:
    """Stepper of a user-defined model, which reads the whole text again for each token.

    logits: tokens [b, s] -> logits [b, s, v], equal on all ranks. positions: longest input; older text is dropped.
    """

    def __init__(self, logits: Callable[[Tensor], Tensor], prompt: list[int], positions: int) -> None:
        self.logits, self.prompt, self.positions = logits, prompt, positions

    def first(self, batch: int) -> Tensor:
        """Start b = `batch` continuations of the prompt. Return logits [b, v] of their first tokens."""
        self.tokens = torch.tensor([self.prompt] * batch)
        return self._last()

    def next(self, tokens: Tensor) -> Tensor:
        """Append a token to each continuation, tokens [b], and return logits [b, v] of the next token."""
        self.tokens = torch.cat([self.tokens, tokens.unsqueeze(1).to(self.tokens.device)], dim=1)
        return self._last()

    def reorder(self, rows: Tensor) -> None:
        """Set continuation i to the state of continuation rows[i], for every i."""
        self.tokens = self.tokens[rows.to(self.tokens.device)]

    def _last(self) -> Tensor:
        return self.logits(self.tokens[:, -self.positions :])[:, -1]


class T5Stepper(_Stepper):
    """Stepper of a T5. source: one or more encoder inputs of equal length. start: the decoder's first token."""

    def __init__(
        self,
        model: T5Model,
        source: Prompts,
        start: int,
        cached: bool = True,
        stages: "Stages | None" = None,
    ) -> None:
        self.model, self.start, self.cached = model, start, cached
        self.sources = _as_rows(source)
        self.stages = stages

    def first(self, batch: int) -> Tensor:
        """Start b = sources * `batch` decoder texts, grouped by source. Return logits [b, v] of their first tokens."""
        device = next(self.model.parameters()).device
        self.encoder_tokens = _repeated(self.sources, batch, device)
        self.tokens = torch.full((len(self.encoder_tokens), 1), self.start, device=device)
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


def _as_rows(prompt: Prompts) -> list[list[int]]:
    """Return one or more prompts as a list. Raises ValueError unless they have equal length."""
    rows = [list(row) for row in prompt if not isinstance(row, int)] or [[i for i in prompt if isinstance(i, int)]]
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"prompts of one batch must have equal length, not {[len(row) for row in rows]} tokens")
    return rows


def _repeated(rows: list[list[int]], times: int, device: torch.device) -> Tensor:
    """Return tokens [len(rows) * times, s]: `times` copies of the first row, then of the second, and so on."""
    return torch.tensor(rows, dtype=torch.int64, device=device).repeat_interleave(times, dim=0)


def _caches(model: GPT2Model | T5Model) -> dict[str, Caches]:
    """Return layer name -> empty cache, for the causal layers. An encoder reads all tokens at once and needs none."""
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


def _whole(model: GPT2Model | T5Model, logits: Any) -> Tensor:
    """Gather logits [s, b, v/t] over the ranks; return the last token's logits without vocabulary padding, [b, v]."""
    return mpu.gather_from_model_parallel_region(mpu.whole_logits(logits)[-1])[..., : model.vocab_size]


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Return next tokens [b], sampled from logits [b, v]."""
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
    seed: int | Sequence[int],
    on_tokens: Callable[[list[int]], None] | None = None,
) -> list[list[int]]:
    """Return `batch` continuations per prompt. Each one stops after the token `end` or after `max_new_tokens` tokens.

    seed: of the only prompt, or one for each prompt. Each prompt has its own random generator, so its samples do not
    depend on the other prompts of the batch.
    on_tokens: callback that receives the new token of every continuation after each step.
    """
    logits = stepper.first(batch)
    count = logits.shape[0]
    seeds = [seed] * (count // batch) if isinstance(seed, int) else seed
    generators = [torch.Generator().manual_seed(each) for each in seeds]
    ended = torch.zeros(count, dtype=torch.bool)
    found: list[Tensor] = []
    while len(found) < max_new_tokens:
        of_prompts = zip(logits.float().cpu().chunk(len(generators)), generators, strict=True)
        new = torch.cat([choose(own, sampling, generator) for own, generator in of_prompts])
        found.append(new.masked_fill(ended, end))
        if on_tokens is not None:
            on_tokens(found[-1].tolist())
        ended |= found[-1] == end
        if ended.all() or len(found) == max_new_tokens:
            break
        logits = stepper.next(found[-1].to(logits.device))
    rows = torch.stack(found, dim=1).tolist() if found else [[] for _ in range(count)]
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


Found = tuple[float, list[int]]  # score (log-probability / length ** length_penalty), tokens


class _Beam:
    """Beam search for one prompt. After a step, beam i continues the previous beam order[i] with the token new[i]."""

    def __init__(self, beams: int, max_new_tokens: int, end: int, length_penalty: float) -> None:
        self.beams, self.longest, self.end, self.length_penalty = beams, max_new_tokens, end, length_penalty
        # All beams start with the same text. The first step extends only one of them, or all beams would stay equal.
        self.total = torch.tensor([0.0] + [-torch.inf] * (beams - 1))
        self.rows: list[list[int]] = [[] for _ in range(beams)]
        self.done: list[Found] = []
        self.unfinished: list[Found] = []
        self.order, self.new = torch.arange(beams), torch.zeros(beams, dtype=torch.int64)
        self.over = max_new_tokens < 1

    def step(self, scores: Tensor) -> None:
        """Extend the beams by one token. scores: log-probabilities of the next token, [beams, v]."""
        length = len(self.rows[0]) + 1
        share = length**self.length_penalty
        best, at = (self.total.unsqueeze(1) + scores).flatten().topk(2 * self.beams)
        kept: list[tuple[float, int, int]] = []
        for rank, (score, flat) in enumerate(zip(best.tolist(), at.tolist(), strict=True)):
            row, token = divmod(flat, scores.shape[1])
            if token == self.end and rank < self.beams:
                self.done.append((score / share, [*self.rows[row], token]))
            elif token != self.end and len(kept) < self.beams:
                kept.append((score, row, token))
        self.done = sorted(self.done, reverse=True)[: self.beams]
        self.total = torch.tensor([score for score, _, _ in kept])
        self.order, self.new = torch.tensor([row for _, row, _ in kept]), torch.tensor([token for _, _, token in kept])
        self.rows = [[*self.rows[row], token] for _, row, token in kept]
        beaten = len(self.done) == self.beams and self.done[-1][0] >= kept[0][0] / share
        if length == self.longest or beaten:
            self.over = True
            self.unfinished = [(score / share, row) for (score, _, _), row in zip(kept, self.rows, strict=True)]
            # While searches for other prompts go on, the model still computes this search's rows. They are ignored.
            self.order, self.new = torch.arange(self.beams), torch.zeros_like(self.new)

    def found(self) -> list[Found]:
        return sorted([*self.done, *self.unfinished], reverse=True)[: self.beams]


@torch.no_grad()
def beam_searches(
    stepper: Stepper, beams: int, max_new_tokens: int, end: int, length_penalty: float = 1.0
) -> list[list[Found]]:
    """Return the `beams` best continuations of each prompt, best first.

    A continuation that ends makes room for an unfinished one. The search stops when `beams` continuations have ended
    and no unfinished one can get a better score than the worst of these, as in Hugging Face with early_stopping=False.
    """
    logits = stepper.first(beams)
    device, count = logits.device, logits.shape[0] // beams
    searches = [_Beam(beams, max_new_tokens, end, length_penalty) for _ in range(count)]
    while not all(search.over for search in searches):
        for search, scores in zip(searches, logits.float().cpu().log_softmax(-1).chunk(count), strict=True):
            if not search.over:
                search.step(scores)
        if not all(search.over for search in searches):
            order = torch.cat([search.order + i * beams for i, search in enumerate(searches)])
            stepper.reorder(order.to(device))
            logits = stepper.next(torch.cat([search.new for search in searches]).to(device))
    return [search.found() for search in searches]


def beam_search(
    stepper: Stepper, beams: int, max_new_tokens: int, end: int, length_penalty: float = 1.0
) -> list[Found]:
    """Return the result of `beam_searches` for a single prompt."""
    (found,) = beam_searches(stepper, beams, max_new_tokens, end, length_penalty)
    return found
