"""The learning rate as a pure function of the iteration: no state to save, nothing to restore."""

import math

from megatron.config import Config


def lr_at(iteration: int, config: Config) -> float:
    """Learning rate of the optimizer step number `iteration`, counted from 0.

    It rises linearly to --lr over the warm-up, then falls so that the last iteration of the
    decay has exactly --min-lr; `constant` stays at the peak.
    """
    o, total = config.optim, config.lr_decay_iters
    warmup = int(o.warmup * total)
    if iteration < warmup:
        return o.lr * (iteration + 1) / warmup
    if o.lr_decay_style == "constant":
        return o.lr
    done = min((iteration + 1 - warmup) / max(total - warmup, 1), 1.0)
    left = 1 - done if o.lr_decay_style == "linear" else (1 + math.cos(math.pi * done)) / 2
    return o.min_lr + (o.lr - o.min_lr) * left
