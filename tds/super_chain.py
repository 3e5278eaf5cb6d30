"""DeepSpeedEngine's methods where a client's `super()` chain expects them: directly above the PipelineEngine."""

from typing import Any

from ._deepspeed import DeepSpeedEngine
from .optimizer_state import complete_weights


class DeepSpeedMethods:
    """First base class of tds's PipelineEngine.

    A client's engine calls methods such as `super(PipelineEngine, self).forward(inputs)`, since DeepSpeed's
    PipelineEngine disables its own. But above tds's PipelineEngine comes DeepSpeed's, so this class stands between.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on one micro-batch, as DeepSpeedEngine does."""
        return DeepSpeedEngine.forward(self, *args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute gradients of one micro-batch's loss, as DeepSpeedEngine does."""
        return DeepSpeedEngine.backward(self, *args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer at the end of an accumulation, as DeepSpeedEngine does."""
        return DeepSpeedEngine.step(self, *args, **kwargs)

    def module_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of this stage's module, which the PipelineEngine writes to files instead."""
        complete_weights(self)
        return DeepSpeedEngine.module_state_dict(self, *args, **kwargs)
