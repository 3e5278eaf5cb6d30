"""At the end of a run that cannot go on: which rank has the first number that is none, found by computing the batch again."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from tds.optimizer_state import local_piece

from .. import mpu
from ..model.layers import global_parameters


class Finding(NamedTuple):
    """Of one rank: the first weight, and the first parameter whose own gradient, is not finite."""

    share: int  # of the samples
    weight: str | None
    gradient: str | None


def find(model: nn.Module, compute: Callable[[], object]) -> list[Finding]:
    """What each rank finds, by rank. compute: makes the step again that was not applied. A collective, and it waits for the device."""
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
    found: list[Any] = [mine]
    if dist.get_world_size() > 1:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
    return found


def _finite(x: Tensor) -> bool:
    return bool(x.detach().isfinite().all())


def words(found: list[Finding], first_sample: int, share: int) -> str:
    """A part of a sentence. first_sample: of the iteration; share: how many samples of it are such a share."""
    for what in ("weight", "gradient"):
        bad = [(rank, each) for rank, each in enumerate(found) if getattr(each, what)]
        if bad:
            rank, each = bad[0]
            begin = first_sample + each.share * share
            name = f"the weight {each.weight}" if what == "weight" else f"the gradient of {each.gradient}"
            others = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            return f"{name} is not finite on rank {rank} (its samples: {begin} to {begin + share - 1}){others}"
    return "computed again, each rank's own gradients are finite: either their sum is too large, or the hardware errs"
