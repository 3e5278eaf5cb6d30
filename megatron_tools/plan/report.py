"""Text output of a plan: table of the layouts, calculation of one layout, memory of each stage."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields

from data_utils.cli import blocks
from megatron.estimate.per_rank import Memory
from megatron.estimate.sizes import in_words, parameters
from megatron.model.work import lengths
from tds.schedule import schedule_of
from tds.timetable import most_in_flight

from .cluster import Cluster
from .cost import Cost
from .layouts import USABLE, Layout, shapes_of

Lines = Iterator[str]
KINDS = tuple(f.name for f in fields(Memory))


def as_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Lines:
    """Yield the lines of Markdown tables with aligned columns, one table for each part that fits the terminal."""
    between: list[str] = []
    for head, *block in blocks([heads, *rows], gap=3):
        yield from between
        yield from _as_markdown(head, block)
        between = [""]


def _as_markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Lines:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = ["-" * width for width in widths]
    for row in (heads, lines, *rows):
        yield "| " + " | ".join(map(str.ljust, row, widths)) + " |"


def recomputed(layout: Layout) -> str:
    """Return which activations a layout recomputes in the backward pass: `none`, `layers` or `modules`."""
    if layout.config.parallel.checkpoint_activations:
        return "layers"
    return "modules" if layout.config.model.recompute_modules else "none"


def duration(days: float) -> str:
    """Return a duration, given in days, as text in a suitable unit, such as `3.2 hours`."""
    for unit, size in (("days", 1.0), ("hours", 1 / 24), ("minutes", 1 / 1440)):
        if days >= size:
            return f"{days / size:,.1f} {unit}"
    return f"{days * 86400:.1f} s"


def ranked(layouts: Sequence[Layout], tokens: float | None) -> Lines:
    """Yield the lines of a table with a row for each layout.

    A row gives the parallel sizes, the memory by kind on the stage that needs the most, and the speed.
    """
    experts = any(layout.config.model.num_experts for layout in layouts)
    rows = []
    for number, layout in enumerate(layouts, 1):
        row = {"": str(number)} | _row(layout, experts)
        if tokens:
            assert layout.cost is not None
            row["time"] = duration(layout.cost.days(tokens))
        rows.append(row)
    yield from as_table(list(rows[0]), [list(row.values()) for row in rows])


def _row(layout: Layout, experts: bool) -> dict[str, str]:
    """Return the cells of a layout by their heads. experts: with a column for expert parallelism."""
    p = layout.config.parallel
    train = layout.config.train
    worst = layout.worst
    cost = layout.cost
    assert cost is not None
    found: dict[str, object] = {
        "dp": p.data_parallel_size(layout.devices),
        "tp": p.model_parallel_size,
        "pp": p.stages,
    }
    if experts:
        found["ep"] = p.expert_parallel_size
    found |= {
        "vp": p.virtual_pipeline_size,
        "zero": layout.resolved.zero_stage,
        "recompute": recomputed(layout),
        "micro": train.batch_size,
        "gas": train.gas,
        "GB": f"{worst.total / 1e9:.3g}",
    }
    for kind in KINDS:
        found[f"{kind[:5]}."] = f"{getattr(worst, kind) / 1e9:.3g}"
    found |= {
        "bubble": f"{cost.bubble:.1%}",
        "s/step": f"{cost.step:.3g}",
        "tokens/s": f"{cost.tokens_per_second:,.0f}",
        "TFLOP/s": f"{cost.tflops:.3g}",
        "MFU": f"{cost.mfu:.1%}",
    }
    return {head: str(value) for head, value in found.items()}


def explained(layout: Layout, cluster: Cluster, tokens: float | None) -> Lines:
    """Yield lines that show how the memory and time of a layout are computed."""
    config = layout.config
    cost = layout.cost
    x = shapes_of(layout, cluster)
    assert cost is not None
    p = config.parallel
    t = config.train
    replicas = p.data_parallel_size(layout.devices)
    context = f" x {p.context_parallel_size} context" if p.context_parallel_size > 1 else ""
    batch = config.train_batch_size(layout.devices)
    grid = f"{replicas} replicas x {p.stages} stages x {p.model_parallel_size} model-parallel{context}"
    yield f"{layout.devices} devices = {grid}"
    yield f"global batch {batch:,} = micro-batch {t.batch_size} x gas {t.gas} x {replicas} replicas"
    long = " + ".join(f"{n:,}" for n in lengths(config) if n)
    yield f"tokens per step: {batch:,} x ({long}) = {cost.tokens:,}"
    yield f"parameters: {parameters(config):,} ({in_words(parameters(config))})"
    yield ""
    yield from stage_table(layout)
    schedule = schedule_of(
        {"schedule": p.pipeline_schedule, "extra_warmup": p.pipeline_extra_warmup}, p.virtual_pipeline_size
    )
    if p.stages > 1 and t.gas * p.stages <= 1 << 16:
        kept = [most_in_flight(list(schedule(s, p.stages, t.gas))) / p.virtual_pipeline_size for s in range(p.stages)]
        yield f"micro-batches kept by each stage ({p.pipeline_schedule}): {', '.join(f'{each:g}' for each in kept)}"
    yield (
        f"hidden states per micro-batch: {x.tokens[0]:,} tokens x {config.model.hidden_size:,} x {x.width} bytes / "
        f"{x.shared} ranks = {x.hidden(x.tokens[0]) / 1e6:,.1f} MB"
    )
    room = USABLE * cluster.memory
    usable = f"{room:.3g} GB ({USABLE:.0%} of {cluster.memory:g} GB)"
    yield f"memory: {layout.worst.total / 1e9:.3g} GB on the stage that needs the most, of {usable}"
    yield ""
    slowest = max(cost.stages, key=lambda s: s.total)
    parts = []
    for kind, seconds in asdict(slowest).items():
        if seconds:
            parts.append(f"{kind.replace('_', ' ')} {seconds * 1e3:.3g}")
    passes = f"{slowest.total * 1e3:.4g} ms ({', '.join(parts)})"
    yield f"forward and backward of a micro-batch on the slowest stage: {passes}"
    if p.stages > 1:
        yield (
            f"stage boundary: {cost.boundary_bytes / 1e6:,.2f} MB per micro-batch, direction and rank; bubble of "
            f"{t.gas} micro-batches on {p.stages} stages: {cost.bubble:.1%}"
        )
    if cost.collective_bytes:
        yield f"model-parallel all-reduces: {cost.collective_bytes / 1e6:,.1f} MB per micro-batch and rank"
    yield from _reductions(layout, cost)
    fill = cost.passes - t.gas * slowest.total
    passes = f"{t.gas} x {slowest.total * 1e3:.4g} ms + {fill * 1e3:.4g} ms to fill and drain the pipeline"
    yield f"step: {passes} + {(cost.step - cost.passes) * 1e3:.3g} ms = {cost.step:.4g} s"
    yield f"model FLOPs per step: {cost.model_flops:.4g}, with recomputation {cost.done_flops:.4g}"
    yield (
        f"MFU: {cost.model_flops:.4g} / {cost.step:.4g} s / {layout.devices} / {cost.peak:.4g} = {cost.mfu:.1%}; "
        f"{cost.tflops:.4g} TFLOP/s per device; {cost.tokens_per_second:,.0f} tokens/s"
    )
    if tokens:
        days = cost.days(tokens)
        spent = f"{duration(days)}, {days * 24 * layout.devices:,.0f} device-hours"
        yield f"{in_words(tokens)} tokens: {tokens / cost.tokens:,.0f} steps, {spent}"


def _reductions(layout: Layout, cost: Cost) -> Lines:
    """Yield lines about the reduction of gradients, and about the distribution of experts if the model has any."""
    p = layout.config.parallel
    count = layout.config.model.num_experts
    copies = p.data_parallel_size(layout.devices) * p.context_parallel_size
    ranks = p.expert_parallel_size
    yield (
        f"gradient all-reduce over {copies} ranks: {cost.gradient_bytes / 1e6:,.1f} MB, "
        f"{cost.gradients * 1e3:.3g} ms not overlapped; optimizer {cost.optimizer * 1e3:.3g} ms"
    )
    if count:
        yield (
            f"experts: {count // ranks} of {count} on each rank; all-to-alls over ranks: {ranks}, "
            f"{cost.expert_bytes / 1e6:,.2f} MB per micro-batch and rank; "
            f"ranks with the same experts: {copies // ranks}"
        )


def stage_table(layout: Layout) -> Lines:
    """Yield the lines of a table: layers, parameters and memory of each stage. Consecutive equal stages share a row."""
    rows: list[list[str]] = []
    first = 0
    for at, (stage, memory) in enumerate(zip(layout.stages, layout.memory, strict=True)):
        row = [f"{stage.repeated} of {len(stage.layers)}", f"{stage.count.held:,}", f"{memory.total / 1e9:.4g}"]
        row += [f"{getattr(memory, kind) / 1e9:.3g}" for kind in KINDS]
        if rows and rows[-1][1:] == row:
            rows[-1][0] = f"{first}-{at}"
            continue
        first = at
        rows.append([str(at), *row])
    yield from as_table(["stage", "transformer layers of all layers", "parameters per rank", "GB", *KINDS], rows)
