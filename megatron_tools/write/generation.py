"""Token-by-token text generation with a trained model and a key-value cache: sampling and beam search.

Shapes: b batch, s tokens so far, v vocabulary, t model-parallel ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron import mpu
from megatron.features.sampling import Sampling, choose
from megatron.model.block import TransformerLayer
from megatron.model.cache import Caches
from megatron.model.gpt2 import GPT2Model
from megatron.model.layers import Layer
from megatron.model.masks import begun_by_prefix, no_documents
from megatron.model.t5 import StackStart, T5Model

from .beams import Beam, Found

Ids = list[int]
Prompts = Sequence[int] | Sequence[Sequence[int]]


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


class Step(NamedTuple):
    """The next token of each continuation, [b], and the logits [b, v] from which the tokens were drawn."""

    tokens: Tensor
    logits: Tensor


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
        # Blocks 1 to 5 of seven layers are cut for 2 stages before block 3: layers 0 to 2 and 3 to 6.
        self.layer_ranges = []
        begin = 0
        for stage in range(1, size):
            end = blocks[len(blocks) * stage // size]
            self.layer_ranges.append(range(begin, end))
            begin = end
        self.layer_ranges.append(range(begin, len(layers)))

    @property
    def own(self) -> range:
        """Indices of the layers on this stage."""
        return self.layer_ranges[self.group.rank]

    def from_stage(self, stage: int, outputs: tuple[Tensor, ...] | Tensor) -> Any:
        """Broadcast the outputs of `stage` to all stages."""
        source = self.group.ranks[stage]
        group = self.group.group
        if group is None:
            return outputs
        mine = stage == self.group.rank
        tensors = list(outputs) if isinstance(outputs, tuple) else [outputs]
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        about: list[Any] = [(shapes, isinstance(outputs, tuple)) if mine else None]
        dist.broadcast_object_list(about, source, group)
        shapes, several = about[0]
        device = tensors[0].device
        found = []
        for i, (shape, dtype) in enumerate(shapes):
            tensor = tensors[i].contiguous() if mine else torch.empty(shape, dtype=dtype, device=device)
            if tensor.numel():
                dist.broadcast(tensor, source, group)
            found.append(tensor)
        return tuple(found) if several else found[0]


class _Stepper:
    """Base class of the steppers. It holds the text so far as tokens [b, s], and the key-value caches."""

    model: GPT2Model | T5Model
    tokens: Tensor
    caches: dict[str, Caches]
    stages: "Stages | None" = None

    def next(self, tokens: Tensor) -> Tensor:
        """Append a token to each continuation, tokens [b], and return logits [b, v] of the next token."""
        new = tokens.unsqueeze(1)
        self.tokens = torch.cat([self.tokens, new], dim=1)
        return self._logits(new)

    def reorder(self, rows: Tensor) -> None:
        """Set continuation i to the state of continuation rows[i], for every i."""
        self.tokens = self.tokens[rows]
        for each in self.caches.values():
            each.own.reorder(rows)
            each.cross.reorder(rows)

    def _logits(self, new: Tensor) -> Tensor:
        raise NotImplementedError

    def _run(self, inputs: tuple[Tensor, ...], seen: int, begin: int = 0, end: int | None = None) -> tuple[Tensor, ...]:
        """Run the layers `begin` to `end`, with their caches, on new tokens that follow `seen` tokens."""
        if end is None:
            end = len(self.model.steps)
        if self.stages is None:
            return _run(self.model, inputs, self.caches, seen, begin, end)
        for stage, own in enumerate(self.stages.layer_ranges):
            low = max(begin, own.start)
            high = min(end, own.stop)
            if low >= high:
                continue
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
        self.model = model
        self.positions = positions
        self.cached = cached
        self.prefix = prefix
        self.prompts = _as_rows(prompt)
        self.stages = stages

    def first(self, batch: int) -> Tensor:
        """Start b = prompts * `batch` continuations, grouped by prompt. Return logits [b, v] of their first tokens."""
        self.tokens = _repeated(self.prompts, batch, next(self.model.parameters()).device)
        self.caches = _caches(self.model)
        return self._logits(self.tokens)

    def _logits(self, new: Tensor) -> Tensor:
        """Return the logits [b, v] after the tokens `new`, which `self.tokens` already contains."""
        length = self.tokens.shape[1]
        visible = self.tokens[:, -self.positions :]
        if not self.cached:
            return self.model(visible, None, self._documents(visible))[:, -1]  # type: ignore[no-any-return]
        if length > self.positions:
            self.caches = _caches(self.model)
            new = visible
            length = new.shape[1]
        seen = length - new.shape[1]
        place = torch.arange(seen, length, device=new.device).expand_as(new)
        documents = no_documents(new.device) if seen else self._documents(new)
        found = self._run((new, place, documents), seen)
        return _whole(self.model, found)

    def _documents(self, visible: Tensor) -> Tensor:
        """Return document ids of `visible` [b, s] for bidirectional attention in the prompt; empty without `prefix`."""
        left = len(self.prompts[0]) - self.tokens.shape[1] + visible.shape[1]
        return begun_by_prefix(visible, left) if self.prefix else no_documents(visible.device)


class ModelStepper(_Stepper):
    """Stepper of a user-defined model, which reads the whole text again for each token.

    logits: tokens [b, s] -> logits [b, s, v], equal on all ranks. positions: longest input; older text is dropped.
    """

    def __init__(self, logits: Callable[[Tensor], Tensor], prompt: Ids, positions: int) -> None:
        self.logits = logits
        self.prompt = prompt
        self.positions = positions
        self.caches = {}

    def first(self, batch: int) -> Tensor:
        """Start b = `batch` continuations of the prompt. Return logits [b, v] of their first tokens."""
        self.tokens = torch.tensor([self.prompt] * batch)
        return self._logits(self.tokens)

    def next(self, tokens: Tensor) -> Tensor:
        """Append a token to each continuation, tokens [b], and return logits [b, v] of the next token."""
        return super().next(tokens.to(self.tokens.device))

    def reorder(self, rows: Tensor) -> None:
        """Set continuation i to the state of continuation rows[i], for every i."""
        super().reorder(rows.to(self.tokens.device))

    def _logits(self, new: Tensor) -> Tensor:
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
        self.model = model
        self.start = start
        self.cached = cached
        self.sources = _as_rows(source)
        self.stages = stages

    def first(self, batch: int) -> Tensor:
        """Start b = sources * `batch` decoder texts, grouped by source. Return logits [b, v] of their first tokens."""
        device = next(self.model.parameters()).device
        self.encoder_tokens = _repeated(self.sources, batch, device)
        count = len(self.encoder_tokens)
        self.tokens = torch.full((count, 1), self.start, device=device)
        self.caches = _caches(self.model)
        names = [layer.name for layer, _ in self.model.steps]
        self.cut = names.index("decoder.embedding")
        empty = no_documents(device)
        inputs = (self.encoder_tokens, self.tokens, empty, empty)
        self.encoded, *_ = self._run(inputs, 0, end=self.cut)
        return self._logits(self.tokens)

    def _logits(self, new: Tensor) -> Tensor:
        """Return the logits [b, v] after the tokens `new`, which `self.tokens` already contains."""
        if not self.cached:
            logits: Tensor = self.model(self.encoder_tokens, self.tokens)[:, -1]
            return logits
        empty = no_documents(new.device)
        seen = self.tokens.shape[1] - new.shape[1]
        found = self._run((self.encoded, new, empty, empty), seen, begin=self.cut)
        return _whole(self.model, found)


def _as_rows(prompt: Prompts) -> list[Ids]:
    """Return one or more prompts as a list. Raises ValueError unless they have equal length."""
    rows = [list(row) for row in prompt if not isinstance(row, int)] or [[i for i in prompt if isinstance(i, int)]]
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"prompts of one batch must have equal length, not {[len(row) for row in rows]} tokens")
    return rows


def _repeated(rows: list[Ids], times: int, device: torch.device) -> Tensor:
    """Return tokens [len(rows) * times, s]: `times` copies of the first row, then of the second, and so on."""
    return torch.tensor(rows, dtype=torch.int64, device=device).repeat_interleave(times, dim=0)


def _caches(model: GPT2Model | T5Model) -> dict[str, Caches]:
    """Return layer name -> empty cache, for the causal layers. An encoder reads all tokens at once and needs none."""
    found = {}
    for name, module in model.named_layers():
        if isinstance(module, TransformerLayer) and module.causal:
            found[name] = Caches()
    return found


def _run(
    model: GPT2Model | T5Model,
    inputs: tuple[Tensor, ...],
    caches: dict[str, Caches],
    seen: int,
    begin: int,
    end: int,
) -> tuple[Tensor, ...]:
    """Run the layers `begin` to `end` on this rank, with their caches, on tokens that follow `seen` tokens."""
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


@torch.no_grad()
def sample_steps(
    stepper: Stepper, batch: int, max_new_tokens: int, end: int, sampling: Sampling, seed: int | Sequence[int]
) -> Iterator[Step]:
    """Yield the steps of `batch` continuations per prompt, until all have ended or have `max_new_tokens` tokens.

    After its token `end`, a continuation gets this token again in each step.
    seed: of the only prompt, or one for each prompt. Each prompt has its own random generator, so its samples do not
    depend on the other prompts of the batch.
    """
    logits = stepper.first(batch)
    count = logits.shape[0]
    seeds = [seed] * (count // batch) if isinstance(seed, int) else seed
    generators = [torch.Generator().manual_seed(each) for each in seeds]
    ended = torch.zeros(count, dtype=torch.bool)
    for number in range(1, max_new_tokens + 1):
        device = logits.device
        logits = logits.float().cpu()
        chosen = []
        for own, generator in zip(logits.chunk(len(generators)), generators, strict=True):
            chosen.append(choose(own, sampling, generator))
        new = torch.cat(chosen).masked_fill(ended, end)
        yield Step(new, logits)
        ended |= new == end
        if ended.all() or number == max_new_tokens:
            return
        logits = stepper.next(new.to(device))


def sample(
    stepper: Stepper, batch: int, max_new_tokens: int, end: int, sampling: Sampling, seed: int | Sequence[int]
) -> list[Ids]:
    """Return the tokens of `sample_steps`, to which it passes its arguments. `max_new_tokens` is at least 1."""
    return collect(sample_steps(stepper, batch, max_new_tokens, end, sampling, seed), end)


def collect(steps: Iterable[Step], end: int, on_tokens: Callable[[Ids], None] | None = None) -> list[Ids]:
    """Return the tokens of each continuation, up to its first token `end` with it.

    on_tokens: callback that receives the new token of every continuation after each step.
    """
    found = []
    for new, _ in steps:
        found.append(new)
        if on_tokens is not None:
            on_tokens(new.tolist())
    rows = torch.stack(found, dim=1).tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


@torch.no_grad()
def beam_searches(
    stepper: Stepper, beams: int, max_new_tokens: int, end: int, length_penalty: float = 1.0
) -> list[list[Found]]:
    """Return the `beams` best continuations of each prompt, best first.

    A continuation that ends makes room for an unfinished one. The search stops when `beams` continuations have ended
    and no unfinished one can get a better score than the worst of these, as in Hugging Face with early_stopping=False.
    """
    logits = stepper.first(beams)
    device = logits.device
    count = logits.shape[0] // beams
    searches = [Beam(beams, max_new_tokens, end, length_penalty) for _ in range(count)]
    while True:
        running = [search for search in searches if not search.over]
        if not running:
            return [search.found() for search in searches]
        by_prompt = logits.float().cpu().log_softmax(-1).chunk(count)
        order = []
        new = []
        for i, (search, scores) in enumerate(zip(searches, by_prompt, strict=True)):
            if not search.over:
                search.step(scores)
            order.append(search.order + i * beams)
            new.append(search.new)
        if any(not search.over for search in running):
            stepper.reorder(torch.cat(order).to(device))
            logits = stepper.next(torch.cat(new).to(device))
