"""The first step of a run: warns about parameters without gradient, and turns on the reuse of freed memory."""

from collections import Counter
from functools import partial
from typing import Any

from torch import Tensor, nn

from .. import mpu
from ..config.messages import shorten_list
from ..engines.engine import StepResult
from ..model.layers import global_parameters
from ..ranks import device as device_module
from ..ranks.objects import gather_objects
from ..ranks.rank_0 import print_rank_0
from ..training.feature import Feature
from ..training.health import SampleRange
from ..training.run_state import Run


class FirstStep(Feature):
    """Feature that warns about parameters without gradient after the first step, and calls keep_freed_memory."""

    def start(self, run: Run) -> None:
        self._run = run
        engine = run.engine.deepspeed
        self._trained = [(name, p) for name, p in global_parameters(engine.module) if p.requires_grad]
        self._received: set[nn.Parameter] = set()  # parameters with a gradient
        self._hooks: list[Any] = []
        # The buckets of a DistributedOptimizer know which gradients came. With hooks on their weights, the matmuls
        # could not add to the gradients, so the first step after a resume would round in another way.
        self._buckets = engine.distributed.buckets if engine.distributed else []
        in_buckets: set[nn.Parameter] = set()
        for bucket in self._buckets:
            in_buckets.update(bucket.parameters)
        for _, p in self._trained:
            if p not in in_buckets:
                hook = p.register_hook(partial(self._record, p))  # type: ignore[no-untyped-call]
                self._hooks.append(hook)
        self._done = False

    def _record(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self._received.add(parameter)

    def after_step(self, step: StepResult | None, samples: SampleRange) -> None:
        if step is None or self._done:  # only the first step counts
            return
        self._done = True
        if self._run.config.train.keep_freed_memory:  # the first step has now allocated the moments
            device_module.keep_freed_memory(self._run.device)
        for hook in self._hooks:
            hook.remove()
        for bucket in self._buckets:
            self._received |= bucket.received
        # A tied weight is on several stages. It is trained if it gets a gradient on at least one of these stages.
        num_stages: Counter[str] = Counter()  # name -> number of stages on which it gets a gradient
        has_gradient = {name: p in self._received for name, p in self._trained}
        for stage in gather_objects(has_gradient, mpu.get_mesh().pipe):
            num_stages.update(stage)
        without_gradient = [name for name, num in num_stages.items() if not num]
        if without_gradient:
            print_rank_0(
                f"warning: no gradient reaches {shorten_list(without_gradient)}: the loss does not depend on these "
                "parameters, so they are not trained"
            )
        elif not step.skipped and float(step.grad_norm) == 0.0:
            print_rank_0(
                "warning: the gradient of every parameter is 0, so no parameter is trained: check whether initial "
                "weights or inputs are all zeros, or whether a layer detaches its input"
            )
