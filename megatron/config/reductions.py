"""Flags that need this project's reduction of gradients instead of DeepSpeed's."""

from collections.abc import Iterator

from .fields import where
from .sections import Config

LATE_GATHER = (
    "--overlap-param-gather needs --zero-stage 1 in fp32 or bf16, --overlap-grad-reduce, and a --deepspeed-config "
    "without other keys in zero_optimization and bf16"
)
PARTIAL_REPLICAS = (
    "--expert-parallel-size reduces experts over some replicas only, which DeepSpeed's optimizers cannot: use "
    "--zero-stage 0 in fp32, or --zero-stage 1 in fp32 or bf16, with --overlap-grad-reduce and a --deepspeed-config "
    "without other keys in zero_optimization and bf16"
)
WHOLE_MATRICES = (
    "--optimizer muon steps whole matrices, which DeepSpeed's ZeRO shards: use --zero-stage 0 in fp32, or "
    "--zero-stage 1 in fp32 or bf16 with --overlap-grad-reduce and a --deepspeed-config without other keys in "
    "zero_optimization and bf16"
)


def needs_own_reduction(config: Config, zero: int, own: bool, plain: bool) -> Iterator[str]:
    """Yield an error text for each flag that needs this project's reduction of gradients instead of DeepSpeed's.

    own: whether the run uses this project's ZeRO 1. plain: whether it reduces all gradients itself, without ZeRO.
    """
    p = config.parallel
    yield from where(
        (p.overlap_param_gather and not own, LATE_GATHER),
        (config.optim.optimizer == "muon" and zero and not own, WHOLE_MATRICES),
        (p.expert_parallel_size > 1 and not own and not plain, PARTIAL_REPLICAS),
    )
