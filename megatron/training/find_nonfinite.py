"""Diagnosis of a failed run: recompute the last batch, and name the first non-finite weight or gradient."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from tds.optimizer_state import complete_weights, local_piece

from .. import mpu
from ..model.layers import global_parameters
from ..ranks.objects import gather_objects
from .data_ranks import read
from .health import Fault
from .run_state import Run

GENTLER = "a lower --lr or a longer --warmup (with --override-lr-schedule, else a resumed run keeps its schedule)"


class Finding(NamedTuple):
    """First weight and first gradient of a rank that are not finite, as names of parameters; None if all are finite."""

    share: int  # index of the rank's share of the iteration's samples
    weight: str | None
    gradient: str | None


def explain(run: Run, fault: Fault) -> str:
    """Return a message that says why the run ends and what the user can do. A collective.

    If the reason is skipped steps, the last iteration is recomputed to find the rank and the parameter.
    """
    samples = fault.samples

    def again() -> None:
        mpu.get_rng().begin(samples.iteration - 1)
        batches = read(run.datasets[0], run.config, samples.first_sample, gas=run.micro_batches)
        run.engine.train_batch(batches, 0.0, run.micro_batches(samples.first_sample))

    begin = samples.iteration - fault.streak + 1
    skip = f"--skip-iterations {begin}-{samples.iteration} continues past them; {GENTLER} may avoid them"
    if fault.spike:
        return (
            f"{fault.streak} steps in a row were skipped, the last one at {samples}: {fault.spike}; {skip}; a higher "
            "--skip-step-sigma accepts them"
        )
    if not fault.streak:
        return f"the loss became {fault.loss} at {samples}, although its gradient is finite; {GENTLER} may help"
    complete_weights(run.engine.deepspeed)
    found = find(run.engine.deepspeed.module, again)
    why = words(found, samples.first_sample, samples.samples // mpu.get_mesh().share.of)
    if fault.scale is not None:
        return (
            f"the loss scale of fp16 is at its minimum {fault.scale:g}, but the gradient still overflows at "
            f"{samples}: {why}; use --precision bf16 or fp32, or {GENTLER}"
        )
    return f"{fault.streak} steps in a row were skipped, the last one at {samples}: {why}; {skip}"


def find(model: nn.Module, compute: Callable[[], object]) -> list[Finding]:
    """Return the findings of all ranks, in the order of ranks. A collective that waits for the device.

    compute: function that computes the skipped step again.
    """
    every = list(global_parameters(model))
    weights = [name for name, p in every if not _finite(local_piece(p))]
    bad: set[str] = set()

    def look(name: str, gradient: Tensor) -> None:
        if not _finite(gradient):
            bad.add(name)

    hooks = [p.register_hook(partial(look, name)) for name, p in every if p.requires_grad]  # type: ignore[no-untyped-call]
    compute()
    for hook in hooks:
        hook.remove()
    gradients = [name for name, _ in every if name in bad]
    mine = Finding(mpu.get_mesh().share.number, next(iter(weights), None), next(iter(gradients), None))
    return gather_objects(mine)


def _finite(x: Tensor) -> bool:
    return bool(x.detach().isfinite().all())


def words(found: list[Finding], first_sample: int, share: int) -> str:
    """Return a clause that describes the findings, for use in a message.

    found: the findings of all ranks, in the order of ranks.
    first_sample: number of the first sample of the iteration.
    share: number of samples that each replica computes.
    """
    for what in ("weight", "gradient"):
        bad = [(rank, each) for rank, each in enumerate(found) if getattr(each, what)]
        if bad:
            rank, each = bad[0]
            begin = first_sample + each.share * share
            name = f"the weight {each.weight}" if what == "weight" else f"the gradient of {each.gradient}"
            others = f", and on {len(bad) - 1} more of {len(found)} ranks" if len(bad) > 1 else ""
            return f"{name} is not finite on rank {rank} (its samples: {begin} to {begin + share - 1}){others}"
    return (
        "when recomputed, each rank's own gradients are finite: either their sum overflows, or the hardware is faulty"
    )
