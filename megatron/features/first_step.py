"""The first step of a run: warns about parameters without gradient, and turns on the reuse of freed memory."""

from collections import Counter
from functools import partial

from torch import Tensor

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
        trained = [(name, p) for name, p in global_parameters(run.engine.deepspeed.module) if p.requires_grad]
        self._has_gradient = {name: False for name, _ in trained}
        self._hooks = [p.register_hook(partial(self._record, name)) for name, p in trained]  # type: ignore[no-untyped-call]
        self._done = False

    def _record(self, name: str, gradient: Tensor) -> None:
        self._has_gradient[name] = True

    def after_step(self, step: StepResult | None, samples: SampleRange) -> None:
        if step is None or self._done:  # only the first step counts
            return
        self._done = True
        if self._run.config.train.keep_freed_memory:  # the first step has now allocated the moments
            device_module.keep_freed_memory(self._run.device)
        for hook in self._hooks:
            hook.remove()
        # A tied weight is on several stages. It is trained if it gets a gradient on at least one of these stages.
        num_stages: Counter[str] = Counter()  # name -> number of stages on which it gets a gradient
        for stage in gather_objects(self._has_gradient, mpu.get_mesh().pipe):
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
