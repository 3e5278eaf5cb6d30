"""The learning-rate schedule of a resumed run: the checkpoint's, or with --override-lr-schedule that of the flags."""

from dataclasses import replace
from typing import Any

from megatron.config import Config
from megatron.config.optim import floor_share

from .optimizer import decay_end, wsd_decay_length


def _schedule(config: Config) -> dict[str, Any]:
    """Return the settings that determine the learning-rate schedule, by their names in `OptimConfig`."""
    o = config.optim
    total = decay_end(config)
    unit = "iters"
    unused = "samples"
    if config.lr_decay_samples is not None:
        unit = "samples"
        unused = "iters"
    # Lengths are kept in the unit that the run uses, such as lr_decay_iters. Those in the other unit, such as
    # lr_decay_samples, are None, so that they do not count.
    schedule = {"lr": o.lr, "min_lr": o.min_lr, "lr_decay_style": o.lr_decay_style, "warmup": o.warmup}
    schedule |= {f"lr_decay_{unit}": total, f"lr_decay_{unused}": None}
    if o.lr_decay_style == "wsd":
        schedule["lr_wsd_decay_style"] = o.lr_wsd_decay_style
        # A default decay that is longer than the rest of the schedule begins with the end of the warm-up.
        longest = total - floor_share(o.warmup, total)
        length = min(wsd_decay_length(config), longest)
        # The length is 0 if the warm-up takes the whole schedule. The setting must be at least 1, so it is then None.
        schedule |= {f"lr_wsd_decay_{unit}": length or None, f"lr_wsd_decay_{unused}": None}
    return schedule


def describe(config: Config, digits: int = 6) -> str:
    """Return a description of the learning-rate schedule, for messages.

    digits: significant digits of the learning rates; with 17, equal descriptions mean equal schedules.
    """
    o = config.optim
    total = decay_end(config)
    unit_name = "iteration" if config.lr_decay_samples is None else "sample"
    warmup_text = f"up to {o.lr:.{digits}g} over {floor_share(o.warmup, total)} {unit_name}s"
    end_text = f"to {o.min_lr:.{digits}g} at {unit_name} {total}"
    if o.lr_decay_style == "constant":
        return f"{warmup_text}, then constant"
    if o.lr_decay_style == "wsd":
        decay_begin = max(total - wsd_decay_length(config), floor_share(o.warmup, total))
        stable_text = f"constant until {unit_name} {decay_begin}"
        return f"{warmup_text}, {stable_text}, {o.lr_wsd_decay_style} {end_text}"
    return f"{warmup_text}, {o.lr_decay_style} {end_text}"


def resolve_lr_schedule(config: Config, saved: Config) -> tuple[Config, str | None]:
    """Return the settings of a resumed run, and a message if the checkpoint's learning-rate schedule differs from them.

    Without --override-lr-schedule, the run keeps the checkpoint's schedule even if --train-iters changes, so that the
    learning rate does not jump in the middle of a run.
    config: settings from the command line. saved: settings from the checkpoint.
    """
    saved_settings = _schedule(saved)
    # Different settings can mean the same schedule. 17 digits distinguish any two learning rates.
    if saved_settings == _schedule(config) or describe(saved, digits=17) == describe(config, digits=17):
        return config, None
    saved_text = describe(saved)
    flag_text = describe(config)
    if saved_text == flag_text:  # the difference shows only in later digits
        saved_text = describe(saved, digits=17)
        flag_text = describe(config, digits=17)
    if config.optim.override_lr_schedule:
        note = f"the learning rate follows the flags ({flag_text}), no longer the checkpoint's schedule ({saved_text})"
        return config, note
    kept_config = replace(config, optim=replace(config.optim, **saved_settings))
    note = (
        f"the learning rate follows the checkpoint's schedule ({saved_text}); "
        f"pass --override-lr-schedule to follow the flags ({flag_text})"
    )
    return kept_config, note
