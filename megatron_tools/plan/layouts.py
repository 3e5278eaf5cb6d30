"""Search for the layouts of a model that fit in the memory of the given devices, with the speed of each."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megatron.config import Config
from megatron.config.command_line import with_values
from megatron.config.ds_config import Resolved, resolve
from megatron.config.fields import ConfigError
from megatron.estimate.per_rank import Memory, rank_memory
from megatron.estimate.sizes import Shapes, Stage, in_words, parameters, stages_of

from .cluster import Cluster
from .cost import DEFAULT, Cost, Efficiency, cost_of

USABLE = 0.9  # usable fraction of a device's memory; driver, libraries and fragmentation take the rest
MICROS = (1, 2, 4, 8, 16, 32)
MODULES = ("norm", "qkv", "activation")
AXES = {
    "model_parallel_size", "pipe_parallel_size", "context_parallel_size", "expert_parallel_size",
    "virtual_pipeline_size", "pipeline_schedule", "zero_stage",
    "checkpoint_activations", "recompute_modules", "sequence_parallel",
}  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Batch sizes.

    total: samples per step. micro: samples per micro-batch. gas: micro-batches per step and replica.
    """

    total: int
    micro: int
    gas: int


def solve_batch(replicas: int, total: int | None = None, micro: int | None = None, gas: int | None = None) -> Batch:
    """Complete a batch from two of its sizes: global batch = micro-batch x gas x replicas.

    Raises ValueError if the sizes contradict each other or if two are missing.
    """
    sizes = [each for each in (total, micro, gas) if each is not None]
    if len(sizes) < 2:
        raise ValueError("give two of --global-batch-size, --micro-batch-size and --gas, which determine the third")
    if min(replicas, *sizes) < 1:
        raise ValueError("--global-batch-size, --micro-batch-size and --gas must be at least 1")
    unit = (micro or 1) * (gas or 1) * replicas
    if total is None:
        total = unit
    fits = total % unit == 0
    if len(sizes) == 3:
        fits = total == unit
    if not fits:
        known = f"--gas {gas} x --micro-batch-size" if micro is None else f"--micro-batch-size {micro} x --gas"
        near = max(round(total / unit), 1) * unit
        raise ValueError(
            f"--global-batch-size {total} is not {known} x {replicas} replicas; set --global-batch-size to {near} or "
            f"another multiple of {unit}"
        )
    return Batch(total, micro or total // unit, gas or total // unit)


@dataclass(frozen=True)
class Layout:
    """One layout: its settings, the layers and the memory of each stage, and the cost of a step."""

    config: Config
    resolved: Resolved
    devices: int
    stages: tuple[Stage, ...]
    memory: tuple[Memory, ...]
    cost: Cost | None

    @property
    def worst(self) -> Memory:
        """Memory of a rank in the stage that needs the most."""
        return max(self.memory, key=lambda m: m.total)

    @property
    def name(self) -> str:
        """Short name of the layout, such as dp 8 x tp 4 x pp 2."""
        p = self.config.parallel
        words = [f"dp {p.data_parallel_size(self.devices)}", f"tp {p.model_parallel_size}", f"pp {p.stages}"]
        further = {"cp": p.context_parallel_size, "ep": p.expert_parallel_size, "vp": p.virtual_pipeline_size}
        for axis, size in further.items():
            if size > 1:
                words.append(f"{axis} {size}")
        return " x ".join(words)


def evaluate(config: Config, devices: int, cluster: Cluster, e: Efficiency = DEFAULT, timed: bool = True) -> Layout:
    """Return the layout that `config` describes, with its memory and, if `timed`, the cost of a step.

    Raises ConfigError or ValueError, naming the setting to change, for an invalid layout.
    """
    resolved = resolve(config, devices, cluster.accelerated)
    stages = stages_of(config)
    memory = rank_memory(config, resolved, devices, cluster.accelerated, stages)
    cost = cost_of(config, resolved, devices, cluster, stages, e) if timed else None
    return Layout(config, resolved, devices, tuple(stages), tuple(memory), cost)


@dataclass(frozen=True)
class Wanted:
    """What the user wants to have planned.

    total, micro, gas: samples per step, samples per micro-batch, micro-batches per step and replica; None if the
    search may choose. fixed: names of settings whose value in `config` the search must keep.
    """

    config: Config
    cluster: Cluster
    devices: int
    total: int | None
    micro: int | None = None
    gas: int | None = None
    fixed: frozenset[str] = frozenset()


def _choices(wanted: Wanted) -> dict[str, list[Any]]:
    """Return the values of each setting that the search combines. Settings in `wanted.fixed` keep theirs."""
    c = wanted.config
    layers = c.model.num_layers
    if c.is_t5:
        layers += c.model.decoder_layers
    tensor = []
    pipes = [0]
    experts = []
    for d in range(1, wanted.devices + 1):
        if wanted.devices % d:
            continue
        if d <= wanted.cluster.devices_per_node:
            tensor.append(d)
        if 1 < d <= layers:
            pipes.append(d)
        if (c.model.num_experts or 1) % d == 0:
            experts.append(d)
    mixed = c.train.dtype in ("bf16", "fp16")
    found: dict[str, list[Any]] = {
        "model_parallel_size": tensor,
        "pipe_parallel_size": pipes,
        "virtual_pipeline_size": [1, 2, 4],
        "zero_stage": [1, 2, 3] if mixed else [0, 1, 2, 3],
        "expert_parallel_size": experts,
    }
    for name in found:
        value = getattr(c.parallel, name)
        if name in wanted.fixed and value is not None:
            found[name] = [value]
    found["again"] = [(False, ()), (False, MODULES), (True, ())]
    if wanted.fixed & {"checkpoint_activations", "recompute_modules"}:
        found["again"] = [(c.parallel.checkpoint_activations, c.model.recompute_modules)]
    return found


def candidates(wanted: Wanted) -> Iterator[Config]:
    """Yield the settings of every valid layout that the search considers."""
    choices = _choices(wanted)
    c = wanted.config
    for tp, pp, chunks, zero, ep, (whole, modules) in product(*choices.values()):
        cell = tp * max(pp, 1) * c.parallel.context_parallel_size
        replicas = wanted.devices // cell
        shards = replicas * c.parallel.context_parallel_size
        if wanted.devices % cell or shards % ep:
            continue
        # ZeRO 2 and 3 support neither pipelines nor expert parallelism. Without replicas ZeRO has nothing to shard, so
        # only the lowest stage that the precision allows is tried.
        if zero > 1 and (pp or ep > 1 or shards == 1):
            continue
        if chunks > 1 and not pp:
            continue
        values = {
            "model_parallel_size": tp, "pipe_parallel_size": pp, "virtual_pipeline_size": chunks, "zero_stage": zero,
            "expert_parallel_size": ep, "checkpoint_activations": whole, "recompute_modules": modules,
        }  # fmt: skip
        if "pipeline_schedule" not in wanted.fixed:
            values["pipeline_schedule"] = "interleaved" if chunks > 1 else "1f1b"
        if "sequence_parallel" not in wanted.fixed:
            values["sequence_parallel"] = tp > 1 and wanted.cluster.accelerated
        for batch in _batches(wanted, replicas):
            if chunks > 1 and batch.gas % pp:
                continue
            with suppress(ConfigError):
                yield with_values(c, {**values, "batch_size": batch.micro, "gas": batch.gas})


def _batches(wanted: Wanted, replicas: int) -> Iterator[Batch]:
    micros: Sequence[int | None] = [wanted.micro]
    if wanted.micro is None and (wanted.gas is None or wanted.total is None):
        micros = MICROS
    for micro in micros:
        with suppress(ValueError):
            yield solve_batch(replicas, wanted.total, micro, wanted.gas)


def fits(layout: Layout, cluster: Cluster) -> bool:
    """Return True if every stage leaves at least a tenth of a device's memory free."""
    return layout.worst.total <= USABLE * cluster.memory * 1e9


def search(wanted: Wanted, e: Efficiency = DEFAULT) -> list[Layout]:
    """Return the layouts that fit in memory, fastest first. Of equally fast ones, the one with less memory comes first.

    Raises ValueError with one sentence of advice if no layout is valid or none fits.
    """
    good: list[Layout] = []
    leanest: Layout | None = None
    for config in candidates(wanted):
        try:
            layout = evaluate(config, wanted.devices, wanted.cluster, e, timed=False)
        except ConfigError:
            continue
        if leanest is None or layout.worst.total < leanest.worst.total:
            leanest = layout
        if fits(layout, wanted.cluster):
            cost = cost_of(config, layout.resolved, wanted.devices, wanted.cluster, layout.stages, e)
            good.append(replace(layout, cost=cost))
    if good:
        return sorted(good, key=_rank)
    if leanest is None:
        raise ValueError(_explain_no_layout(wanted))
    raise ValueError(_explain_too_large(wanted, leanest))


def _rank(layout: Layout) -> tuple[float, float]:
    assert layout.cost is not None
    return -float(f"{layout.cost.tokens_per_second:.2e}"), layout.worst.total


def _explain_too_large(wanted: Wanted, leanest: Layout) -> str:
    """Return the error message for a model of which no layout fits in memory. It advises a number of devices.

    leanest: the layout that needs the least memory.
    """
    need = leanest.worst.total / 1e9
    there = USABLE * wanted.cluster.memory
    return (
        f"{in_words(parameters(wanted.config))} parameters do not fit on {wanted.devices} devices of "
        f"{wanted.cluster.name}: the leanest layout ({leanest.name}, ZeRO {leanest.resolved.zero_stage}) needs "
        f"{need:,.3g} GB per device, and {there:,.3g} GB are usable; use about {_devices_for(wanted, leanest):,} "
        f"devices, a smaller model, a shorter --seq-length or devices with more memory"
    )


def _devices_for(wanted: Wanted, leanest: Layout) -> int:
    """Estimate how many devices the model needs: the given number is doubled until the model fits.

    The model is taken to fit if each device's equal share of weights, gradients and optimizer state fits beside the
    activations of the leanest layout.
    """
    total = 0.0
    for stage in leanest.memory:
        total += stage.weights + stage.gradients + stage.optimizer
    whole = total * leanest.devices / len(leanest.memory)
    memory = wanted.cluster.memory * 1e9
    room = max(USABLE * memory - leanest.worst.activations, 0.25 * memory)
    count = wanted.devices * 2
    while count * room < whole:
        count *= 2
    return count


def _explain_no_layout(wanted: Wanted) -> str:
    """Return the error message for a search without a valid layout.

    If the user's own settings already raise an error, that error's message is returned.
    """
    c = wanted.config
    micro = wanted.micro or (None if wanted.gas else 1)
    try:
        replicas = c.parallel.data_parallel_size(wanted.devices)
        batch = solve_batch(replicas, wanted.total, micro, wanted.gas)
        values: dict[str, Any] = {"batch_size": batch.micro, "gas": batch.gas}
        if "zero_stage" not in wanted.fixed:
            values["zero_stage"] = None
        evaluate(with_values(c, values), wanted.devices, wanted.cluster, timed=False)
    except ValueError as error:
        return str(error)
    if not wanted.total or wanted.total % wanted.devices == 0:
        given = " and ".join(f"--{name.replace('_', '-')}" for name in sorted(wanted.fixed)) or "the batch"
        return f"no layout of {wanted.devices} devices fits {given} and these batch sizes; omit one of these flags"
    return (
        f"--global-batch-size {wanted.total} cannot be split over any layout of {wanted.devices} devices; set it to a "
        f"multiple of {wanted.devices}"
    )


def shapes_of(layout: Layout, cluster: Cluster) -> Shapes:
    """Return the tensor sizes from which the memory of a layout's activations is computed."""
    return Shapes(layout.config, layout.resolved.precision, cluster.accelerated)
