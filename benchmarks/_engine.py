"""Ours as `pretrain()` drives it, without its data: from flags to a step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import _alternate  # noqa: F401  puts the packages on the path


class Ours(NamedTuple):
    """engine: of `megatron.training.engine`; step: one optimizer step on the same batch each time."""

    config: Any
    engine: Any
    model: Any
    step: Callable[[], None]


def tokens_of(config: Any, seed: int = 1) -> tuple[Any, Any]:
    """(inputs, targets) of a micro-batch on this rank's device: of GPT-2 [b, s], or of T5 ([b, k], [b, q])."""
    import torch

    from megatron.ranks import device as device_module

    device, dice = device_module.current(), torch.Generator().manual_seed(seed)
    b, d, v = config.train.batch_size, config.data, config.model.vocab_size
    if not config.is_t5:
        text = torch.randint(v, (b, d.seq_length + 1), generator=dice).to(device)
        return (text[:, :-1],), text[:, 1:]
    encoder = torch.randint(v, (b, d.enc_seq_length), generator=dice).to(device)
    wanted = torch.randint(v, (b, d.dec_seq_length + 1), generator=dice).to(device)
    return (encoder, wanted[:, :-1]), wanted[:, 1:]


def ours(flags: str) -> Ours:
    """An engine, of GPT-2 with a pipeline if the flags ask for one. The first step lets the process keep freed memory, as `train()` does."""
    import torch

    from megatron.config.command_line import parse
    from megatron.config.ds_config import resolve
    from megatron.model import GPT2Model, GPT2ModelPipe, T5Model
    from megatron.model.masks import no_documents
    from megatron.ranks import device as device_module
    from megatron.ranks.initialize import initialize_megatron, world_size
    from megatron.training import global_vars
    from megatron.training.compiling import compile_layers
    from megatron.training.engine import build_engine
    from megatron.training.metrics import Timers

    config = parse(flags.split())
    device = initialize_megatron(config)
    global_vars.start(config, None, Timers())
    resolved = resolve(config, world_size(), device_module.fast_bf16(device))
    pipeline = config.parallel.pipe_parallel_size > 0
    model = (GPT2ModelPipe if pipeline else T5Model if config.is_t5 else GPT2Model)(config)
    compile_layers(model, config)
    inputs, targets = tokens_of(config)
    if pipeline:
        places = torch.arange(targets.shape[1], device=device).expand_as(targets)
        batch = (*inputs, places, no_documents(device)), (targets, torch.ones_like(targets))
        model._megatron_batch_fn = lambda _: batch
    count = torch.tensor(float(targets.numel()), device=device)

    def forward_step(batches: Any, model: Any) -> tuple[Any, Any]:
        next(batches)
        return model(*inputs, labels=targets).sum(), None

    engine = build_engine(model, config, resolved, forward_step, lambda _: count, Timers())
    keep = config.train.keep_freed_memory

    def step() -> None:
        nonlocal keep
        engine.train_batch(iter([{}] * config.train.gas), 1e-4)
        if keep:
            device_module.keep_freed_memory(device)
            keep = False

    return Ours(config, engine, model, step)
