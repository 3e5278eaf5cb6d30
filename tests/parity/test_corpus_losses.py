"""The loss of each corpus and of each named validation set, in every layout, against plain torch and separate runs."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data_utils.indexed_writer import IndexedDatasetBuilder
from megatron.data.blend import BlendedDataset
from megatron.data.gpt2_dataset import GPT2Dataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.tokenizer import load_tokenizer
from tests.checkpoints.runs import Start, run_all
from tests.parity import reference
from tests.support import command, covering, on_ranks

from .layouts import GLOBAL_BATCH, HEADS, LAYERS, SEED, SEQ, Layout, initial_weights, ours


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, vocab_file: str) -> str:
    """A corpus of 40 documents that has other frequent tokens than `tiny_data`."""
    prefix, rng = str(tmp_path_factory.mktemp("other") / "other_text_document"), np.random.default_rng(5)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(40):
            ids = rng.integers(2000, 2050, int(rng.integers(5, 100)))
            builder.add_document(np.append(ids, load_tokenizer(vocab_file).eod))
    return prefix


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two corpora for fine-tuning; a third and two thirds of their tokens are targets."""
    prefixes, rng = (
        [str(tmp_path_factory.mktemp("records") / name) for name in ("chats", "tasks")],
        np.random.default_rng(6),
    )
    for number, prefix in enumerate(prefixes):
        with (
            IndexedDatasetBuilder(prefix, np.uint16) as tokens,
            IndexedDatasetBuilder(f"{prefix}_loss", np.uint8) as counts,
        ):
            for _ in range(80):
                ids = rng.integers(10 + 1000 * number, 60 + 1000 * number, int(rng.integers(2, 31)))
                tokens.add_document(ids)
                counts.add_document((rng.random(len(ids)) < (1 + number) / 3).astype(np.uint8))
    return prefixes


def rows_of(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found[row["split"]].append(row)
    return found


def first_losses(data: str, other: str, vocab_file: str) -> tuple[list[float], list[float]]:
    """Return (loss, share of the targets) of each corpus in the first step, from plain torch."""
    sets = [
        GPT2Dataset(indexed, range(indexed.num_documents), SEQ, SEED, "train")
        for indexed in map(IndexedDataset, (data, other))
    ]
    blend, sums, counts = BlendedDataset(sets, ["0.6", "0.4"]), [0.0, 0.0], [0, 0]
    w = {name: value.double() for name, value in initial_weights(load_tokenizer(vocab_file).vocab_size).items()}
    for n in range(GLOBAL_BATCH):
        which, k = blend.locate(n)
        text = sets[which][k]["text"]
        seen = torch.ones(1, SEQ, SEQ, dtype=torch.bool).tril()
        out = reference.logits(w, text[None, :-1], torch.arange(SEQ)[None], seen, LAYERS, HEADS)
        sums[which] += F.cross_entropy(out[0], text[1:], reduction="sum").item()
        counts[which] += SEQ
    return [s / c for s, c in zip(sums, counts, strict=True)], [c / sum(counts) for c in counts]


LAYOUTS = [
    (Layout(0, 1, 1), ""),
    (Layout(0, 2, 2), "--logits-chunk-size 20 --z-loss 0.01"),
    (Layout(2, 2, 1), "--logits-chunk-size 20"),
    (Layout(2, 1, 2), "--pipeline-schedule zb-h1 --sequence-parallel"),
    (Layout(2, 1, 1, cp=2), ""),
    (Layout(0, 2, 1), "--no-overlap-grad-reduce"),
]


@pytest.mark.parametrize(("layout", "more"), covering(LAYOUTS, lambda case: case in LAYOUTS[1:5:3], several=True))
def test_losses_of_corpora_are_those_of_plain_torch(
    layout: Layout, more: str, tmp_path: Path, tiny_data: str, other: str, vocab_file: str
) -> None:
    blend = f"0.6 {tiny_data} 0.4 {other}"
    losses = ours(layout, tmp_path, blend, vocab_file, *more.split(), precision="fp64", steps=3)
    found = rows_of(tmp_path)
    corpora = [found["train/tiny"], found["train/other"]]
    expected, shares = first_losses(tiny_data, other, vocab_file)
    # A pipeline reports additional losses in fp32, as DeepSpeed does.
    assert [rows[0]["lm_loss"] for rows in corpora] == pytest.approx(expected, rel=1e-7)
    assert [rows[0]["target_share"] for rows in corpora] == pytest.approx(shares, rel=1e-7)
    for loss, *rows in zip(losses, *corpora, strict=True):
        assert sum(row["lm_loss"] * row["target_share"] for row in rows) == pytest.approx(loss, rel=1e-7)


def test_losses_between_log_lines_are_averaged(tmp_path: Path, tiny_data: str, other: str, vocab_file: str) -> None:
    """A log line of four steps has the mean of the losses of its steps, for each corpus and in total."""
    blend = f"0.6 {tiny_data} 0.4 {other}"
    for every in (1, 4):
        more = "--precision fp32", "--log-interval", str(every)
        ours(Layout(0, 1, 1), tmp_path / str(every), blend, vocab_file, *more[1:], steps=4)
    single, joined = (rows_of(tmp_path / str(every)) for every in (1, 4))
    for name in ("tiny", "other"):
        rows, (row,) = single[f"train/{name}"], joined[f"train/{name}"]
        shares = [each["target_share"] for each in rows]
        mean = sum(each["lm_loss"] * share for each, share in zip(rows, shares, strict=True)) / sum(shares)
        assert (row["lm_loss"], row["target_share"]) == (pytest.approx(mean), pytest.approx(sum(shares) / 4))
    (total,) = joined["train"]
    parts = [joined[f"train/{name}"][0] for name in ("tiny", "other")]
    assert sum(row["lm_loss"] * row["target_share"] for row in parts) == pytest.approx(total["lm_loss"])


def test_each_named_set_has_the_loss_of_a_run_that_validates_on_it_alone(
    tmp_path: Path, tiny_data: str, other: str, vocab_file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def start(name: str, model: str, flags: str) -> Start:
        return Start(model, tmp_path / f"{model}-{name}", f"{flags} --train-iters 2 --eval-iters 2 --batch-size 2")

    train = f"--train-data-path {tiny_data} --valid-data-path"
    models = ("gpt2", "t5-v1.1")
    sets = {"web": tiny_data, "books": other}
    starts = [
        start(name, model, f"{train} {words}")
        for model in models
        for name, words in (sets | {"both": f"web={tiny_data} books={other}"}).items()
    ]
    on_ranks(2, run_all, starts, None, vocab_file)
    for model in models:
        both = rows_of(tmp_path / f"{model}-both")
        for name in sets:
            (alone,), (row,) = rows_of(tmp_path / f"{model}-{name}")["valid"], both[f"valid/{name}"]
            assert row == {**alone, "split": f"valid/{name}"}
        (total,) = both["valid"]
        low, high = sorted(both[f"valid/{name}"][0]["lm_loss"] for name in sets)
        assert low < total["lm_loss"] < high
        if model == "gpt2":  # both sets have the same number of targets
            assert total["lm_loss"] == pytest.approx((low + high) / 2, rel=1e-12)


def _close(ours: dict[str, Any], theirs: dict[str, Any], what: str) -> None:
    for key in ("lm_loss", "target_share"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-5), what


def test_other_objectives_in_layouts(
    tmp_path: Path, tiny_data: str, other: str, records: list[str], vocab_file: str
) -> None:
    """All layouts agree on samples with unequal numbers of targets, and the weighted mean is the loss of the blend."""
    text, chats = f"--data-path 0.6 {tiny_data} 0.4 {other}", f"--data-path 0.5 {records[0]} 0.5 {records[1]}"
    ways = {
        "t5-v1.1": text,
        "t5-cpm": text,
        "llama": f"{chats} --objective sft --no-reset-position-ids",
        "gpt2": f"{text} --objective prefix-lm",
    }
    layouts = {"one": (1, "--gas 2"), "pp2": (2, "--gas 2 --pipe-parallel-size 2")}
    for layout, (ranks, flags) in layouts.items():
        starts = [
            Start(
                model,
                tmp_path / layout / model,
                f"{flags} {more} --split 8,2 --train-iters 2 --eval-iters 2 --batch-size 2",
            )
            for model, more in ways.items()
        ]
        on_ranks(ranks, run_all, starts, None, vocab_file)
    for model in ways:
        one = rows_of(tmp_path / "one" / model)
        names = sorted(split for split in one if "/" in split)
        assert len(names) == 4
        for total in (*one["train"], *one["valid"]):
            split = total["split"]
            parts = [row for name in names if name.startswith(split) for row in one[name]]
            parts = [row for row in parts if row["iteration"] == total["iteration"]]
            mean = sum(row["lm_loss"] * row["target_share"] for row in parts)
            assert mean == pytest.approx(total["lm_loss"], rel=1e-6), (model, total)
        found = rows_of(tmp_path / "pp2" / model)
        assert names == sorted(split for split in found if "/" in split)
        for name in names:
            for here, there in zip(found[name], one[name], strict=True):
                _close(here, there, f"{model} {name}")


@pytest.mark.parametrize(
    ("words", "named"),
    [("web={a} {b}", "name"), ("web={a} web={b}", "web"), ("web=nowhere", "nowhere.idx"), ("web={a} books=", "books=")],
)
def test_bad_names_are_refused(
    words: str, named: str, tmp_path: Path, tiny_data: str, other: str, vocab_file: str
) -> None:
    argv = ["--train-data-path", tiny_data, "--valid-data-path", *words.format(a=tiny_data, b=other).split()]
    done = command("python", "pretrain_gpt2.py", *argv, "--vocab-file", vocab_file, "--run-dir", str(tmp_path / "run"))
    assert done.returncode != 0 and named in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
