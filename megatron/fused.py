"""Element-wise functions that take one kernel on CUDA, where torch.compile fuses their operations.

Each eager torch operation is a kernel that reads its inputs from memory and writes its result to memory. Compiled,
the whole function reads its inputs once and writes its results once.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._torch import version_counter

Function = Callable[..., Tensor]


def compile_pointwise(plain: Function) -> Function:
    """Return `plain`, a function of tensors [...], compiled into one kernel."""
    # Without this option, the compiler does not fuse every concatenation.
    return torch.compile(plain, options={"force_pointwise_cat": True})


@dataclass(eq=False)
class Fused:
    """Function of tensors with two definitions: one for torch.compile and one for eager execution.

    plain: the function in torch operations that write new tensors, which the compiler fuses. It runs on CUDA and in
    code that is being compiled.
    eager: the same function with as few passes over memory as eager operations permit. It runs elsewhere, and on CUDA
    if `plain` cannot be compiled, for instance without Triton.
    """

    plain: Function
    eager: Function
    compiled: Function | None = None  # set by the first call on CUDA

    def __call__(self, x: Tensor, *more: Any) -> Tensor:
        """Return the function of x [...] and `more`; the device of x selects the definition."""
        if torch.compiler.is_compiling():
            return self.plain(x, *more)
        if x.device.type != "cuda":
            return self.eager(x, *more)
        if self.compiled is not None:
            return self.compiled(x, *more)
        return self._compile(x, *more)

    def _compile(self, *inputs: Any) -> Tensor:
        """Compile `plain` and return its result, or warn once and use `eager` from now on."""
        version_before = version_counter(inputs[0])
        try:
            function = compile_pointwise(self.plain)
            result = function(*inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler raises errors of many types
            if version_counter(inputs[0]) != version_before:  # `eager` would change the first input a second time
                raise
            # The first line of the message, or the type of an error without a message.
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            warnings.warn(
                f"{self.plain.__qualname__} runs unfused, because torch.compile failed: {reason}", stacklevel=2
            )
            function = self.eager
            result = self.eager(*inputs)
        self.compiled = function
        return result
