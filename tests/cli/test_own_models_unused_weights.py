"""Users' models with frozen, unused or temporarily unused weights resume as if uninterrupted."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import get_args, mpu
from megatron.training import pretrain
from tests.checkpoints.runs import whole_tensors
from tests.support import covering, losses, on_ranks

from .test_own_model import _flags


class Sometimes(nn.Module):
    """A model that uses its layer `extra` only in the iterations `used`. first: whether `extra` is the first layer."""

    def __init__(self, vocab_size: int, used: tuple[int, ...], first: bool = False) -> None:
        super().__init__()
        self.used = used
        if first:
            self.extra = nn.Linear(8, 8)
        self.table = nn.Embedding(vocab_size, 8)
        if not first:
            self.extra = nn.Linear(8, 8)
        self.out = nn.Linear(8, vocab_size)

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        hidden = self.table(inputs[0].t())
        if mpu.get_rng().iteration in self.used:
            hidden = hidden + self.extra(hidden)
        logits: Tensor = self.out(hidden)
        return logits


def _frozen_stage() -> Any:
    """Return the model of examples/pretrain_decoder.py with all weights of stage 0 frozen, including tied weights."""
    import examples.pretrain_decoder as entry

    model = entry.model_provider()
    weights = model.parameters() if model.stage_id == 0 else model.tied_modules.parameters()
    for weight in weights:
        weight.requires_grad_(False)
    return model


def _run(provider: Any, argv: list[str]) -> list[float]:
    import contextlib
    import io

    import examples.pretrain_decoder as entry

    with contextlib.redirect_stdout(io.StringIO()):
        pretrain(
            entry.train_valid_test_datasets_provider, provider, entry.forward_step, name="x", argv=argv, exit=False
        )
    rows = Path(argv[argv.index("--run-dir") + 1], "metrics.jsonl").read_text().splitlines()
    return losses([json.loads(row) for row in rows])


def _sometimes(argv: list[str], used: tuple[int, ...], first: bool = False) -> list[float]:
    return _run(lambda: Sometimes(get_args().vocab_size, used, first), argv)


BODIES: dict[str, tuple[int, int, Any, str]] = {
    "never, the first weights": (1, 0, partial(_sometimes, used=(), first=True), "--zero-stage 0"),
    "from iteration 3 on": (1, 0, partial(_sometimes, used=(2, 3, 4, 5)), "--zero-stage 0"),
    "after the resume": (1, 0, partial(_sometimes, used=(3, 4, 5)), "--zero-stage 0"),
    "before it, on 2 replicas": (2, 0, partial(_sometimes, used=(0, 4)), "--zero-stage 0 --no-overlap-grad-reduce"),
    "a frozen stage": (2, 2, partial(_run, _frozen_stage), ""),
    "a frozen stage, ZeRO 0": (2, 2, partial(_run, _frozen_stage), "--zero-stage 0"),
}


@pytest.mark.parametrize("name", covering(list(BODIES), lambda name: name != "a frozen stage, ZeRO 0"))
def test_what_has_moments_is_saved_with_its_own_step(
    name: str, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    ranks, stages, body, more = BODIES[name]

    def run(folder: str, iterations: int) -> list[float]:
        flags = _flags(tiny_data, vocab_file, stages, 1, 4 // ranks if not stages else 4, iterations, more)
        found: list[float] = on_ranks(ranks, body, ["--run-dir", str(tmp_path / folder), *flags])[0]
        return found

    whole = run("whole", 6)
    run("halves", 3)
    index = json.loads((tmp_path / "halves" / "checkpoints" / "iter_0000003" / "checkpoint.json").read_text())
    assert index["optimizer"]["moments"] == ["exp_avg", "exp_avg_sq"] and index["optimizer"]["step"] == 3
    if name.startswith(("from", "before")):
        assert index["optimizer"]["steps"] == {"extra.weight": 1, "extra.bias": 1}
    assert run("halves", 6) == whole


@pytest.mark.parametrize(("ranks", "more"), [(1, ""), (2, ""), (2, "--no-overlap-grad-reduce")])
def test_a_weight_that_no_replica_uses_stays_as_it_is(
    ranks: int, more: str, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """Without ZeRO, a weight that no replica uses in a step stays unchanged, as in plain torch.

    If its gradient were zero instead of None, AdamW's momentum and weight decay would change the weight.
    """
    flags = _flags(tiny_data, vocab_file, 0, 1, 4 // ranks, 6, f"--zero-stage 0 --weight-decay 0.1 {more}")
    on_ranks(ranks, partial(_sometimes, used=(0, 1)), ["--run-dir", str(tmp_path), *flags])
    early, late = (whole_tensors(tmp_path / "checkpoints" / f"iter_000000{i}")["weight.extra.weight"] for i in (3, 6))
    assert torch.equal(torch.as_tensor(early), torch.as_tensor(late))
