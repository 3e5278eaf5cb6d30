"""The learning rate as a pure function of the iteration: no state to save, nothing to restore."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.config import Config
from megatron.config.optim import share_of


def lr_at(iteration: int, config: Config) -> float:
    """Learning rate of the optimizer step number `iteration`, counted from 0.

    It rises linearly to --lr over the warm-up, then falls so that the last iteration of the
    decay has exactly --min-lr; `constant` stays at the peak, `wsd` until it falls at the end (Hu et al. 2024).
    """
    o, total = config.optim, config.lr_decay_iters
    warmup = share_of(o.warmup, total)
    if iteration < warmup:
        return o.lr * (iteration + 1) / warmup
    if o.lr_decay_style == "constant":
        return o.lr
    begin = max(total - _falling(config), warmup) if o.lr_decay_style == "wsd" else warmup
    done = min(max(iteration + 1 - begin, 0) / max(total - begin, 1), 1.0)
    style = o.lr_wsd_decay_style if o.lr_decay_style == "wsd" else o.lr_decay_style
    return o.min_lr + (o.lr - o.min_lr) * LEFT[style](done)


LEFT: dict[str, Callable[[float], float]] = {  # of the way down, by the share of the fall that is done
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "minus-sqrt": lambda done: 1 - math.sqrt(done),
    "exponential": lambda done: 2 * 0.5**done - 1,
}


def _falling(config: Config) -> int:
    """Iterations of the fall at the end of `wsd`."""
    return config.optim.lr_wsd_decay_iters or max(config.lr_decay_iters // 10, 1)


def _schedule(config: Config) -> dict[str, Any]:
    """All that the learning rate depends on, apart from the iteration."""
    wsd = config.optim.lr_decay_style == "wsd"
    names = ("lr", "min_lr", "lr_decay_style", "warmup", *(("lr_wsd_decay_style",) if wsd else ()))
    schedule = {**{name: getattr(config.optim, name) for name in names}, "lr_decay_iters": config.lr_decay_iters}
    return schedule | ({"lr_wsd_decay_iters": _falling(config)} if wsd else {})


def describe(config: Config) -> str:
    """The schedule in words."""
    o, total = config.optim, config.lr_decay_iters
    rise = f"up to {o.lr:g} over {share_of(o.warmup, total)} iterations"
    if o.lr_decay_style == "constant":
        return f"{rise}, then constant"
    if o.lr_decay_style == "wsd":
        return f"{rise}, constant until {total - _falling(config)}, {o.lr_wsd_decay_style} to {o.min_lr:g} at {total}"
    return f"{rise}, {o.lr_decay_style} to {o.min_lr:g} at {total}"


def settled(config: Config, saved: Config) -> tuple[Config, str | None]:
    """(the settings to go on with, a line where those of the checkpoint have another schedule than these).

    saved: the settings of the checkpoint. Without --override-lr-schedule its schedule stays, whatever --train-iters
    says: the curve would bend in the middle of the run otherwise.
    """
    of_checkpoint = _schedule(saved)
    if of_checkpoint == _schedule(config):
        return config, None
    there, here = describe(saved), describe(config)
    if config.optim.override_lr_schedule:
        return config, f"the learning rate follows the flags ({here}), no longer the checkpoint's schedule ({there})"
    kept = replace(config, optim=replace(config.optim, **of_checkpoint))
    return (
        kept,
        f"the learning rate follows the checkpoint's schedule ({there}); --override-lr-schedule takes the flags' ({here})",
    )
