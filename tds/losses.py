"""The losses of one step: summed over micro-batches and replicas, divided by targets, broadcast to all stages.

The host waits for the device only once per step, in `Losses.read`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._torch import to_device
from .mistakes import refuse_non_scalars

LossByName = dict[str, Tensor]
TRAINED, ADDITIONAL = 0, 1  # kinds of losses
LossKey = tuple[int, str]  # kind (TRAINED or ADDITIONAL) and name of a loss


class SumToShare(NamedTuple):
    """A scalar of each rank, to be summed over `group`. adds_losses: whether this rank adds the losses to the sum."""

    adds_losses: bool
    scalar: Tensor
    group: Any


def _divisor_of(num_targets: Tensor) -> Tensor:
    """Return the divisor of losses: a batch without targets counts as one target, since 0 / 0 would be NaN."""
    return torch.where(num_targets == 0, 1.0, num_targets)


class Losses:
    """The losses of one step.

    Call `begin`, then `add` for each micro-batch, `reduce` on the last stage, and `share` and `read` on all stages.
    A loss that is not in a dict has the name `loss`. Additional losses are only reported, not trained on.
    `reduce` and `share` send one message each, with a place for every loss that the previous step had. If a loss has a
    new name, `read` sends all names and values once more.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._last_means: dict[LossKey, Tensor] = {}  # losses of the last step, after the division
        self._last_keys: tuple[LossKey, ...] = ((TRAINED, "loss"),)  # keys of the last step, equal on all ranks
        self.mean_counts: Tensor | None = None  # mean over micro-batches of what `count_targets` returned
        # fp64 vector that the ranks reduce together, for k keys in `_last_keys`:
        #   [0] targets and [1] micro-batches of all replicas
        #   [2] > 0 if a loss has a new name, [3] > 0 if losses are fp64
        #   [4 : 4 + k] number of replicas that have each loss, [4 + k : 4 + 2 * k] mean of each loss
        #   [-1] the number that `share` sums, if it was called with `with_sum`
        self._numbers: Tensor  # set by `reduce` on the last stage and by `share` on the others
        self.begin(1, 0)  # only sets the attributes of a step; each step calls it again

    def begin(self, micro_batches: int, replicas: int) -> None:
        """Start a step with `micro_batches` on this replica."""
        self._micro_batches = micro_batches
        self._counted: Tensor | None = None  # number of targets in the global batch, if they are counted
        self._numbers_on_host: list[float] | None = None  # `_numbers` on the host
        self.targets = float(micro_batches * replicas)  # divisor of the losses, unless `count` is called
        self._sums: dict[LossKey, Tensor] = {}
        self.dtype = torch.float32  # dtype of the losses that the engine returns

    def _zeros(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.float64, device=self.device)

    def count(self, count_targets: Callable[[Any], Any], labels: Sequence[Any], replicas: Any) -> None:
        """Count the targets in `labels`, summed over the replicas. Their number becomes the divisor of the losses.

        count_targets: returns a scalar, or a vector [k] of which the first element is the number of targets.
        """
        total = self._zeros()  # [] or, after the first sum, [k]
        for each in labels:
            count = torch.as_tensor(count_targets(each), dtype=torch.float64)
            total = total + count.to(self.device, non_blocking=True)  # labels, and so counts, may be on the host
        # Replicas may evaluate different numbers of micro-batches, so these are summed, too.
        numbers = torch.cat([total.reshape(-1), total.new_full((1,), self._micro_batches)])  # counts, micro-batches
        dist.all_reduce(numbers, group=replicas)
        counts = numbers[:-1]
        self._counted = counts[0].clone()
        counts[0] = self.divisor  # the number of targets, but at least 1
        self.mean_counts = (counts / numbers[-1]).view(total.shape)

    @property
    def divisor(self) -> Tensor:
        """The number by which the losses of this step are divided, a scalar in fp64 on the device."""
        if self._counted is None:
            return self._zeros() + self.targets
        return _divisor_of(self._counted)

    def add(self, loss: Any, additional: Mapping[str, Any]) -> Tensor:
        """Add the losses of a micro-batch, a scalar or a dict of scalars, and return the scalar to train on."""
        named = loss if isinstance(loss, Mapping) else {"loss": loss}
        refuse_non_scalars(named)
        for name, value in named.items():
            self._add(TRAINED, name, value)
            if value.dtype is torch.float64:
                self.dtype = torch.float64
        for name, value in additional.items():
            self._add(ADDITIONAL, name, value)
        return sum(named.values())  # type: ignore[return-value]

    def _add(self, kind: int, name: str, value: Any) -> None:
        total = self._sums.get((kind, name), 0.0)
        tensor = torch.as_tensor(value, device=self.device)  # an additional loss may be a number
        self._sums[kind, name] = total + tensor.detach().double().sum()  # `sum` turns shape [1] into a scalar

    def reduce(self, replicas: Any) -> None:
        """Sum the losses by name over the replicas, on the last stage, into the vector described in `__init__`.

        Replicas may have different names and different numbers of micro-batches.
        """
        last_keys = self._last_keys
        self._replicas = replicas  # like `_stages`, for `exchange_means`
        has_new_key = bool(self._sums.keys() - last_keys)
        is_fp64 = self.dtype is torch.float64
        present = [key in self._sums for key in last_keys]
        counts = [self._micro_batches, has_new_key, is_fp64, *present]

        # One all-reduce over the replicas sums the number of micro-batches, the flags, and a loss for each key.
        header = to_device(counts, self.device)
        zero = self._zeros()
        sums = torch.stack([self._sums.get(key, zero) for key in last_keys])
        numbers = torch.cat([header, sums])
        if dist.get_world_size(replicas) > 1:
            dist.all_reduce(numbers, group=replicas)
        summed_header, totals = torch.split(numbers, [len(counts), len(last_keys)])

        micros = summed_header[:1]  # of all replicas
        targets = micros if self._counted is None else self._counted.view(1)
        trained_divisor = _divisor_of(targets)
        divisors = torch.cat([trained_divisor if kind == TRAINED else micros for kind, _ in last_keys])
        self._numbers = torch.cat([targets, summed_header, totals / divisors])  # in the order described in __init__

    def share(self, source: int, stages: Any, with_sum: SumToShare | None = None) -> None:
        """Broadcast the losses from rank `source` to the other stages. Collective over the group `stages`.

        with_sum: if given, one all-reduce over its group, which contains `stages`, shares losses and sums the scalars.
        """
        self._source = source
        self._stages = stages
        has_losses = dist.get_rank() == source
        if with_sum:
            has_losses = with_sum.adds_losses  # on one rank of the group, so that the sum has them once
        if not has_losses:  # zeros for the 4 numbers, the flags and the means that are described in __init__
            self._numbers = self._zeros(4 + 2 * len(self._last_keys))
        if with_sum:
            self._numbers = torch.cat([self._numbers, with_sum.scalar.view(1)])
            dist.all_reduce(self._numbers, group=with_sum.group)
        elif dist.get_world_size(stages) > 1:
            dist.broadcast(self._numbers, source, group=stages)

    def read(self) -> Tensor:
        """Copy the shared numbers to the host, and return `total`.

        Only the first call in a step waits for the device. Collective over all ranks if a loss has a new name.
        """
        if self._numbers_on_host is not None:
            return self.total
        numbers = self._numbers.tolist()
        self._numbers_on_host = numbers
        self.targets, micros, has_new_key, is_fp64 = numbers[:4]  # see __init__
        self.dtype = torch.float64 if is_fp64 else torch.float32
        if has_new_key:
            from .new_losses import exchange_means

            means = exchange_means(self, {TRAINED: self.targets or 1.0, ADDITIONAL: micros})  # divisors by kind, not 0
        else:
            means = {}
            first_mean = 4 + len(self._last_keys)  # index, after 4 numbers and a count for each loss
            for i, key in enumerate(self._last_keys):
                if numbers[4 + i]:  # some replica has this loss
                    means[key] = self._numbers[first_mean + i]
        self._last_keys = tuple(means)
        self._last_means = means
        return self.total

    @property
    def shared_sum(self) -> Tensor:
        """The sum of the scalars that were given to `share` in this step, a scalar in fp64."""
        return self._numbers[-1]

    @property
    def shared_sum_on_host(self) -> float:
        """The value of `shared_sum` as a float. Call `read` first."""
        assert self._numbers_on_host is not None, "read() comes first"
        return self._numbers_on_host[-1]

    @property
    def means(self) -> LossByName:
        """The losses of the last step by name, scalars in fp64."""
        return self._means_of_kind(TRAINED)

    def _means_of_kind(self, wanted_kind: int) -> LossByName:
        return {name: value for (kind, name), value in self._last_means.items() if kind == wanted_kind}

    @property
    def additional(self) -> LossByName:
        """The means of the additional losses of the last step by name, scalars in fp64."""
        return self._means_of_kind(ADDITIONAL)

    @property
    def total(self) -> Tensor:
        """The loss of the last step, a scalar."""
        return torch.stack(list(self.means.values())).sum().to(self.dtype)

    @property
    def local_sum(self) -> Tensor | None:
        """The sum of this rank's losses in this step, a scalar, not yet divided by targets; None without losses."""
        trained = [value for (kind, _), value in self._sums.items() if kind == TRAINED]
        return torch.stack(trained).sum().to(self.dtype) if trained else None

    @property
    def all_means(self) -> LossByName:
        """All losses by name, scalars, for a progress line."""
        return self.means | self.additional
