"""Pipeline on random tokens, for benchmarks without a corpus or tokenizer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.config import Config
from megatron.model.masks import no_documents
from megatron.model.pipe import GPT2ModelPipe, T5ModelPipe
from megatron.ranks import device as device_module
from megatron.tasks import GPT2, T5
from megatron.training import start_engine


class Synthetic(NamedTuple):
    """Pipeline engine, a function that runs one optimizer step, and the (inputs, labels) of every micro-batch."""

    engine: Any
    step: Callable[[], None]
    batch: tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]


def random_batch(config: Config, device: torch.device) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Return a random micro-batch: inputs of the first pipeline layer, and (labels, loss mask) of the last one.

    Tokens are [b, s], or for a T5 [b, k] and [b, q].
    """
    dice, b, d, v = torch.Generator().manual_seed(1), config.train.batch_size, config.data, config.model.vocab_size

    def tokens(length: int) -> Tensor:
        return torch.randint(v or 1, (b, length), generator=dice).to(device)

    nothing = no_documents(device)
    if config.is_t5:
        wanted = tokens(d.dec_seq_length or d.seq_length // 4)
        inputs: tuple[Tensor, ...] = (tokens(d.enc_seq_length or d.seq_length), wanted.int(), nothing, nothing)
        return inputs, (wanted, torch.ones_like(wanted, dtype=torch.float32))
    text = tokens(d.seq_length)
    places = torch.arange(d.seq_length, device=device).expand_as(text)
    return (text, places, nothing), (text, torch.ones_like(text, dtype=torch.float32))


def start(config: Config) -> Synthetic:
    """Start a pipeline engine for `config`. Raises ValueError for an unsupported family or without a pipeline."""
    if config.model.family not in ("gpt2", "t5") or config.parallel.pipe_parallel_size < 1:
        raise ValueError(
            "measured are pipelines of GPT-2 and T5: give --family gpt2 or t5, and --pipe-parallel-size 1 or more"
        )
    base = T5 if config.is_t5 else GPT2

    class Random(base):  # type: ignore[misc, valid-type]
        """Task that repeats one random micro-batch."""

        made: Any = None

        def model(self, config: Config, tokenizer: Any) -> Any:
            """Return the pipeline model; the tokenizer is ignored."""
            return T5ModelPipe(config) if config.is_t5 else GPT2ModelPipe(config)

        def batch(self, *_: Any, **__: Any) -> Any:
            """Return the batch of `random_batch`, created at the first call."""
            self.made = self.made or random_batch(config, device_module.current())
            return self.made

    engine = start_engine(Random(), config)
    kept = False

    def step() -> None:
        nonlocal kept
        engine.train_batch(iter([{}] * config.train.gas), 1e-4)
        if config.train.keep_freed_memory and not kept:
            device_module.keep_freed_memory(device_module.current())
            kept = True

    return Synthetic(engine.deepspeed, step, random_batch(config, device_module.current()))
