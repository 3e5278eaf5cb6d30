"""The learning-rate schedule of a resumed run: the checkpoint's, or with --override-lr-schedule that of the flags."""

from dataclasses import replace
from typing import Any

from megatron.config import Config
from megatron.config.optim import share_of

from .lr import decay_end, length_at_end


def _schedule(config: Config) -> dict[str, Any]:
    """Return the settings that determine the learning-rate schedule."""
    o = config.optim
    unit = "iters"
    unused = "samples"
    if config.lr_decay_samples is not None:
        unit = "samples"
        unused = "iters"
    found = {"lr": o.lr, "min_lr": o.min_lr, "lr_decay_style": o.lr_decay_style, "warmup": o.warmup}
    found |= {f"lr_decay_{unit}": decay_end(config), f"lr_decay_{unused}": None}
    if o.lr_decay_style == "wsd":
        found["lr_wsd_decay_style"] = o.lr_wsd_decay_style
        found |= {f"lr_wsd_decay_{unit}": length_at_end(config), f"lr_wsd_decay_{unused}": None}
    return found


def describe(config: Config, digits: int = 6) -> str:
    """Return a description of the learning-rate schedule, for messages.

    digits: significant digits of the learning rates; with 17, equal descriptions mean equal schedules.
    """
    o = config.optim
    total = decay_end(config)
    one = "iteration" if config.lr_decay_samples is None else "sample"
    rise = f"up to {o.lr:.{digits}g} over {share_of(o.warmup, total)} {one}s"
    end = f"to {o.min_lr:.{digits}g} at {one} {total}"
    if o.lr_decay_style == "constant":
        return f"{rise}, then constant"
    if o.lr_decay_style == "wsd":
        stable = f"constant until {one} {total - length_at_end(config)}"
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
