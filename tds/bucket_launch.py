"""Overlap of the gradient reduction with the last backward pass of a step, by bucket (Li et al. 2020)."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn

from ._torch import has_hooks, has_post_hooks
from .messages import setting_advice

BUCKET_BYTES = 25 * 2**20  # minimum bytes of gradients in a bucket
BYTES_PER_REPLICA = 4 * 2**20  # minimum bytes of a bucket per replica, so that each replica's share stays large
Weights = list[nn.Parameter]
ChunkOf = Mapping[nn.Parameter, int]  # weight -> index of the chunk of layers that contains it


class ReducibleBucket(Protocol):
    """Gradients that are reduced together, in an order that is equal on all replicas."""

    parameters: Weights

    def add(self, parameter: nn.Parameter) -> None:
        """Accumulate the gradient `parameter.grad` into the bucket."""

    def reduce(self) -> None:
        """Start the reduction over the replicas, with zeros for missing gradients."""

    def wait(self) -> None:
        """Wait until the reduction is done."""


def pack_buckets(
    parameters: Iterable[nn.Parameter],
    group: Any,
    bucket_bytes: int | None,
    chunk_of: ChunkOf,
    separate: Iterable[nn.Parameter] = (),
    is_enough: Callable[[Weights], bool] | None = None,
) -> list[Weights]:
    """Group parameters into buckets, last layer first, which is roughly the order in which their gradients arrive.

    bucket_bytes: minimum bytes of gradients in a bucket; None: depends on the number of replicas.
    chunk_of: index of the chunk of layers that contains each weight, 0 by default; a bucket has weights of one chunk.
    separate: weights that each get a separate bucket. is_enough: returns whether weights of `bucket_bytes` or more may
    be a bucket, or need more weights.
    """
    packed: list[Weights] = []
    capacity = bucket_bytes or max(BUCKET_BYTES, BYTES_PER_REPLICA * dist.get_world_size(group))
    free_bytes = capacity  # in the last bucket; negative if its weights exceed the capacity
    last_kind = None  # weights of this kind go into the last bucket; None: the next weight begins a bucket
    separate = set(separate)
    for parameter in reversed(list(parameters)):
        kind = (chunk_of.get(parameter, 0), parameter.dtype, parameter.device)
        # The last bucket may be closed if it has enough bytes and, if `is_enough` is given, also enough weights for it.
        is_full = free_bytes <= 0 and (is_enough is None or is_enough(packed[-1]))
        is_separate = parameter in separate
        if kind != last_kind or is_full or is_separate:
            packed.append([])
            free_bytes = capacity
            last_kind = kind
        packed[-1].append(parameter)
        free_bytes -= parameter.numel() * max(parameter.element_size(), 4)  # sums are in fp32 or wider
        if is_separate:
            last_kind = None
    return packed


def sort_buckets(buckets: list[Any], parameters: Iterable[nn.Parameter], chunk_of: ChunkOf) -> None:
    """Sort buckets by the order in which their last gradients come: last chunk first, and in it last layer first.

    parameters: all parameters, in the order of layers.
    """
    position = {p: index for index, p in enumerate(parameters)}

    def order(bucket: Any) -> tuple[int, int]:
        weights = bucket.parameters
        chunk = chunk_of.get(weights[0], 0)
        first_position = min(position[p] for p in weights)  # the gradient of the first layer comes last
        return -chunk, -first_position

    buckets.sort(key=order)


class BucketLauncher:
    """Scheduler of bucket reductions: `arm()` before a step's last backward pass, `finish()` after it.

    The reduction of a bucket starts as soon as two conditions hold. The reductions of all earlier buckets have started,
    and each gradient of the bucket has arrived as often as in the previous step's last backward pass.

    chunk_of: for a stage with several chunks of layers, the chunk whose backward pass gives a weight its last gradient;
    0 by default.
    """

    def __init__(self, buckets: Sequence[ReducibleBucket], chunk_of: ChunkOf) -> None:
        self._buckets = buckets
        self._chunk_of = chunk_of
        self._bucket_of: dict[nn.Parameter, ReducibleBucket] = {}
        self._hooks: list[Any] = []
        for bucket in buckets:
            for parameter in bucket.parameters:
                self._bucket_of[parameter] = bucket
                hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)
        # Number of gradients that each weight received in the previous step's last backward pass.
        self._expected: Counter[nn.Parameter] = Counter()
        # Weights that had user hooks in the previous step. A weight with hooks gets one total gradient; a weight
        # without hooks may get one per matmul. So the expected counts are wrong if hooks were added or removed.
        self._hooked: set[nn.Parameter] = set()
        self.reset()

    def close(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()

    def reset(self) -> None:
        """Prepare for a new step; the previous one may have ended in an error."""
        # Number of gradients that each weight has received so far in this step's last backward pass.
        self._counts: Counter[nn.Parameter] = Counter()
        self._armed_chunks: set[int] = set()  # chunks whose last backward pass of this step has begun or ended
        # Buckets whose reductions of this step's gradients have not started, in the order of reduction.
        self._pending = deque(self._buckets)

    def arm(self, chunk: int = 0) -> None:
        """Mark the next backward pass as the one that gives this chunk's weights their last gradients of the step."""
        self._armed_chunks.add(chunk)

    def finish(self) -> None:
        """Reduce the remaining buckets and wait until all buckets are reduced."""
        while self._pending:
            self._pending.popleft().reduce()
        for bucket in self._buckets:
            bucket.wait()
        self._expected = self._counts  # for the next step
        self._hooked = set(filter(has_hooks, self._bucket_of))
        self.reset()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Handle the gradient that autograd has accumulated; autograd may also call this hook without a gradient."""
        if parameter.grad is not None:
            self.add_gradient(parameter, self._bucket_of[parameter].add)

    def add_gradient(self, parameter: nn.Parameter, add: Callable[[nn.Parameter], None]) -> None:
        """Add a gradient to its bucket by calling `add`. Raises RuntimeError if the bucket's reduction has started."""
        bucket = self._bucket_of[parameter]
        if bucket not in self._pending:
            raise RuntimeError(
                f"a gradient of a weight of shape {tuple(parameter.shape)} arrived after its bucket was reduced over "
                "the replicas: the weight is used more often than in the previous step. Turn the overlap of reduction "
                f"and backward pass off: {setting_advice['overlap']}"
            )
        add(parameter)
        if self._chunk_of.get(parameter, 0) in self._armed_chunks:
            self._counts[parameter] += 1
            while self._pending and self._is_complete(self._pending[0]):
                self._pending.popleft().reduce()  # all replicas reduce the buckets in this order

    def _is_complete(self, bucket: ReducibleBucket) -> bool:
        """Return whether the bucket has all its expected gradients.

        The expected counts are those of the previous step. A weight that had no gradient in that step may get one
        in this step, so its bucket waits for `finish`.
        """
        if self._chunk_of.get(bucket.parameters[0], 0) not in self._armed_chunks:
            return False
        for p in bucket.parameters:
            # The weight had no gradient in the previous step, or some of its gradients are still missing.
            if not 0 < self._expected[p] <= self._counts[p]:
                return False
            # If hooks were added or removed, the expected count is wrong. A hook of the user's may also change the
            # gradient after the hook of this launcher. In both cases, the bucket waits for `finish`.
            if has_hooks(p) != (p in self._hooked) or has_post_hooks(p):
                return False
        return True
