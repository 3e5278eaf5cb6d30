"""tds in a custom training loop, without the rest of this project.

    python tools/launch.py --standalone --nproc-per-node 2 examples/tds_alone.py

The example shows how a plain torch loop changes for pipeline training. The model becomes a list of layers.
`engine.train_batch` replaces forward, backward and step. `engine.eval_batch` evaluates a whole batch.
The example prints the loss of every 20th step, the accuracy on held-out points, and the number of stages. Loss and
accuracy are the same with any number of stages up to six.
"""

import math
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # to use tds elsewhere, copy tds/ next to your script

import tds as deepspeed
from tds.pipe import LayerSpec, PipelineModule, seeded_layers

STEPS, MICROS, ROWS = 60, 4, 32


def points(seed):
    """Return points on two spirals: MICROS micro-batches of (points [ROWS, 2], spiral index [ROWS])."""
    generator = torch.Generator().manual_seed(seed)
    turn = 2.5 * math.pi * torch.rand(MICROS, ROWS, generator=generator).sqrt()
    label = torch.randint(0, 2, (MICROS, ROWS), generator=generator)
    angle = turn + math.pi * label
    place = torch.stack([angle.cos(), angle.sin()], -1) * turn[..., None] / 3
    return list(zip(place, label, strict=True))


def main():
    deepspeed.init_distributed()  # uses gloo on CPUs, NCCL on GPUs
    rank, stages = torch.distributed.get_rank(), torch.distributed.get_world_size()
    layers = [LayerSpec(nn.Linear, 2, 64), LayerSpec(nn.Tanh), LayerSpec(nn.Linear, 64, 64), LayerSpec(nn.Tanh),
              LayerSpec(nn.Linear, 64, 64), LayerSpec(nn.Linear, 64, 2)]  # fmt: skip
    with seeded_layers(3):  # a layer's initial weights do not depend on its stage
        model = PipelineModule(
            layers, num_stages=stages, loss_fn=nn.functional.cross_entropy, partition_method="uniform"
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    config = {
        "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": MICROS, "gradient_clipping": 1.0,
        "steps_per_print": 10**9, "pipeline": {"schedule": "1f1b"},
    }  # fmt: skip
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    printed = []
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, step / 10)  # your own learning rate schedule
        # Every rank calls this; only the first and the last stage read data.
        loss = engine.train_batch(iter(points(seed=step)))
        if step % 20 == 0:
            printed.append(f"step {step} loss {loss.item():.4f}")
    held_out = points(seed=0)
    found = engine.eval_batch(iter(held_out), compute_loss=False, reduce_output=None)  # only the last stage gets logits
    right = torch.zeros(1, device=engine.device)
    if engine.is_last_stage():
        for logits, (_, label) in zip(found, held_out, strict=True):
            right += (logits.argmax(1) == label.to(engine.device)).sum()
    torch.distributed.all_reduce(right)
    printed.append(f"accuracy {right.item() / (MICROS * ROWS):.1%}")
    if rank == 0:
        print(*printed, f"on {stages} stages", sep="\n")
    torch.distributed.destroy_process_group()
    return printed


if __name__ == "__main__":
    main()
