"""In every layout, Llama, Qwen2, Qwen3 and Mistral have the losses of Hugging Face's models in one process."""

import functools
import itertools

import numpy as np
import pytest

from tests.support import covering

from .llama_layouts import KINDS, LAYERS, Way, expected, losses

pytest.importorskip("transformers")

GRIDS = [
    (0, 1, 1),
    (0, 2, 2),
    (0, 1, 4),
    *(g for g in itertools.product((1, 2, 4), (1, 2), (1, 2, 4)) if np.prod(g) <= 8),
]
# Grids that run by default. Some have more tensor-parallel ranks than key-value heads.
COVERING = [(0, 1, 4), (2, 1, 2)]


def _schedules(grid: tuple[int, int, int]) -> list[str]:
    """Return the flags to test on a grid: pipeline schedules, recomputation, sequence parallelism and ZeRO stages.

    grid: the pipeline, data and tensor-parallel size. Flags that the grid does not support are left out.
    """
    pp, dp, tp = grid
    sequence, again = "--sequence-parallel", "--recompute-modules norm qkv activation"
    found = [f"{sequence} --pipeline-schedule zb-h1", f"{sequence} --checkpoint-activations", f"{sequence} {again}"]
    found += [f"--pipeline-schedule interleaved --virtual-pipeline-size 2 --partition-method 0,3,4,5,{LAYERS}"]
    found += ["", again, "--checkpoint-attention", "--pipeline-schedule zb-h1", "--pipeline-schedule gpipe"]
    found += ["--zero-stage 2", "--zero-stage 3"]
    return [
        each
        for each in found
        if not (("pipeline" in each and pp < 2) or ("virtual" in each and pp != 2) or (sequence in each and tp < 2))
        and not ("zero" in each and (pp or dp < 2))
    ]


@functools.cache
def reference(kind: str, precision: str, data: str, vocab_file: str) -> list[float]:
    return expected(Way(kind, precision=precision), data, vocab_file)


@pytest.mark.parametrize("grid", covering(GRIDS, COVERING.__contains__), ids=lambda g: f"pp{g[0]}-dp{g[1]}-tp{g[2]}")
def test_losses_equal_one_process(
    grid: tuple[int, int, int], tiny_data: str, vocab_file: str, request: pytest.FixtureRequest
) -> None:
    """Losses equal those of Hugging Face's models in one process: to 1e-9 in fp64, to 1e-5 in fp32."""
    schedules, full = _schedules(grid), request.config.getoption("--full")
    ways = [Way(kind, schedules[i % len(schedules)], "fp64") for i, kind in enumerate(KINDS)]
    if full:
        ways += [Way(kind, each) for kind in KINDS for each in schedules]
    elif grid == (0, 1, 4):  # a key-value head is shared by two of the four ranks in llama
        ways = [way for way in ways if way.kind == "llama"]
    bad = []
    for way, found in zip(ways, losses(grid, ways, tiny_data, vocab_file), strict=True):
        wanted = reference(way.kind, way.precision, tiny_data, vocab_file)
        worst = np.abs(np.array(found) / np.array(wanted) - 1).max()
        if not worst <= (1e-9 if way.precision == "fp64" else 1e-5):
            bad.append(f"{way}: off by {worst:.1e}")
    assert not bad, "\n".join(bad)


def test_the_reference_learns(tiny_data: str, vocab_file: str) -> None:
    """Training changes the loss of Hugging Face's models by more than 1e-3, so comparisons to 1e-5 detect errors."""
    for kind in KINDS:
        still = expected(Way(kind, precision="fp64"), tiny_data, vocab_file, rate=0.0)
        assert abs(reference(kind, "fp64", tiny_data, vocab_file)[-1] / still[-1] - 1) > 1e-3, kind
