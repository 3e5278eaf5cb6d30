"""Checks that a run's settings are consistent, and fit the number of ranks and the available memory."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config import Config
from megatron.config.command_line import from_file
from megatron.config.families import parse_any_family
from megatron.config.fields import ConfigError

from . import memory
from .finding import Finding, Findings, failed, ok, warning

if TYPE_CHECKING:
    from megatron.config.ds_config import Resolved
    from megatron_tools.plan.cluster import Cluster


def read_settings(flags: Sequence[str], run_config: Path | None, ranks: int) -> tuple[Config | None, list[Finding]]:
    """Return (settings, or None after an error; findings).

    Without `flags`, the settings are those saved in the file `run_config`, the config.json of the run directory. If
    there are flags, `run_config` may be None, or a file that does not exist yet. ranks: 0 if unknown, see `parse`.
    """
    try:
        if run_config and not flags:
            return from_file(str(run_config)), [ok("settings", f"from {run_config}")]
        config = parse_any_family(flags, ranks)
    except ConfigError as error:
        return None, [
            failed(
                "settings", str(error), "change the flags that the message names; --help all of the script lists them"
            )
        ]
    words = f"a {config.model.family}" if config.model.family else "a custom model"
    # The training script in front of the flags, or --family, names the model's family.
    names_family = flags[0].endswith(".py") or any(word.startswith("--family") for word in flags)
    if not names_family:
        words += " (begin with the training script, or give --family, to select another)"
    if run_config and run_config.is_file():
        words += f", from the given flags; {run_config} is used only if no flags are given"
    return config, [ok("settings", words)]


def check_layout(config: Config, ranks: int) -> Findings:
    """Check that the parallel sizes fit the number of ranks."""
    p = config.parallel
    try:
        replicas = p.data_parallel_size(ranks)
    except ConfigError as error:
        yield failed("layout", str(error), "change --ranks (or the hostfile), or the sizes that the message names")
        return
    context_text = f" x {p.context_parallel_size} context" if p.context_parallel_size > 1 else ""
    expert_text = f", experts divided over {p.expert_parallel_size} ranks" if p.expert_parallel_size > 1 else ""
    yield ok(
        "layout",
        f"{ranks} ranks: {p.stages} stages x {p.model_parallel_size} model-parallel{context_text} x {replicas} replicas"
        f"{expert_text}, global batch {config.batch_schedule(ranks)}",
    )


def resolve_settings(config: Config, ranks: int, cluster: "Cluster | None") -> tuple["Resolved | None", list[Finding]]:
    """Check that the ds_config and the flags agree; return the resolved settings and findings.

    The settings are None if ds_config and flags contradict each other or do not fit the number of ranks.
    cluster: hardware of the run, None for that of this machine.
    """
    from megatron.config.ds_config import resolve
    from megatron.ranks import device

    try:
        config.parallel.data_parallel_size(ranks)
    except ConfigError:
        return None, []  # `check_layout` reports this error
    try:
        # `--precision auto` chooses bf16 only where it is fast: where the data sheet of a cluster has a figure for it.
        if cluster:
            has_fast_bf16 = "bf16" in cluster.peak_tflops
        else:
            has_fast_bf16 = device.has_fast_bf16(device.current_device())
        resolved = resolve(config, ranks, has_fast_bf16)
    except ConfigError as error:
        # The ds_config may be at fault, but also a flag or another file, such as that of --param-groups.
        return None, [failed("ds_config", str(error), "correct the flag or the file that this message names")]
    words = f"{resolved.precision}, ZeRO {resolved.zero_stage}"
    if config.train.deepspeed_config:
        words += f", from {config.train.deepspeed_config}"
    return resolved, [ok("ds_config", words)]


def check_memory(
    config: Config, resolved: "Resolved | None", ranks: int, ranks_here: int | None, device_bytes: float | None
) -> Findings:
    """Check whether the rank that needs the most memory fits into the available memory.

    resolved: result of `resolve_settings`. ranks_here: number of ranks on a machine, None if unknown.
    device_bytes: memory of an accelerator, None if ranks run on the CPU.
    """
    from megatron.config.ds_config import offloaded_part
    from megatron.config.parallel import SCHEDULES
    from megatron.estimate.per_rank import rank_memory
    from megatron.estimate.sizes import parameters, stages_of

    if resolved is None:
        return
    p = config.parallel
    if p.pipe_parallel_size and SCHEDULES(p.pipeline_schedule):  # the check of an unknown name returns a text
        yield warning(
            "memory",
            f"the memory was not estimated: --pipeline-schedule {p.pipeline_schedule} is no built-in schedule",
            "check that the training script registers it by tds.schedule.register()",
        )
        return
    if config.model.family is None:
        yield ok("memory", "the memory was not estimated: a custom model")
        return
    zero_config = resolved.deepspeed.get("zero_optimization", {})
    if offloaded_part(zero_config):
        yield ok("memory", "the memory was not estimated: the ds_config enables offloading")
        return
    problem = _unknown_stages(config)
    if problem:
        yield ok("memory", f"the memory was not estimated: {problem}")
        return
    # Memory is counted as on accelerators if there is a device, else as on CPUs.
    stages = rank_memory(config, resolved, ranks, device_bytes is not None, stages_of(config))
    bytes_by_kind = asdict(max(stages, key=lambda stage: stage.total))
    needed = sum(bytes_by_kind.values())
    # An unknown number of ranks on this machine is reported below; until then one is assumed.
    free_bytes, capacity_text = _free_memory(device_bytes, ranks_here or 1)
    kind_text = ", ".join(f"{kind} {size / 1e9:.2g}" for kind, size in bytes_by_kind.items())
    model = f"{parameters(config) / 1e6:.1f} million parameters"
    usage = f"{model}; the rank that needs the most memory needs {needed / 1e9:.2g} GB ({kind_text})"
    words = f"{usage}; {capacity_text}"
    remedy = (
        "use more ranks with --model-parallel-size, --pipe-parallel-size or --zero-stage 1 to 3, "
        "--checkpoint-activations, a smaller model or --precision bf16; tools/plan.py finds a layout"
    )
    if device_bytes is None and ranks_here is None:
        yield warning(
            "memory",
            f"{usage}; {ranks} ranks are more than this machine has cores",
            "give --cluster or --hostfile, or run the doctor on a node of the cluster",
        )
    elif needed > free_bytes:
        yield failed("memory", words, remedy)
    elif needed > 0.9 * free_bytes:
        yield warning("memory", words + ", which leaves less than a tenth free", remedy)
    else:
        yield ok("memory", words)


def _unknown_stages(config: Config) -> str:
    """Return why the stages cannot be known without the built model, as with --partition-method measured; else ""."""
    from megatron.estimate.sizes import stages_of

    try:
        stages_of(config)
    except ConfigError:
        raise
    except ValueError as error:
        return str(error)
    return ""


def _free_memory(device_bytes: float | None, ranks_here: int) -> tuple[float, str]:
    """Return the bytes of memory that a rank can use, infinity if unknown, and words for them."""
    if device_bytes is not None:
        return device_bytes, f"the device has {device_bytes / 1e9:.1f} GB"
    machine = memory.machine_bytes()
    if machine is None:
        return math.inf, f"{ranks_here} such ranks share this machine"
    return machine / ranks_here, f"{ranks_here} such ranks share {machine / 1e9:.1f} GB of this machine"
