"""Small layers, batches, and the same training in one process of plain torch, shared by the tests of patterns."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, ROWS, MICROS, STEPS = 4, 2, 4, 3
Batch = tuple[Any, Any]


def linears(count: int = 4) -> list[nn.Module]:
    """Return layers that are the same at each call."""
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def mse(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean()


def samples() -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(5)
    while True:
        inputs = torch.randn(ROWS, WIDTH, generator=generator)
        yield inputs, torch.randn(ROWS, WIDTH, generator=generator)


def share() -> Iterator[Batch]:
    """Yield the half of the micro-batches that this one of two replicas reads."""
    mine = torch.distributed.get_rank()
    for number, batch in enumerate(samples()):
        if number // MICROS % 2 == mine:
            yield batch


def library(name: str) -> Any:
    """Return the module that a client imports as `deepspeed`: tds, or DeepSpeed itself."""
    import deepspeed

    import tds  # prepares DeepSpeed for CPUs

    return tds if name == "tds" else deepspeed


def config(clip: float = 0.0, **more: Any) -> dict[str, Any]:
    rows = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": MICROS}
    return {**rows, "gradient_clipping": clip, "steps_per_print": 10**9, **more}


def sgd(model: nn.Module, rate: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def plain(
    layers: Sequence[Callable[..., Any]],
    loss: Callable[[Any, Any], Tensor] = mse,
    data: Iterator[Batch] | None = None,
    clip: float = 0.0,
    steps: int = STEPS,
    rate: float = 0.5,
    micros: int = MICROS,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> list[float]:
    """Train `layers` in one process; return each step's loss, then the loss of an evaluation of one more batch."""
    weights = nn.ModuleList(each for each in layers if isinstance(each, nn.Module))
    stepped = optimizer(weights) if optimizer else sgd(weights, rate)
    data = data or samples()
    found = []
    for step in range(steps + 1):
        losses = []
        for _ in range(micros):
            value, labels = next(data)
            for layer in layers:
                value = layer(value)
            losses.append(loss(value, labels))
        mean = torch.stack(losses).mean()
        found.append(mean.item())
        if step < steps:
            stepped.zero_grad()
            mean.backward()
            if clip:
                nn.utils.clip_grad_norm_(weights.parameters(), clip)
            stepped.step()
    return found


def trained(engine: Any, data: Iterator[Batch] | None = None, steps: int = STEPS) -> list[float]:
    """Train and evaluate a pipeline engine; return the losses in the order of `plain`."""
    data = data or samples()
    found = [engine.train_batch(data).item() for _ in range(steps)]
    return [*found, engine.eval_batch(data).item()]
