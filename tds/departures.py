"""When gradients leave for the other replicas: by the bucket, while the last backward pass of a step runs (Li et al. 2020)."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn

from ._torch import has_hooks
from .advice import ways

BUCKET_BYTES = 25 * 2**20  # of gradients, at least
BYTES_A_REPLICA = 4 * 2**20  # so that what one rank sends to another does not shrink as replicas become more


class Bucket(Protocol):
    """Gradients that travel together, in an order that is the same on all replicas."""

    parameters: list[nn.Parameter]
    left: bool  # whether gradients of this step are on their way, or summed

    def add(self, parameter: nn.Parameter) -> None:
        """A gradient has been added to its `.grad`."""
        ...

    def reduce(self) -> None:
        """Begin to add up over the replicas, zeros where there is no gradient."""
        ...

    def wait(self) -> None:
        """Until that is done."""
        ...


def pack(
    parameters: Iterable[nn.Parameter],
    group: Any,
    bucket_bytes: int | None = None,
    chunk_of: Mapping[nn.Parameter, int] | None = None,
    apart: Iterable[nn.Parameter] = (),
) -> list[list[nn.Parameter]]:
    """Those that share a bucket, each list in about the order in which gradients come: the last layer's first.

    bucket_bytes: of gradients, at least; None: as many as suit so many replicas. chunk_of: see `Departures`. apart: weights that get a bucket of their own.
    """
    packed: list[list[nn.Parameter]] = []
    room = bucket_bytes or max(BUCKET_BYTES, BYTES_A_REPLICA * dist.get_world_size(group))
    left, last, apart = 0, None, set(apart)
    for parameter in reversed(list(parameters)):
        kind = ((chunk_of or {}).get(parameter, 0), parameter.dtype, parameter.device)
        if kind != last or left <= 0 or parameter in apart:
            packed.append([])
            left, last = room, kind
        packed[-1].append(parameter)
        left -= parameter.numel() * max(parameter.element_size(), 4)
        if parameter in apart:
            last = None
    return packed


class Departures:
    """`arm()` before the last backward pass of a step, `finish()` after it: then all buckets have travelled.

    A bucket leaves when its gradients have come as often as in the last pass of the step before, and all before it have left.
    chunk_of: of a pipeline stage with several chunks of layers, by whose backward pass a weight gets its last gradient;
    0 where nothing is said.
    """

    def __init__(self, buckets: Sequence[Bucket], chunk_of: Mapping[nn.Parameter, int] | None = None) -> None:
        self._buckets, self._chunk_of = buckets, dict(chunk_of or {})
        self._bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}
        self._usual: Counter[nn.Parameter] = Counter()  # gradients in the last pass of the step before
        self._seen: Counter[nn.Parameter] = Counter()  # in this one
        self._watched: set[nn.Parameter] = set()  # in the step before; who is watched takes all of autograd's at once
        self._armed: set[int] = set()  # chunks in their last backward pass
        self._next = 0  # bucket to leave
        self._hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
            for parameter in self._bucket_of
        ]

    def close(self) -> None:
        """Look at no gradient any more."""
        for hook in self._hooks:
            hook.remove()

    def reset(self) -> None:
        """A new step begins, also where an error ended the one before."""
        for bucket in self._buckets:
            bucket.left = False
        self._seen = Counter()
        self._armed.clear()
        self._next = 0

    def arm(self, chunk: int = 0) -> None:
        """The next backward pass gives the weights of this chunk their last gradients of this step."""
        self._armed.add(chunk)

    def finish(self) -> None:
        """Send what is left, and wait for all of it."""
        while self._next < len(self._buckets):
            self._send_next()
        for bucket in self._buckets:
            bucket.wait()
        self._usual = self._seen
        self._watched = {p for p in self._bucket_of if has_hooks(p)}
        self.reset()

    def _arrived(self, parameter: nn.Parameter) -> None:
        """A hook of autograd, which may have found nothing."""
        if parameter.grad is not None:
            self.take(parameter, self._bucket_of[parameter].add)

    def take(self, parameter: nn.Parameter, add: Callable[[nn.Parameter], None]) -> None:
        """A gradient is there, which `add` adds to its bucket. Raises RuntimeError if that has left."""
        bucket = self._bucket_of[parameter]
        if bucket.left:
            raise RuntimeError(
                f"a gradient of a weight of shape {tuple(parameter.shape)} arrived after its sum had left for the other replicas: "
                f"the weight is used more often than in the step before. Do not overlap the reduction with the backward pass: "
                f"{ways['overlap']}"
            )
        add(parameter)
        if self._chunk_of.get(parameter, 0) in self._armed:
            self._seen[parameter] += 1
            while self._next < len(self._buckets) and self._is_complete(self._buckets[self._next]):
                self._send_next()

    def _is_complete(self, bucket: Bucket) -> bool:
        """As far as the step before tells; a weight that had no gradient then may still get one."""
        if self._chunk_of.get(bucket.parameters[0], 0) not in self._armed:
            return False
        return all(
            0 < self._usual[p] <= self._seen[p] and has_hooks(p) == (p in self._watched) for p in bucket.parameters
        )

    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.left = True
        bucket.reduce()
