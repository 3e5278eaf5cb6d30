"""Detection of parameters that do not learn, in the first step, reported once by name."""

from functools import partial

from torch import Tensor, nn

from .. import mpu
from ..model.layers import global_parameters
from ..ranks.objects import gather_objects
from .engine import Step


class GradientWatch:
    """Recorder of which parameters of this process get a gradient, from now until `warnings` is called."""

    def __init__(self, model: nn.Module) -> None:
        self._learns = {name: False for name, parameter in global_parameters(model) if parameter.requires_grad}
        self._hooks = [
            parameter.register_hook(partial(self._note, name))  # type: ignore[no-untyped-call]
            for name, parameter in global_parameters(model)
            if parameter.requires_grad
        ]

    def _note(self, name: str, gradient: Tensor) -> None:
        self._learns[name] = True

    def warnings(self, step: Step) -> list[str]:
        """Return warnings after the first step, and end the recording. A collective."""
        silent = self._silent()
        if silent:
            return [
                f"warning: no gradient reaches {_some(silent)}: the loss does not depend on them, and they do not learn",
            ]
        if not step.skipped and float(step.grad_norm) == 0.0:
            return [
                "warning: the gradient of every parameter is 0, so nothing learns: look whether initial weights or inputs "
                "are all zeros, or a layer cuts the gradient off",
            ]
        return []

    def _silent(self) -> list[str]:
        """Return the names of parameters without a gradient, over all pipeline stages."""
        for hook in self._hooks:
            hook.remove()
        learns: dict[str, bool] = {}
        # A tied weight is on several stages, and learns if it does on one.
        for stage in gather_objects(self._learns, mpu.get_mesh().pipe):
            for name, value in stage.items():
                learns[name] = learns.get(name, False) or value
        return [name for name, value in learns.items() if not value]


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
