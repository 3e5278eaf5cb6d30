"""Settings of batches, iterations and precision; the other sections are in `sections.py`."""

from collections.abc import Iterator
from dataclasses import dataclass

from .fields import Section, at_least, one_of, opt, range_problem


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Settings of batches, iterations and precision."""

    batch_size: int = opt(4, "samples of one micro-batch", at_least(1))
    gas: int = opt(1, "gradient accumulation steps: micro-batches of one iteration", at_least(1))
    train_iters: int = opt(100000, "iterations (optimizer steps) of the whole run", at_least(0))
    eval_interval: int = opt(1000, "iterations between two evaluations; 0 evaluates only at the end", at_least(0))
    eval_iters: int = opt(10, "global batches of one evaluation; 0 for no evaluation", at_least(0))
    z_loss: float = opt(
        0.0,
        "weight of the z-loss, (log Z)^2 of each target, which keeps logits from drifting; 1e-4 is usual. It is "
        "reported separately from the loss",
        at_least(0),
    )
    seed: int = opt(1234, "seed of weights, sample order and dropout", at_least(0))
    precision: str = opt(
        "auto",
        "number format: fp32, bf16, fp16 or fp64; auto takes that of --deepspeed-config, else bf16 if the device is "
        "fast at it, else fp32",
        one_of("auto", "fp32", "bf16", "fp16", "fp64"),
    )
    max_skipped_steps: int = opt(
        10,
        "end the run when this many steps in a row are skipped because of NaN or Inf gradients; skipped steps of "
        "fp16's initial search for a loss scale do not count",
        at_least(1),
    )
    skip_iterations: tuple[str, ...] | None = opt(
        None, "iterations to skip, e.g. 41 or 41-50: their samples count as consumed, but are not trained on"
    )
    skip_samples: tuple[str, ...] | None = opt(
        None, "samples to avoid, e.g. 328-335 as a loss warning names them: each iteration with one of them is skipped"
    )
    check_replicas: int = opt(
        0,
        "iterations between two checks that all replicas hold the same weights; 0 checks only at saves",
        at_least(0),
    )
    manual_gc_interval: int = opt(
        100,
        "iterations between two garbage collections, on all ranks at once; 0 leaves them to Python",
        at_least(0),
    )
    compile: bool = opt(
        False, "compile the transformer layers (torch.compile): a slow first step, faster ones after it"
    )
    cpu_matmul: str = opt(
        "auto",
        "library for fp32 matmuls on a CPU: torch (torch's BLAS, MKL) or onednn; auto measures both at the first "
        "start on a machine, within milliseconds, and takes the faster one (cached in "
        "~/.cache/megatron-cpu-matmul.json)",
        one_of("auto", "torch", "onednn"),
    )
    keep_freed_memory: bool = opt(
        True,
        "on a CPU: keep memory that a step frees for the next one, so that the system need not clear every page again",
    )
    deepspeed_config: str | None = opt(None, "DeepSpeed's configuration file (JSON), e.g. configs/ds_config_gpt2.json")

    def _problems(self) -> Iterator[str]:
        for name, ranges in (("--skip-iterations", self.skip_iterations), ("--skip-samples", self.skip_samples)):
            for word in ranges or ():
                if problem := range_problem(word):
                    yield f"{name} {word} {problem}"
