"""Attributes of `get_args()` that entry scripts of CPM-Pretrain read and that are no settings here."""

import os
from collections.abc import Callable
from typing import Any

from ..config.command_line import Args

NO_VALUE = "it has no value here"
ATTRIBUTES: dict[str, Callable[["ScriptArgs"], Any]] = {
    "args": lambda args: args,
    "bf16": lambda args: args.config.train.precision == "bf16",
    "data_impl": lambda args: "mmap",
    "deepspeed": lambda args: True,
    "deepspeed_config": lambda args: args.config.train.deepspeed_config,
    "distributed_backend": lambda args: "nccl" if _on_cuda() else "gloo",
    "fp16": lambda args: args.config.train.precision == "fp16",
    "local_rank": lambda args: int(os.environ.get("LOCAL_RANK", "0")),
    "mmap_warmup": lambda args: False,
    "padded_vocab_size": lambda args: _padded_vocab_size(args),
    "rank": lambda args: int(os.environ.get("RANK", "0")),
    "tensorboard_dir": lambda args: args.config.log.tensorboard_dir,
    "world_size": lambda args: int(os.environ.get("WORLD_SIZE", "1")),
}


class ScriptArgs(Args):
    """The settings of a run, flat and read-only, with the attributes above."""

    def __getattr__(self, name: str) -> Any:
        if name in ATTRIBUTES:
            return ATTRIBUTES[name](self)
        return super().__getattr__(name)


def _on_cuda() -> bool:
    from ..ranks import device

    return device.current().type == "cuda"


def _padded_vocab_size(args: ScriptArgs) -> int:
    from .. import mpu

    model, ranks = args.config.model, args.config.parallel.model_parallel_size
    if model.vocab_size is None:
        raise AttributeError("args.padded_vocab_size is not known before the tokenizer is loaded")
    return mpu.padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by, ranks)
