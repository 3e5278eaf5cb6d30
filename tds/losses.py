"""The losses of one step: added up over micro-batches and replicas, divided by targets, told to all stages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MOST = 16  # named and additional losses


def _check(named: Mapping[str, Any]) -> None:
    """Raise TypeError unless there is something to learn from."""
    if not named:
        raise TypeError("loss_fn returns an empty dict: there is nothing to learn from")
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.numel() != 1:
            found = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"loss_fn returns {found} for {name!r}: return a tensor of one number, or a dict of such")


class Losses:
    """Sums in fp64, by name. A loss that is not a dict has the name `loss`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.targets = 0.0
        self.dtype = torch.float32  # of what users are given
        self.means: dict[str, Tensor] = {}
        self.additional: dict[str, Tensor] = {}  # means of what is looked at, not learned from
        self._names: tuple[tuple[str, ...], tuple[str, ...]] = (("loss",), ())  # what all ranks know, of both kinds
        self._sums: dict[str, Tensor] = {}
        self._aside: dict[str, Tensor] = {}
        self._micros = 1

    def begin(self, micro_batches: int) -> None:
        """A new step; micro_batches: of all replicas, which is what losses are divided by if nothing is counted."""
        self.targets, self._micros = float(micro_batches), micro_batches
        self._sums, self._aside = {}, {}
        self.dtype = torch.float32

    def count(self, count_targets: Callable[[Any], Any], labels: Sequence[Any], replicas: Any) -> None:
        """Divide by targets instead, the total over the labels and the group of replicas."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for each in labels:
            total += count_targets(each)
        dist.all_reduce(total, group=replicas)
        self.targets = max(total.item(), 1.0)

    def add(self, loss: Any, aside: Mapping[str, Any]) -> Tensor:
        """The loss of a micro-batch, a scalar or a dict of scalars; returns what to learn from. aside: additional losses."""
        named = loss if isinstance(loss, Mapping) else {"loss": loss}
        _check(named)
        if len(named) + len(aside) > MOST:
            raise ValueError(f"loss_fn returns {len(named) + len(aside)} named losses; there is room for {MOST}")
        for sums, given in ((self._sums, named), (self._aside, aside)):
            for name, value in given.items():
                sums[name] = sums.get(name, 0.0) + value.detach().double().sum()
        if any(value.dtype is torch.float64 for value in named.values()):
            self.dtype = torch.float64
        return sum(named.values())  # type: ignore[return-value]

    def reduce(self, replicas: Any) -> None:
        """On the last stage: add up over the group of replicas."""
        sums = torch.stack([*self._sums.values(), *self._aside.values()])
        dist.all_reduce(sums, group=replicas)
        learned, aside = sums.tensor_split([len(self._sums)])
        self.means = dict(zip(self._sums, (learned / self.targets).unbind(), strict=True))
        self.additional = dict(zip(self._aside, (aside / self._micros).float().unbind(), strict=True))

    def tell(self, source: int, stages: Any, with_sum: tuple[bool, Tensor, Any] | None = None) -> Tensor | None:
        """Give the result of rank `source` to the group of stages, which all call this.

        with_sum: (whether this rank speaks, a scalar, a group that `stages` is a part of): one rank speaks for the whole group, and
        the sum of its scalars, which is returned, takes no message of its own.
        """
        here = dist.get_rank() == source
        names = tuple(self.means), tuple(self.additional)
        header = [self.targets, float(names != self._names), float(self.dtype is torch.float64)]
        values = [*self.means.values(), *self.additional.values()] if here else []
        numbers = torch.zeros(len(header) + MOST + 1, dtype=torch.float64, device=self.device)
        if with_sum[0] if with_sum else here:
            numbers[: len(header)] = torch.tensor(header, dtype=torch.float64)
            numbers[len(header) : len(header) + len(values)] = torch.stack([value.double() for value in values])
        if with_sum:
            numbers[-1] = with_sum[1]
            dist.all_reduce(numbers, group=with_sum[2])
        else:
            dist.broadcast(numbers, source, group=stages)
        (self.targets, renamed, is_double), found = numbers[: len(header)].tolist(), numbers[len(header) : -1].unbind()
        if renamed:
            told = [names]
            dist.broadcast_object_list(told, source, group=stages)
            self._names = told[0]
        self.dtype = torch.float64 if is_double else torch.float32
        learned, aside = self._names
        self.means = dict(zip(learned, found, strict=False))
        self.additional = {n: v.float() for n, v in zip(aside, found[len(learned) :], strict=False)}
        return numbers[-1] if with_sum else None

    @property
    def total(self) -> Tensor:
        """Of the last step."""
        return torch.stack(list(self.means.values())).sum().to(self.dtype)

    @property
    def sum(self) -> Tensor | None:
        """What this rank has added up in this step, before any division."""
        return torch.stack(list(self._sums.values())).sum().to(self.dtype) if self._sums else None

    @property
    def named(self) -> dict[str, Tensor]:
        """All of them, for a line of progress."""
        return self.means | self.additional
