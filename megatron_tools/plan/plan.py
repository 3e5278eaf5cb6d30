"""The work of tools/plan.py, whose flags are in plan_flags.py."""

import argparse
from pathlib import Path
from typing import Any

from data_utils.cli import new_figure, save_figure
from megatron.config import SECTIONS, Config
from megatron.config.command_line import parse, read_json, values_of_files, with_values
from megatron.config.defaults import DEFAULTS
from megatron.config.ds_config import enabled_formats
from megatron.config.flags import read_flags
from megatron.config.names import replace_renamed_flags
from megatron.config.source import new_source
from megatron.estimate.sizes import parameters
from megatron.training.console import format_count

from .cluster import Cluster, load_cluster
from .layouts import LAYOUT_SETTINGS, Layout, SearchRequest, search
from .report import MEMORY_KINDS, explain_layout, layout_table
from .scripts import doctor_command, write_files

DEFAULT_VOCABULARIES = {"gpt2": 50257, "llama": 128256, "t5": 32128}


def run_settings(args: argparse.Namespace, cluster: Cluster) -> Config:
    """Return the settings of the run for which layouts are searched.

    Raises ConfigError for flags that training would reject.
    """
    argv: list[str] = []
    for path in args.model:
        argv += ["--config", path]
    argv += args.flags
    flags = read_flags(argv)
    given = flags.settings
    if "batch_size_schedule" in given:
        raise ValueError(
            "a plan has one global batch size: leave --batch-size-schedule out, and give its largest size as "
            "--global-batch-size"
        )
    # Several chunks of layers need the schedule `interleaved`, which is chosen unless the user names one.
    if given.get("virtual_pipeline_size", 1) > 1 and "pipeline_schedule" not in given:
        argv += ["--pipeline-schedule", "interleaved"]
    family = (values_of_files(flags.files) | given).get("family")
    config = parse(argv, DEFAULTS.get(str(family)), ranks=args.devices, notify=_print_note)
    values: dict[str, Any] = {}
    if config.model.vocab_size is None:
        values["vocab_size"] = DEFAULT_VOCABULARIES.get(config.model.family or "gpt2", 50257)
        print(f"note: assuming a vocabulary of {values['vocab_size']:,} tokens; set --vocab-size for another size")
    if config.train.precision == "auto":
        ds_config = config.train.deepspeed_config
        enabled = enabled_formats(read_json(ds_config)) if ds_config else []
        values["precision"] = enabled[0] if enabled else _fastest_precision(cluster)
    return with_values(config, values)


def _fastest_precision(cluster: Cluster) -> str:
    """Return the precision that --precision auto means on a cluster."""
    is_bf16_fast = cluster.accelerated and "bf16" in cluster.peak_tflops
    return "bf16" if is_bf16_fast else "fp32"


def _print_note(note: str) -> None:
    """Print a note on a flag, unless it depends on the layout, which the plan has yet to find."""
    # A note begins with its flag: --no-sequence-parallel names the setting sequence_parallel.
    setting = note.split()[0].removeprefix("--").removeprefix("no-").replace("-", "_")
    if setting not in SECTIONS["parallel"].__dataclass_fields__:
        print(f"note: {note}")


def fixed_settings(flags: list[str], config: Config, ranks: int) -> frozenset[str]:
    """Return the names of the layout settings that were given as flags of this project or of another framework.

    config: the settings to which the flags lead.
    """
    words, _ = replace_renamed_flags(flags)
    given = read_flags(words)
    # `source.values` begins with the settings given as this project's flags. Each translated flag of another framework
    # adds the settings that it stands for.
    source = new_source(given.settings, given.foreign)
    source.translate_all(given.foreign)
    # The translation of some flags depends on other settings or the number of ranks, so it comes last.
    source.apply_deferred(config, ranks, with_values)
    return LAYOUT_SETTINGS & source.values.keys()


def main(args: argparse.Namespace) -> None:
    if None in (args.devices, args.cluster):
        raise ValueError("give --cluster and --devices, which describe the hardware; --help shows examples")
    cluster = load_cluster(args.cluster)
    _check_nodes(args.devices, cluster)
    config = run_settings(args, cluster)
    if args.global_batch_size is None and args.micro_batch_size is None and args.gas is None:
        raise ValueError("give --global-batch-size, or two of --global-batch-size, --micro-batch-size and --gas")
    request = SearchRequest(
        config,
        cluster,
        args.devices,
        total=args.global_batch_size,
        micro=args.micro_batch_size,
        gas=args.gas,
        fixed=fixed_settings(args.flags, config, args.devices),
    )
    layouts = search(request)
    print(
        f"{parameters(config):,} parameters ({format_count(parameters(config))}), {config.train.precision}, "
        f"{args.devices} devices of {cluster.name}; {len(layouts)} layouts fit; the table shows the memory "
        f"of the stage that needs the most, in GB, and TFLOP/s per device including recomputation"
    )
    print("\n".join(layout_table(layouts[: args.top], args.tokens)))
    if not 1 <= args.layout <= len(layouts):
        raise ValueError(f"--layout {args.layout} must be a row of the table, 1 to {len(layouts)}")
    layout = layouts[args.layout - 1]
    if args.explain:
        print(f"\nlayout {args.layout}: {layout.name}")
        print("\n".join(explain_layout(layout, args.tokens)))
    if args.chart:
        draw_memory(layout, args.chart)
    if args.write:
        for path in write_files(layout, args.write, args.tokens):
            print(f"wrote {path}")
        print(f"check it before launch: {doctor_command(layout, args.cluster, args.write)}")


def _check_nodes(devices: int, cluster: Cluster) -> None:
    """Raise ValueError for several nodes of which one is used in part: links and launches need equal nodes."""
    per_node = cluster.devices_per_node
    # A single node may be used in part.
    if devices > per_node and devices % per_node:
        fewer = devices // per_node * per_node  # 16 for 20 devices on nodes of 8
        raise ValueError(
            f"--devices {devices} is not a multiple of the {per_node} devices of a node of {cluster.name}: use {fewer} "
            f"or {fewer + per_node}, or a cluster file with another devices_per_node"
        )


def draw_memory(layout: Layout, path: str) -> None:
    """Draw the memory of each stage as a bar, coloured by kind, with a line at the device's capacity."""
    figure = new_figure("--chart", figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    stages = range(len(layout.memory))
    bottoms = [0.0] * len(layout.memory)
    colours = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#9d9d9d", "#eeca3b")
    for kind, colour in zip(MEMORY_KINDS, colours, strict=True):
        sizes = [getattr(memory, kind) / 1e9 for memory in layout.memory]
        # Each kind is stacked on the kinds before it. Stages are 1 apart, and a bar is 0.7 wide.
        axes.bar(stages, sizes, 0.7, bottoms, label=kind, color=colour)
        for stage, size in enumerate(sizes):
            bottoms[stage] += size
    capacity_label = f"{layout.cluster.name}: {layout.cluster.memory:g} GB"
    axes.axhline(layout.cluster.memory, color="black", linestyle="--", linewidth=1, label=capacity_label)
    size_in_words = format_count(parameters(layout.config))
    axes.set(
        xlabel="pipeline stage",
        ylabel="GB per rank",
        title=f"{size_in_words} parameters, {layout.name}, micro-batch {layout.config.train.batch_size}",
    )
    axes.set_xticks(stages)
    figure.legend(loc="outside right upper", frameon=False)
    save_figure(figure, path, dpi=110)
    print(f"wrote {Path(path)}")
