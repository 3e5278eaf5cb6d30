"""The losses of one step: summed over micro-batches and replicas, divided by targets, sent to all stages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MOST = 16  # limit on named plus additional losses


def _check(named: Mapping[str, Any]) -> None:
    """Raise TypeError unless `loss_fn` returned at least one loss and all of them are scalars."""
    if not named:
        raise TypeError("loss_fn returns an empty dict: there is nothing to learn from")
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.numel() != 1:
            found = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"loss_fn returns {found} for {name!r}: return a tensor of one number, or a dict of such")


class Losses:
    """Sums of losses in fp64, by name. A loss that is not a dict has the name `loss`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.targets = 0.0
        self.dtype = torch.float32  # dtype of the losses that users get
        self.means: dict[str, Tensor] = {}
        self.additional: dict[str, Tensor] = {}  # means of losses that are only reported, not trained on
        # Names known to all ranks: of the losses, and of the additional losses.
        self._names: tuple[tuple[str, ...], tuple[str, ...]] = (("loss",), ())
        self._sums: dict[str, Tensor] = {}
        self._aside: dict[str, Tensor] = {}
        # Names known to all replicas: of the losses, and of the additional losses.
        self._agreed: tuple[tuple[str, ...], tuple[str, ...]] = (("loss",), ())
        self._own = self._micros = 1  # micro-batches of this replica, and of all replicas
        self._counted = False

    def begin(self, micro_batches: int, replicas: int) -> None:
        """Start a step with `micro_batches` on this replica.

        Without counted targets, losses are divided by the number of micro-batches on all replicas.
        """
        self._own, self._micros, self._counted = micro_batches, micro_batches * replicas, False
        self.targets = float(self._micros)
        self._sums, self._aside = {}, {}
        self.dtype = torch.float32

    def count(self, count_targets: Callable[[Any], Any], labels: Sequence[Any], replicas: Any) -> None:
        """Divide by the number of targets instead, totalled over the labels and the replicas."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for each in labels:
            total += count_targets(each)
        dist.all_reduce(total, group=replicas)
        self.targets, self._counted = max(total.item(), 1.0), True

    def add(self, loss: Any, aside: Mapping[str, Any]) -> Tensor:
        """Add the losses of a micro-batch, a scalar or a dict of scalars, and return the scalar to train on.

        aside: additional losses, only reported.
        """
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
        """Sum the losses by name over the replicas, on the last stage.

        Replicas may have different names and different numbers of micro-batches.
        """
        learned, aside = self._sums, self._aside
        if dist.get_world_size(replicas) > 1:
            learned, aside = self._over_replicas(replicas)
        self.means = {name: total / self.targets for name, total in learned.items()}
        self.additional = {name: (total / self._micros).float() for name, total in aside.items()}

    def _over_replicas(self, replicas: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the sums over replicas: one all-reduce over the names of the previous step.

        A second exchange is needed only if a replica has a new name.
        """
        sums = self._sums, self._aside
        places = [(kind, name) for kind, names in enumerate(self._agreed) for name in names]
        strange = any(name not in known for given, known in zip(sums, self._agreed, strict=True) for name in given)
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        head = [float(strange), float(self._own), *(float(name in sums[kind]) for kind, name in places)]
        numbers = torch.cat([
            torch.tensor(head, dtype=torch.float64).to(self.device),
            torch.stack([sums[kind].get(name, zero) for kind, name in places]),
        ])  # fmt: skip
        dist.all_reduce(numbers, group=replicas)
        someone, micros, *there = numbers[: len(head)].tolist()
        self._micros = int(micros)
        if not self._counted:
            self.targets = micros
        found: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        for (kind, name), count, total in zip(places, there, numbers[len(head) :], strict=True):
            if count:
                found[kind][name] = total
        if someone:
            found = self._by_name(replicas)
        self._agreed = tuple(found[0]), tuple(found[1])
        return found

    def _by_name(self, replicas: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        told: list[Any] = [None] * dist.get_world_size(replicas)
        mine = [{name: total.item() for name, total in given.items()} for given in (self._sums, self._aside)]
        dist.all_gather_object(told, mine, group=replicas)
        added: tuple[dict[str, float], dict[str, float]] = ({}, {})
        for each in told:
            for total, given in zip(added, each, strict=True):
                for name, value in given.items():
                    total[name] = total.get(name, 0.0) + value
        learned, aside = (
            {name: torch.tensor(value, dtype=torch.float64, device=self.device) for name, value in total.items()}
            for total in added
        )
        return learned, aside

    def tell(self, source: int, stages: Any, with_sum: tuple[bool, Tensor, Any] | None = None) -> Tensor | None:
        """Broadcast the result of rank `source` to the stages. Collective over the group `stages`.

        with_sum: (whether this rank contributes the result, a scalar, a group that contains `stages`). If given,
        one all-reduce over that group carries both the result and the sum of the scalars, which is returned.
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
        """The loss of the last step, a scalar."""
        return torch.stack(list(self.means.values())).sum().to(self.dtype)

    @property
    def sum(self) -> Tensor | None:
        """The sum over this rank's micro-batches in this step before any division, a scalar."""
        return torch.stack(list(self._sums.values())).sum().to(self.dtype) if self._sums else None

    @property
    def named(self) -> dict[str, Tensor]:
        """All losses by name, scalars, for a progress line."""
        return self.means | self.additional
