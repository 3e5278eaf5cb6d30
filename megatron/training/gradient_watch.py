"""Which parameters do not learn, and which buffers change unsaved: seen in the first step, said once, by name."""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from .. import mpu
from .._torch import persistent_buffers, version
from ..model.layers import global_parameters
from .engine import Step


class GradientWatch:
    """Notes which parameters of this process get a gradient, from now until `warnings` is asked, and which buffers change."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers = _marks(model)
        self._learns = {name: False for name, parameter in global_parameters(model) if parameter.requires_grad}
        self._hooks = [
            parameter.register_hook(partial(self._note, name))  # type: ignore[no-untyped-call]
            for name, parameter in global_parameters(model)
            if parameter.requires_grad
        ]

    def _note(self, name: str, gradient: Tensor) -> None:
        self._learns[name] = True

    def warnings(self, step: Step) -> list[str]:
        """What to say after the first step. A collective; ends the watch."""
        silent, changed = self._silent(), self._changed()
        said = []
        if changed:
            said = [
                f"warning: training changes the buffers {_some(changed)}, but checkpoints hold only parameters: after a resume "
                f"they begin again; let a buffer that is no state have persistent=False"
            ]
        if silent:
            return [
                *said,
                f"warning: no gradient reaches {_some(silent)}: the loss does not depend on them, and they do not learn",
            ]
        if not step.skipped and float(step.grad_norm) == 0.0:
            return [
                *said,
                "warning: the gradient of every parameter is 0, so nothing learns: look whether initial weights or inputs "
                "are all zeros, or a layer cuts the gradient off",
            ]
        return said

    def _changed(self) -> list[str]:
        """Names of the buffers, of all pipeline stages, that the step changed."""
        now = _marks(self._model)
        changed = [name for name, mark in now.items() if mark != self._buffers.get(name)]
        return list(dict.fromkeys(name for stage in _of_all_stages(changed) for name in stage))

    def _silent(self) -> list[str]:
        """Names of the parameters, of all pipeline stages, that got no gradient."""
        for hook in self._hooks:
            hook.remove()
        learns: dict[str, bool] = {}
        for stage in _of_all_stages(self._learns):  # a tied weight is on several, and learns if it does on one
            for name, value in stage.items():
                learns[name] = learns.get(name, False) or value
        return [name for name, value in learns.items() if not value]


def _of_all_stages(mine: Any) -> list[Any]:
    line = mpu.get_mesh().pipe
    if line.group is None:
        return [mine]
    stages: list[Any] = [None] * line.size
    dist.all_gather_object(stages, mine, line.group)
    return stages


def _marks(model: nn.Module) -> dict[str, tuple[int, int]]:
    """By buffer that a state_dict would hold, what is another after it was changed or replaced."""
    return {
        f"{path}.{name}" if path else name: (id(buffer), version(buffer))
        for path, module in model.named_modules()
        for name, buffer in persistent_buffers(module)
    }


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
