"""Settings of batches, iterations and precision; the other sections are in `sections.py`."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..json_text import brief
from .batches import schedule_problem
from .fields import Section, at_least, flag, one_of, opt, problems_where


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Settings of batches, iterations and precision."""

    batch_size: int = opt(4, "number of samples in a micro-batch (per replica)", at_least(1))
    gas: int = opt(1, "gradient accumulation steps: number of micro-batches per iteration (and replica)", at_least(1))
    batch_size_schedule: str | None = opt(
        None,
        "global batch sizes in samples, e.g. '0:256 500M:512 2B:1024': 256 at first, 512 after 500 million consumed "
        "tokens, and so on; a start such as 3M_samples counts samples instead of tokens. --gas follows from the size "
        "of each iteration. Evaluation uses the largest size",
        schedule_problem,
    )
    train_iters: int = opt(100000, "number of iterations (optimizer steps) of the whole run", at_least(0))
    train_samples: int | None = opt(
        None,
        "number of samples of the whole run, instead of --train-iters; the learning rate then follows the consumed "
        "samples, unless --lr-decay-iters is given",
        at_least(1),
    )
    eval_interval: int = opt(1000, "number of iterations between evaluations; 0 evaluates only at the end", at_least(0))
    eval_iters: int = opt(10, "number of global batches per evaluation; 0 for no evaluation", at_least(0))
    eval_tasks: tuple[str, ...] | None = opt(
        None,
        "evaluate on tasks while training: cloze files (x.jsonl or NAME=x.jsonl, each line with a context and a "
        "target), names of lm-eval tasks, and lm-eval's YAML files or folders of them",
        family=("gpt2", "llama"),
    )
    eval_tasks_interval: int | None = opt(
        None,
        "number of iterations between evaluations on --eval-tasks; 0 evaluates only at the end; if not given, "
        "--save-interval",
        at_least(0),
        family=("gpt2", "llama"),
    )
    eval_tasks_limit: int | None = opt(
        None,
        "maximum number of questions in each of --eval-tasks; all if not given",
        at_least(1),
        family=("gpt2", "llama"),
    )
    z_loss: float = opt(
        0.0,
        "weight of the z-loss, (log Z)^2 of each target token, which keeps logits from drifting; 1e-4 is usual. The "
        "z-loss is reported separately from the loss",
        at_least(0),
    )
    seed: int = opt(1234, "random seed of initial weights, sample order and dropout", at_least(0))
    precision: str = opt(
        "auto",
        "number format: fp32, bf16, fp16, fp64 or fp8 (bf16, but the matmuls of transformer layers are in fp8); auto "
        "takes the format in --deepspeed-config; without one, bf16 if the device computes faster in bf16, else fp32",
        one_of("auto", "fp32", "bf16", "fp16", "fp64", "fp8"),
    )
    max_skipped_steps: int = opt(
        10,
        "end the run when this many consecutive steps are skipped because of NaN or Inf gradients or by "
        "--skip-step-sigma; skipped steps while fp16 searches for its initial loss scale do not count",
        at_least(1),
    )
    skip_iterations: tuple[str, ...] | None = opt(
        None,
        "iterations to skip, e.g. 41 or 41-50: the samples of these iterations count as consumed, but are not trained "
        "on",
    )
    skip_samples: tuple[str, ...] | None = opt(
        None,
        "samples to avoid, numbered as in loss warnings, e.g. 328-335: each iteration that would train on one of these "
        "samples is skipped",
    )
    check_replicas: int = opt(
        0,
        "number of iterations between checks that all replicas have the same weights; 0 checks only after steps 1, 2, "
        "4, 8, ... of a run and at each save",
        at_least(0),
    )
    compile: bool | None = opt(
        None,
        "compile the transformer layers with torch.compile: the first step is slow, later steps are faster; if not "
        "given, on for CUDA devices, except with settings that cannot be combined with compiled layers",
    )
    flash_attention_impl: str | None = opt(
        None,
        "version of FlashAttention for attention without a mask on CUDA devices, from a package that torch activates; "
        "if not given, torch chooses between cuDNN and its own FlashAttention 2",
        one_of("FA3", "FA4"),
    )
    cpu_matmul: str = opt(
        "auto",
        "kernels of matmuls on a CPU: torch (torch's own) or onednn (oneDNN in fp32); auto measures each matmul of a "
        "model (cached in ~/.cache/megatron-cpu-matmuls.json) and takes the faster kernel; in bf16, it multiplies in "
        "fp32, or with AMX in parts, if that is faster",
        one_of("auto", "torch", "onednn"),
    )
    keep_freed_memory: bool = opt(
        True,
        "on a CPU: keep the memory that a step frees for the next step. This saves time, as the kernel zeroes pages "
        "that were returned to it",
    )
    deepspeed_config: str | None = opt(None, "configuration file of DeepSpeed (JSON), e.g. configs/ds_config_gpt2.json")

    @property
    def dtype(self) -> str:
        """Number format of weights and activations, or auto: that of --precision, except that fp8 keeps bf16."""
        return "bf16" if self.precision == "fp8" else self.precision

    def _problems(self) -> Iterator[str]:
        """Yield an error text for each invalid range to skip, and for flags of evaluations on tasks without tasks."""
        for name in ("skip_iterations", "skip_samples"):
            for word in getattr(self, name) or ():
                problem = range_problem(word)
                if problem:
                    yield f"{flag(name)} {brief(word)} {problem}"
        if not self.eval_tasks:
            yield from problems_where(
                (self.eval_tasks_interval is not None, "--eval-tasks-interval needs --eval-tasks"),
                (self.eval_tasks_limit is not None, "--eval-tasks-limit needs --eval-tasks"),
            )


def range_problem(word: str) -> str | None:
    """Return None if `word` is a number `A` or a range `A-B` with A <= B, else an error text."""
    problem = "must be a number or a range such as 10-12"
    first, dash, last = word.partition("-")
    # int() refuses thousands of digits. Two numbers of int64, of 19 digits each, have less than 40 characters.
    if len(word) > 40 or not first.isdecimal():
        return problem
    if not dash:
        return None
    is_ascending = last.isdecimal() and int(last) >= int(first)
    return None if is_ascending else problem
