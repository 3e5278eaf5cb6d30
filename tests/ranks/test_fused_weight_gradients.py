"""A matmul that adds a weight gradient directly to the gradient bucket gives the same sums as autograd."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tds
from megatron import mpu
from tds import buckets
from tests.checkpoints.runs import Start, run_all, whole_tensors
from tests.support import on_ranks


class Model(nn.Module):
    """A model with four kinds of weights: used twice, used outside of its layer, with a gradient hook, and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.shared, self.watched, self.frozen = (
            mpu.ColumnParallelLinear(6, 6, gather_output=False, init_method=mpu.normal(0.5)) for _ in range(4)
        )
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.twice, self.twice, self.shared, self.watched, self.frozen):
            x = torch.tanh(layer(x)[0])
        return x.square().sum() + self.shared.weight.square().sum()


def _widened(total: Tensor, left: Tensor, right: Tensor, *, beta: int, out: Tensor, out_dtype: Any = None) -> Tensor:
    """Emulate torch.addmm with `out_dtype`, which needs CUDA: add a bf16 matmul to the fp32 tensor `total`."""
    return torch.add(total * beta, left.float() @ right.float(), out=out)


def _sums(dtype: torch.dtype) -> int:
    mpu.initialize_model_parallel(1)
    torch.manual_seed(0)
    model = Model().to(dtype)
    model.watched.weight.register_hook(lambda grad: grad * 2)
    plain = copy.deepcopy(model)
    plain.watched.weight.register_hook(lambda grad: grad * 2)
    ours = tds.DistributedOptimizer(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1))
    ours.attach(model, mpu.get_data_parallel_group())
    added = []
    honest = ours.buckets[0].__class__.add_matmul
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets.Bucket, "add_matmul", lambda *args: (added.append(args[3]), honest(*args)))
        names = {name: p for name, p in plain.named_parameters() if p.requires_grad}
        sums: dict[str, Tensor] = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in names.items()}
        for step in range(2):
            for micro in range(3):
                x = torch.randn(4, 6, dtype=dtype)
                plain(x).backward()
                for name, p in names.items():
                    assert p.grad is not None
                    sums[name] = (sums[name] if micro else 0) + p.grad.float()
                    p.grad = None
                if micro == 2:
                    ours.arm()
                model(x).backward()
            ours.finish()
            for name, p in model.named_parameters():
                if p.requires_grad:
                    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
                    torch.testing.assert_close(
                        ours._bucket_of[p]._grad_of[p], sums[name], **tolerance, msg=f"{step} {name}"
                    )
            ours.zero_grad()
        handed_out = torch.autograd.grad(model(x), model.twice.weight)
        torch.testing.assert_close(handed_out, torch.autograd.grad(plain(x), plain.twice.weight))
    assert {id(p) for p in added} == {id(model.twice.weight), id(model.shared.weight)}
    return len(added)


def _sums_as_on_cuda() -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets.Bucket, "accumulates_matmuls", True)
        patch.setattr(torch, "addmm", _widened)
        return _sums(torch.bfloat16)


def test_sums_are_those_of_autograd() -> None:
    """Accumulated gradients equal autograd's, even for weights that are used twice or have a gradient hook."""
    assert on_ranks(1, _sums, torch.float32) == [2 * 3 * 3]
    assert on_ranks(1, _sums_as_on_cuda) == [2 * 3 * 3]


VIEWS = {"aten.t.default", "aten.detach.default", "aten.slice.Tensor"}  # operators that read no elements


class _Touched(TorchDispatchMode):
    """Counts how often operations read or write a tensor of `numbers` elements."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.count = numbers, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "view" not in str(func) and str(func) not in VIEWS:
            self.count += sum(isinstance(t, Tensor) and t.numel() == self.numbers for t in (*args, out))
        return out


def _passes(direct: bool) -> list[int]:
    mpu.initialize_model_parallel(1)
    layer = mpu.ColumnParallelLinear(6, 7, bias=False, gather_output=False)
    ours = tds.DistributedOptimizer(torch.optim.AdamW(layer.parameters()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets.Bucket, "accumulates_matmuls", direct)
        ours.attach(layer, mpu.get_data_parallel_group())
    counts = []
    for _ in range(2):
        loss = layer(torch.randn(2, 6))[0].sum()
        with _Touched(42) as touched:
            loss.backward()
        counts.append(touched.count)
    return counts


def _taken(again: bool, looked_up: bool) -> int:
    """Train two steps; return how many matmuls added their weight gradient directly to the gradient bucket.

    again: recompute the layer in the backward pass. looked_up: also use the weight as an embedding table.
    """
    mpu.initialize_model_parallel(1)
    table = mpu.VocabParallelEmbedding(8, 6, multiple=1)
    ours = tds.DistributedOptimizer(torch.optim.AdamW(table.parameters()))
    ours.attach(table, mpu.get_data_parallel_group())
    taken = 0
    with pytest.MonkeyPatch.context() as patch:
        honest = buckets.Bucket.add_matmul

        def add(*args: Any) -> None:
            nonlocal taken
            taken += 1
            honest(*args)

        patch.setattr(buckets.Bucket, "add_matmul", add)
        for _ in range(2):
            x = table(torch.tensor([1, 2])) if looked_up else torch.randn(2, 6, requires_grad=True)
            out = mpu.checkpoint(table.logits, x) if again else table.logits(x)
            ours.arm()
            out.sum().backward()
            ours.finish()
            ours.zero_grad()
    return taken


def _four() -> list[int]:
    return [_taken(again, looked_up) for again in (False, True) for looked_up in (False, True)]


def test_recomputed_products_are_taken_and_those_of_a_tied_table_are_not() -> None:
    """Recomputed matmuls add to the bucket directly; matmuls of a tied embedding table never do."""
    assert on_ranks(1, _four) == [[2, 0, 2, 0]]


def _both() -> tuple[list[int], list[int]]:
    return _passes(True), _passes(False)


def test_memory_is_gone_over_less_often() -> None:
    """A backward pass whose matmuls add to the bucket directly reads and writes the gradient 2 times, not 4."""
    assert on_ranks(1, _both) == [([2, 2], [4, 4])]


def _resumed(folder: Path, data: str, vocab_file: str) -> None:
    # Only with that many tokens in a matmul, its sum and autograd's differ in the last bits on a CPU.
    flags = (
        "--zero-stage 1 --precision fp32 --cpu-matmul torch --hidden-size 64 --num-layers 1 --seq-length 256 "
        "--batch-size 4 --gas 2 --train-iters 4 --save-interval 4"
    )
    through = Start("gpt2", folder / "through", flags)
    halves = Start("gpt2", folder / "halves", f"{flags} --exit-interval 2")
    run_all([through, halves, halves], data, vocab_file)


def test_the_first_step_of_a_start_adds_gradients_like_all_others(
    tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """A resumed run has the bits of the uninterrupted one where matmuls add to the sums of the optimizer."""
    on_ranks(1, _resumed, tmp_path, tiny_data, vocab_file)
    expected = whole_tensors(tmp_path / "through" / "checkpoints" / "iter_0000004")
    found = whole_tensors(tmp_path / "halves" / "checkpoints" / "iter_0000004")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name
