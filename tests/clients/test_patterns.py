"""Patterns of public projects, on DeepSpeed's PipelineEngine and on that of tds, beside one process of plain torch."""

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.support import on_ranks

from .common import STEPS, config, library, plain
from .patterns import PATTERNS, Pattern, built

CLIP = 0.05


def _engine(name: str, pattern: Pattern, clip: float) -> Any:
    lib = library(name)
    net = lib.PipelineModule(
        pattern.layers, num_stages=2, loss_fn=pattern.loss, partition_method="uniform", **pattern.module
    )
    weights = [each for each in net.parameters() if each.requires_grad]
    of_config = "optimizer" in pattern.config
    engine = lib.initialize(
        model=net,
        optimizer=None if of_config else pattern.optimizer(nn.ParameterList(weights)),
        model_parameters=weights,
        config=config(clip, **pattern.config),
    )[0]
    if pattern.batch_fn:
        engine.set_batch_fn(pattern.batch_fn)
    return engine


def _stepped(engine: Any, pattern: Pattern) -> float:
    if pattern.resets:
        engine.reset_activation_shape()
    loss: float = engine.train_batch(pattern.data).item()
    return loss


def _trained(engine: Any, pattern: Pattern) -> list[float]:
    found = [_stepped(engine, pattern) for _ in range(STEPS)]
    if pattern.resets:
        engine.reset_activation_shape()
    return [*found, engine.eval_batch(pattern.data).item()]


def _all(name: str, clip: float) -> dict[str, Any]:
    """Train each pattern; return its losses, and under `warnings` the warnings about shared weights."""
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for which, make in PATTERNS.items():
            pattern = make()
            found[which] = _trained(_engine(name, pattern, clip), pattern)
    found["warnings"] = [str(each.message) for each in said if "TiedLayerSpec" in str(each.message)]
    return found


@functools.cache
def _runs(name: str, clip: float) -> list[dict[str, Any]]:
    return on_ranks(2, _all, name, clip)


def _expected(which: str, clip: float) -> list[float]:
    pattern = PATTERNS[which]()
    return plain(built(pattern.layers), pattern.loss, pattern.batches(), clip, optimizer=pattern.optimizer)


@pytest.mark.parametrize("which", PATTERNS)
@pytest.mark.parametrize(("name", "clip"), [("stock", 0.0), ("tds", 0.0), ("tds", CLIP)])
def test_a_pattern_trains_as_in_plain_torch(name: str, clip: float, which: str) -> None:
    expected = _expected(which, clip)
    for found in _runs(name, clip):
        assert found[which] == pytest.approx(expected, rel=1e-5)


def _next_losses(engine: Any, which: str) -> list[float]:
    pattern = PATTERNS[which]()
    return [_stepped(engine, pattern) for _ in range(2)]


def _checkpoints(writer: str, reader: str, folder: str) -> dict[str, tuple[list[float], list[float]]]:
    """Save each pattern after its steps; return the next losses of the writer and of the reader that loads."""
    found = {}
    for which, make in PATTERNS.items():
        pattern = make()
        first = _engine(writer, pattern, 0.0)
        _trained(first, pattern)
        first.save_checkpoint(f"{folder}/{which}")
        second = _engine(reader, make(), 0.0)
        second.load_checkpoint(f"{folder}/{which}")
        found[which] = _next_losses(first, which), _next_losses(second, which)
    return found


@pytest.mark.parametrize(("writer", "reader"), [("stock", "tds"), ("tds", "stock")])
def test_checkpoints_load_both_ways(writer: str, reader: str, tmp_path: Path) -> None:
    for rank in on_ranks(2, _checkpoints, writer, reader, str(tmp_path)):
        for which, (expected, found) in rank.items():
            assert found == pytest.approx(expected, rel=1e-5), which


def test_no_pattern_warns_of_shared_weights() -> None:
    for found in _runs("tds", 0.0):
        assert found["warnings"] == []
