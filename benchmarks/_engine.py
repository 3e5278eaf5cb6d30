"""The training step that this project's `pretrain()` runs, built from flags and without the data pipeline."""

from collections.abc import Callable
from typing import Any, NamedTuple

import _alternate  # noqa: F401  puts the packages on the path


class Ours(NamedTuple):
    """This project's settings, training engine and model, and a function that runs one training step.

    `engine` is a PipeEngine or NoPipeEngine (see `megatron.engines.engine`). `step` runs one optimizer step,
    always on the same batch.
    """

    config: Any
    engine: Any
    model: Any
    step: Callable[[], None]


def tokens_of(config: Any, seed: int = 1) -> tuple[Any, Any]:
    """Return (inputs, targets) of a micro-batch of b samples on this rank's device.

    GPT-2: ([b, s],), [b, s]. T5 with k encoder and q decoder tokens: ([b, k], [b, q]), [b, q].
    """
    import torch

    from megatron.ranks import device as device_module

    device, dice = device_module.current_device(), torch.Generator().manual_seed(seed)
    b, d, v = config.train.batch_size, config.data, config.model.vocab_size
    if not config.is_t5:
        text = torch.randint(v, (b, d.seq_length + 1), generator=dice).to(device)
        return (text[:, :-1],), text[:, 1:]
    encoder = torch.randint(v, (b, d.enc_seq_length), generator=dice).to(device)
    wanted = torch.randint(v, (b, d.dec_seq_length + 1), generator=dice).to(device)
    return (encoder, wanted[:, :-1]), wanted[:, 1:]


def ours(flags: str) -> Ours:
    """Build this project's training engine from command-line flags.

    After the first step the allocator keeps freed memory for reuse, as in `train()`, unless --no-keep-freed-memory is
    passed.
    """
    import torch

    from megatron import mpu
    from megatron.config.command_line import parse
    from megatron.model.masks import no_documents
    from megatron.ranks import device as device_module
    from megatron.tasks import TASKS
    from megatron.training import start_engine

    config = parse(flags.split())

    class OneBatch(TASKS[config.model.family or "gpt2"]):  # type: ignore[misc]
        """A task that returns the same micro-batch every time."""

        made: Any = None

        def batch(self, *_: Any, **__: Any) -> Any:
            if self.made is None:
                inputs, targets = tokens_of(config)
                places = torch.arange(targets.shape[1], device=targets.device).expand_as(targets)
                if not config.is_t5:
                    *inputs, targets = (mpu.shard_sequence(x, 1, mpu.context_axis()) for x in (*inputs, targets))
                nothing = no_documents(targets.device)
                if config.parallel.pipe_parallel_size:
                    inputs = (
                        (inputs[0], inputs[1].int(), nothing, nothing) if config.is_t5 else (*inputs, places, nothing)
                    )
                self.made = inputs, (targets, torch.ones_like(targets))
            return self.made

    engine = start_engine(OneBatch(), config)
    keep = config.train.keep_freed_memory

    def step() -> None:
        nonlocal keep
        engine.train_batch(iter([{}] * config.train.gas), 1e-4)
        if keep:
            device_module.keep_freed_memory(device_module.current_device())
            keep = False

    return Ours(config, engine, engine.deepspeed.module, step)
