"""Token-by-token text generation with a trained model and a key-value cache: sampling and beam search.

Shapes: b batch, s tokens so far, v vocabulary, t model-parallel ranks.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron import mpu
from megatron.features.sampling import Sampling, sample_next_tokens
from megatron.model.block import TransformerLayer
from megatron.model.cache import Caches
from megatron.model.gpt2 import GPT2Model
from megatron.model.layers import Layer
from megatron.model.masks import no_documents, prefix_document_ids
from megatron.model.t5 import StackStart, T5Model

from .beams import Beam, EndId, ScoredTokens, list_ends

Ids = list[int]
Prompts = Sequence[int] | Sequence[Sequence[int]]
Tensors = tuple[Tensor, ...]


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
        block_indices = [i for i, layer in enumerate(layers) if layer.repeated]
        num_stages = self.group.size
        if len(block_indices) < num_stages:
            raise ValueError(f"--pipe-parallel-size {num_stages} exceeds the model's {len(block_indices)} layers")
        # Each stage gets about as many transformer blocks, and begins with one, except the first stage, which also has
        # the layers before all blocks. If layers 1 to 5 of seven are blocks, 2 stages have layers 0 to 2 and 3 to 6.
        self.layer_ranges = []
        begin = 0
        for stage in range(1, num_stages):
            end = block_indices[len(block_indices) * stage // num_stages]
            self.layer_ranges.append(range(begin, end))
            begin = end
        self.layer_ranges.append(range(begin, len(layers)))

    @property
    def own_layers(self) -> range:
        """Indices of the layers on this stage."""
        return self.layer_ranges[self.group.rank]

    def broadcast_from(self, stage: int, outputs: Tensors | Tensor) -> Any:
        """Broadcast the outputs of `stage` to all stages.

        outputs: on `stage` itself, what its layers returned; on other stages any tensors, which only name the device.
        """
        source_rank = self.group.ranks[stage]
        group = self.group.group
        if group is None:
            return outputs
        is_source = stage == self.group.rank
        tensors = list(outputs) if isinstance(outputs, tuple) else [outputs]
        # The other stages do not know what `stage` computed, so it sends shapes and dtypes first. They receive them in
        # place of the None.
        header: list[Any] = [None]
        if is_source:
            shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
            header = [(shapes, isinstance(outputs, tuple))]
        dist.broadcast_object_list(header, source_rank, group)
        shapes, is_tuple = header[0]
        device = tensors[0].device
        received = []
        for i, (shape, dtype) in enumerate(shapes):
            if is_source:
                tensor = tensors[i].contiguous()
            else:
                tensor = torch.empty(shape, dtype=dtype, device=device)
            if tensor.numel():
                dist.broadcast(tensor, source_rank, group)
            received.append(tensor)
        return tuple(received) if is_tuple else received[0]


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
        for caches in self.caches.values():
            caches.self_attention.reorder(rows)
            caches.cross_attention.reorder(rows)

    def _logits(self, new: Tensor) -> Tensor:
        raise NotImplementedError

    def _run_on_stages(self, inputs: Tensors, seen: int, begin: int = 0, end: int = sys.maxsize) -> Tensors:
        """Run the layers `begin` to `end`, by default to the last, with caches, on new tokens after `seen` tokens.

        Every stage gets the outputs of the last layer.
        """
        if self.stages is None:
            return self._run_layers(inputs, seen, begin, end)
        for stage, stage_layers in enumerate(self.stages.layer_ranges):
            first_layer = max(begin, stage_layers.start)
            end_layer = min(end, stage_layers.stop)
            if first_layer >= end_layer:
                continue  # this stage has none of these layers
            if stage == self.stages.group.rank:
                inputs = self._run_layers(inputs, seen, first_layer, end_layer)
            inputs = self.stages.broadcast_from(stage, inputs)
        return inputs

    def _run_layers(self, inputs: Tensors, seen: int, begin: int, end: int) -> Tensors:
        """Run the layers `begin` to `end` on this rank, with their caches, on tokens that follow `seen` tokens."""
        for layer, call in self.model.steps[begin:end]:
            if layer.name in self.caches:
                inputs = call(inputs, self.caches[layer.name])
            elif isinstance(call, StackStart):
                inputs = call(inputs, seen)
            else:
                inputs = call(inputs)
        return inputs

    def _clear_caches(self) -> None:
        """Give the causal layers empty caches. An encoder reads all tokens at once and needs none."""
        self.caches = {}
        for name, module in self.model.named_layers():
            if isinstance(module, TransformerLayer) and module.causal:
                self.caches[name] = Caches()

    def _last_logits(self, logits: Any) -> Tensor:
        """Gather logits [s, b, v/t] over the ranks; return the last token's without vocabulary padding, [b, v]."""
        last = mpu.whole_logits(logits)[-1]
        return mpu.gather_from_model_parallel_region(last)[..., : self.model.vocab_size]


class GPT2Stepper(_Stepper):
    """Stepper of a GPT-2 or Llama. If a text exceeds `positions` tokens, each step reads the last `positions` again."""

    def __init__(
        self,
        model: GPT2Model,
        prompt: Prompts,
        positions: int,
        stages: "Stages | None" = None,
        bidirectional_prompt: bool = False,
    ) -> None:
        """Prepare to read `prompt`. bidirectional_prompt: as with --objective prefix-lm, not causal attention."""
        self.model = model
        self.positions = positions
        self.bidirectional_prompt = bidirectional_prompt
        self.prompts = _as_prompt_list(prompt)
        self.stages = stages

    def first(self, batch: int) -> Tensor:
        """Start b = prompts * `batch` continuations, grouped by prompt. Return logits [b, v] of their first tokens."""
        self.tokens = _repeat_rows(self.prompts, batch, next(self.model.parameters()).device)
        self._clear_caches()
        return self._logits(self.tokens)

    def _logits(self, new: Tensor) -> Tensor:
        """Return the logits [b, v] after the tokens `new`, which `self.tokens` already contains."""
        length = self.tokens.shape[1]
        num_dropped = max(length - self.positions, 0)  # tokens that have left the window
        if num_dropped:
            # The window has moved, so every token has another position and the cache is of no use.
            self._clear_caches()
            new = self.tokens[:, num_dropped:]
            length = self.positions
        seen = length - new.shape[1]
        positions = torch.arange(seen, length, device=new.device).expand_as(new)
        documents = no_documents(new.device)  # plain causal attention
        # If no token is cached, `new` begins with what is left of the prompt. Its tokens may attend in both directions.
        if self.bidirectional_prompt and not seen:
            documents = prefix_document_ids(new, len(self.prompts[0]) - num_dropped)
        layer_outputs = self._run_on_stages((new, positions, documents), seen)
        return self._last_logits(layer_outputs)


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
        stages: "Stages | None" = None,
    ) -> None:
        self.model = model
        self.start = start
        self.sources = _as_prompt_list(source)
        self.stages = stages

    def first(self, batch: int) -> Tensor:
        """Start b = sources * `batch` decoder texts, grouped by source. Return logits [b, v] of their first tokens."""
        device = next(self.model.parameters()).device
        encoder_tokens = _repeat_rows(self.sources, batch, device)
        count = len(encoder_tokens)
        self.tokens = torch.full((count, 1), self.start, device=device)
        self._clear_caches()
        names = [layer.name for layer, _ in self.model.steps]
        self.decoder_start = names.index("decoder.embedding")
        # The layers before the decoder's embedding are the encoder, which runs only once. Of its outputs, only the
        # first is new, `encoded` [k, b, h]. It passes the decoder's tokens and the document ids of both through.
        no_docs = no_documents(device)
        inputs = (encoder_tokens, self.tokens, no_docs, no_docs)
        self.encoded, *_ = self._run_on_stages(inputs, seen=0, end=self.decoder_start)
        return self._logits(self.tokens)

    def _logits(self, new: Tensor) -> Tensor:
        """Return the logits [b, v] after the tokens `new`, which `self.tokens` already contains."""
        no_docs = no_documents(new.device)
        inputs = (self.encoded, new, no_docs, no_docs)
        seen = self.tokens.shape[1] - new.shape[1]
        layer_outputs = self._run_on_stages(inputs, seen, begin=self.decoder_start)
        return self._last_logits(layer_outputs)


def _as_prompt_list(prompt: Prompts) -> list[Ids]:
    """Return one or more prompts as a list. Raises ValueError unless they have equal length."""
    # [[5, 7], [5, 8]] are two prompts. [5, 7] is a single prompt, of ints, so the first line takes none of its items.
    rows = [list(row) for row in prompt if not isinstance(row, int)]
    if not rows:
        rows = [[id_ for id_ in prompt if isinstance(id_, int)]]
    if len(set(map(len, rows))) > 1:
        raise ValueError(f"prompts of one batch must have equal length, not {list(map(len, rows))} tokens")
    return rows


def _repeat_rows(rows: list[Ids], times: int, device: torch.device) -> Tensor:
    """Return tokens [len(rows) * times, s]: `times` copies of the first row, then of the second, and so on."""
    return torch.tensor(rows, dtype=torch.int64, device=device).repeat_interleave(times, dim=0)


@torch.no_grad()
def sample_steps(
    stepper: Stepper, batch: int, max_new_tokens: int, end_id: EndId, sampling: Sampling, seed: int | Sequence[int]
) -> Iterator[Step]:
    """Yield the steps of `batch` continuations per prompt, until all have ended or have `max_new_tokens` tokens.

    end_id: token, or tokens, that end a continuation. The first of them fills the rest of an ended continuation.
    seed: of the only prompt, or one for each prompt, so that its samples do not depend on the other prompts.
    """
    logits = stepper.first(batch)  # rows 0 to batch - 1 belong to the first prompt, and so on
    count = logits.shape[0]
    num_prompts = count // batch
    seeds = [seed] * num_prompts if isinstance(seed, int) else seed
    generators = [torch.Generator().manual_seed(prompt_seed) for prompt_seed in seeds]
    has_ended = torch.zeros(count, dtype=torch.bool)
    end_ids = torch.tensor(list_ends(end_id))
    for step in range(1, max_new_tokens + 1):
        device = logits.device
        # Random numbers are drawn on the CPU, where they are equal on all kinds of devices.
        logits = logits.float().cpu()
        chosen = []  # the new tokens of each prompt's rows
        for prompt_logits, generator in zip(logits.chunk(len(generators)), generators, strict=True):
            chosen.append(sample_next_tokens(prompt_logits, sampling, generator))
        new_tokens = torch.where(has_ended, end_ids[0], torch.cat(chosen))
        yield Step(new_tokens, logits)
        has_ended |= torch.isin(new_tokens, end_ids)
        if has_ended.all() or step == max_new_tokens:
            return
        logits = stepper.next(new_tokens.to(device))


def sample(
    stepper: Stepper, batch: int, max_new_tokens: int, end_id: EndId, sampling: Sampling, seed: int | Sequence[int]
) -> list[Ids]:
    """Return the tokens of `sample_steps`, to which it passes its arguments. `max_new_tokens` is at least 1."""
    return collect(sample_steps(stepper, batch, max_new_tokens, end_id, sampling, seed), end_id)


def collect(steps: Iterable[Step], end_id: EndId, on_tokens: Callable[[Ids], None] | None = None) -> list[Ids]:
    """Return the tokens of each continuation, up to its first end token with it.

    on_tokens: callback that receives the new token of every continuation after each step.
    """
    tokens_by_step = []
    for new_tokens, _ in steps:
        tokens_by_step.append(new_tokens)
        if on_tokens is not None:
            on_tokens(new_tokens.tolist())
    continuations = []
    for row in torch.stack(tokens_by_step, dim=1).tolist():
        # With the end tokens 0 and 2, the row [7, 2, 2, 0] could be cut after 2 or 4 tokens: it becomes [7, 2].
        end_lengths = [row.index(end) + 1 for end in list_ends(end_id) if end in row]
        continuations.append(row[: min(end_lengths, default=len(row))])
    return continuations


@torch.no_grad()
def beam_searches(stepper: Stepper, num_beams: int, max_new_tokens: int, end_id: EndId) -> list[list[ScoredTokens]]:
    """Return the `num_beams` best continuations of each prompt, best first.

    A continuation that ends makes room for an unfinished one. The search stops when `num_beams` continuations have
    ended and no unfinished one can get a better score than the worst of these, as in Hugging Face with
    early_stopping=False.
    """
    logits = stepper.first(num_beams)
    device = logits.device
    num_prompts = logits.shape[0] // num_beams
    searches = [Beam(num_beams, max_new_tokens, end_id) for _ in range(num_prompts)]
    while not all(search.is_over for search in searches):
        # From [prompts * beams, v] to a tensor [beams, v] for each prompt.
        by_prompt = logits.float().cpu().log_softmax(-1).chunk(num_prompts)
        parents = []
        new_tokens = []
        for prompt, (search, scores) in enumerate(zip(searches, by_prompt, strict=True)):
            if not search.is_over:
                search.step(scores)
            # With 3 beams, beam 2 of prompt 1 is row 5 of the logits.
            parents.append(search.parents + prompt * num_beams)
            new_tokens.append(search.new_tokens)
        if not all(search.is_over for search in searches):
            stepper.reorder(torch.cat(parents).to(device))
            logits = stepper.next(torch.cat(new_tokens).to(device))
    return [search.best() for search in searches]
