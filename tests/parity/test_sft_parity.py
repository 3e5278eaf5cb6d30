"""In every layout, fine-tuning on packed records has the losses of plain torch, which processes records one by one."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data_utils.indexed_writer import IndexedDatasetBuilder
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.sft_dataset import Records, SftDataset
from megatron.tokenizer import load_tokenizer
from tests.parity import reference
from tests.support import covering

from .layouts import GLOBAL_BATCH, HEADS, LAYERS, LEARNS, LR, SEED, SEQ, STEPS, Layout, initial_weights, ours


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A corpus of 300 records of 2 to 30 tokens, some longer than a sample; about half of the tokens are targets."""
    prefix, rng = str(tmp_path_factory.mktemp("records") / "chats_sft"), np.random.default_rng(5)
    with (
        IndexedDatasetBuilder(prefix, np.uint16) as tokens,
        IndexedDatasetBuilder(f"{prefix}_loss", np.uint8) as counts,
    ):
        for _ in range(300):
            ids = (300 + 60 * rng.standard_exponential(int(rng.integers(2, 31)))).astype(np.int64) % 2900 + 3
            tokens.add_document(ids)
            counts.add_document((rng.random(len(ids)) < rng.random()).astype(np.uint8))
    return prefix


def _alone(of_step: list[tuple[Tensor, Tensor]], w: reference.Weights) -> Tensor:
    """Return a step's mean loss over all targets, a scalar; each record passes through the model alone."""
    total, targets = torch.zeros((), dtype=torch.float64), 0
    for ids, flags in of_step:
        s = len(ids) - 1
        seen = torch.ones(1, s, s, dtype=torch.bool).tril()
        out = reference.logits(w, ids[None, :-1], torch.arange(s)[None], seen, LAYERS, HEADS)[0]
        total = total + (F.cross_entropy(out, ids[1:], reduction="none") * flags[1:]).sum()
        targets += int(flags[1:].sum())
    return total / targets


@pytest.fixture(scope="module")
def expected(records: str, vocab_file: str) -> list[float]:
    tokens, counts = IndexedDataset(records), IndexedDataset(f"{records}_loss")
    vocab_size = load_tokenizer(vocab_file).vocab_size
    order = SftDataset(Records(records, None), range(300), SEQ, 0, SEED, "train").order
    steps = []
    for step in range(LEARNS):
        numbers = [d for n in range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH) for d in order.records(n).tolist()]
        pairs = [[torch.from_numpy(each[d][: SEQ + 1].astype(np.int64)) for each in (tokens, counts)] for d in numbers]
        steps.append(partial(_alone, [(ids, flags) for ids, flags in pairs]))
    return reference.learn(initial_weights(vocab_size), steps, LR["sgd"], "sgd", 1.0, torch.float64)


LAYOUTS = [
    (Layout(0, 1, 1), ""),
    (Layout(0, 1, 2), "--sequence-parallel"),
    (Layout(2, 1, 1), ""),
    (Layout(0, 2, 1), ""),
    (Layout(2, 2, 1), "--logits-chunk-size 20"),
    (Layout(2, 1, 2), "--reference-ops document-attention"),
    (Layout(0, 1, 1), "--num-workers 1"),
    (Layout(0, 1, 1, cp=2), ""),
]


@pytest.mark.parametrize(("layout", "more"), covering(LAYOUTS, [LAYOUTS[2], LAYOUTS[-1]].__contains__, several=True))
def test_losses_equal_records_by_themselves(
    layout: Layout, more: str, expected: list[float], records: str, tmp_path: Path, vocab_file: str
) -> None:
    flags = ("--objective", "sft", *more.split())
    found = ours(layout, tmp_path, records, vocab_file, *flags, precision="fp64")
    np.testing.assert_allclose(found, expected[:STEPS], rtol=1e-10)
    assert expected[0] - min(expected) > 0.3  # the reference's loss falls, so an error in our training would show


STATISTICS = "--objective sft --log-layers --num-experts 4 --router-z-loss 0.05 --router-aux-loss 0.1"


def _logged(layout: Layout, more: str, records: str, run_dir: Path, vocab_file: str) -> list[dict[str, Any]]:
    ours(layout, run_dir, records, vocab_file, *STATISTICS.split(), *more.split(), precision="fp64", steps=3)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_no_layout_counts_padding(records: str, tmp_path: Path, vocab_file: str) -> None:
    """Losses of routers, tokens of experts, activations and logits are those of the text, in every layout."""
    one = _logged(Layout(0, 1, 1), "", records, tmp_path / "one", vocab_file)
    order = SftDataset(Records(records, None), range(300), SEQ, 0, SEED, "train").order
    for step, row in enumerate(one):
        pieces = [order.pieces(n) for n in range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)]
        text = sum(length for each in pieces for _, _, length in each)
        assert row["padding"] == pytest.approx(1 - text / (GLOBAL_BATCH * SEQ))
        assert all(sum(tokens) == 2 * text for tokens in row["expert_tokens"].values())
    for at, (layout, more) in enumerate(COUNTED):
        found = _logged(layout, more, records, tmp_path / str(at), vocab_file)
        for row, wanted in zip(found, one, strict=True):
            for name in ("lm_loss", "router_loss", "padding", "grad_norm"):
                assert row[name] == pytest.approx(wanted[name], rel=1e-9), (layout, name)
            assert row["expert_tokens"] == wanted["expert_tokens"], layout
            for layer, metrics in wanted["layers"].items():
                assert row["layers"][layer] == pytest.approx(metrics, rel=1e-8), (layout, layer)


EVALUATED = [Layout(0, 2, 1), Layout(1, 1, 1), Layout(2, 1, 1)]


def test_evaluation_of_experts_is_that_of_every_layout(records: str, tmp_path: Path, vocab_file: str) -> None:
    """Without a pipeline, too, where the counts of targets and of text are a vector."""
    more = "--split 8,2,0 --eval-iters 2 --eval-interval 2"

    def evaluated(layout: Layout, name: str) -> list[dict[str, Any]]:
        rows = _logged(layout, more, records, tmp_path / name, vocab_file)
        return [row for row in rows if row["split"] == "valid"]

    expected = evaluated(Layout(0, 1, 1), "one")
    assert len(expected) == 2
    for at, layout in enumerate(EVALUATED):
        found = evaluated(layout, str(at))
        for row, wanted in zip(found, expected, strict=True):
            assert row["lm_loss"] == pytest.approx(wanted["lm_loss"], rel=1e-9), layout


COUNTED = [
    (Layout(0, 1, 2), "--sequence-parallel"),
    (Layout(2, 1, 1), "--batch-size 4 --gas 2"),
    (Layout(0, 2, 1), "--expert-parallel-size 2 --batch-size 1 --gas 4"),
    (Layout(0, 1, 1, cp=2), ""),
]
