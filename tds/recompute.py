"""The function by which a pipeline stage recomputes activations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._deepspeed import checkpointing
from .boundary import BoundaryError, kind_of
from .memory import non_leaf_view
from .nested import as_tuple, map_tensors


def choose_checkpoint_function(config_class: Any = None, model: Any = None, **_: Any) -> None:
    """Make non-reentrant activation checkpointing the default, before an engine is built.

    DeepSpeed's default is re-entrant and gives no gradients to a stage that begins with an embedding.
    `"pipeline": {"use_reentrant": true}`, or the PipelineModule's `activation_checkpoint_func`, overrides this
    default.
    """
    if config_class is None or model.activation_checkpoint_func is not checkpointing.checkpoint:
        return  # no ds_config, or a function that the user has chosen
    # Set the key, too: without it, DeepSpeed would set it to True when it builds the engine.
    use_reentrant = config_class.pipeline.setdefault("use_reentrant", False)
    if use_reentrant:
        model.activation_checkpoint_func = _checkpoint_reentrantly
    else:
        model.activation_checkpoint_func = checkpointing.non_reentrant_checkpoint


def views_requiring_grad(inputs: Any) -> Any:
    """Return views of a stage's inputs that require gradients where they can; re-entrant checkpointing needs one."""
    return map_tensors(inputs, lambda t: non_leaf_view(t.requires_grad_(kind_of(t) == "float")))


def _checkpoint_reentrantly(function: Callable[..., Any], *args: Any) -> Any:
    """Call DeepSpeed's re-entrant checkpoint function. Raises BoundaryError for complex outputs."""
    outputs = checkpointing.checkpoint(function, *args)
    for i, each in enumerate(as_tuple(outputs)):
        if torch.is_grad_enabled() and isinstance(each, Tensor) and each.is_complex():
            raise BoundaryError(
                f"output {i} of checkpointed layers is {each.dtype}, and re-entrant checkpointing drops the gradients "
                'of complex tensors: leave "use_reentrant" out of the section "pipeline" of the ds_config'
            )
    return outputs
