"""Checks for mistakes in a user's loop or model that torch reports far from their origin, or not at all."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .groups import gather_objects
from .nested import as_tuple


def require_iterator(data: Any, stage: int) -> None:
    """Raise TypeError for data that are not an iterator, such as a list or a DataLoader."""
    if data is None or hasattr(type(data), "__next__"):
        return
    raise TypeError(
        f"stage {stage}: train_batch() and eval_batch() take an iterator, not a {type(data).__name__}, which would "
        f"start again at every step: create iter(data) before the loop and pass it to every call"
    )


def require_scalar_loss(outputs: Any, stage: int) -> None:
    """Raise TypeError if there is no loss_fn and the last layer does not return a scalar loss."""
    values = outputs.values() if isinstance(outputs, Mapping) else [outputs]
    if all(isinstance(each, Tensor) and each.numel() == 1 for each in values):
        return
    raise TypeError(
        f"stage {stage}: the PipelineModule has no loss_fn, and its last layer returns {_describe(outputs)}, not a "
        f"scalar loss: build it with PipelineModule(..., loss_fn=f), where f(outputs, labels) returns a scalar tensor"
    )


def require_gradient(loss: Tensor, outputs: Any, stage: int) -> None:
    """Raise RuntimeError if the loss of a training step, a scalar, does not require a gradient."""
    if loss.requires_grad:
        return
    if any(isinstance(each, Tensor) and each.requires_grad for each in as_tuple(outputs)):
        raise RuntimeError(
            f"stage {stage}: the loss has no gradient with respect to the outputs of the model: loss_fn must compute "
            f"it from the outputs without detach(), item() or no_grad()"
        )
    raise RuntimeError(
        f"stage {stage}: there is nothing to learn: no weight that the outputs depend on requires a gradient; call "
        f"requires_grad_(True) on the weights to train"
    )


def narrow_sum_warning(engine: Any) -> str | None:
    """Return a warning if torch's CPU kernels would sum gradients of weights over all tokens in bf16 or fp16.

    They do so for nn.LayerNorm, nn.Embedding and nn.EmbeddingBag (torch 2.11 to 2.15). Collective if the engine trains
    in less than fp32 on a CPU.
    """
    autocast = engine._config.torch_autocast_enabled
    is_narrow = autocast or engine.bfloat16_enabled() or engine.fp16_enabled()
    if engine.device.type != "cpu" or not is_narrow:
        return None
    kinds: list[type[nn.Module]] = [nn.LayerNorm]
    if not autocast:  # under autocast, embeddings look up rows in fp32
        kinds += [nn.Embedding, nn.EmbeddingBag]
    names = set()
    for module in engine.module.modules():
        for kind in kinds:
            if isinstance(module, kind) and module.weight is not None and _runs_forward_of(kind, module):
                names.add(f"nn.{kind.__name__}")
    if torch.distributed.is_initialized():  # other stages have other layers
        names = set().union(*gather_objects(names))
    if not names:
        return None
    return (
        f"{' and '.join(sorted(names))} in half precision on a CPU: torch adds gradients of their weights over "
        "all tokens in half precision, so they are wrong by up to 90 %; train in fp32, or use mpu.LayerNorm and "
        "mpu.VocabParallelEmbedding, which add in fp32"
    )


def _runs_forward_of(kind: type[nn.Module], module: nn.Module) -> bool:
    """Return whether `module`, of a subclass of `kind`, runs the forward method of `kind`, directly or by super()."""
    # From the class of the module to its bases: a forward method on the way to that of `kind` hides it, unless it calls
    # super().
    for each in type(module).__mro__:
        forward = vars(each).get("forward")  # None if this class inherits it
        if forward is vars(kind)["forward"]:
            return True
        code = getattr(forward, "__code__", None)
        if code is not None and "__class__" not in code.co_freevars:  # a method that calls super() has this variable
            return False
    return False


def refuse_non_scalars(named: Mapping[str, Any]) -> None:
    """Raise TypeError unless `loss_fn` returned at least one loss and all of them are scalars."""
    if not named:
        raise TypeError("loss_fn returns an empty dict: return at least one loss")
    for name, value in named.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            continue
        raise TypeError(
            f"loss_fn returns {_describe(value)} for {name!r}: return a scalar tensor, or a dict of scalar tensors"
        )


def _describe(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def refuse_untrained(weight: nn.Parameter, name: str, stage: int, is_only_elsewhere: bool) -> None:
    """Raise RuntimeError if a tied weight that another stage trains is not trained on this stage.

    is_only_elsewhere: whether only the optimizers of other stages have the weight.
    """
    if not weight.requires_grad:
        raise RuntimeError(
            f"the tied weight {name} is frozen on stage {stage} but trained on another stage: freeze it on all of its "
            f"stages or on none"
        )
    if is_only_elsewhere:
        raise RuntimeError(
            f"the tied weight {name} is in the optimizer of another stage but not in that of stage {stage}: pass the "
            f"weight to the optimizers of both stages"
        )
