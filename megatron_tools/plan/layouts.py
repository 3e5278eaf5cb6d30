"""Search for the layouts of a model that fit in the memory of the given devices, with the speed of each."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from megatron.config import Config
from megatron.config.command_line import with_values
from megatron.config.ds_config import Resolved, offloaded_part, read_file, resolve
from megatron.config.fields import ConfigError
from megatron.estimate.per_rank import Memory, rank_memory
from megatron.estimate.sizes import Stage, parameters, stages_of
from megatron.training.console import format_count

from .cluster import Cluster
from .cost import DEFAULT, Efficiency, cost_of
from .step_cost import Cost

USABLE_MEMORY = 0.9  # usable fraction of a device's memory; driver, libraries and fragmentation take the rest
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
RECOMPUTED_MODULES = ("norm", "qkv", "activation")
LAYOUT_SETTINGS = frozenset((
    "model_parallel_size", "pipe_parallel_size", "context_parallel_size", "expert_parallel_size",
    "virtual_pipeline_size", "pipeline_schedule", "zero_stage",
    "checkpoint_activations", "recompute_modules", "sequence_parallel",
))  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Batch sizes.

    total: samples per step. micro: samples per micro-batch. gas: micro-batches per step and replica.
    """

    total: int
    micro: int
    gas: int


def solve_batch(replicas: int, total: int | None, micro: int | None, gas: int | None) -> Batch:
    """Complete a batch from two of its sizes: global batch = micro-batch x gas x replicas.

    Raises ValueError if the sizes contradict each other or if two are missing.
    """
    given = [size for size in (total, micro, gas) if size is not None]
    if len(given) < 2:
        raise ValueError("give two of --global-batch-size, --micro-batch-size and --gas, which determine the third")
    if min(replicas, *given) < 1:
        raise ValueError("--global-batch-size, --micro-batch-size and --gas must be at least 1")
    # The size that is missing counts as 1 here: the global batch must then be a multiple of the others. With total 64,
    # micro 4 and 2 replicas, step_samples is 8, and 64 / 8 is the missing gas.
    step_samples = (micro or 1) * (gas or 1) * replicas
    if total is None:
        total = step_samples
    divides = total % step_samples == 0
    if len(given) == 3:
        divides = total == step_samples
    if not divides:
        # Without --gas, the message says: is not --micro-batch-size 4 x --gas x 2 replicas. If all three are given, it
        # has --gas 3 there.
        known = f"--gas {gas} x --micro-batch-size" if micro is None else f"--micro-batch-size {micro} x --gas"
        near = max(round(total / step_samples), 1) * step_samples
        raise ValueError(
            f"--global-batch-size {total} is not {known} x {replicas} replicas; set --global-batch-size to {near} or "
            f"another multiple of {step_samples}"
        )
    missing_size = total // step_samples  # micro or gas, as at most one of them is missing
    return Batch(total, micro or missing_size, gas or missing_size)


@dataclass(frozen=True)
class Layout:
    """One layout: its settings, and the layers and the memory of each stage. efficiency: for the cost of a step."""

    config: Config
    resolved: Resolved
    devices: int
    cluster: Cluster
    stages: Sequence[Stage]
    memory: Sequence[Memory]
    efficiency: Efficiency

    @cached_property
    def cost(self) -> Cost:
        """Cost of a step. Raises ValueError if the cluster's file gives no peak for the run's dtype."""
        return cost_of(self.config, self.resolved, self.devices, self.cluster, self.stages, self.efficiency)

    @property
    def peak_memory(self) -> Memory:
        """Memory of a rank in the stage that needs the most."""
        return max(self.memory, key=lambda m: m.total)

    @property
    def fits_in_memory(self) -> bool:
        """True if every stage leaves at least a tenth of a device's memory free."""
        return self.peak_memory.total <= USABLE_MEMORY * self.cluster.memory * 1e9

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


def evaluate(config: Config, devices: int, cluster: Cluster, e: Efficiency = DEFAULT) -> Layout:
    """Return the layout that `config` describes, with its memory.

    Raises ConfigError, naming the setting to change, for an invalid layout.
    """
    resolved = resolve(config, devices, cluster.accelerated)
    stages = stages_of(config)
    memory = rank_memory(config, resolved, devices, cluster.accelerated, stages)
    return Layout(config, resolved, devices, cluster, stages, memory, e)


@dataclass(frozen=True)
class SearchRequest:
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


def _search_space(request: SearchRequest) -> dict[str, list[Any]]:
    """Return the values of each setting that the search combines. Settings in `request.fixed` keep theirs.

    Raises ValueError for a ds_config with offloading.
    """
    c = request.config
    zero_section = read_file(c, lambda section, content: None).get("zero_optimization", {})
    name = offloaded_part(zero_section)
    if name:
        raise ValueError(f"memory with offloading is not estimated: leave {name} out of the --deepspeed-config")
    num_layers = c.model.num_layers
    if c.is_t5:
        num_layers += c.model.decoder_layers
    tp_sizes = []
    # No pipeline (0) stands for a single stage.
    pp_sizes = [0]
    ep_sizes = []
    for size in range(1, request.devices + 1):
        if request.devices % size:  # a parallel size must divide the devices
            continue
        if size <= request.cluster.devices_per_node:
            tp_sizes.append(size)
        if 1 < size <= num_layers:
            pp_sizes.append(size)
        if (c.model.num_experts or 1) % size == 0:  # a model without experts has only the size 1
            ep_sizes.append(size)
    is_mixed_precision = c.train.dtype in ("bf16", "fp16")  # needs ZeRO, which keeps fp32 master weights
    space: dict[str, list[Any]] = {
        "model_parallel_size": tp_sizes,
        "pipe_parallel_size": pp_sizes,
        "virtual_pipeline_size": [1, 2, 4],
        "zero_stage": [1, 2, 3] if is_mixed_precision else [0, 1, 2, 3],
        "expert_parallel_size": ep_sizes,
    }
    if isinstance(zero_section.get("stage"), int):
        space["zero_stage"] = [zero_section["stage"]]
    for name in space:
        value = getattr(c.parallel, name)
        # --zero-stage may be given as `none`, which leaves the choice to the search.
        if name in request.fixed and value is not None:
            space[name] = [value]
    # Pairs of (--checkpoint-activations, --recompute-modules): nothing, some modules or whole layers.
    space["recomputation"] = [(False, ()), (False, RECOMPUTED_MODULES), (True, ())]
    if request.fixed & {"checkpoint_activations", "recompute_modules"}:
        space["recomputation"] = [(c.parallel.checkpoint_activations, c.model.recompute_modules)]
    return space


def candidates(request: SearchRequest) -> Iterator[Config]:
    """Yield the settings of every valid layout that the search considers."""
    space = _search_space(request)
    c = request.config
    # The values come in the order of the keys of `space`.
    for tp, pp, chunks, zero, ep, (whole_layers, modules) in product(*space.values()):
        ranks_per_replica = tp * max(pp, 1) * c.parallel.context_parallel_size
        replicas = request.devices // ranks_per_replica
        shards = replicas * c.parallel.context_parallel_size
        # Experts are divided over some of the ranks that hold different samples or parts of them.
        if request.devices % ranks_per_replica or shards % ep:
            continue
        # ZeRO 2 and 3 support neither pipelines nor expert parallelism. With shards == 1, ZeRO has nothing to shard, so
        # of several stages, only 1 is tried, and without mixed precision also 0.
        is_needless = shards == 1 and len(space["zero_stage"]) > 1
        if zero > 1 and (pp or ep > 1 or is_needless):
            continue
        if chunks > 1 and not pp:
            continue
        values = {
            "model_parallel_size": tp, "pipe_parallel_size": pp, "virtual_pipeline_size": chunks, "zero_stage": zero,
            "expert_parallel_size": ep, "checkpoint_activations": whole_layers, "recompute_modules": modules,
        }  # fmt: skip
        if "pipeline_schedule" not in request.fixed:
            values["pipeline_schedule"] = "interleaved" if chunks > 1 else "1f1b"
        for batch in _batch_sizes(request, replicas):
            # An interleaved schedule of other numbers of micro-batches takes long to simulate, so it is not proposed.
            if chunks > 1 and batch.gas % pp and request.gas is None:
                continue
            with suppress(ConfigError):
                yield with_values(c, {**values, "batch_size": batch.micro, "gas": batch.gas})


def _batch_sizes(request: SearchRequest, replicas: int) -> Iterator[Batch]:
    """Yield the batches to try with this number of replicas, without those whose sizes are no whole numbers."""
    micros: Sequence[int | None] = [request.micro]
    # The global batch and gas determine the micro-batch: for None, `solve_batch` computes it. Else several are tried.
    determine_micro = request.gas is not None and request.total is not None
    if request.micro is None and not determine_micro:
        micros = MICRO_BATCHES
    for micro in micros:
        with suppress(ValueError):
            yield solve_batch(replicas, request.total, micro, request.gas)


def search(request: SearchRequest, e: Efficiency = DEFAULT) -> list[Layout]:
    """Return the layouts that fit in memory, fastest first. Of equally fast ones, the one with less memory comes first.

    Raises ValueError with one sentence of advice if no layout is valid or none fits.
    """
    fitting: list[Layout] = []
    leanest: Layout | None = None
    for config in candidates(request):
        try:
            layout = evaluate(config, request.devices, request.cluster, e)
        except ConfigError:
            continue
        if leanest is None or layout.peak_memory.total < leanest.peak_memory.total:
            leanest = layout
        if layout.fits_in_memory:
            fitting.append(layout)
    # Only layouts that fit in memory are timed, because most do not fit and timing is slow.
    if fitting:
        return sorted(fitting, key=_sort_key)
    if leanest is None:
        raise ValueError(_explain_no_layout(request))
    raise ValueError(_explain_too_large(request, leanest))


def _sort_key(layout: Layout) -> tuple[float, float]:
    # Speeds with equal first three digits count as equal. The minus sorts the fastest first.
    return -float(f"{layout.cost.tokens_per_second:.2e}"), layout.peak_memory.total


def _explain_too_large(request: SearchRequest, leanest: Layout) -> str:
    """Return the error message for a model of which no layout fits in memory. It advises a number of devices.

    leanest: the layout that needs the least memory.
    """
    need = leanest.peak_memory.total / 1e9
    usable = USABLE_MEMORY * request.cluster.memory
    return (
        f"{format_count(parameters(request.config))} parameters do not fit on {request.devices} devices of "
        f"{request.cluster.name}: the leanest layout ({leanest.name}, ZeRO {leanest.resolved.zero_stage}) needs "
        f"{need:,.3g} GB per device, and {usable:,.3g} GB are usable; use about {_devices_for(request, leanest):,} "
        f"devices, a smaller model, a shorter --seq-length or devices with more memory"
    )


def _devices_for(request: SearchRequest, leanest: Layout) -> int:
    """Estimate how many devices the model needs: the given number is doubled until the model fits.

    The model is taken to fit if each device's equal share of weights, gradients and optimizer state fits beside the
    activations of the leanest layout.
    """
    total_bytes = 0.0
    for stage in leanest.memory:
        total_bytes += stage.weights + stage.gradients + stage.optimizer
    # leanest.memory has one rank of each stage, and each stage has devices / stages ranks.
    state_bytes = total_bytes * leanest.devices / len(leanest.memory)
    memory = request.cluster.memory * 1e9
    # Even if activations fill the device, a quarter is taken to be free, so that the loop ends.
    room = max(USABLE_MEMORY * memory - leanest.peak_memory.activations, 0.25 * memory)
    devices = request.devices * 2
    while devices * room < state_bytes:
        devices *= 2
    return devices


def _explain_no_layout(request: SearchRequest) -> str:
    """Return the error message for a search without a valid layout.

    If the user's own settings already raise an error, that error's message is returned.
    """
    c = request.config
    micro = request.micro
    # solve_batch needs two sizes. If only the global batch is given, it is tried with one sample per micro-batch.
    if not micro and not request.gas:
        micro = 1
    try:
        replicas = c.parallel.data_parallel_size(request.devices)
        batch = solve_batch(replicas, request.total, micro, request.gas)
        values: dict[str, Any] = {"batch_size": batch.micro, "gas": batch.gas}
        if "zero_stage" not in request.fixed:
            values["zero_stage"] = None  # the lowest stage that the precision allows
        evaluate(with_values(c, values), request.devices, request.cluster)
    except ValueError as error:
        return str(error)
    if not request.total or request.total % request.devices == 0:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in sorted(request.fixed)) or "the batch"
        return f"no layout of {request.devices} devices fits {flags} and these batch sizes; omit one of these flags"
    return (
        f"--global-batch-size {request.total} cannot be split over any layout of {request.devices} devices; set it "
        f"to a multiple of {request.devices}"
    )
