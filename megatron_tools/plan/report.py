"""Text output of a plan: table of the layouts, calculation of one layout, memory of each stage."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields

from megatron.estimate.per_rank import Memory
from megatron.estimate.sizes import Shapes, parameters
from megatron.model.work import sample_lengths
from megatron.training.console import format_count
from megatron_tools.tables import split_columns
from tds.timetable import max_in_flight

from ..report.timetable import instructions_of
from .layouts import USABLE_MEMORY, Layout
from .step_cost import Cost

Lines = Iterator[str]
MEMORY_KINDS = tuple(f.name for f in fields(Memory))


def as_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Lines:
    """Yield the lines of Markdown tables with aligned columns, one table for each part that fits the terminal."""
    separator: list[str] = []  # an empty line before each table except the first
    # Each part is the row of heads and the rows below it, with as many columns as fit. " | " needs a gap of 3.
    for head, *block in split_columns([heads, *rows], gap=3):
        yield from separator
        widths = [max(map(len, column)) for column in zip(head, *block, strict=True)]
        dashes = ["-" * width for width in widths]
        for row in (head, dashes, *block):
            yield "| " + " | ".join(map(str.ljust, row, widths)) + " |"
        separator = [""]


def recompute_label(layout: Layout) -> str:
    """Return which activations a layout recomputes in the backward pass: `none`, `layers` or `modules`."""
    if layout.config.parallel.checkpoint_activations:
        return "layers"
    return "modules" if layout.config.model.recompute_modules else "none"


def format_duration(days: float) -> str:
    """Return a duration, given in days, as text in a suitable unit, such as `3.2 hours`."""
    for unit, size in (("days", 1.0), ("hours", 1 / 24), ("minutes", 1 / 1440)):
        if days >= size:
            return f"{days / size:,.1f} {unit}"
    return f"{days * 86400:.1f} s"


def layout_table(layouts: Sequence[Layout], tokens: float | None) -> Lines:
    """Yield the lines of a table with a row for each layout.

    A row gives the parallel sizes, the memory by kind on the stage that needs the most, and the speed.
    """
    has_experts = any(layout.config.model.num_experts for layout in layouts)
    rows = []
    for number, layout in enumerate(layouts, 1):
        row = {"": str(number)} | _layout_cells(layout, has_experts)
        if tokens:
            row["time"] = format_duration(layout.cost.days(tokens))
        rows.append(row)
    cells = [list(row.values()) for row in rows]
    yield from as_table(list(rows[0]), cells)


def _layout_cells(layout: Layout, has_experts: bool) -> dict[str, str]:
    """Return the cells of a layout by their heads. has_experts: with a column for expert parallelism."""
    p = layout.config.parallel
    train = layout.config.train
    peak = layout.peak_memory
    cost = layout.cost
    cells: dict[str, object] = {
        "dp": p.data_parallel_size(layout.devices),
        "tp": p.model_parallel_size,
        "pp": p.stages,
    }
    if has_experts:
        cells["ep"] = p.expert_parallel_size
    cells |= {
        "vp": p.virtual_pipeline_size,
        "zero": layout.resolved.zero_stage,
        "recompute": recompute_label(layout),
        "micro": train.batch_size,
        "gas": train.gas,
        "GB": f"{peak.total / 1e9:.3g}",
    }
    for kind in MEMORY_KINDS:
        # Heads are shortened, as in `weigh.`.
        cells[f"{kind[:5]}."] = f"{getattr(peak, kind) / 1e9:.3g}"
    cells |= {
        "bubble": f"{cost.bubble:.1%}",
        "s/step": f"{cost.step:.3g}",
        "tokens/s": f"{cost.tokens_per_second:,.0f}",
        "TFLOP/s": f"{cost.tflops:.3g}",
        "MFU": f"{cost.mfu:.1%}",
    }
    return {head: str(value) for head, value in cells.items()}


def explain_layout(layout: Layout, tokens: float | None) -> Lines:
    """Yield lines that show how the memory and time of a layout are computed."""
    config = layout.config
    cost = layout.cost
    # The tensor sizes from which the memory of the activations is computed.
    shapes = Shapes(config, layout.resolved.precision, layout.cluster.accelerated, layout.resolved.zero_stage)
    p = config.parallel
    train = config.train
    replicas = p.data_parallel_size(layout.devices)
    context = f" x {p.context_parallel_size} context" if p.context_parallel_size > 1 else ""
    batch = config.train_batch_size(layout.devices)
    grid = f"{replicas} replicas x {p.stages} stages x {p.model_parallel_size} model-parallel{context}"
    yield f"{layout.devices} devices = {grid}"
    yield f"global batch {batch:,} = micro-batch {train.batch_size} x gas {train.gas} x {replicas} replicas"
    lengths = " + ".join(f"{n:,}" for n in sample_lengths(config) if n)  # no decoder: 0
    yield f"tokens per step: {batch:,} x ({lengths}) = {cost.tokens:,}"
    yield f"parameters: {parameters(config):,} ({format_count(parameters(config))})"
    yield ""
    yield from stage_table(layout)
    # A larger schedule would take too long to write out.
    if p.stages > 1 and train.gas * p.stages <= 1 << 16:
        chunks = p.virtual_pipeline_size
        plan = instructions_of(p.pipeline_schedule, p.stages, train.gas, chunks, p.pipeline_extra_warmup)
        kept = ", ".join(f"{max_in_flight(stage) / chunks:g}" for stage in plan)
        yield f"micro-batches kept by each stage ({p.pipeline_schedule}): {kept}"
    yield (
        f"hidden states per micro-batch: {shapes.tokens[0]:,} tokens x {config.model.hidden_size:,} x "
        f"{shapes.width} bytes / {shapes.sequence_shards} ranks = {shapes.hidden(shapes.tokens[0]) / 1e6:,.1f} MB"
    )
    usable = f"{USABLE_MEMORY * layout.cluster.memory:.3g} GB ({USABLE_MEMORY:.0%} of {layout.cluster.memory:g} GB)"
    yield f"memory: {layout.peak_memory.total / 1e9:.3g} GB on the stage that needs the most, of {usable}"
    yield ""
    slowest = max(cost.stages, key=lambda s: s.total)
    parts = [f"{kind.replace('_', ' ')} {t * 1e3:.3g}" for kind, t in asdict(slowest).items() if t]
    passes = f"{slowest.total * 1e3:.4g} ms ({', '.join(parts)})"
    yield f"forward and backward of a micro-batch on the slowest stage: {passes}"
    if p.stages > 1:
        yield (
            f"stage boundary: {cost.boundary_bytes / 1e6:,.2f} MB per micro-batch, direction and rank; bubble of "
            f"{train.gas} micro-batches on {p.stages} stages: {cost.bubble:.1%}"
        )
    if cost.collective_bytes:
        yield f"model-parallel all-reduces: {cost.collective_bytes / 1e6:,.1f} MB per micro-batch and rank"
    yield from _explain_reductions(layout, cost)
    fill_seconds = cost.passes - train.gas * slowest.total
    passes = f"{train.gas} x {slowest.total * 1e3:.4g} ms + {fill_seconds * 1e3:.4g} ms to fill and drain the pipeline"
    yield f"step: {passes} + {(cost.step - cost.passes) * 1e3:.3g} ms = {cost.step:.4g} s"
    yield f"model FLOPs per step: {cost.model_flops:.4g}, with recomputation {cost.done_flops:.4g}"
    yield (
        f"MFU: {cost.model_flops:.4g} / {cost.step:.4g} s / {layout.devices} / {cost.peak:.4g} = {cost.mfu:.1%}; "
        f"{cost.tflops:.4g} TFLOP/s per device; {cost.tokens_per_second:,.0f} tokens/s"
    )
    if tokens:
        days = cost.days(tokens)
        spent = f"{format_duration(days)}, {days * 24 * layout.devices:,.0f} device-hours"
        yield f"{format_count(tokens)} tokens: {tokens / cost.tokens:,.0f} steps, {spent}"


def _explain_reductions(layout: Layout, cost: Cost) -> Lines:
    """Yield lines about the reduction of gradients, and about the distribution of experts if the model has any."""
    p = layout.config.parallel
    experts = layout.config.model.num_experts
    replicas = p.data_parallel_size(layout.devices) * p.context_parallel_size
    ranks = p.expert_parallel_size
    yield (
        f"gradient all-reduce over {replicas} ranks: {cost.gradient_bytes / 1e6:,.1f} MB, "
        f"{cost.gradients * 1e3:.3g} ms not overlapped; optimizer {cost.optimizer * 1e3:.3g} ms"
    )
    if experts:
        yield (
            f"experts: {experts // ranks} of {experts} on each rank; all-to-alls over ranks: {ranks}, "
            f"{cost.expert_bytes / 1e6:,.2f} MB per micro-batch and rank; "
            f"ranks with the same experts: {replicas // ranks}"
        )


def stage_table(layout: Layout) -> Lines:
    """Yield the lines of a table: layers, parameters and memory of each stage. Consecutive equal stages share a row."""
    rows: list[list[str]] = []
    first_stage = 0
    for index, (stage, memory) in enumerate(zip(layout.stages, layout.memory, strict=True)):
        row = [f"{stage.repeated} of {len(stage.layers)}", f"{stage.count.held:,}", f"{memory.total / 1e9:.4g}"]
        row += [f"{getattr(memory, kind) / 1e9:.3g}" for kind in MEMORY_KINDS]
        # Equal to the row above but for its number: that row then stands for stages such as 1-3.
        if rows and rows[-1][1:] == row:
            rows[-1][0] = f"{first_stage}-{index}"
            continue
        first_stage = index
        rows.append([str(index), *row])
    heads = ["stage", "transformer layers of all layers", "parameters per rank", "GB", *MEMORY_KINDS]
    yield from as_table(heads, rows)
