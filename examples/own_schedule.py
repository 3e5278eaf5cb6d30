"""A custom pipeline schedule: GPipe in waves of two micro-batches.

    python tools/launch.py --standalone --nproc-per-node 2 examples/own_schedule.py

A stage keeps the activations of at most two micro-batches. The example shows that a schedule is only a list of forward
and backward passes; tds checks and runs the list. The example prints each stage's passes, the bubble, and how many
micro-batches each stage keeps. It also prints the losses of four steps, which are equal under 1f1b and this schedule.
"""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # import tds from this checkout

import tds
from tds.pipe import LayerSpec, PipelineModule
from tds.schedule import Backward, Forward, register, with_messages
from tds.timetable import bubble_fraction, check_plan, max_in_flight, simulate_times

MICROS, WAVE = 6, 2


def waves(stage, stages, micros):
    """Return a stage's schedule: all forward passes of a wave of micro-batches, then all its backward passes.

    `with_messages` adds the sends and receives between stages.
    """
    order = []
    for first in range(0, micros, WAVE):
        wave = range(first, min(first + WAVE, micros))
        order += [*(Forward(i) for i in wave), *(Backward(i) for i in wave)]
    return with_messages(order, stage, stages)


def show(stages):
    """Check the schedule without running it, and print each stage's passes, the bubble and micro-batches in memory."""
    plan = [list(waves(stage, stages, MICROS)) for stage in range(stages)]
    check_plan(plan, MICROS)  # raises ScheduleError, which names the stage and instruction of the mistake
    for stage, instructions in enumerate(plan):
        passes = (f"{type(each).__name__[0]}{each.micro}" for each in instructions if type(each) in (Forward, Backward))
        print(f"stage {stage} | {' '.join(passes)}")
    kept = [max_in_flight(each) for each in plan]
    print(f"bubble {bubble_fraction(simulate_times(plan)):.1%}; micro-batches kept by each stage: {kept}")


def losses(schedule, steps=4):
    torch.manual_seed(1)
    layers = [
        LayerSpec(nn.Linear, 8, 32),
        LayerSpec(nn.Tanh),
        LayerSpec(nn.Linear, 32, 32),
        LayerSpec(nn.Linear, 32, 8),
    ]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": MICROS, "gradient_clipping": 0.0,
        "steps_per_print": 10**9, "pipeline": {"schedule": schedule},
    }  # fmt: skip
    engine, *_ = tds.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), config=config)
    data = torch.randn(MICROS, 4, 8, generator=torch.Generator().manual_seed(2))
    return [engine.train_batch(iter([(x, x.flip(1)) for x in data])).item() for _ in range(steps)]


def main():
    tds.init_distributed()
    register("waves", waves)
    if torch.distributed.get_rank() == 0:
        show(stages=2)
    known, own = losses("1f1b"), losses("waves")
    assert own == known, (own, known)
    if torch.distributed.get_rank() == 0:
        print("losses", *(f"{loss:.6f}" for loss in own), "under 1f1b and under waves")
    torch.distributed.destroy_process_group()
    return own


if __name__ == "__main__":
    main()
