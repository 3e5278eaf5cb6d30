"""Watchdog for runs without a pipeline: if a rank fails or stalls, all end, and rank 0 reports where each one was.

The pipeline engine has its own watchdog, which reports instructions; this one reports micro-batches.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tds.diagnose import Watchdog

from ..config import Config
from ..ranks.errors import RunError
from .engine import Batches, Engine, PlainEngine, Step


class WatchedEngine:
    """`PlainEngine` with a watchdog.

    seconds: time limit of a micro-batch, and of the rest of a step after the last one.
    """

    def __init__(self, engine: PlainEngine, seconds: float) -> None:
        self.engine, self.deepspeed = engine, engine.deepspeed
        self.watchdog = Watchdog(seconds, self._describe, "run", engine.deepspeed.device)
        self._step, self._micro, self._part = 0, 0, "training"
        self._loss = engine.loss
        engine.loss = self._noted

    def train_batch(self, batches: Batches | None, lr: float) -> Step:
        self._step += 1
        with self._watched("training"):
            return self.engine.train_batch(batches, lr)

    def eval_batch(self, batches: Batches | None) -> dict[str, float]:
        with self._watched("evaluation"):
            return self.engine.eval_batch(batches)

    def busy(self, timed: Mapping[str, float]) -> float:
        return self.engine.busy(timed)

    def times(self) -> dict[str, float]:
        return self.engine.times()

    def _noted(self, model: Any, batch: Any) -> Tensor:
        self._micro += 1
        self.watchdog.at(self._place())
        return self._loss(model, batch)

    def _place(self) -> tuple[str, int, int]:
        return self._part, self._step, self._micro

    @contextmanager
    def _watched(self, part: str) -> Iterator[None]:
        self._part, self._micro = part, 0
        self.watchdog.at(self._place())
        try:
            yield
        except (ValueError, OSError, RunError):
            raise  # errors with a message for the user
        except BaseException as error:
            self.watchdog.fail(error)
            raise
        finally:
            self.watchdog.at(None)

    @staticmethod
    def _words(part: str, step: int, micro: int) -> str:
        where = f"micro-batch {micro - 1}" if micro else "reading its micro-batches"
        return f"{part}, {where} of the step number {step} since the start"

    def _describe(self, what: Any) -> str:
        return self._words(*what)


def memory_advice(parameters: int, config: Config, precision: str) -> str:
    """Return what takes memory and which flags reduce it, for the message on an out-of-memory error."""
    moments = 1 if config.optim.optimizer == "sgd" else 2
    width = {"fp64": 8, "fp32": 4}.get(precision)
    each = (
        width * (2 + moments) if width else 2 + 4 * (2 + moments)
    )  # weight, gradient and moments; below fp32 also a low-precision copy of the weight
    return (
        f"weights, gradients and optimizer of the whole model take {each * parameters / 1e9:.3g} GB, shared out by --zero-stage, "
        f"--model-parallel-size and --pipe-parallel-size; activations take the rest: --batch-size {config.train.batch_size} down and "
        f"--gas up, --checkpoint-activations, --offload-activations"
    )


def watched(engine: Engine, seconds: float) -> Engine:
    """Return `engine` under a watchdog if it is a plain engine on several ranks, else `engine` itself."""
    if isinstance(engine, PlainEngine) and dist.get_world_size() > 1:
        return WatchedEngine(engine, seconds)
    return engine
