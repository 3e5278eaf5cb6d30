"""Do one short training run and print measurements: `python -m tests.gpu.worker '{"flags": ...}'` prints JSON.

It needs only torch, DeepSpeed and numpy, and safetensors if it loads or saves checkpoints.
"""

import hashlib
import json
import os
import sys
from dataclasses import replace
from typing import Any

import torch

from megatron import mpu
from megatron.config.command_line import parse
from megatron.model import global_parameters
from megatron.ranks import device as device_module
from megatron.training import start_engine
from tests.text_task import TextTask


def _batches(config: Any, steps: int, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Return batches in which each token id is the one before plus 1; a small model learns them in a few steps."""
    dice, d, v = torch.Generator().manual_seed(3), config.data, config.model.vocab_size

    def text(length: int) -> torch.Tensor:
        return ((torch.randint(v, (config.train.batch_size, 1), generator=dice) + torch.arange(length)) % v).to(device)

    return [
        {"text": text(d.seq_length + 1)}
        if not config.is_t5
        else {"text": text(d.enc_seq_length), "wanted": text(d.dec_seq_length + 1)}
        for _ in range(steps)
    ]


def train(flags: str, steps: int = 8, load: str | None = None, save: str | None = None) -> dict[str, Any]:
    """Train for `steps` steps; return losses and other measurements by name.

    load, save: folders of checkpoints to load before and to write after training.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    config = parse(flags.split())
    engine = start_engine(TextTask(), config)
    device = device_module.current()
    if load:
        from megatron.checkpointing import find_checkpoint, load_checkpoint

        load_checkpoint(find_checkpoint(load), engine.deepspeed, config, "")
    batches = iter(_batches(config, steps, device))
    found = []
    for iteration in range(steps):
        mpu.get_rng().begin(iteration)
        found.append(engine.train_batch(batches, config.optim.lr))
    if save:
        from megatron.checkpointing import Saver, TrainState

        settings = replace(config, checkpoint=replace(config.checkpoint, save=save))
        Saver(save, engine.deepspeed, settings, "").save(TrainState(iteration=steps), wait=True)
    digest = hashlib.sha256()
    for _, p in sorted(global_parameters(engine.deepspeed.module)):
        digest.update(p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return {
        "device": device.type,
        "losses": [step.loss.item() for step in found],
        "grad_norms": [float(step.grad_norm) for step in found],
        "loss_scales": [step.loss_scale for step in found],
        "skipped": [step.skipped for step in found],
        "weights": digest.hexdigest(),
        "peak_mb": device_module.peak_memory_mb(device),
    }


if __name__ == "__main__":
    print(json.dumps(train(**json.loads(sys.argv[1]))), flush=True)
    os._exit(0)
