"""In every layout with context parallelism, GPT-2, Llama, Qwen and Mistral have the losses of one process."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import FULL, covering

from .layouts import STEPS, Layout, ours, plain
from .llama_layouts import KINDS, LAYERS, Way, losses
from .test_llama_parity import reference
from .test_parity import needs_a_compiler

SEQUENCE = "--sequence-parallel"
INTERLEAVED = "--pipeline-schedule interleaved --virtual-pipeline-size 2"

# (layout, flags) of runs in fp64 with separate documents, so that ranks have different numbers of targets.
GRID = [
    (Layout(0, 1, 1, cp=2), ""),
    (Layout(0, 1, 1, cp=4), ""),
    (Layout(1, 1, 1, cp=2), ""),
    (Layout(0, 2, 1, cp=2), ""),
    (Layout(0, 1, 2, cp=2), ""),
    (Layout(0, 1, 2, cp=2), SEQUENCE),
    (Layout(0, 1, 2, cp=4), SEQUENCE),
    (Layout(0, 2, 2, cp=2), SEQUENCE),
    (Layout(2, 1, 1, cp=2), ""),
    (Layout(2, 1, 1, cp=2), "--pipeline-schedule zb-h1"),
    (Layout(2, 1, 1, cp=2), f"{INTERLEAVED} --checkpoint-activations"),
    (Layout(2, 1, 1, cp=4), "--pipeline-schedule gpipe --checkpoint-attention"),
    (Layout(2, 2, 1, cp=2), "--recompute-modules norm qkv activation"),
    (Layout(2, 1, 2, cp=2), f"{SEQUENCE} --pipeline-schedule zb-h1 --logits-chunk-size 10"),
    (Layout(2, 2, 2, cp=2), f"{SEQUENCE} --checkpoint-activations"),
    (Layout(2, 1, 1, cp=2), "--partition-method measured"),
    (Layout(0, 1, 1, cp=2), "--reference-ops document-attention"),
    (Layout(0, 1, 1, cp=2), "--recompute-modules norm qkv activation --logits-chunk-size 10"),
]


@pytest.mark.parametrize(
    ("layout", "more"), covering(GRID, (GRID[9],).__contains__, several=True), ids=lambda part: str(part)
)
def test_in_fp64_nothing_but_the_order_of_sums_differs(
    layout: Layout, more: str, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    found = ours(layout, tmp_path, tiny_data, vocab_file, *more.split(), precision="fp64", by_document=True)
    expected = plain(tiny_data, vocab_file, dtype=torch.float64, by_document=True)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


# (layout, flags) of runs in fp32 with attention across documents.
WHOLE = [
    *(case for case in GRID if "reference-ops" not in case[1]),
    *((Layout(0, dp, 1, zero, cp=2), "") for dp in (1, 2) for zero in (1, 2, 3)),
    (Layout(2, 1, 1, zero=1, cp=2), ""),
    (Layout(2, 2, 2, zero=1, cp=2), SEQUENCE),
    (Layout(0, 1, 1, zero=1, cp=2), "--no-overlap-grad-reduce"),
    (Layout(0, 2, 1, zero=1, cp=2), "--overlap-param-gather"),
]


@pytest.mark.parametrize(
    ("layout", "more"), covering(WHOLE, WHOLE[-10:-9].__contains__, several=True), ids=lambda part: str(part)
)
@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adam", marks=FULL)])
def test_losses_equal_one_process(
    optimizer: str, layout: Layout, more: str, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    found = ours(layout, tmp_path, tiny_data, vocab_file, *more.split(), optimizer=optimizer)
    np.testing.assert_allclose(found, plain(tiny_data, vocab_file, optimizer=optimizer), rtol=1e-5)


@FULL
@pytest.mark.parametrize("layout", [Layout(0, 1, 1, zero=1, cp=2), Layout(2, 1, 2, zero=1, cp=2)], ids=str)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_follows_fp32(
    precision: str, layout: Layout, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """Losses in bf16 and fp16 are within 0.2% of those in fp32 with context parallelism."""
    found = ours(layout, tmp_path, tiny_data, vocab_file, precision=precision)
    np.testing.assert_allclose(found, plain(tiny_data, vocab_file), rtol=2e-3)


@FULL
@pytest.mark.parametrize("more", ["", "--checkpoint-attention", SEQUENCE])
def test_compiled_layers(more: str, tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    needs_a_compiler()
    layout = Layout(0, 1, 2 if more == SEQUENCE else 1, cp=2)
    found = ours(layout, tmp_path, tiny_data, vocab_file, "--compile", *more.split(), by_document=True)
    np.testing.assert_allclose(found, plain(tiny_data, vocab_file, by_document=True), rtol=1e-5)


@FULL
@pytest.mark.parametrize(
    ("first", "then"),
    [(Layout(0, 1, 1, zero=1, cp=2), Layout(0, 2, 1)), (Layout(0, 1, 1), Layout(2, 1, 1, cp=2))],
    ids=str,
)
def test_a_checkpoint_knows_no_context_ranks(
    first: Layout, then: Layout, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    more = "--train-iters", str(STEPS // 2), "--save-interval", str(STEPS // 2)
    found = ours(first, tmp_path / "first", tiny_data, vocab_file, *more, optimizer="adam")
    load = "--load", str(tmp_path / "first" / "checkpoints")
    found += ours(then, tmp_path / "then", tiny_data, vocab_file, *load, optimizer="adam")
    np.testing.assert_allclose(found, plain(tiny_data, vocab_file, optimizer="adam"), rtol=1e-5)


# ((pipeline, data, tensor-parallel, context-parallel size), flags) of runs with Llama, Qwen and Mistral.
OTHERS = [
    ((0, 1, 1, 2), ""),
    ((0, 1, 1, 4), ""),
    ((0, 2, 1, 2), "--zero-stage 3"),
    ((2, 1, 1, 2), "--pipeline-schedule zb-h1"),
    ((2, 1, 1, 2), "--recompute-modules norm qkv activation"),
    ((0, 1, 4, 2), SEQUENCE),
    ((2, 1, 2, 2), f"{SEQUENCE} --checkpoint-activations"),
    ((2, 2, 1, 2), f"{INTERLEAVED} --partition-method 0,3,4,5,{LAYERS}"),
]


@pytest.mark.parametrize(
    ("grid", "flags"), covering(OTHERS, OTHERS[:1].__contains__, several=True), ids=lambda part: str(part)
)
def test_every_kind_of_decoder(grid: tuple[int, ...], flags: str, tiny_data: str, vocab_file: str) -> None:
    """Losses equal Hugging Face's with grouped-query attention, QK norms, sliding windows and separate documents."""
    pytest.importorskip("transformers")
    ways = [Way(kind, flags, "fp32" if "zero" in flags else "fp64") for kind in KINDS]
    for way, found in zip(ways, losses(grid, ways, tiny_data, vocab_file), strict=True):
        wanted = reference(way.kind, way.precision, tiny_data, vocab_file)
        np.testing.assert_allclose(found, wanted, rtol=1e-5 if way.precision == "fp32" else 1e-9, err_msg=str(way))
