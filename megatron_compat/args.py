"""Attributes of `get_args()` that entry scripts of CPM-Pretrain read but this project's settings lack."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from megatron.config import Config
from megatron.config.command_line import HOME, RENAMED, nearest


def _distributed_backend() -> str:
    from megatron.ranks import device

    return device.default_backend(device.current_device())


def _params_dtype(args: "Args") -> Any:
    """Return the dtype of the weights in the forward pass."""
    from megatron.training.build import DTYPES

    return DTYPES.get(args.number_format, DTYPES["fp32"])


def _padded_vocab_size(args: "Args") -> int:
    from megatron import mpu

    model = args.config.model
    ranks = args.config.parallel.model_parallel_size
    if model.vocab_size is None:
        raise AttributeError("args.padded_vocab_size is unknown until the tokenizer is loaded")
    return mpu.padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by, ranks)


# Attributes of CPM-Pretrain that are False in every run.
_OFF = (
    "adlr_autoresume apply_query_key_layer_scaling apply_residual_connection_post_layernorm "
    "bias_dropout_fusion bias_gelu_fusion contigious_checkpointing cpu_optimizer cpu_torch_adam "
    "distribute_checkpointed_activations fp16_lm_cross_entropy fp32_allreduce mmap_warmup onnx_safe "
    "partition_activations profile_backward scaled_masked_softmax_fusion "
    "scaled_upper_triang_masked_softmax_fusion synchronize_each_layer"
)
CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(_OFF.split(), False),
    **dict.fromkeys(("attention_softmax_in_fp32", "deepspeed", "use_cpu_initialization"), True),
    "DDP_impl": "local",
    "data_impl": "mmap",
    "lazy_mpu_init": None,
}
ATTRIBUTES: dict[str, Callable[["Args"], Any]] = {
    "args": lambda args: args,  # CPM-Pretrain's tutorial uses args.args.hidden_size
    "bf16": lambda args: args.number_format == "bf16",
    "checkpoint_in_cpu": lambda args: args.offload_activations,
    "deepspeed_activation_checkpointing": lambda args: args.checkpoint_activations,
    "distributed_backend": lambda args: _distributed_backend(),
    "do_test": lambda args: args.config.train.eval_iters > 0,
    "do_train": lambda args: args.config.train.train_iters > 0,
    "do_valid": lambda args: args.config.train.eval_iters > 0,
    "fp16": lambda args: args.number_format == "fp16",
    "local_rank": lambda args: int(os.environ.get("LOCAL_RANK", "0")),
    "openai_gelu": lambda args: args.activation == "gelu-tanh",
    "override_lr_scheduler": lambda args: args.override_lr_schedule,
    "padded_vocab_size": _padded_vocab_size,
    "params_dtype": _params_dtype,
    "rank": lambda args: int(os.environ.get("RANK", "0")),
    "use_checkpoint_lr_scheduler": lambda args: not args.override_lr_schedule,
    "world_size": lambda args: int(os.environ.get("WORLD_SIZE", "1")),
}
_LOSS_SCALE = 'DeepSpeed holds the loss scale, see "fp16" of --deepspeed-config'
# Name of an attribute in CPM-Pretrain that has no value in this project -> the reason, for the error message.
WITHOUT_VALUE = {
    "adlr_autoresume_interval": "SIGTERM makes a run save and end",
    **dict.fromkeys(("dynamic_loss_scale", "hysteresis", "loss_scale", "loss_scale_window", "min_scale"), _LOSS_SCALE),
    "iteration": "a run counts its iterations itself; metrics.jsonl has them",
}


class Args:
    """Flat, read-only view of the settings of a run: args.hidden_size is config.model.hidden_size.

    The attributes in CONSTANTS and ATTRIBUTES, which CPM-Pretrain's scripts read, are also available. `config` is the
    whole configuration. The tokenizer and the process groups exist only after start-up: use `get_tokenizer()` and
    `torch.distributed`. own: values of the script's own flags. number_format: the format of the weights, to which the
    run has resolved --precision auto; None for that of --precision.
    """

    config: Config
    own: Mapping[str, Any]
    number_format: str

    def __init__(self, config: Config, own: Mapping[str, Any] | None = None, number_format: str | None = None) -> None:
        # The `__setattr__` of this class refuses every change, so the fields are put into its dict.
        vars(self).update(config=config, own=own or {}, number_format=number_format or config.train.dtype)

    def __getattr__(self, name: str) -> Any:
        if name in Args.__annotations__:  # a copy has no fields until `copy` or `pickle` has set them
            raise AttributeError(name)
        if name in self.own:
            return self.own[name]
        name = RENAMED.get(name, name)
        if name in CONSTANTS:
            return CONSTANTS[name]
        if name in ATTRIBUTES:
            return ATTRIBUTES[name](self)
        if name in HOME:
            return getattr(getattr(self.config, HOME[name]), name)
        if name in WITHOUT_VALUE:
            raise AttributeError(f"args.{name} of CPM-Pretrain has no value in this project: {WITHOUT_VALUE[name]}")
        from .flags.translate import settings_for

        # A flag of another framework may have this name. Then name the settings to which it is translated.
        settings = settings_for(name)
        advice = f"; use {' and '.join(f'args.{each}' for each in settings)}" if settings else nearest(name, HOME)
        raise AttributeError(f"args has no attribute {name!r}{advice}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"args.{name} cannot be changed: the settings of a run are fixed when it starts")

    def __dir__(self) -> list[str]:
        return sorted([*HOME, *self.own, "config"])
