"""The losses of one step: summed over micro-batches and replicas, divided by targets, broadcast to all stages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .groups import gather_objects

MOST = 16  # maximum number of named and additional losses together
TRAINED, ADDITIONAL = 0, 1  # kinds of losses
Key = tuple[int, str]  # kind (TRAINED or ADDITIONAL) and name of a loss


def _check(named: Mapping[str, Any]) -> None:
    """Raise TypeError unless `loss_fn` returned at least one loss and all of them are scalars."""
    if not named:
        raise TypeError("loss_fn returns an empty dict: return at least one loss")
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.numel() != 1:
            found = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"loss_fn returns {found} for {name!r}: return a scalar tensor, or a dict of scalar tensors"
            )


class Losses:
    """The losses of one step: `add` sums by name in fp64, `reduce` sums over replicas, `broadcast` informs all stages.

    A loss that is not in a dict has the name `loss`. Additional losses are only reported, not trained on.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.targets = 0.0
        self.dtype = torch.float32  # dtype of the losses that the engine returns
        self._found: dict[Key, Tensor] = {}  # losses of the last step, after the division
        self._sums: dict[Key, Tensor] = {}
        self._of_replicas: tuple[Key, ...] = ((TRAINED, "loss"),)  # keys of the last step, equal on all replicas
        self._of_stages: tuple[Key, ...] = ((TRAINED, "loss"),)  # keys of the last step, equal on all stages
        self._own = self._micros = 1  # number of micro-batches of this replica, and of all replicas
        self._counted = False

    def begin(self, micro_batches: int, replicas: int) -> None:
        """Start a step with `micro_batches` on this replica.

        Unless `count` is called, losses are divided by the number of micro-batches on all replicas.
        """
        self._own, self._micros, self._counted = micro_batches, micro_batches * replicas, False
        self.targets = float(self._micros)
        self._sums = {}
        self.dtype = torch.float32

    def count(self, count_targets: Callable[[Any], Any], labels: Sequence[Any], replicas: Any) -> None:
        """Set the divisor of the losses to the number of targets in `labels`, summed over the replicas."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for each in labels:
            total += count_targets(each)
        dist.all_reduce(total, group=replicas)
        self.targets, self._counted = max(total.item(), 1.0), True

    def add(self, loss: Any, additional: Mapping[str, Any]) -> Tensor:
        """Add the losses of a micro-batch, a scalar or a dict of scalars, and return the scalar to train on."""
        named = loss if isinstance(loss, Mapping) else {"loss": loss}
        _check(named)
        if len(named) + len(additional) > MOST:
            raise ValueError(
                f"loss_fn and get_additional_losses() return {len(named) + len(additional)} losses; return at most "
                f"{MOST}"
            )
        for kind, given in ((TRAINED, named), (ADDITIONAL, additional)):
            for name, value in given.items():
                self._sums[kind, name] = self._sums.get((kind, name), 0.0) + value.detach().double().sum()
        if any(value.dtype is torch.float64 for value in named.values()):
            self.dtype = torch.float64
        return sum(named.values())  # type: ignore[return-value]

    def reduce(self, replicas: Any) -> None:
        """Sum the losses by name over the replicas, on the last stage.

        Replicas may have different names and different numbers of micro-batches.
        """
        sums = self._sums if dist.get_world_size(replicas) == 1 else self._over_replicas(replicas)
        self._found = {
            key: total / self.targets if key[0] == TRAINED else (total / self._micros).float()
            for key, total in _trained_first(sums).items()
        }

    def _over_replicas(self, replicas: Any) -> dict[Key, Tensor]:
        """Return the losses summed over the replicas.

        One all-reduce sums the losses whose names are known from the previous step. The replicas exchange all names
        and values only if some replica has a loss with a new name.
        """
        sums, known = self._sums, self._of_replicas
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        head = [float(not sums.keys() <= {*known}), float(self._own), *(float(key in sums) for key in known)]
        numbers = torch.cat([
            torch.tensor(head, dtype=torch.float64).to(self.device),
            torch.stack([sums.get(key, zero) for key in known]),
        ])  # fmt: skip
        dist.all_reduce(numbers, group=replicas)
        has_new, micros, *counts = numbers[: len(head)].tolist()
        self._micros = int(micros)
        if not self._counted:
            self.targets = micros
        found = {key: total for key, count, total in zip(known, counts, numbers[len(head) :], strict=True) if count}
        if has_new:
            found = self._by_name(replicas)
        self._of_replicas = tuple(found)
        return found

    def _by_name(self, replicas: Any) -> dict[Key, Tensor]:
        added: dict[Key, float] = {}
        for each in gather_objects({key: total.item() for key, total in self._sums.items()}, replicas):
            for key, value in each.items():
                added[key] = added.get(key, 0.0) + value
        return _trained_first({k: torch.tensor(v, dtype=torch.float64, device=self.device) for k, v in added.items()})

    def broadcast(self, source: int, stages: Any, with_sum: tuple[bool, Tensor, Any] | None = None) -> Tensor | None:
        """Broadcast the losses from rank `source` to the other stages. Collective over the group `stages`.

        with_sum: (whether this rank contributes the losses, a scalar, a group that contains `stages`). If with_sum is
        given, one all-reduce over its group shares the losses and sums the scalars, and the sum is returned.
        """
        here = dist.get_rank() == source
        keys = tuple(self._found)
        header = [self.targets, float(keys != self._of_stages), float(self.dtype is torch.float64)]
        numbers = torch.zeros(len(header) + MOST + 1, dtype=torch.float64, device=self.device)
        if with_sum[0] if with_sum else here:
            numbers[: len(header)] = torch.tensor(header, dtype=torch.float64)
            values = torch.stack([value.double() for value in self._found.values()]) if here else numbers[:0]
            numbers[len(header) : len(header) + len(values)] = values
        if with_sum:
            numbers[-1] = with_sum[1]
            dist.all_reduce(numbers, group=with_sum[2])
        else:
            dist.broadcast(numbers, source, group=stages)
        (self.targets, renamed, is_double), found = numbers[: len(header)].tolist(), numbers[len(header) : -1].unbind()
        if renamed:
            names = [keys]
            dist.broadcast_object_list(names, source, group=stages)
            self._of_stages = names[0]
        self.dtype = torch.float64 if is_double else torch.float32
        self._found = {
            key: value if key[0] == TRAINED else value.float()
            for key, value in zip(self._of_stages, found, strict=False)
        }
        return numbers[-1] if with_sum else None

    @property
    def means(self) -> dict[str, Tensor]:
        """The losses of the last step by name, scalars in fp64."""
        return {name: value for (kind, name), value in self._found.items() if kind == TRAINED}

    @property
    def additional(self) -> dict[str, Tensor]:
        """The means of the additional losses of the last step by name, scalars in fp32."""
        return {name: value for (kind, name), value in self._found.items() if kind == ADDITIONAL}

    @property
    def total(self) -> Tensor:
        """The loss of the last step, a scalar."""
        return torch.stack(list(self.means.values())).sum().to(self.dtype)

    @property
    def sum(self) -> Tensor | None:
        """The sum of this rank's losses in this step, a scalar, not yet divided by targets; None without losses."""
        trained = [value for (kind, _), value in self._sums.items() if kind == TRAINED]
        return torch.stack(trained).sum().to(self.dtype) if trained else None

    @property
    def named(self) -> dict[str, Tensor]:
        """All losses by name, scalars, for a progress line."""
        return {name: value for (_, name), value in self._found.items()}


def _trained_first(losses: dict[Key, Tensor]) -> dict[Key, Tensor]:
    return dict(sorted(losses.items(), key=lambda item: item[0][0]))
