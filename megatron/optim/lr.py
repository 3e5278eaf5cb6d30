"""Learning rate as a pure function of the iteration or of the consumed samples: no state to save or restore."""

import math
from collections.abc import Callable

from megatron.config import Config
from megatron.config.optim import floor_share


def lr_at(iteration: int, config: Config, samples: tuple[int, int] | None = None) -> float:
    """Return the learning rate of optimizer step `iteration`, counted from 0.

    samples: number of samples consumed after the step, and after the next step. Required if the learning rate follows
    the consumed samples, that is, with --lr-decay-samples or --train-samples.

    The learning rate rises linearly to --lr over the warm-up and then decays. In the last step of the decay it is
    exactly --min-lr. With --lr-decay-style constant, it stays at --lr. With wsd, it stays at --lr until the decay at
    the end (Hu et al. 2024).
    """
    o = config.optim
    total = decay_end(config)
    completed = iteration + 1
    next_completed = iteration + 2
    if config.lr_decay_samples is not None:
        if samples is None:
            raise ValueError("the learning rate follows samples: give lr_at the samples of the step")
        completed, next_completed = samples
    warmup = floor_share(o.warmup, total)
    if completed <= warmup:  # never without a warm-up, because `completed` is at least 1
        return o.lr * completed / warmup
    if o.lr_decay_style == "constant":
        return o.lr
    if next_completed > total:
        completed = total  # the next step would end after the decay, so the decay ends with this step
    decay_begin = warmup
    style = o.lr_decay_style
    if style == "wsd":
        decay_begin = max(total - wsd_decay_length(config), warmup)
        style = o.lr_wsd_decay_style
    done_fraction = min(max(completed - decay_begin, 0) / max(total - decay_begin, 1), 1.0)
    return o.min_lr + (o.lr - o.min_lr) * REMAINING[style](done_fraction)


# Shape of the decay -> function from the completed fraction of the decay to the remaining fraction of lr - min_lr.
REMAINING: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "minus-sqrt": lambda done: 1 - math.sqrt(done),
    "exponential": lambda done: 2 * 0.5**done - 1,
}


def decay_end(config: Config) -> int:
    """Return the end of the learning-rate decay, in samples if the learning rate follows them, else in iterations."""
    return config.lr_decay_iters if config.lr_decay_samples is None else config.lr_decay_samples


def wsd_decay_length(config: Config) -> int:
    """Return the length of the decay at the end of --lr-decay-style wsd, in the unit of `decay_end`."""
    o = config.optim
    chosen = o.lr_wsd_decay_iters if config.lr_decay_samples is None else o.lr_wsd_decay_samples
    return chosen or max(decay_end(config) // 10, 1)
