"""In every layout, T5, UMT5 and CPM-2's T5 have the losses of plain torch in one process."""

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from tests.support import covering

from .t5_layouts import LAYERS, Way, evaluated, expected, expected_evaluation, losses

VARIANTS = ("cpm", "t5")
SCHEDULES = (
    "",
    "--pipeline-schedule gpipe",
    "--pipeline-schedule zb-h1",
    "--pipeline-extra-warmup 1",
    "--checkpoint-activations",
    "--checkpoint-activations --checkpoint-num-layers 2",
    "--checkpoint-attention",
    "--recompute-modules norm qkv activation",
)
GRIDS = [(0, 1, 1), (0, 2, 2), *(g for g in itertools.product((1, 2, 3, 4), (1, 2), (1, 2)) if g[0] * g[1] * g[2] <= 8)]


@functools.cache
def reference(variant: str, precision: str, data: str, vocab_file: str) -> list[float]:
    return expected(Way(variant, precision=precision), data, vocab_file)


def check(grid: tuple[int, int, int], ways: Sequence[Way], data: str, vocab_file: str) -> None:
    bad = []
    for way, found in zip(ways, losses(grid, ways, data, vocab_file), strict=True):
        wanted = reference(way.variant, way.precision, data, vocab_file)
        worst = np.abs(np.array(found) / np.array(wanted) - 1).max()
        if not worst <= (1e-9 if way.precision == "fp64" else 1e-5):
            bad.append(f"{way}: off by {worst:.1e}")
    assert not bad, "\n".join(bad)


# Grids that run by default: no pipeline, a pipeline alone, and a pipeline with tensor parallelism.
COVERING = [(0, 1, 1), (3, 1, 1), (2, 1, 2)]


@pytest.mark.parametrize("grid", covering(GRIDS, COVERING.__contains__), ids=lambda g: f"pp{g[0]}-dp{g[1]}-tp{g[2]}")
def test_losses_equal_one_process(
    grid: tuple[int, int, int], tiny_data: str, vocab_file: str, request: pytest.FixtureRequest
) -> None:
    """Losses equal plain torch's in fp32 and fp64, with every pipeline schedule and kind of recomputation."""
    # To save time, a variant runs with every second schedule. With --full, all schedules run if there is no tensor
    # parallelism.
    whole = request.config.getoption("--full") and grid[2] == 1
    ways = [
        Way(variant, schedule)
        for number, variant in enumerate(VARIANTS)
        for schedule in (SCHEDULES if whole else SCHEDULES[number::2])
        if grid[0] > 1 or "pipeline" not in schedule
    ]
    if grid[0] == 2:  # 2 encoder and 3 decoder blocks are too few for more than two stages with two model chunks each
        interleaved = "--pipeline-schedule interleaved --virtual-pipeline-size 2 --partition-method 0,3,6,9,"
        ways += [Way(variant, f"{interleaved}{LAYERS[variant]}") for variant in VARIANTS]
    ways += [Way(variant, precision="fp64") for variant in VARIANTS]
    if grid[2] > 1:
        saving = ["", "--checkpoint-activations", "--checkpoint-attention", "--pipeline-schedule zb-h1"]
        if grid[0] < 2 or not request.config.getoption("--full"):
            saving.pop()
        if not request.config.getoption("--full"):
            saving = saving[::2]
        ways += [Way(variant, f"--sequence-parallel {each}") for variant in VARIANTS for each in saving]
        ways += [Way(variant, "--sequence-parallel --logits-chunk-size 5") for variant in VARIANTS]
    ways += [Way(variant, "--logits-chunk-size 5") for variant in VARIANTS]
    if grid[2] > 1 and not request.config.getoption("--full"):  # to save time, one way of each kind
        ways = ways[6:16:3]  # recomputation, interleaved chunks, sequence parallelism without and with recomputation
    check(grid, ways, tiny_data, vocab_file)


@pytest.mark.parametrize(
    "grid",
    covering([(1, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 2)], (3, 1, 1).__eq__),
    ids=lambda g: f"pp{g[0]}-dp{g[1]}-tp{g[2]}",
)
def test_a_table_for_each_layer(
    grid: tuple[int, int, int], tiny_data: str, vocab_file: str, request: pytest.FixtureRequest
) -> None:
    """UMT5 reproduces plain torch's losses, even if a block and its position table are on two stages."""
    schedules = ["", "--checkpoint-activations", "--pipeline-schedule zb-h1"][: 3 if grid[0] > 1 else 2]
    ways = [Way("umt5", schedule) for schedule in schedules]
    if grid[0] == 2:
        cuts = (3, 4, 11, 12) if request.config.getoption("--full") else (4, 11)
        ways += [Way("umt5", f"--partition-method 0,{cut},{LAYERS['umt5']}") for cut in cuts]
    ways += [Way("umt5", "--sequence-parallel")] if grid[2] > 1 else []
    check(grid, ways, tiny_data, vocab_file)


def test_the_reference_learns(tiny_data: str, vocab_file: str) -> None:
    for variant in VARIANTS:
        curve = reference(variant, "fp32", tiny_data, vocab_file)
        assert curve[0] - curve[-1] > 0.02


@pytest.mark.parametrize("stages", covering([2, 3], lambda stages: stages == 2))
def test_every_legal_cut(stages: int, tiny_data: str, vocab_file: str, request: pytest.FixtureRequest) -> None:
    """Losses are equal for all partitions: a stage may begin at any embedding, position table, block or norm.

    By default, every second partition runs.
    """
    ways = [
        Way(variant, "--partition-method " + ",".join(map(str, (0, *cuts, LAYERS[variant]))))
        for variant in VARIANTS
        for cuts in itertools.combinations(range(1, LAYERS[variant]), stages - 1)
    ]
    check((stages, 1, 1), ways if request.config.getoption("--full") else ways[::2], tiny_data, vocab_file)


# Each grid, with one of the two variants on several ranks.
EVALUATED = [((0, 2, 2), "t5"), ((2, 1, 2), "cpm"), ((2, 2, 1), "t5")]
EVALUATED += [(grid, variant) for grid in ((0, 1, 1), (1, 1, 1)) for variant in VARIANTS]
GRIDS_OF_EVALUATION = [(0, 1, 1), (0, 2, 2), (1, 1, 1), (2, 1, 2), (2, 2, 1)]
EVALUATIONS = [(grid, variant) for grid in GRIDS_OF_EVALUATION for variant in VARIANTS]


@pytest.mark.quick
@pytest.mark.parametrize(("grid", "variant"), covering(EVALUATIONS, EVALUATED.__contains__, several=True), ids=str)
def test_masked_text_is_looked_at_apart(
    grid: tuple[int, int, int], variant: str, tiny_data: str, vocab_file: str
) -> None:
    """Evaluation reports loss, accuracy and count of the masked text, without sentinels, EOD and padding.

    Layouts with two replicas compute logits in chunks.
    """
    wanted = expected_evaluation(Way(variant), tiny_data, vocab_file)
    assert 0 < wanted[0]["text_tokens"] < wanted[0]["targets"]
    chunk = 5 if grid[1] == 2 else 0
    found = evaluated(grid, Way(variant, f"--logits-chunk-size {chunk}"), tiny_data, vocab_file)
    assert found == [pytest.approx(each, rel=2e-5) for each in wanted]
