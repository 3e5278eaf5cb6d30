"""Formulas for what a rank holds, without building a model: its parameters, and micro-batches in flight."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from tds.schedule import Backward, BackwardInput, BackwardWeight, Forward, Instruction, find_schedule
from tds.timetable import max_in_flight

from .._torch import emulates_matmul
from ..config import Config, ModelConfig
from ..config.fields import ConfigError
from ..config.parallel import uses_sequence_parallel
from ..model.cuts import balanced_cuts, listed_cuts
from ..model.gpt2_layers import gpt2_layers, vocab_size_of
from ..model.layers import Layer
from ..model.work import sample_lengths
from ..mpu import padded_vocab_size

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


class Count(NamedTuple):
    """Number of parameters of one or several layers.

    whole: parameters of the whole layer, without padding of the vocabulary.
    held: parameters on each model-parallel rank, with padding of the vocabulary.
    largest: parameters of the largest matrix on a rank. Memory estimates need this number, because the gradient of a
    matrix is temporarily a separate tensor.
    hidden: parameters on each rank of the matrices of transformer layers, for which Muon keeps one moment.
    experts, expert_matrices: the parts of `held` and `hidden` in experts, which expert-parallel ranks divide.
    """

    whole: int = 0
    held: int = 0
    largest: int = 0
    hidden: int = 0
    experts: int = 0
    expert_matrices: int = 0

    def touched_elements(self, replicas: int) -> float:
        """Return the number of elements of all matrices that touch the share of one of `replicas` ranks."""
        return min(self.held, self.held / replicas + self.largest)

    def by_replicas(self, replicas: int, expert_ranks: int) -> Iterator[tuple["Count", int]]:
        """Yield the parameters without experts, and those of any experts, each with the number of ranks with copies.

        replicas: data-parallel size x context-parallel size. expert_ranks: --expert-parallel-size.
        """
        # Callers read only `held` (all weights) and `hidden` (those that Muon steps), so only these are divided.
        dense = Count(self.whole, held=self.held - self.experts, hidden=self.hidden - self.expert_matrices)
        yield dense, replicas
        if self.experts:
            experts = Count(held=self.experts, hidden=self.expert_matrices)
            yield experts, replicas // expert_ranks  # if 8 // 4, each expert has 2 copies


def _sum_counts(counts: Sequence[Count]) -> Count:
    sums = Count(*map(sum, zip(*counts, strict=True)))  # also of `largest`, which is no sum
    return sums._replace(largest=max((count.largest for count in counts), default=0))


def _linear(outputs: int, inputs: int, bias: bool, ranks: int, row_parallel: bool = False) -> Count:
    """Return the number of parameters of a linear layer.

    row_parallel: True for a row-parallel layer, which has the whole bias on each rank; False for a column-parallel
    layer, which splits its bias over the ranks.
    """
    bias_rows = outputs if row_parallel else outputs // ranks
    weight_shard = outputs * inputs // ranks
    whole = outputs * inputs + outputs * bias  # `bias` is 0 or 1
    return Count(whole, held=weight_shard + bias_rows * bias, largest=weight_shard, hidden=weight_shard)


def _replicated(numbers: int) -> Count:
    return Count(whole=numbers, held=numbers, largest=numbers)


def _norm(config: Config, layer: Layer) -> Count:
    m = config.model
    return _replicated(m.hidden_size * (1 if m.normalization == "rmsnorm" else 2))  # LayerNorm has a bias, too


def _mlp(m: ModelConfig, ranks: int, width: int) -> list[Count]:
    """Return the two linear layers of an MLP or an expert with an inner width of `width`."""
    return [
        # A gated MLP multiplies two projections of its input.
        _linear(width * m.inner_projections, m.hidden_size, m.hidden_bias, ranks),
        _linear(m.hidden_size, width, m.hidden_bias, ranks, row_parallel=True),
    ]


def _mixture(config: Config, ranks: int) -> list[Count]:
    """Return experts, shared experts, router and gate of a layer. Expert-parallel ranks divide the experts."""
    m = config.model
    num_experts = m.num_experts or 0
    expert = _sum_counts(_mlp(m, ranks, m.expert_ff_size))
    experts_on_rank = num_experts // config.parallel.expert_parallel_size
    on_rank = expert.held * experts_on_rank
    matrices_on_rank = expert.hidden * experts_on_rank
    whole = expert.whole * num_experts
    # whole, held, largest, hidden; experts and expert_matrices repeat `held` and `hidden`, as all of this is experts.
    counts = [Count(whole, on_rank, expert.largest, matrices_on_rank, on_rank, matrices_on_rank)]
    if m.num_shared_experts:
        counts += _mlp(m, ranks, m.num_shared_experts * m.expert_ff_size)
    router = _replicated(num_experts * m.hidden_size)
    gate = _replicated(m.shared_expert_gate * m.hidden_size)  # `shared_expert_gate` is a bool: 0 without a gate
    return [*counts, router, gate]


def _transformer(config: Config, layer: Layer, cross: bool = False) -> Count:
    """Return the parameters of a transformer layer. cross: True for a decoder layer with cross-attention."""
    m = config.model
    ranks = config.parallel.model_parallel_size
    hidden = m.hidden_size
    query_size = m.num_attention_heads * m.head_size
    key_size = m.key_value_heads * m.head_size
    bias = m.hidden_bias
    norm = _norm(config, layer)
    output = _linear(hidden, query_size, bias, ranks, row_parallel=True)
    parts = [
        norm,
        _linear(query_size + 2 * key_size, hidden, m.has_qkv_bias, ranks),
        output,
        norm,
        *(_mixture(config, ranks) if layer.routes else _mlp(m, ranks, m.ff_size)),
    ]
    if m.qk_norm:
        parts += [_replicated(m.head_size)] * 2  # the norm of queries and that of keys, which all heads share
    if cross:
        parts += [
            norm,
            _linear(query_size, hidden, bias, ranks),
            _linear(2 * query_size, hidden, bias, ranks),  # keys and values of the encoder's output
            output,
        ]
    return _sum_counts(parts)


def vocabulary_rows(config: Config) -> int:
    """Return the number of rows of the embedding table on a rank, with padding for all model-parallel ranks."""
    ranks = config.parallel.model_parallel_size
    return padded_vocab_size(vocab_size_of(config), config.model.make_vocab_size_divisible_by, ranks) // ranks


def _word_embedding(config: Config, layer: Layer) -> Count:
    hidden = config.model.hidden_size
    rows = vocabulary_rows(config)
    return Count(vocab_size_of(config) * hidden, rows * hidden, rows * hidden)


def _positions(config: Config, layer: Layer) -> Count:
    learned = config.model.position_embedding == "learned"
    return _replicated(config.positions * config.model.hidden_size) if learned else Count()


def _relative_bias(config: Config, layer: Layer) -> Count:
    whole = config.model.relative_attention_num_buckets * config.model.num_attention_heads
    held = whole // config.parallel.model_parallel_size
    return Count(whole, held, held)


LAYER_COUNTS: dict[str, Callable[[Config, Layer], Count]] = {
    "WordEmbedding": _word_embedding,
    "DecoderStart": _positions,
    "StackStart": _positions,
    "RelativePositions": _relative_bias,
    "Block": _transformer,
    "EncoderBlock": _transformer,
    "DecoderBlock": partial(_transformer, cross=True),
    "StackNorm": _norm,
    "DecoderNorm": _norm,
}


def layers_of(config: Config) -> list[Layer]:
    """Return the descriptions of the model's layers without building the layers.

    Raises ValueError if the vocabulary size is unknown.
    """
    vocabulary = vocab_size_of(config)
    if not config.is_t5:
        return gpt2_layers(config, vocabulary)
    from ..model.t5 import t5_layers

    return t5_layers(config, vocabulary)


def count_layers(layers: Sequence[Layer], config: Config) -> Count:
    """Return the number of parameters of `layers`; tied layers count once."""
    seen_ties: set[str | None] = set()
    counts = []
    for layer in layers:
        if layer.tied is None or layer.tied not in seen_ties:
            counts.append(LAYER_COUNTS[layer.cls.__name__](config, layer))
        seen_ties.add(layer.tied)
    return _sum_counts(counts)


def parameters(config: Config) -> int:
    """Return the number of parameters of the whole model; a run prints the same number."""
    return count_layers(layers_of(config), config).whole


@dataclass(frozen=True)
class Stage:
    """Layers of one pipeline stage.

    number: index of the stage. chunks: layers of each virtual-pipeline chunk. count: parameters of the stage.
    """

    number: int
    chunks: tuple[tuple[Layer, ...], ...]
    count: Count

    @property
    def layers(self) -> list[Layer]:
        """Layers of all virtual-pipeline chunks of the stage."""
        return [layer for chunk in self.chunks for layer in chunk]

    @property
    def repeated(self) -> int:
        """Number of transformer layers on the stage."""
        return sum(layer.repeated for layer in self.layers)


@lru_cache(maxsize=4096)
def _balanced_cuts(works: tuple[tuple[int, bool], ...], num_chunks: int, recomputed: bool) -> tuple[int, ...]:
    """Call `balanced_cuts`, which reads only (work, repeated) of each layer; these can be keys of the cache."""
    stubs = [Layer("", object, work=work, repeated=repeated) for work, repeated in works]  # type: ignore[arg-type]
    return tuple(balanced_cuts(stubs, num_chunks, recomputed))


def cuts_of(layers: Sequence[Layer], config: Config) -> list[int]:
    """Return the index of the first layer of each stage (or virtual-pipeline chunk), followed by the number of layers.

    Raises ConfigError if there are too few layers, and ValueError for a --partition-method that measures a built model.
    """
    p = config.parallel
    num_chunks = p.stages * p.chunks
    if num_chunks == 1:
        return [0, len(layers)]
    if num_chunks > len(layers):
        raise ConfigError(
            f"--pipe-parallel-size {p.pipe_parallel_size} x --virtual-pipeline-size {p.virtual_pipeline_size} is more "
            f"than the {len(layers)} layers of the model; lower one of them"
        )
    if p.partition_method == "balanced":
        works = tuple((layer.work, layer.repeated) for layer in layers)
        return list(_balanced_cuts(works, num_chunks, bool(config.recomputed_layers)))
    cuts = listed_cuts(p.partition_method, num_chunks, len(layers))
    if cuts:
        return cuts
    raise ValueError(
        f"--partition-method {p.partition_method} needs the built model; for an estimate, use balanced or list the "
        "first layer of each stage, such as 0,4,8"
    )


def stages_of(config: Config) -> list[Stage]:
    """Return all pipeline stages, each with its layers and its number of parameters."""
    layers = layers_of(config)
    stages = config.parallel.stages
    cuts = cuts_of(layers, config)
    result = []
    for number in range(stages):
        chunks = []
        stage_layers = []
        # Of n stages, stage i has the chunks i, i + n, i + 2n and so on.
        for chunk_index in range(number, len(cuts) - 1, stages):
            chunk = layers[cuts[chunk_index] : cuts[chunk_index + 1]]
            chunks.append(tuple(chunk))
            stage_layers += chunk
        result.append(Stage(number, tuple(chunks), count_layers(stage_layers, config)))
    return result


class StageSchedule(NamedTuple):
    """Settings that determine the order of the passes on a stage."""

    name: str  # --pipeline-schedule
    extra_warmup: int  # --pipeline-extra-warmup
    num_chunks: int  # groups of layers on the stage
    stage: int
    stages: int
    micro_batches: int


@lru_cache(maxsize=65536)
def _instructions(stage_schedule: StageSchedule) -> list[Instruction]:
    """Return the instructions of a stage, with fewer micro-batches if a shorter schedule has the same steady state."""
    name, extra_warmup, num_chunks, stage, stages, micro_batches = stage_schedule
    # Four times the warm-up of the first stage contains the steady state, in which these schedules repeat a pattern.
    repeats = name in ("1f1b", "interleaved", "zb-h1") and micro_batches % stages == 0
    warmup = stages * (1 + extra_warmup)
    if repeats and micro_batches > 6 * warmup:
        micro_batches = 4 * warmup
    schedule = find_schedule({"schedule": name, "extra_warmup": extra_warmup}, num_chunks)
    return list(schedule(stage, stages, micro_batches))


@lru_cache(maxsize=65536)
def in_flight(schedule: StageSchedule, chunk: int | None = None) -> int:
    """Return the maximum number of forward passes whose activations a stage keeps at the same time.

    A forward pass takes one micro-batch through one of the groups of layers on the stage.
    chunk: count only the passes through this group of layers; None counts those of all groups.
    """
    instructions = _instructions(schedule)
    if chunk is not None:
        instructions = [each for each in instructions if each.chunk == chunk]
    return max_in_flight(instructions)


@lru_cache(maxsize=65536)
def peak_in_flight(after: type[Instruction], schedule: StageSchedule) -> tuple[int, int]:
    """Return (micro-batches in flight, those of them whose weight gradients zb-h1 has yet to compute).

    They are counted after each instruction of the type `after`; the largest pair is returned, (0, 0) if there is none.
    """
    num_in_flight = deferred = 0
    peak = (0, 0)
    for instruction in _instructions(schedule):
        if isinstance(instruction, Forward):
            num_in_flight += 1
        elif isinstance(instruction, Backward):
            num_in_flight -= 1
        elif isinstance(instruction, BackwardInput):  # first half of a backward pass
            deferred += 1
        elif isinstance(instruction, BackwardWeight):  # second half
            num_in_flight -= 1
            deferred -= 1
        if isinstance(instruction, after):
            peak = max(peak, (num_in_flight, deferred))
    return peak


class Shapes(NamedTuple):
    """Settings, precision and device kind of a rank, and the activation sizes that follow from them."""

    config: Config
    precision: str
    accelerated: bool
    zero_stage: int

    @property
    def width(self) -> int:
        """Bytes per element of an activation."""
        return DTYPE_BYTES[self.precision]

    @property
    def matmul_width(self) -> int:
        """Bytes per element in matmuls and attention: 4 in 16 bits on a CPU that emulates matmuls, else `width`."""
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.precision)
        if self.accelerated or dtype is None or not emulates_matmul(dtype):
            return self.width
        return 4

    @property
    def ranks(self) -> int:
        """Number of model-parallel ranks."""
        return self.config.parallel.model_parallel_size

    @property
    def sequence_shards(self) -> int:
        """Number of ranks that shard hidden states: all model-parallel ranks with sequence parallelism, else 1."""
        return self.ranks if uses_sequence_parallel(self.config, self.accelerated) else 1

    @property
    def tokens(self) -> tuple[int, int]:
        """Numbers of tokens of a micro-batch on one rank: (encoder, decoder) for T5, (all, 0) for GPT-2 and Llama."""
        first, second = sample_lengths(self.config)
        b = self.config.train.batch_size
        return first * b // self.config.parallel.context_parallel_size, second * b

    @property
    def target_tokens(self) -> int:
        """Number of tokens of a micro-batch on one rank that have logits: T5's decoder tokens, or all tokens."""
        return self.tokens[1] if self.config.is_t5 else self.tokens[0]

    def hidden(self, tokens: int) -> float:
        """Return the bytes of the hidden states of `tokens` tokens on one rank; sequence parallelism shards them."""
        return tokens * self.config.model.hidden_size * self.width / self.sequence_shards

    def layer_tokens(self, layer: Layer) -> int:
        """Return the number of tokens in a micro-batch that `layer` processes on one rank."""
        encoder, decoder = self.tokens
        return decoder if self.in_decoder(layer) else encoder

    def in_decoder(self, layer: Layer) -> bool:
        """Return whether the layer belongs to the decoder of a T5."""
        return self.config.is_t5 and (layer.name.startswith("decoder.") or layer.name == "head")

    @property
    def mask(self) -> float:
        """Bytes per element of a dropout mask."""
        return 1 if self.accelerated else self.width
