"""Ways to train through `tds.initialize`, and the comparison of each with plain torch in one process.

SGD without clipping shows a factor of the gradients, which Adam and clipping hide. SGD with clipping shows a wrong
gradient norm.
"""

import itertools
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tds

STEPS, ROWS, WIDTH, LAYERS, REPLICAS = 8, 4, 8, 4, 2
LIMIT = 0.1  # gradient norm to which a route with clipping clips; the norm of the first steps is larger
# Relative; in half precision, a weight is rounded by up to 0.4 % of its size, and steps move it by about a tenth.
TOLERANCES = {"fp32": 1e-4, "bf16": 0.1, "fp16": 0.1}
MOST_ACCUMULATED = 4


class Route(NamedTuple):
    """Settings of one training run on two replicas; a pipeline has two stages.

    optimizer: "SGD", "SGD, clipped", "AdamW", or "sharded" for tds.DistributedOptimizer around SGD.
    """

    engine: str  # "plain" or "pipeline"
    precision: str
    zero: int
    micros: int
    optimizer: str

    @property
    def name(self) -> str:
        return f"{self.engine} {self.precision} zero-{self.zero} x{self.micros} {self.optimizer}"

    @property
    def ranks(self) -> int:
        return REPLICAS * (2 if self.engine == "pipeline" else 1)


class Measured(NamedTuple):
    """Deviations of a run from plain torch; all are relative errors, except `factor` and `norm`.

    factor: size of the first step over that of plain torch. norm: the engine's gradient norm of this step over that of
    plain torch, or None if the engine has none.
    """

    factor: float
    norm: float | None
    losses: float
    weights: float


def routes() -> list[Route]:
    """Return all routes that are measured, in the order of the table."""
    found = []
    for engine, precision in itertools.product(("plain", "pipeline"), TOLERANCES):
        for zero in range(4 if engine == "plain" else 2):
            found.append(Route(engine, precision, zero, 1, "SGD"))
            found += [Route(engine, precision, zero, MOST_ACCUMULATED, o) for o in ("SGD", "SGD, clipped", "AdamW")]
        if precision != "fp16":  # tds.DistributedOptimizer has no loss scale
            found.append(Route(engine, precision, 1, MOST_ACCUMULATED, "sharded"))
    return found


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]


def batch(step: int, replica: int, micro: int) -> tuple[Tensor, Tensor]:
    """Return (inputs, labels) of a micro-batch, both fp32 `[ROWS, WIDTH]`."""
    seed = (step * REPLICAS + replica) * MOST_ACCUMULATED + micro
    x, y = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x, y.tanh()


def _optimizer(route: Route, parameters: Any) -> torch.optim.Optimizer:
    if route.optimizer == "AdamW":
        return torch.optim.AdamW(parameters, lr=0.02)
    return torch.optim.SGD(parameters, lr=1.0)


class Reference(NamedTuple):
    losses: list[float]
    norm: float  # global gradient norm of the first step, before clipping
    after_first: list[list[Tensor]]  # layer -> its weights after the first step
    after_last: list[list[Tensor]]


def reference(route: Route) -> Reference:
    """Train in fp32 in one process of plain torch; the loss is the mean over micro-batches and replicas."""
    model = layers()
    parameters = [p for layer in model for p in layer.parameters()]
    optimizer = _optimizer(route, parameters)
    losses, norms, after_first = [], [], []
    for step in range(STEPS):
        parts = []
        for replica, micro in itertools.product(range(REPLICAS), range(route.micros)):
            x, y = batch(step, replica, micro)
            parts.append(nn.functional.mse_loss(nn.Sequential(*model)(x), y))
        optimizer.zero_grad()
        loss = torch.stack(parts).mean()
        loss.backward()
        limit = LIMIT if "clipped" in route.optimizer else math.inf
        norms.append(nn.utils.clip_grad_norm_(parameters, limit).item())
        optimizer.step()
        losses.append(loss.item())
        after_first = after_first or _copies(model)
    assert "clipped" not in route.optimizer or norms[0] > 2 * LIMIT
    return Reference(losses, norms[0], after_first, _copies(model))


def _copies(model: list[nn.Module]) -> list[list[Tensor]]:
    return [[p.detach().float().clone() for p in layer.parameters()] for layer in model]


def train(route: Route) -> Measured:
    """Train on this rank as `route` says, and compare with plain torch."""
    expected = reference(route)
    run = _Pipeline(route) if route.engine == "pipeline" else _Plain(route)
    first, losses, norm = None, [], None
    before = run.weights()
    for step in range(STEPS):
        losses.append(run.step(step))
        if first is None:
            first, norm = run.weights(), run.engine.get_global_grad_norm()
    indices = run.indices
    start = [_copies(layers())[i] for i in indices]
    moved = _flat(first) - _flat(before)
    wanted = _flat([expected.after_first[i] for i in indices]) - _flat(start)
    last, wanted_last = _flat(run.weights()), _flat([expected.after_last[i] for i in indices])
    return Measured(
        (moved @ wanted / wanted.square().sum()).item(),
        None if norm is None else float(norm) / expected.norm,
        max(abs(a - b) / b for a, b in zip(losses, expected.losses, strict=True)),
        ((last - wanted_last).norm() / (wanted_last - _flat(start)).norm()).item(),
    )


def _flat(model: list[list[Tensor]]) -> Tensor:
    return torch.cat([p.flatten() for layer in model for p in layer]).double()


def _config(route: Route) -> dict[str, Any]:
    precision = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    }[route.precision]
    if route.precision == "bf16" and route.zero:
        precision["data_types"] = {"grad_accum_dtype": "fp32"}
    return precision | {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": route.micros,
        "gradient_clipping": LIMIT if "clipped" in route.optimizer else 0.0,
        "zero_optimization": {"stage": route.zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def _initialize(route: Route, model: nn.Module) -> Any:
    optimizer: Any = _optimizer(route, model.parameters())
    if route.optimizer == "sharded":
        optimizer = tds.DistributedOptimizer(optimizer)
    return tds.initialize(model=model, optimizer=optimizer, config=_config(route))[0]


class _Plain:
    """A model without a pipeline, trained as a script for DeepSpeed does: forward, backward(), step()."""

    indices = list(range(LAYERS))

    def __init__(self, route: Route) -> None:
        self.route, self.engine = route, _initialize(route, nn.Sequential(*layers()))
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[route.precision]

    def step(self, step: int) -> float:
        """Take an optimizer step; return the loss of the global batch."""
        total = torch.zeros(())
        for micro in range(self.route.micros):
            x, y = batch(step, dist.get_rank(), micro)
            loss = nn.functional.mse_loss(self.engine(x.to(self.dtype)).float(), y)
            total += loss.detach() / (self.route.micros * REPLICAS)
            sharded = self.engine.optimizer if self.route.optimizer == "sharded" else None
            last = micro == self.route.micros - 1
            if sharded and last:
                sharded.arm()
            self.engine.backward(loss / REPLICAS if sharded else loss)
            if sharded and last:
                sharded.finish()
                squared = sharded.squared_norm(0, torch.device("cpu"))
                dist.all_reduce(squared)
                sharded.clip(squared.sqrt(), self.engine.gradient_clipping())
            self.engine.step()
        dist.all_reduce(total)
        return total.item()

    def weights(self) -> list[list[Tensor]]:
        """Return the weights of each layer."""
        with tds.zero.GatheredParameters(list(self.engine.module.parameters()), enabled=self.route.zero == 3):
            return _copies(list(self.engine.module))


class _Mean(nn.Module):
    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs.float(), labels.float())


class _Pipeline:
    """A pipeline of two stages, trained with `train_batch`."""

    def __init__(self, route: Route) -> None:
        self.route = route
        model = tds.PipelineModule(layers(), num_stages=2, loss_fn=_Mean(), partition_method="uniform")
        self.indices = list(range(model._local_start, model._local_stop))
        self.engine = _initialize(route, model)
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[route.precision]

    def step(self, step: int) -> float:
        """Take an optimizer step; return the loss of the global batch."""
        batches = (batch(step, self.engine.grid.get_data_parallel_rank(), micro) for micro in range(self.route.micros))
        return self.engine.train_batch((x.to(self.dtype), y) for x, y in batches).item()

    def weights(self) -> list[list[Tensor]]:
        """Return the weights of each layer of this stage."""
        return _copies(list(self.engine.module.forward_funcs))
