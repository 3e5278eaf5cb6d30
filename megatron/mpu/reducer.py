"""Gradients averaged over the replicas while the backward pass still runs (Li et al. 2020, torch's DistributedDataParallel).

Parameters share buckets in the reverse of the order in which they were made, which is about the order in which
their gradients come. A bucket is on its way as soon as its last gradient is there, and buckets leave in the same order
on all ranks. DeepSpeed, without ZeRO or in bf16, begins when all gradients are there, with a copy of all of them.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .mesh import Axis

BUCKET_BYTES = 25 * 2**20


class _Bucket:
    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self.missing = 0
        self.sent: dist.Work | None = None


GradBuffers = Mapping[nn.Parameter, Tensor]


class GradReducer:
    """`arm()` before the last backward pass of a step, `finish()` after it: then `.grad` is the sum over the replicas.

    grad_buffers: where an optimizer adds gradients up instead, as soon as they are there: a 1-D view of a flat buffer for each
    of `parameters`, which follow one another as the views do. Then the sums come about there, and nothing is copied.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        axis: Axis,
        bucket_bytes: int = BUCKET_BYTES,
        grad_buffers: GradBuffers | None = None,
    ) -> None:
        self._axis, self._armed, self._next, self._grad_buffers = axis, False, 0, grad_buffers
        self._buckets = self._pack([p for p in parameters if p.requires_grad][::-1], bucket_bytes)
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._hook(bucket))  # type: ignore[no-untyped-call]

    def _pack(self, parameters: list[nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
        buckets: list[_Bucket] = []
        room = 0
        for p in parameters:
            size = p.numel() * (self._grad_buffers[p] if self._grad_buffers else p).element_size()
            if not buckets or room < size or not self._fits(p, buckets[-1].parameters[-1]):
                buckets.append(_Bucket())
                room = bucket_bytes
            buckets[-1].parameters.append(p)
            room -= size
        return buckets

    def _fits(self, p: nn.Parameter, last: nn.Parameter) -> bool:
        """Whether `p` can share a message with `last`: what is sent in place must lie directly before it."""
        if self._grad_buffers is None:
            return p.dtype == last.dtype
        mine, its = self._grad_buffers[p], self._grad_buffers[last]
        return mine.data_ptr() + mine.numel() * mine.element_size() == its.data_ptr()

    def arm(self) -> None:
        """The gradients of the next backward pass are the last of this step."""
        self._armed, self._next = True, 0
        for bucket in self._buckets:
            bucket.missing, bucket.sent = len(bucket.parameters), None

    def finish(self) -> None:
        """Send what is left, zeros for parameters without a gradient, and wait for all of it."""
        while self._next < len(self._buckets):
            self._send_next()
        for bucket in self._buckets:
            assert bucket.sent is not None
            bucket.sent.wait()
            bucket.sent = None
        self._armed = False

    def _hook(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def arrived(_: Tensor) -> None:
            if self._armed:
                bucket.missing -= 1
                while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                    self._send_next()

        return arrived

    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        if self._grad_buffers is not None:
            size = sum(p.numel() for p in bucket.parameters)
            stretch = self._grad_buffers[bucket.parameters[-1]].as_strided((size,), (1,))
            bucket.sent = dist.all_reduce(stretch, group=self._axis.group, async_op=True)
            return
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket.parameters]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        bucket.sent = dist.all_reduce(flat, group=self._axis.group, async_op=True)
        # The gradients are views of their bucket from here on: nothing is copied back.
        for p, part in zip(bucket.parameters, torch.split(flat, [p.numel() for p in bucket.parameters]), strict=True):
            p.grad = part.view_as(p)
