"""The losses of one step: added up over micro-batches and replicas, divided by targets, told to all stages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MOST = 16  # named losses


class Losses:
    """Sums in fp64, by name. A loss that is not a dict has the name `loss`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.targets = 0.0
        self.means: dict[str, Tensor] = {}
        self._names: tuple[str, ...] = ("loss",)  # what all ranks know
        self._sums: dict[str, Tensor] = {}

    def begin(self, micro_batches: int) -> None:
        """A new step; micro_batches: of all replicas, which is what losses are divided by if nothing is counted."""
        self.targets = float(micro_batches)
        self._sums = {}

    def count(self, count_targets: Callable[[Any], Any] | None, labels: Sequence[Any], replicas: Any) -> None:
        """Divide by targets instead, the total over the labels and the group of replicas."""
        if count_targets is None:
            return
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for each in labels:
            total += count_targets(each)
        dist.all_reduce(total, group=replicas)
        self.targets = max(total.item(), 1.0)

    def add(self, loss: Any) -> Tensor:
        """The loss of a micro-batch, a scalar or a dict of scalars; returns what to learn from."""
        named = loss if isinstance(loss, Mapping) else {"loss": loss}
        if len(named) > MOST:
            raise ValueError(f"loss_fn returns {len(named)} named losses; there is room for {MOST}")
        for name, value in named.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.detach().double().sum()
        return sum(named.values())  # type: ignore[return-value]

    def reduce(self, replicas: Any) -> None:
        """On the last stage: add up over the group of replicas."""
        sums = torch.stack(list(self._sums.values()))
        dist.all_reduce(sums, group=replicas)
        self.means = {name: each / self.targets for name, each in zip(self._sums, sums, strict=True)}

    def tell(self, source: int, stages: Any) -> None:
        """Give the result of rank `source` to the group of stages, which all call this."""
        here = dist.get_rank() == source
        header = torch.tensor([self.targets, float(tuple(self.means) != self._names)], dtype=torch.float64)
        values = torch.stack([value.cpu() for value in self.means.values()]) if here else torch.empty(0)
        numbers = torch.cat([header, values, torch.zeros(MOST - len(values))]).double().to(self.device)
        dist.broadcast(numbers, source, group=stages)
        targets, renamed, *means = numbers.unbind()
        if renamed:
            told = [tuple(self.means)]
            dist.broadcast_object_list(told, source, group=stages)
            self._names = told[0]
        self.targets = targets.item()
        self.means = dict(zip(self._names, means, strict=False))

    @property
    def total(self) -> Tensor:
        return torch.stack(list(self.means.values())).sum()
