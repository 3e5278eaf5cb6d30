"""Diagnosis of a failed run: recompute the last batch, and name the first non-finite weight or gradient."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tds.optimizer_state import local_shard, wait_for_weights

from .. import mpu
from ..model.layers import global_parameters
from ..ranks.objects import gather_objects
from .data_ranks import read_batches
from .health import Fault
from .run_state import Run

LR_ADVICE = "a lower --lr or a longer --warmup (with --override-lr-schedule, else a resumed run keeps its schedule)"


class Finding(NamedTuple):
    """First weight and first gradient of a rank that are not finite, as names of parameters; None if all are finite."""

    share: int  # index of the rank's share of the iteration's samples
    weight: str | None
    gradient: str | None


def explain_fault(run: Run, fault: Fault) -> str:
    """Return a message that says why the run ends and what the user can do. A collective.

    If the reason is skipped steps, the last iteration is recomputed to find the rank and the parameter.
    """
    samples = fault.samples
    advice = f"--skip-iterations {fault.first}-{samples.iteration} continues past them; {LR_ADVICE} may avoid them"
    if fault.spike:  # --skip-step-sigma skipped the last step, so there is nothing non-finite to find
        return (
            f"{fault.streak} steps in a row were skipped, the last one at {samples}: {fault.spike}; {advice}; a higher "
            "--skip-step-sigma accepts them"
        )
    # The step was taken, with a loss that is not finite. Skipped steps that lower the first loss scale do not count.
    if not fault.streak and fault.min_scale is None:
        return f"the loss became {fault.loss} at {samples}, although its gradient is finite; {LR_ADVICE} may help"
    wait_for_weights(run.engine.deepspeed)  # they are read below

    def recompute() -> None:
        # Draw the same random numbers as in the failed iteration, which is counted from 0 here.
        mpu.get_rng().begin(samples.iteration - 1)
        batches = read_batches(run.datasets[0], run.config, samples.first_sample, gas=run.num_micro_batches)
        run.engine.train_batch(batches, 0.0, run.num_micro_batches(samples.first_sample))  # with a learning rate of 0

    findings = gather_findings(run.engine.deepspeed.module, recompute)
    replica_samples = samples.samples // mpu.get_mesh().share.size
    cause = describe_findings(findings, samples.first_sample, replica_samples)
    if fault.min_scale is not None:
        return (
            f"the loss scale of fp16 is at its minimum {fault.min_scale:g}, but the gradient still overflows at "
            f"{samples}: {cause}; use --precision bf16 or fp32, or {LR_ADVICE}"
        )
    return f"{fault.streak} steps in a row were skipped, the last one at {samples}: {cause}; {advice}"


def gather_findings(model: nn.Module, recompute: Callable[[], object]) -> list[Finding]:
    """Return the findings of all ranks, in the order of ranks. A collective that waits for the device.

    recompute: function that computes the skipped step again.
    """
    named = list(global_parameters(model))  # pairs (name, parameter)
    first_weight = next((name for name, p in named if not _is_finite(local_shard(p))), None)
    nonfinite = set()  # names of parameters

    # A hook gets the gradient before it is summed over the replicas, which would spread NaN to all of them.
    def record_nonfinite(name: str, gradient: Tensor) -> None:
        if not _is_finite(gradient):
            nonfinite.add(name)

    hooks = [p.register_hook(partial(record_nonfinite, name)) for name, p in named if p.requires_grad]  # type: ignore[no-untyped-call]
    with torch.compiler.set_stance("force_eager"):  # compiled layers do not call the hooks of all weights
        recompute()
    for hook in hooks:
        hook.remove()
    # The first in the order of the model, whose last layers the backward pass visits first.
    first_gradient = next((name for name, _ in named if name in nonfinite), None)
    return gather_objects(Finding(mpu.get_mesh().share.rank, first_weight, first_gradient))


def _is_finite(x: Tensor) -> bool:
    return bool(x.detach().isfinite().all())


def describe_findings(findings: list[Finding], first_sample: int, replica_samples: int) -> str:
    """Return a clause that describes the findings, for use in a message.

    For example: "the weight a.b is not finite on rank 2 (its samples: 8 to 15), and on 1 more of 4 ranks".
    findings: the findings of all ranks, in the order of ranks.
    first_sample: number of the first sample of the iteration.
    replica_samples: number of samples that each replica computes.
    """
    for kind in ("weight", "gradient"):  # a non-finite weight explains all gradients, so weights come first
        # The attributes `weight` and `gradient` of a finding are names, or None if all values are finite.
        failing = [(rank, each) for rank, each in enumerate(findings) if getattr(each, kind)]
        if failing:
            rank, first = failing[0]  # the message describes the first rank and counts the others
            begin = first_sample + first.share * replica_samples
            end = begin + replica_samples - 1
            name = f"the weight {first.weight}" if kind == "weight" else f"the gradient of {first.gradient}"
            others = f", and on {len(failing) - 1} more of {len(findings)} ranks" if len(failing) > 1 else ""
            return f"{name} is not finite on rank {rank} (its samples: {begin} to {end}){others}"
    return (
        "when recomputed, each rank's own gradients are finite: either their sum overflows, or the hardware is faulty"
    )
