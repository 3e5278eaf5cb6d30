"""Settings of the optimizer and learning rate. Each section has such a file; `sections.py` joins the sections."""

from collections.abc import Iterator
from dataclasses import dataclass

from .fields import at_least, between, more_than, one_of, opt
from .muon import MuonConfig


def floor_share(share: float, total: int) -> int:
    """Return `share` x `total` as a whole number of iterations or samples, rounded down.

    Floating-point errors are corrected: 0.29 x 100 is 29, although the product of the floats is just below 29.
    """
    product = share * total
    nearest = round(product)
    tolerance = 1e-9 * max(1, nearest)
    return nearest if abs(product - nearest) <= tolerance else int(product)


def _check_beta(value: float) -> str | None:
    """Return an error text unless `value` can be a beta of Adam."""
    if 0 <= value < 1:
        return None
    return "must be at least 0 and less than 1"


@dataclass(frozen=True, kw_only=True)
class OptimConfig(MuonConfig):
    """Settings of the optimizer and the learning-rate schedule."""

    optimizer: str = opt(
        "adam",
        "optimizer: adam (AdamW), sgd (with momentum 0.9), or muon (Muon for the matrices of transformer layers, AdamW "
        "for all other weights)",
        one_of("adam", "sgd", "muon"),
    )
    lr: float = opt(1.5e-4, "peak learning rate", at_least(0))
    min_lr: float = opt(0.0, "learning rate at the end of the learning-rate decay", at_least(0))
    lr_decay_style: str = opt(
        "cosine",
        "learning rate after the warm-up: cosine or linear decay, constant, or wsd (constant, then a decay at the end)",
        one_of("cosine", "linear", "constant", "wsd"),
    )
    lr_decay_iters: int | None = opt(
        None, "iteration at which the learning-rate decay ends; --train-iters if not given", at_least(1)
    )
    lr_decay_samples: int | None = opt(
        None,
        "number of samples after which the learning-rate decay ends; the learning rate then follows the consumed "
        "samples instead of the iterations; --train-samples if not given",
        at_least(1),
    )
    lr_wsd_decay_iters: int | None = opt(
        None,
        "with --lr-decay-style wsd: number of iterations of the decay at the end; a tenth of --lr-decay-iters if not "
        "given",
        at_least(1),
    )
    lr_wsd_decay_samples: int | None = opt(
        None,
        "with --lr-decay-style wsd and a learning rate that follows samples: number of samples of the decay at the "
        "end; a tenth of --lr-decay-samples if not given",
        at_least(1),
    )
    lr_wsd_decay_style: str = opt(
        "minus-sqrt",
        "with --lr-decay-style wsd: shape of the decay at the end: minus-sqrt, linear, cosine or exponential",
        one_of("minus-sqrt", "linear", "cosine", "exponential"),
    )
    warmup: float = opt(
        0.01,
        "length of the learning-rate warm-up, as a fraction of --lr-decay-iters or --lr-decay-samples",
        between(0, 1),
    )
    override_lr_schedule: bool = opt(
        False,
        "after loading a checkpoint, use the learning-rate schedule of the flags instead of the checkpoint's",
    )
    weight_decay: float = opt(0.01, "weight decay of matrices; biases and norms have none", at_least(0))
    embedding_weight_decay: bool = opt(True, "apply weight decay to the embeddings of tokens and positions, too")
    param_groups: str | None = opt(
        None,
        "JSON file with settings of single weights by patterns of their names: a list of objects with pattern and "
        "lr_factor, weight_decay or frozen; a later entry overrides an earlier one",
    )
    clip_grad: float | None = opt(
        None,
        "gradient clipping: maximum global gradient norm; 0 for no clipping; if not given, gradient_clipping of "
        "--deepspeed-config, or 1.0",
        at_least(0),
    )
    adam_beta1: float = opt(0.9, "Adam's beta1", _check_beta)
    adam_beta2: float = opt(0.999, "Adam's beta2", _check_beta)
    adam_eps: float = opt(
        1e-8, "Adam's epsilon; muP divides it by the width of the model over the base width", more_than(0)
    )
    exp_avg_dtype: str = opt(
        "fp32",
        "dtype in which Adam keeps its first moment between steps, which compute in that of the master weights",
        one_of("fp32", "bf16"),
    )
    exp_avg_sq_dtype: str = opt(
        "fp32",
        "dtype in which Adam keeps its second moment; bf16 needs an --adam-beta2 of at most 0.98",
        one_of("fp32", "bf16"),
    )
    ema_decay: float | None = opt(
        None,
        "keep an exponential moving average of the weights, average = decay x average + (1 - decay) x weight, updated "
        "after each step; checkpoints contain it, and --ema of the tools uses it; 0.999 is usual; no average if not "
        "given",
        lambda value: None if 0 < value < 1 else "must lie between 0 and 1, without these",
    )

    @property
    def muon_scale(self) -> str | None:
        """--muon-adjust-lr-fn if Muon steps matrices, else None."""
        return self.muon_adjust_lr_fn if self.optimizer == "muon" else None

    @property
    def rounded_moments(self) -> list[str]:
        """Names of Adam's moments that are kept in bf16."""
        names = []
        if self.exp_avg_dtype == "bf16":
            names.append("exp_avg")
        if self.exp_avg_sq_dtype == "bf16":
            names.append("exp_avg_sq")
        return names

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.lr_decay_iters is not None and self.lr_decay_samples is not None:
            yield (
                f"--lr-decay-iters {self.lr_decay_iters} and --lr-decay-samples {self.lr_decay_samples} both set the "
                f"end of the learning-rate decay; leave one of them out"
            )
