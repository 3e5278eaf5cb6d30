"""Formulas for what a rank holds, without building a model: its parameters, and micro-batches in flight."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from tds.schedule import Backward, BackwardInput, BackwardWeight, Forward, Instruction, schedule_of
from tds.timetable import most_in_flight

from ..config import Config, ModelConfig
from ..config.fields import ConfigError
from ..config.parallel import splits_sequences
from ..model.cuts import balanced_cuts
from ..model.gpt2 import gpt2_layers, vocab_size_of
from ..model.layers import Layer
from ..model.work import lengths

WIDTHS = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Count:
    """Number of parameters of one or several layers.

    whole: parameters of the whole layer, without padding of the vocabulary.
    held: parameters on each model-parallel rank, with padding of the vocabulary.
    largest: parameters of the largest matrix on a rank. Memory estimates need this number, because the gradient of a
    matrix is temporarily a separate tensor.
    hidden: parameters on each rank of the matrices of transformer layers, for which Muon keeps one moment.
    experts, expert_matrices: those of `held` and of `hidden` that belong to experts, which expert-parallel ranks
    divide.
    """

    whole: int
    held: int
    largest: int = 0
    hidden: int = 0
    experts: int = 0
    expert_matrices: int = 0

    def touched(self, replicas: int) -> float:
        """Return the number of elements of all matrices that touch the share of one of `replicas` ranks."""
        return min(self.held, self.held / replicas + self.largest)

    def by_replicas(self, replicas: int, expert_ranks: int) -> list[tuple["Count", int]]:
        """Return the parameters without experts, and those of any experts, each with the number of ranks with copies.

        replicas: data-parallel size x context-parallel size. expert_ranks: --expert-parallel-size.
        """
        common = Count(self.whole, self.held - self.experts, hidden=self.hidden - self.expert_matrices)
        found = [(common, replicas)]
        if self.experts:
            experts = Count(0, self.experts, hidden=self.expert_matrices)
            found.append((experts, replicas // expert_ranks))
        return found


def _sum(counts: Sequence[Count]) -> Count:
    names = "whole", "held", "hidden", "experts", "expert_matrices"
    sums = {name: sum(getattr(c, name) for c in counts) for name in names}
    return Count(**sums, largest=max((c.largest for c in counts), default=0))


def _linear(out: int, into: int, bias: bool, ranks: int, by_rows: bool = False) -> Count:
    """Return the number of parameters of a linear layer.

    by_rows: True for a row-parallel layer, which has the whole bias on each rank; False for a column-parallel layer,
    which splits its bias over the ranks.
    """
    copies = out if by_rows else out // ranks
    shard = out * into // ranks
    return Count(out * into + out * bias, shard + copies * bias, shard, shard)


def _copy(numbers: int) -> Count:
    return Count(numbers, numbers, numbers)


def _norm(m: ModelConfig) -> Count:
    return _copy(m.hidden_size * (1 if m.normalization == "rmsnorm" else 2))


def _mlp(m: ModelConfig, ranks: int, width: int) -> list[Count]:
    """Return the two linear layers of an MLP or an expert with an inner width of `width`."""
    return [
        _linear(width * (2 if m.gated else 1), m.hidden_size, m.hidden_bias, ranks),
        _linear(m.hidden_size, width, m.hidden_bias, ranks, by_rows=True),
    ]


def _mixture(config: Config, ranks: int) -> list[Count]:
    """Return experts, shared experts, router and gate of a layer. Expert-parallel ranks divide the experts."""
    m = config.model
    all_experts = config.model.num_experts or 0
    expert = _sum(_mlp(m, ranks, m.expert_ff_size))
    here = all_experts // config.parallel.expert_parallel_size
    held = expert.held * here
    matrices = expert.hidden * here
    found = [Count(expert.whole * all_experts, held, expert.largest, matrices, held, matrices)]
    if m.num_shared_experts:
        found += _mlp(m, ranks, m.num_shared_experts * m.expert_ff_size)
    return [*found, _copy(all_experts * m.hidden_size), _copy(m.shared_expert_gate * m.hidden_size)]


def _transformer(config: Config, ranks: int, layer: Layer, cross: bool = False) -> Count:
    m = config.model
    h = m.hidden_size
    inner = m.num_attention_heads * m.head_size
    keys = m.key_value_heads * m.head_size
    bias = m.hidden_bias
    parts = [
        _norm(m),
        _linear(inner + 2 * keys, h, m.has_qkv_bias, ranks),
        _linear(h, inner, bias, ranks, by_rows=True),
        _norm(m),
        *(_mixture(config, ranks) if layer.routes else _mlp(m, ranks, m.ff_size)),
    ]
    if m.qk_norm:
        parts += [_copy(m.head_size)] * 2
    if cross:
        parts += [
            _norm(m),
            _linear(inner, h, bias, ranks),
            _linear(2 * inner, h, bias, ranks),
            _linear(h, inner, bias, ranks, by_rows=True),
        ]
    return _sum(parts)


def padded_vocabulary(config: Config, ranks: int) -> int:
    """Return the number of rows of the whole embedding table, with padding for all model-parallel ranks."""
    unit = config.model.make_vocab_size_divisible_by * ranks
    return -(-vocab_size_of(config) // unit) * unit


def _table(config: Config, ranks: int, layer: Layer) -> Count:
    h = config.model.hidden_size
    rows = padded_vocabulary(config, ranks) // ranks
    return Count(vocab_size_of(config) * h, rows * h, rows * h)


def _positions(config: Config, ranks: int, layer: Layer) -> Count:
    learned = config.model.position_embedding == "learned"
    return _copy(config.positions * config.model.hidden_size) if learned else Count(0, 0)


def _relative(config: Config, ranks: int, layer: Layer) -> Count:
    m = config.model
    whole = m.relative_attention_num_buckets * m.num_attention_heads
    return Count(whole, whole // ranks, whole // ranks)


COUNTS: dict[str, Callable[[Config, int, Layer], Count]] = {
    "WordEmbedding": _table,
    "DecoderStart": _positions,
    "StackStart": _positions,
    "RelativePositions": _relative,
    "Block": _transformer,
    "EncoderBlock": _transformer,
    "DecoderBlock": partial(_transformer, cross=True),
    "StackNorm": lambda config, ranks, layer: _norm(config.model),
    "DecoderNorm": lambda config, ranks, layer: _norm(config.model),
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
    ranks = config.parallel.model_parallel_size
    seen: set[str | None] = set()
    counts = []
    for layer in layers:
        if layer.tied is None or layer.tied not in seen:
            counts.append(COUNTS[layer.cls.__name__](config, ranks, layer))
        if layer.tied is not None:
            seen.add(layer.tied)
    return _sum(counts)


def parameters(config: Config) -> int:
    """Return the number of parameters of the whole model; a run prints the same number."""
    return count_layers(layers_of(config), config).whole


@dataclass(frozen=True)
class Stage:
    """Layers of one pipeline stage.

    number: index of the stage. stretches: layers of each virtual-pipeline chunk. count: parameters of the stage.
    """

    number: int
    stretches: tuple[tuple[Layer, ...], ...]
    count: Count

    @property
    def layers(self) -> list[Layer]:
        """Layers of all virtual-pipeline chunks of the stage."""
        return [layer for stretch in self.stretches for layer in stretch]

    @property
    def repeated(self) -> int:
        """Number of transformer layers on the stage."""
        return sum(layer.repeated for layer in self.layers)


@lru_cache(maxsize=4096)
def _cuts(works: tuple[tuple[int, bool], ...], stretches: int, recomputed: bool) -> tuple[int, ...]:
    stand_ins = [Layer("", object, work=work, repeated=repeated) for work, repeated in works]  # type: ignore[arg-type]
    return tuple(balanced_cuts(stand_ins, stretches, recomputed))


def cuts_of(layers: Sequence[Layer], config: Config) -> list[int]:
    """Return the index of the first layer of each stage (or virtual-pipeline chunk), followed by the number of layers.

    Raises ConfigError if there are more ranges than layers, and ValueError for a --partition-method that measures a
    built model.
    """
    p = config.parallel
    stretches = p.stages * p.virtual_pipeline_size if p.stages > 1 else 1
    if stretches == 1:
        return [0, len(layers)]
    if stretches > len(layers):
        raise ConfigError(
            f"--pipe-parallel-size {p.pipe_parallel_size} x --virtual-pipeline-size {p.virtual_pipeline_size} is more "
            f"than the {len(layers)} layers of the model; lower one of them"
        )
    if p.partition_method == "balanced":
        works = tuple((layer.work, layer.repeated) for layer in layers)
        return list(_cuts(works, stretches, bool(config.recomputed_layers)))
    if p.partition_method.replace(",", "").isdigit():
        return [*map(int, p.partition_method.split(",")), len(layers)]
    raise ValueError(
        f"--partition-method {p.partition_method} needs the built model; for an estimate, use balanced or list the "
        "first layer of each stage, such as 0,4,8"
    )


def stages_of(config: Config) -> list[Stage]:
    """Return all pipeline stages, each with its layers and its number of parameters."""
    layers = layers_of(config)
    stages = config.parallel.stages
    cuts = cuts_of(layers, config)
    found = []
    for number in range(stages):
        chunks = []
        mine = []
        for at in range(number, len(cuts) - 1, stages):
            chunk = layers[cuts[at] : cuts[at + 1]]
            chunks.append(tuple(chunk))
            mine += chunk
        found.append(Stage(number, tuple(chunks), count_layers(mine, config)))
    return found


def in_words(number: float) -> str:
    """Format a number with a unit, such as 1.3 G or 345 M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number / size < 999.5 else f"{math.floor(number / size)} {unit}"
    return f"{number:.3g}"


@lru_cache(maxsize=65536)
def _instructions(name: str, extra: int, chunks: int, stage: int, stages: int, micros: int) -> list[Instruction]:
    """Return the instructions of a stage, with fewer micro-batches if a shorter schedule has the same steady state."""
    few = micros
    steady = name in ("1f1b", "interleaved", "zb-h1")
    if steady and micros > 6 * stages * (1 + extra) and micros % stages == 0:
        few = 4 * stages * (1 + extra)
    schedule = schedule_of({"schedule": name, "extra_warmup": extra}, chunks)
    return list(schedule(stage, stages, few))


@lru_cache(maxsize=65536)
def in_flight(
    name: str, extra: int, chunks: int, stage: int, stages: int, micros: int, chunk: int | None = None
) -> int:
    """Return the maximum number of forward passes whose activations a stage keeps at the same time.

    A forward pass takes one micro-batch through one of the `chunks` groups of layers on the stage. The function finds
    the maximum in the schedule of the stage.
    name: --pipeline-schedule. extra: --pipeline-extra-warmup. micros: number of micro-batches.
    chunk: count only the passes through this group of layers; None counts those of all groups.
    """
    plan = _instructions(name, extra, chunks, stage, stages, micros)
    return most_in_flight([each for each in plan if chunk in (None, each.chunk)])


@lru_cache(maxsize=65536)
def fullest(
    after: type[Instruction], name: str, extra: int, chunks: int, stage: int, stages: int, micros: int
) -> tuple[int, int]:
    """Return (micro-batches in flight, those of them whose weight gradients zb-h1 has yet to compute).

    They are counted after each instruction of the type `after`; the largest pair is returned, (0, 0) if there is none.
    """
    alive = waiting = 0
    most = (0, 0)
    for each in _instructions(name, extra, chunks, stage, stages, micros):
        alive += isinstance(each, Forward) - isinstance(each, (Backward, BackwardWeight))
        waiting += isinstance(each, BackwardInput) - isinstance(each, BackwardWeight)
        if isinstance(each, after):
            most = max(most, (alive, waiting))
    return most


@dataclass(frozen=True)
class Shapes:
    """Settings, precision and device kind of a rank, and the activation sizes that follow from them."""

    config: Config
    precision: str
    accelerated: bool

    @property
    def width(self) -> int:
        """Bytes per element of an activation."""
        return WIDTHS[self.precision]

    @property
    def ranks(self) -> int:
        """Number of model-parallel ranks."""
        return self.config.parallel.model_parallel_size

    @property
    def shared(self) -> int:
        """Number of ranks that shard hidden states: all model-parallel ranks with sequence parallelism, else 1."""
        return self.ranks if splits_sequences(self.config, self.accelerated) else 1

    @property
    def tokens(self) -> tuple[int, int]:
        """Numbers of tokens of a micro-batch on one rank: (encoder, decoder) for T5, (all, 0) for GPT-2 and Llama."""
        first, second = lengths(self.config)
        b = self.config.train.batch_size
        return first * b // self.config.parallel.context_parallel_size, second * b

    def hidden(self, tokens: int) -> float:
        """Return the bytes of the hidden states of `tokens` tokens on one rank; sequence parallelism shards them."""
        return tokens * self.config.model.hidden_size * self.width / self.shared

    def of_layer(self, layer: Layer) -> int:
        """Return the number of tokens in a micro-batch that `layer` processes on one rank."""
        encoder, decoder = self.tokens
        in_decoder = self.config.is_t5 and (layer.name.startswith("decoder.") or layer.name == "head")
        return decoder if in_decoder else encoder

    @property
    def mask(self) -> float:
        """Bytes per element of a dropout mask."""
        return 1 if self.accelerated else self.width
