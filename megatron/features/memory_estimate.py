"""Estimate of the memory of a run before any weight is allocated; an error if the weights alone exceed the memory."""

from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from megatron.estimate.per_rank import rank_memory
from megatron.estimate.sizes import DTYPE_BYTES, parameters, stages_of
from tds.clip import trainable_weights
from tds.diagnose import Watchdog

from ..config import Config
from ..config.ds_config import Resolved, offloaded_part
from ..model.parameter_counts import count_parameters
from ..ranks import device as device_module
from ..ranks.accelerators import ranks_on_machine
from ..ranks.rank_0 import print_rank_0
from ..training.feature import Feature, Interval, Plan
from ..training.run_state import Run
from ..training.task import Task

LAYOUT_ADVICE = (
    "use more ranks with --pipe-parallel-size, --model-parallel-size or --zero-stage, or a smaller model; "
    "tools/plan.py finds a layout"
)


class MemoryEstimate(Feature):
    """Feature that says what a run needs: before the model is built, and if its memory does not suffice."""

    def prepare(self, plan: Plan) -> None:
        # On a CPU, the log shows the memory of the process, of which Python and libraries already hold a part.
        self._before_model = device_module.peak_memory_mb(plan.device) if plan.device.type == "cpu" else 0.0
        lines = estimate_lines(plan.task, plan.config, plan.resolved, plan.device, dist.get_world_size())
        if lines and self._before_model:
            lines[0] += f", besides {self._before_model / 1e3:.2f} GB of the process before the model"
        for line in lines:
            print_rank_0(line)
        self._has_printed = bool(lines)

    def engine(self, engine: Any, plan: Plan) -> None:
        model = engine.module
        parameters = count_parameters(model)
        num_trained = count_parameters(model, set(trainable_weights(model)))
        num_muon = 0
        if plan.config.optim.muon_scale:
            from ..model.muon_parameters import muon_parameters

            num_muon = count_parameters(model, muon_parameters(model))
        Watchdog.advice = memory_advice(parameters, num_trained, plan.config, plan.resolved.precision, num_muon)

    def row(self, interval: Interval) -> dict[str, Any]:
        return {"memory_before_model_mb": self._before_model} if self._before_model else {}

    def start(self, run: Run) -> None:
        if not self._has_printed:
            print_rank_0(f"{run.parameters / 1e6:.2f} million parameters")


def estimate_lines(task: Task, config: Config, resolved: Resolved, device: torch.device, world: int) -> list[str]:
    """Return lines to print: number of parameters, peak memory of the rank that needs most, and a warning.

    The warning is included only if the memory may not suffice. Returns [] for custom models, and if the partition of
    layers over stages is known only at run time.
    Raises ValueError if the weights alone exceed the memory and swap of a machine without accelerators.
    """
    # The estimate knows only the shapes of the models of this project.
    if not type(task).__module__.startswith("megatron.tasks.") or config.model.family is None:
        return []
    try:
        num_parameters = parameters(config)
        memories = rank_memory(config, resolved, world, device.type != "cpu", stages_of(config))
    except Exception:  # the estimate is only a help, so its failure must not end the run
        return []
    peak = max(memories, key=lambda memory: memory.total)
    size = f"{num_parameters / 1e6:.2f} million parameters, {peak.total / 1e9:.3g} GB of tensors on the peak rank"
    if config.log.log_details:
        # Name and size in GB of each kind of memory that takes 1% or more, largest first.
        kinds = sorted(asdict(peak).items(), key=lambda each: -each[1])
        parts = ", ".join(f"{name} {held / 1e9:.2g}" for name, held in kinds if held >= 0.01 * peak.total)
        size += f" ({parts})"
    lines = [f"estimate: {size}"]
    available = device_module.total_memory(device)
    # Offloaded tensors are in the memory of the host, so the device needs less than the estimate.
    if available is None or offloaded_part(resolved.deepspeed["zero_optimization"]):
        return lines
    # The ranks of a machine share the memory of its CPUs; an accelerator has one rank.
    ranks = ranks_on_machine(world) if device.type == "cpu" else 1
    if ranks is None:  # it is unknown how many ranks share the memory
        return lines
    # Which ranks run on this machine is not known here, so take the mean rank for the weights.
    weights = ranks * sum(each.weights for each in memories) / len(memories)
    total = ranks * peak.total
    whose = f"{ranks} ranks on this machine" if ranks > 1 else "this rank"
    if device.type == "cpu" and weights > available:
        raise ValueError(
            f"{num_parameters / 1e9:,.1f} G parameters: the weights alone of {whose} take {weights / 1e9:,.0f} GB, but "
            f"this machine has {available / 1e9:,.0f} GB; {LAYOUT_ADVICE}"
        )
    if total > available:
        lines.append(
            f"warning: {whose} may need {total / 1e9:,.1f} GB, more than the {available / 1e9:,.1f} GB available; "
            f"{LAYOUT_ADVICE}, or use --checkpoint-activations"
        )
    return lines


def memory_advice(parameters: int, num_trained: int, config: Config, precision: str, num_muon: int = 0) -> str:
    """Return the part of an out-of-memory message that says what takes memory and which flags reduce it.

    num_trained: how many of the parameters are not frozen. num_muon: how many Muon steps, for which it keeps one moment
    instead of two.
    """
    moments = 1 if config.optim.optimizer == "sgd" else 2
    if config.optim.ema_decay is not None:
        moments += 1
    num_values = (1 + moments) * num_trained - num_muon  # gradient and moments
    if precision in ("fp64", "fp32"):
        size = (parameters + num_values) * DTYPE_BYTES[precision]
    else:
        size = 4 * (num_trained + num_values) + 2 * parameters  # fp32 master weight and these, and the 16-bit weight
    return (
        f"weights, gradients and optimizer of the whole model take {size / 1e9:.3g} GB, sharded by "
        "--zero-stage, --model-parallel-size and --pipe-parallel-size; activations take the rest of the memory: lower "
        f"--batch-size {config.train.batch_size} and raise --gas, or use --checkpoint-activations or "
        "--offload-activations"
    )
