"""Learning rate as a pure function of the iteration or of the consumed samples: no state to save or restore."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.config import Config
from megatron.config.optim import share_of


def lr_at(iteration: int, config: Config, samples: tuple[int, int] | None = None) -> float:
    """Return the learning rate of optimizer step `iteration`, counted from 0.

    samples: number of samples consumed after the step, and after the next step. Required if the learning rate follows
    the consumed samples, that is, with --lr-decay-samples or --train-samples.

    The learning rate rises linearly to --lr over the warm-up and then decays. In the last step of the decay it is
    exactly --min-lr. With --lr-decay-style constant, it stays at --lr. With wsd, it stays at --lr until the decay at
    the end (Hu et al. 2024).
    """
    o = config.optim
    total = _total(config)
    done = iteration + 1
    following = iteration + 2
    if config.lr_decay_samples is not None:
        if samples is None:
            raise ValueError("the learning rate follows samples: give lr_at the samples of the step")
        done, following = samples
    warmup = share_of(o.warmup, total)
    if done <= warmup:
        return o.lr * done / warmup
    if o.lr_decay_style == "constant":
        return o.lr
    if following > total:
        done = total  # the next step would end after the decay, so the decay ends with this step
    begin = warmup
    style = o.lr_decay_style
    if style == "wsd":
        begin = max(total - _falling(config), warmup)
        style = o.lr_wsd_decay_style
    done_share = min(max(done - begin, 0) / max(total - begin, 1), 1.0)
    return o.min_lr + (o.lr - o.min_lr) * LEFT[style](done_share)


# Shape of the decay -> function from the completed fraction of the decay to the remaining fraction of lr - min_lr.
LEFT: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "minus-sqrt": lambda done: 1 - math.sqrt(done),
    "exponential": lambda done: 2 * 0.5**done - 1,
}


def _total(config: Config) -> int:
    """Return the end of the learning-rate decay, in samples if the learning rate follows them, else in iterations."""
    return config.lr_decay_iters if config.lr_decay_samples is None else config.lr_decay_samples


def _falling(config: Config) -> int:
    """Return the length of the decay at the end of --lr-decay-style wsd, in the unit of `_total`."""
    o = config.optim
    given = o.lr_wsd_decay_iters if config.lr_decay_samples is None else o.lr_wsd_decay_samples
    return given or max(_total(config) // 10, 1)


def _schedule(config: Config) -> dict[str, Any]:
    """Return the settings that determine the learning-rate schedule."""
    o = config.optim
    unit = "iters"
    unused = "samples"
    if config.lr_decay_samples is not None:
        unit = "samples"
        unused = "iters"
    found = {"lr": o.lr, "min_lr": o.min_lr, "lr_decay_style": o.lr_decay_style, "warmup": o.warmup}
    found |= {f"lr_decay_{unit}": _total(config), f"lr_decay_{unused}": None}
    if o.lr_decay_style == "wsd":
        found["lr_wsd_decay_style"] = o.lr_wsd_decay_style
        found |= {f"lr_wsd_decay_{unit}": _falling(config), f"lr_wsd_decay_{unused}": None}
    return found


def describe(config: Config, digits: int = 6) -> str:
    """Return a description of the learning-rate schedule, for messages.

    digits: significant digits of the learning rates; with 17, equal descriptions mean equal schedules.
    """
    o = config.optim
    total = _total(config)
    one = "iteration" if config.lr_decay_samples is None else "sample"
    rise = f"up to {o.lr:.{digits}g} over {share_of(o.warmup, total)} {one}s"
    end = f"to {o.min_lr:.{digits}g} at {one} {total}"
    if o.lr_decay_style == "constant":
        return f"{rise}, then constant"
    if o.lr_decay_style == "wsd":
        stable = f"constant until {one} {total - _falling(config)}"
        return f"{rise}, {stable}, {o.lr_wsd_decay_style} {end}"
    return f"{rise}, {o.lr_decay_style} {end}"


def settled(config: Config, saved: Config) -> tuple[Config, str | None]:
    """Return the settings of a resumed run, and a message if the checkpoint's learning-rate schedule differs from them.

    Without --override-lr-schedule, the run keeps the checkpoint's schedule even if --train-iters changes, so that the
    learning rate does not jump in the middle of a run.
    config: settings from the command line. saved: settings from the checkpoint.
    """
    of_checkpoint = _schedule(saved)
    if of_checkpoint == _schedule(config) or describe(saved, 17) == describe(config, 17):
        return config, None
    there = describe(saved)
    here = describe(config)
    if there == here:
        there = describe(saved, 17)
        here = describe(config, 17)
    if config.optim.override_lr_schedule:
        return config, f"the learning rate follows the flags ({here}), no longer the checkpoint's schedule ({there})"
    kept = replace(config, optim=replace(config.optim, **of_checkpoint))
    note = (
        f"the learning rate follows the checkpoint's schedule ({there}); "
        f"pass --override-lr-schedule to follow the flags ({here})"
    )
    return kept, note
