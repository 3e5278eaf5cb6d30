"""A training step without a pipeline does not synchronise with the device; reading its loss does."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron import mpu
from megatron.config.command_line import parse
from megatron.engines.engine import Engine
from megatron.training import start_engine
from tds import optimizer_state as zero_state
from tests.support import covering, on_ranks
from tests.text_task import TextTask

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 64 --hidden-dropout 0 "
    "--attention-dropout 0 --batch-size 2 --gas 2 --precision fp32 --partition-method type:Block"
)


class Reads(TorchDispatchMode):
    """Counts scalars read from tensors (`item`), each of which would make the CPU wait for an accelerator."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return func(*args, **(kwargs or {}))


def _engine(flags: str) -> tuple[Engine, Iterator[dict[str, torch.Tensor]]]:
    engine = start_engine(TextTask(), parse(f"{FLAGS} {flags}".split()))
    text = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1 + mpu.get_mesh().data.rank))

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield {"text": text}

    return engine, batches()


def _reads(flags: str) -> tuple[int, int]:
    """Return how many scalars a step reads from tensors, and how many a caller reads to get loss and gradient norm."""
    engine, batches = _engine(flags)
    engine.train_batch(batches, 1e-3)
    with Reads() as reads:
        step = engine.train_batch(batches, 1e-3)
    with Reads() as asked:
        assert step.loss.item() > 0
        assert float(step.grad_norm) > 0
    return reads.count, asked.count


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(1, ""), (2, ""), (2, "--model-parallel-size 2"), (2, "--model-parallel-size 2 --sequence-parallel")],
)
def test_a_step_reads_no_number(ranks: int, flags: str) -> None:
    for found in on_ranks(ranks, _reads, flags):
        assert found == (0, 2)


def _learned(flags: str) -> dict[str, torch.Tensor]:
    """Train three steps, with different text on each replica; return the fp32 weights and the last gradient norm."""
    engine, batches = _engine(flags)
    steps = [engine.train_batch(batches, 1e-2) for _ in range(3)]
    named = engine.deepspeed.module.named_parameters()
    found = {name: zero_state.get_weight(p).clone() for name, p in named}
    return found | {"norm": torch.as_tensor(float(steps[-1].grad_norm))}


@pytest.mark.parametrize(
    "flags",
    covering(
        ["--precision bf16", "--precision fp32", "--precision bf16 --model-parallel-size 2"],
        lambda flags: flags != "--precision bf16",
    ),
)
def test_gradients_added_up_under_way_are_those_that_deepspeed_adds_up_afterwards(flags: str) -> None:
    ours = on_ranks(2, _learned, flags)
    theirs = on_ranks(2, _learned, f"{flags} --no-overlap-grad-reduce")
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)  # the runs sum gradients in different orders


class Travelling:
    """A collective on its way, which notes when it is waited for."""

    def __init__(self, work: Any, events: list[str]) -> None:
        self._work = work
        self._events = events

    def wait(self) -> None:
        self._events.append("waits")
        self._work.wait()


def _events(evaluates: bool) -> list[str]:
    """Return the order in which a step starts scalar all-reduces, waits for them and computes; dp 2."""
    engine, batches = _engine("")
    engine.train_batch(batches, 1e-3)
    events: list[str] = []
    all_reduce = dist.all_reduce

    def noted(x: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if x.numel() > 2:  # gradients
            return all_reduce(x, *args, async_op=async_op, **kwargs)
        events.append("starts" if async_op else "blocks")
        work = all_reduce(x, *args, async_op=async_op, **kwargs)
        return Travelling(work, events) if async_op else work

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted_call(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return call(*args, **kwargs)

        return noted_call

    engine.loss = noting("forward", engine.loss)  # type: ignore[attr-defined]
    engine.deepspeed.backward = noting("backward", engine.deepspeed.backward)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", noted)
        if evaluates:
            engine.eval_batch(batches)
        else:
            engine.train_batch(batches, 1e-3)
    return events


def test_sums_over_replicas_travel_while_a_step_computes() -> None:
    """The number of targets travels during the first forward pass, the loss during the last backward pass."""
    step = ["starts", "forward", "waits", "backward", "forward", "starts", "backward", "waits"]
    assert on_ranks(2, _events, False) == [step] * 2
    evaluation = ["starts", "forward", "forward", "waits", "starts", "waits"]
    assert on_ranks(2, _events, True) == [evaluation] * 2
