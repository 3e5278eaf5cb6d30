"""Learning rate as a pure function of the iteration: no state to save or restore."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.config import Config
from megatron.config.optim import share_of


def lr_at(iteration: int, config: Config) -> float:
    """Return the learning rate of optimizer step `iteration`, counted from 0.

    The learning rate rises linearly to --lr over the warm-up and then decays. In the last iteration of the decay it is
    exactly --min-lr. With --lr-decay-style constant, it stays at --lr. With wsd, it stays at --lr until the decay at
    the end (Hu et al. 2024).
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


# Shape of the decay -> function from the completed fraction of the decay to the remaining fraction of lr - min_lr.
LEFT: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "minus-sqrt": lambda done: 1 - math.sqrt(done),
    "exponential": lambda done: 2 * 0.5**done - 1,
}


def _falling(config: Config) -> int:
    """Return the number of iterations of the decay at the end of --lr-decay-style wsd."""
    return config.optim.lr_wsd_decay_iters or max(config.lr_decay_iters // 10, 1)


def _schedule(config: Config) -> dict[str, Any]:
    """Return the settings that determine the learning-rate schedule."""
    wsd = config.optim.lr_decay_style == "wsd"
    names = ("lr", "min_lr", "lr_decay_style", "warmup", *(("lr_wsd_decay_style",) if wsd else ()))
    schedule = {**{name: getattr(config.optim, name) for name in names}, "lr_decay_iters": config.lr_decay_iters}
    return schedule | ({"lr_wsd_decay_iters": _falling(config)} if wsd else {})


def describe(config: Config) -> str:
    """Return a description of the learning-rate schedule, for messages."""
    o, total = config.optim, config.lr_decay_iters
    rise = f"up to {o.lr:g} over {share_of(o.warmup, total)} iterations"
    if o.lr_decay_style == "constant":
        return f"{rise}, then constant"
    if o.lr_decay_style == "wsd":
        stable = f"constant until iteration {total - _falling(config)}"
        return f"{rise}, {stable}, {o.lr_wsd_decay_style} to {o.min_lr:g} at iteration {total}"
    return f"{rise}, {o.lr_decay_style} to {o.min_lr:g} at iteration {total}"


def settled(config: Config, saved: Config) -> tuple[Config, str | None]:
    """Return the settings of a resumed run, and a message if the checkpoint's learning-rate schedule differs from them.

    Without --override-lr-schedule, the run keeps the checkpoint's schedule even if --train-iters changes, so that the
    learning rate does not jump in the middle of a run.
    config: settings from the command line. saved: settings from the checkpoint.
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
        f"the learning rate follows the checkpoint's schedule ({there}); "
        f"pass --override-lr-schedule to follow the flags ({here})",
    )
