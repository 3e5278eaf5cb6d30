"""Checks of engine features that training scripts use; each function returns whether a trained engine is right."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Trained:
    """A trained engine and its reference in plain torch.

    calls: functions that apply the reference's trained layers. batches: the micro-batches on which checks run.
    """

    engine: Any
    calls: list[Any]
    batches: list[tuple[Any, Tensor]]
    loss: Any
    dtype: torch.dtype

    def outputs(self) -> list[Tensor]:
        """Return the reference's output for each micro-batch of `batches`."""
        found = []
        with torch.no_grad():
            for x, _ in self.batches:
                for call in self.calls:
                    x = call(x)
                found.append(x)
        return found

    def losses(self) -> list[Tensor]:
        return [self.loss(out, y) for out, (_, y) in zip(self.outputs(), self.batches, strict=True)]

    def near(self, found: Any, expected: Any) -> bool:
        tolerance = 1e-9 if self.dtype is torch.float64 else 1e-4
        one, other = (torch.as_tensor(each).double() for each in (found, expected))
        return one.shape == other.shape and torch.allclose(one, other, rtol=tolerance, atol=tolerance)

    def evaluate(self, **how: Any) -> Any:
        return self.engine.eval_batch(iter(self.batches), **how)

    @property
    def last(self) -> bool:
        return bool(self.engine.is_last_stage())


# ------------------------------------------------------------------- recomputation


def _configure(**how: Any) -> None:
    import deepspeed

    deepspeed.checkpointing.configure(None, **how)


def partition_activations(model: Any) -> None:
    _configure(partition_activations=True, num_checkpoints=64)


def contiguous_activations(model: Any) -> None:
    _configure(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=64, checkpoint_in_cpu=True)


def configured_back(t: Trained) -> bool:
    import deepspeed

    deepspeed.checkpointing.reset()
    _configure(partition_activations=False, contiguous_checkpointing=False, checkpoint_in_cpu=False)
    return True


def evaluates_twice(t: Trained) -> bool:
    """Return whether each of 12 evaluations in a row gives the right loss.

    With contiguous_checkpointing, DeepSpeed allocates buffers for a fixed number of activations. If evaluations did not
    release their buffers, the buffers would run out.
    """
    found = [t.evaluate() for _ in range(12)]
    return configured_back(t) and all(t.near(each, torch.stack(t.losses()).mean()) for each in found)


# ---------------------------------------------------------------------- evaluation


def logits(t: Trained) -> bool:
    loss, found = t.evaluate(return_logits=True)
    right = t.near(loss.reshape(()), torch.stack(t.losses()).mean())
    return right and (t.near(found, t.outputs()[-1]) if t.last else found is None)


def all_outputs(t: Trained) -> bool:
    found = t.evaluate(compute_loss=False, reduce_output=None)
    if not t.last:
        return found is None
    return len(found) == len(t.batches) and all(map(t.near, found, t.outputs()))


def mean_of_outputs(t: Trained) -> bool:
    found = t.evaluate(compute_loss=False)
    return t.near(found, torch.stack(t.outputs()).mean(0)) if t.last else found is None


def loss_stays(t: Trained) -> bool:
    found = t.evaluate(bcast_loss=False)
    return t.near(found.reshape(()), torch.stack(t.losses()).mean()) if t.last else found is None


# ------------------------------------------------------------------------ training


def loss_is_fp32(t: Trained) -> bool:
    loss = t.engine.train_batch(iter(t.batches))
    return torch.allclose(loss.reshape(()), torch.stack(t.losses()).mean(), rtol=1e-5)  # raises if dtypes differ


def attributes(t: Trained) -> bool:
    expected = torch.stack(t.losses())
    t.engine.timers("train_batch").elapsed(reset=True)
    t.engine.train_batch(iter(t.batches))
    milliseconds = t.engine.timers("train_batch").elapsed(reset=True)
    right = t.near(t.engine.agg_train_loss.reshape(()), expected.mean()) and milliseconds > 0
    if t.last:
        right = right and t.near(torch.stack([each.reshape(()) for each in t.engine.fwd_outputs]), expected)
        right = right and t.near(t.engine.loss.reshape(()), expected[-1])
        return right and t.near(t.engine.total_loss.reshape(()), expected.sum())
    return right and t.engine.total_loss is None


class _Remembered(nn.Module):
    def forward(self, out: Tensor, labels: Tensor) -> Tensor:
        self.last = out.detach().abs().mean()
        return (out - labels).square().mean()


def give_additional_losses(model: Any) -> None:
    """Let the model report an additional loss "size": the mean of |output|, or 0 before the first step."""
    remembered = _Remembered()
    remembered.last = torch.zeros(())
    model.loss_fn = remembered
    model.get_additional_losses = lambda: {"size": remembered.last}


def additional_losses(t: Trained) -> bool:
    expected = torch.stack([out.abs().mean() for out in t.outputs()]).mean()
    t.engine.train_batch(iter(t.batches))
    tolerance = 1e-5  # the engine rounds additional losses to fp32
    return abs(float(t.engine.get_additional_losses()["size"]) - float(expected)) < tolerance


def reset_shapes(t: Trained) -> bool:
    expected = torch.stack(t.losses()).mean()
    t.engine.reset_activation_shape()
    return t.near(t.engine.train_batch(iter(t.batches)).reshape(()), expected)


def next_epoch(t: Trained) -> bool:
    expected = torch.stack(t.losses()).mean()
    for _ in range(2):
        try:
            t.engine.train_batch(iter([]))
            return False
        except StopIteration:
            pass
    return t.near(t.engine.train_batch(iter(t.batches)).reshape(()), expected)
