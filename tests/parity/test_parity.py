"""In every layout, GPT-2 has the losses of plain torch in one process."""

import json
import math
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from megatron import mpu
from megatron.features.compiling import compiler_found
from tests.support import FULL, covering

from .layouts import LAYOUTS, LEARNS, Layout, ours, plain

# Layouts that run by default: a pipeline and ZeRO alone, and all three kinds of parallelism together. Below, tensor
# parallelism runs alone, with separate documents.
COVERING = [
    Layout(1, 1, 1),
    Layout(2, 1, 1),
    Layout(2, 2, 2),
    Layout(0, 2, 1, zero=2),
    Layout(0, 2, 1, zero=3),
]
MIXED = [Layout(0, 2, 1, zero=1), Layout(0, 2, 1, zero=2), Layout(0, 2, 1, zero=3), Layout(2, 1, 2, zero=1)]


@pytest.fixture(scope="module")
def expected(tiny_data: str, vocab_file: str) -> list[float]:
    return plain(tiny_data, vocab_file)


@pytest.mark.parametrize("layout", covering(LAYOUTS, COVERING.__contains__), ids=str)
def test_losses_equal_one_process(
    layout: Layout, expected: list[float], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    np.testing.assert_allclose(ours(layout, tmp_path, tiny_data, vocab_file), expected, rtol=1e-5)


def test_the_reference_learns(tiny_data: str, vocab_file: str) -> None:
    """The loss of plain torch falls, so the comparisons with this loss can detect wrong training."""
    expected = plain(tiny_data, vocab_file, steps=LEARNS)
    assert expected[0] - expected[-1] > 0.3


FP64 = [Layout(0, 2, 2), Layout(2, 1, 2), Layout(2, 2, 1)]


@pytest.mark.quick
@pytest.mark.parametrize("layout", covering(FP64, FP64[:2].__contains__), ids=str)
def test_in_fp64_nothing_but_the_order_of_sums_differs(
    layout: Layout, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    found = ours(layout, tmp_path, tiny_data, vocab_file, precision="fp64")
    np.testing.assert_allclose(found, plain(tiny_data, vocab_file, dtype=torch.float64), rtol=1e-10)


DOCUMENTS = [Layout(0, 1, 2), Layout(2, 2, 1), Layout(4, 1, 2)]


@pytest.mark.parametrize("layout", covering(DOCUMENTS, DOCUMENTS[:2].__contains__), ids=str)
def test_documents_apart_and_uneven_target_counts(
    layout: Layout, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """Losses equal plain torch's if documents are separate and micro-batches have unequal numbers of targets."""
    found = ours(layout, tmp_path, tiny_data, vocab_file, precision="fp64", by_document=True)
    expected = plain(tiny_data, vocab_file, dtype=torch.float64, by_document=True)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


ADAM = [Layout(0, 2, 1, zero=1), Layout(2, 1, 2), Layout(2, 2, 1, zero=1)]


@pytest.mark.parametrize("layout", covering(ADAM, ADAM[2:].__contains__), ids=str)
def test_with_adam(layout: Layout, tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    found = ours(layout, tmp_path, tiny_data, vocab_file, optimizer="adam")
    np.testing.assert_allclose(found, plain(tiny_data, vocab_file, optimizer="adam"), rtol=1e-5)


AGAIN = [(Layout(0, 1, 1), "1"), (Layout(0, 1, 1), "2"), (Layout(2, 1, 1), "1"), (Layout(2, 1, 1), "2")]


GATHERING = [Layout(0, 2, 1, zero=1), Layout(1, 2, 2, zero=1), Layout(2, 2, 1, zero=1)]


@pytest.mark.parametrize("layout", covering(GATHERING, lambda layout: layout.pp == 2), ids=str)
def test_weights_gathered_in_the_next_forward_pass(
    layout: Layout, expected: list[float], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """Losses equal plain torch's with --overlap-param-gather."""
    found = ours(layout, tmp_path, tiny_data, vocab_file, "--overlap-param-gather")
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("layout", "interval"), [pytest.param(*case, marks=[] if case in AGAIN[1:3] else FULL) for case in AGAIN]
)
def test_recomputed_activations(
    layout: Layout, interval: str, expected: list[float], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    more = ("--checkpoint-activations", "--checkpoint-num-layers", interval)
    np.testing.assert_allclose(ours(layout, tmp_path, tiny_data, vocab_file, *more), expected, rtol=1e-5)


@pytest.mark.parametrize("library", ["onednn", pytest.param("torch", marks=FULL)])
@pytest.mark.parametrize(
    "layout", covering([Layout(2, 1, 2), Layout(0, 2, 2)], [Layout(2, 1, 2)].__contains__), ids=str
)
def test_whoever_multiplies(
    layout: Layout, library: str, expected: list[float], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """Losses equal the reference's, whether oneDNN or torch computes the matmuls."""
    if library == "onednn" and not mpu.onednn_is_there():
        pytest.skip("this build of torch has no oneDNN")
    found = ours(layout, tmp_path, tiny_data, vocab_file, "--cpu-matmul", library)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_dropout_does_not_depend_on_stages_nor_on_recomputing(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """Losses with dropout are the same for one and two stages, with and without recomputation."""
    dropout = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
    whole = ours(Layout(0, 1, 1), tmp_path / "a", tiny_data, vocab_file, *dropout, precision="fp64")
    cut = ours(Layout(2, 1, 1), tmp_path / "b", tiny_data, vocab_file, *dropout, precision="fp64")
    again = ours(
        Layout(2, 1, 1), tmp_path / "c", tiny_data, vocab_file, *dropout, "--checkpoint-activations", precision="fp64"
    )
    without = ours(Layout(0, 1, 1), tmp_path / "d", tiny_data, vocab_file, precision="fp64", steps=1)
    np.testing.assert_allclose(cut, whole, rtol=1e-10)
    np.testing.assert_allclose(again, whole, rtol=1e-10)
    assert abs(whole[0] - without[0]) > 1e-6


@pytest.mark.parametrize(
    ("stages", "schedule"),
    [
        (4, "--pipeline-schedule gpipe"),
        (4, "--pipeline-schedule zb-h1"),
        (4, "--pipeline-extra-warmup 1"),
        (2, "--pipeline-schedule interleaved --virtual-pipeline-size 2"),
        (2, "--partition-method measured"),
        (3, "--partition-method balanced"),
        (1, "--partition-method balanced --pipeline-schedule interleaved --virtual-pipeline-size 2"),
        pytest.param(
            2, "--partition-method balanced --pipeline-schedule interleaved --virtual-pipeline-size 2", marks=FULL
        ),
    ],
)
def test_every_schedule(
    stages: int, schedule: str, expected: list[float], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    found = ours(Layout(stages, 1, 1), tmp_path, tiny_data, vocab_file, *schedule.split())
    np.testing.assert_allclose(found, expected, rtol=1e-5)


CHUNKED = [
    (Layout(0, 1, 1), ""),
    (Layout(0, 2, 1, zero=1), ""),
    (Layout(0, 2, 1, zero=2), ""),
    (Layout(0, 2, 1, zero=3), ""),
    (Layout(0, 2, 2), "--sequence-parallel"),
    (Layout(2, 1, 1), "--pipeline-schedule zb-h1"),
    (Layout(2, 1, 1), "--pipeline-schedule zb-h1 --no-tie-embeddings"),
    (Layout(1, 1, 1), "--pipeline-schedule zb-h1"),
    (Layout(2, 1, 1), "--pipeline-schedule gpipe"),
    (Layout(2, 2, 1, zero=1), "--pipeline-schedule interleaved --virtual-pipeline-size 2"),
    (Layout(2, 1, 2), "--sequence-parallel --checkpoint-activations"),
    (Layout(2, 1, 1), "--partition-method measured"),
]


@pytest.mark.parametrize(("layout", "more"), covering(CHUNKED, (CHUNKED[1], CHUNKED[5]).__contains__, several=True))
def test_logits_in_chunks(
    layout: Layout, more: str, expected: list[float], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """Losses equal plain torch's with --logits-chunk-size 20 and micro-batches of 48 tokens.

    Since the model in plain torch has a tied output layer, losses with --no-tie-embeddings are compared with those of
    --logits-chunk-size 0.
    """
    if "--no-tie-embeddings" in more:
        expected = ours(layout, tmp_path / "whole", tiny_data, vocab_file, *more.split(), "--logits-chunk-size", "0")
    found = ours(layout, tmp_path / "chunks", tiny_data, vocab_file, *more.split(), "--logits-chunk-size", "20")
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("layout", "precision"),
    covering(
        [(layout, precision) for layout in MIXED for precision in ("bf16", "fp16")],
        [(MIXED[0], "bf16")].__contains__,
        several=True,
    ),
)
def test_logits_in_chunks_in_mixed_precision(
    layout: Layout, precision: str, expected: list[float], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """Losses in bf16 and fp16 are within 0.2% of those in fp32 with --logits-chunk-size."""
    found = ours(layout, tmp_path, tiny_data, vocab_file, "--logits-chunk-size", "20", precision=precision)
    np.testing.assert_allclose(found, expected, rtol=2e-3)


Z = [
    (Layout(0, 2, 1), ""),
    (Layout(2, 1, 2), "--logits-chunk-size 20"),
    (Layout(2, 2, 1), "--eod-mask-loss --reset-position-ids --reset-attention-mask"),
    (Layout(0, 1, 2), "--reference-ops cross-entropy"),
]


@pytest.mark.parametrize(("layout", "more"), covering(Z, Z[1:3].__contains__, several=True))
def test_z_loss(layout: Layout, more: str, tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """--z-loss changes the training as in plain torch; it is logged separately, not as part of the loss."""
    apart = "--eod-mask-loss" in more
    found = ours(layout, tmp_path, tiny_data, vocab_file, *more.split(), "--z-loss", "0.01", precision="fp64")
    expected = plain(tiny_data, vocab_file, dtype=torch.float64, by_document=apart, z_loss=0.01)
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    assert abs(found[-1] - plain(tiny_data, vocab_file, dtype=torch.float64, by_document=apart)[-1]) > 1e-4
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    # Initial logits are almost 0, so Z, the sum of their exponentials, is about 3000, the number of tokens.
    assert rows[0]["z_loss"] == pytest.approx(0.01 * math.log(3000) ** 2, rel=0.01)
    assert all("z_loss" in row for row in rows if row["split"] == "train")


SEQUENCE = [Layout(0, 1, 2), Layout(0, 2, 2, zero=1), Layout(2, 1, 2), Layout(2, 2, 2)]
SAVING = (
    "",
    "--checkpoint-activations",
    "--checkpoint-attention",
    "--recompute-modules norm qkv activation",
    "--pipeline-schedule zb-h1",
)


@pytest.mark.parametrize("saving", covering(SAVING, SAVING[3:4].__contains__))
@pytest.mark.parametrize("layout", covering(SEQUENCE, SEQUENCE[2:3].__contains__), ids=str)
def test_sequence_parallelism(
    layout: Layout, saving: str, expected: list[float], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    if "zb-h1" in saving and layout.pp == 0:
        pytest.skip("a schedule of pipelines")
    found = ours(layout, tmp_path, tiny_data, vocab_file, "--sequence-parallel", *saving.split())
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def needs_a_compiler() -> None:
    if not compiler_found():
        pytest.skip("needs a C++ compiler")


COMPILED = [Layout(0, 1, 1), Layout(0, 2, 2, zero=1), Layout(2, 1, 2)]


@pytest.mark.parametrize("layout", covering(COMPILED, [].__contains__), ids=str)
def test_compiled_layers(
    layout: Layout, expected: list[float], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    needs_a_compiler()
    np.testing.assert_allclose(ours(layout, tmp_path, tiny_data, vocab_file, "--compile"), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (Layout(0, 2, 1, zero=1), ()),
        (Layout(0, 1, 2, zero=1), ("--sequence-parallel", "--checkpoint-activations")),
        (Layout(2, 1, 1, zero=1), ("--checkpoint-activations",)),
    ],
    ids=str,
)
def test_compiled_layers_add_to_the_sums_of_the_optimizer(
    layout: Layout,
    more: tuple[str, ...],
    expected: list[float],
    tmp_path: Path,
    tiny_data: str,
    vocab_file: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Losses equal plain torch's with the settings that are the default on CUDA: --compile with ZeRO 1."""
    needs_a_compiler()
    backend = "aot_eager_decomp_partition"  # without kernel generation
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    flags = ("--compile", "--cpu-matmul", "torch", *more)
    found = ours(layout, tmp_path, tiny_data, vocab_file, *flags)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("layout", covering([Layout(0, 1, 2), Layout(0, 2, 2)], [].__contains__), ids=str)
def test_everything_at_once(
    layout: Layout, expected: list[float], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """Compiled layers, sequence parallelism and attention recomputation together give the reference's losses."""
    needs_a_compiler()
    more = ("--compile", "--sequence-parallel", "--checkpoint-attention")
    np.testing.assert_allclose(ours(layout, tmp_path, tiny_data, vocab_file, *more), expected, rtol=1e-5)


@FULL
def test_compiled_layers_draw_the_same_dropout(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    needs_a_compiler()
    dropout = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
    compiled = ("--compile", "--checkpoint-activations")
    found = ours(Layout(2, 1, 1), tmp_path / "a", tiny_data, vocab_file, *dropout, *compiled)
    np.testing.assert_allclose(found, ours(Layout(0, 1, 1), tmp_path / "b", tiny_data, vocab_file, *dropout), rtol=1e-5)


@pytest.mark.parametrize("cuts", covering(["0,1,8", "0,3,8", "0,7,8"], {"0,1,8", "0,3,8"}.__contains__))
def test_any_cut(cuts: str, expected: list[float], tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """Losses do not depend on where stages begin: after an embedding, between blocks, or before the output layer."""
    found = ours(Layout(2, 1, 1), tmp_path, tiny_data, vocab_file, "--partition-method", cuts)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", covering(MIXED, MIXED[3:].__contains__), ids=str)
def test_mixed_precision_follows_fp32(
    layout: Layout, precision: str, expected: list[float], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """Losses in bf16 and fp16 are within 0.2% of those in fp32; bf16 rounds activations to 8 significant bits."""
    found = ours(layout, tmp_path, tiny_data, vocab_file, precision=precision)
    np.testing.assert_allclose(found, expected, rtol=2e-3)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=FULL)])
@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved --virtual-pipeline-size 2"], ids=["zb-h1", "interleaved"])
def test_mixed_precision_in_every_order(
    schedule: str, precision: str, expected: list[float], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """Losses in bf16 and fp16 are within 0.2% of those in fp32 with zb-h1 and interleaved schedules.

    These schedules accumulate gradients in fp32.
    """
    flags = ("--pipeline-schedule", *schedule.split())
    found = ours(Layout(2, 1, 1, zero=1), tmp_path, tiny_data, vocab_file, *flags, precision=precision)
    np.testing.assert_allclose(found, expected, rtol=2e-3)
