"""Losses and gradients stay the same if a flag switches off an optimisation of the model code."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.command_line import parse
from megatron.config.model_settings import FUSED
from megatron.model import GPT2Model, T5Model
from megatron.mpu import linear
from megatron.mpu.sequence import Pending
from megatron.ranks.initialize import initialize_megatron
from tests.support import covering, on_ranks

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --family t5 --enc-seq-length 12 --dec-seq-length 6 "
    "--vocab-size 50 "
    "--make-vocab-size-divisible-by 4 --hidden-dropout 0 --attention-dropout 0 --batch-size 3 --normalization rmsnorm "
    "--activation gated-gelu --position-embedding relative --no-scale-attention --no-hidden-bias --no-tie-embeddings"
)


def _graph(loss: Tensor) -> set[str]:
    """Return the names of the autograd nodes on which a loss depends."""
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [behind for behind, _ in node.next_functions]
    return {type(node).__name__ for node in seen}


@contextmanager
def _listening() -> Iterator[list[str]]:
    """Yield a list of a backward pass's events, in order.

    "start": an asynchronous all-reduce begins. "settle": the pass waits for that all-reduce. "matmul": a matmul.
    """
    said: list[str] = []

    def telling(name: str, call: Any) -> Any:
        def told(*args: Any, **kwargs: Any) -> Any:
            said.append(name)
            return call(*args, **kwargs)

        return told

    with pytest.MonkeyPatch.context() as patch:
        for name, owner, what in (
            ("start", Pending, "__init__"),
            ("settle", Pending, "block"),
            ("matmul", linear, "matmul"),
        ):
            patch.setattr(owner, what, telling(name, getattr(owner, what)))
        yield said


OURS = {
    "biased-attention": "_BlockAttentionBackward",
    "document-attention": "_FlashAttentionBackward",
    "cross-entropy": "_VocabParallelCrossEntropyBackward",
    "gated-gelu": "_GatedBackward",
    "relative-positions": "FlipBackward0",
    "rms-norm": "_RMSNormBackward",
    "rope": "_SplitGroupedBackward",
    "swiglu": "_GatedBackward",
}
IN_LLAMA = ("rope", "swiglu")  # optimisations to test with Llama; the others are tested with T5


LLAMA = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --num-key-value-heads 2 --family llama --seq-length 12 "
    "--vocab-size 50 "
    "--make-vocab-size-divisible-by 4 --hidden-dropout 0 --attention-dropout 0 --batch-size 3 --normalization "
    "rmsnorm --qk-norm "
    "--activation swiglu --position-embedding rope --no-hidden-bias --no-tie-embeddings"
)


def _llama_learns(flags: str) -> tuple[dict[str, Tensor], set[str], list[str]]:
    """Return Llama's losses and gradients in fp64, its autograd nodes, and the events of its backward pass."""
    config = parse(f"{LLAMA} {flags}".split())
    initialize_megatron(config)
    tokens = torch.randint(50, (3, 13), generator=torch.Generator().manual_seed(1))
    return _learned(GPT2Model(config).double(), tokens[:, :-1], labels=tokens[:, 1:])


def _learns(flags: str) -> tuple[dict[str, Tensor], set[str], list[str]]:
    """Return T5's losses and gradients in fp64, its autograd nodes, and the events of its backward pass."""
    config = parse(f"{FLAGS} {flags}".split())
    initialize_megatron(config)
    model = T5Model(config).double()
    dice = torch.Generator().manual_seed(1)
    encoder, decoder = torch.randint(50, (3, 12), generator=dice), torch.randint(50, (3, 7), generator=dice)
    of_encoder = torch.tensor([[1] * 5 + [2] * 7, [1] * 4 + [2] * 4 + [3] * 4, [1] * 10 + [0] * 2])
    of_decoder = torch.tensor([[1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 3, 4], [1, 1, 1, 1, 1, 0]])
    return _learned(model, encoder, decoder[:, :-1], of_encoder, of_decoder, labels=decoder[:, 1:])


def _learned(model: Any, *inputs: Tensor, labels: Tensor) -> tuple[dict[str, Tensor], set[str], list[str]]:
    losses = model(*inputs, labels=labels)
    with _listening() as said:
        losses.sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"losses": losses.detach(), **found}, _graph(losses), said


SWITCHED = [(ranks, name) for name in [*FUSED, "all"] for ranks in (1, 2)]


@pytest.mark.parametrize(
    ("ranks", "name"),
    covering(SWITCHED, lambda case: case[0] == 1 or case[1] in ("all", "cross-entropy", "swiglu"), several=True),
)
def test_unfused(ranks: int, name: str) -> None:
    flags = f"--model-parallel-size {ranks}"
    names = [each for each in FUSED if each not in IN_LLAMA] if name == "all" else [name]
    learns = _llama_learns if name in IN_LLAMA else _learns
    fused, plain = on_ranks(ranks, learns, flags), on_ranks(ranks, learns, f"{flags} --reference-ops {' '.join(names)}")
    for (ours, with_ours, _), (theirs, without, _) in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
        assert {OURS[each] for each in names} <= with_ours - without


@pytest.mark.parametrize("flags", ["", "--sequence-parallel"])
def test_sums_under_way_or_not(flags: str) -> None:
    flags += " --model-parallel-size 2"
    ahead = on_ranks(2, _learns, flags)
    in_turn = on_ranks(2, _learns, f"{flags} --no-async-tensor-model-parallel-allreduce")
    for (ours, _, said), (theirs, _, said_in_turn) in zip(ahead, in_turn, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert ("start", "matmul") in pairwise(said)
        assert {after for before, after in pairwise(said_in_turn) if before == "start"} == {"settle"}
