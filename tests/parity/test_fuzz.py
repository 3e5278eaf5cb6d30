"""The parity fuzzer on gloo ranks: drawn settings agree with one process, and a missing all-reduce is found."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_tools.verify.fuzz import Fuzzer
from megatron_tools.verify.fuzz_campaign import Campaign, shrink
from megatron_tools.verify.fuzz_data import write_data
from megatron_tools.verify.fuzz_table import case_of
from megatron_tools.verify.verify_layout import build_parser
from tests.support import FULL

Start = Callable[[Callable[[], object] | None], Fuzzer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that returns a fuzzer; its argument is called on each rank."""
    write_data(tmp_path, 0)
    made: list[Fuzzer] = []

    def make(prepare: Callable[[], object] | None = None) -> Fuzzer:
        made.append(Fuzzer(tmp_path, prepare=prepare))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("draws", [4, pytest.param(500, marks=[FULL, pytest.mark.timeout(3600)])])
def test_draws_agree_with_one_process(draws: int, start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    campaign = Campaign(start(None), 0, verbose=False)
    args = build_parser().parse_args(["--fuzz", str(draws)])
    args.flags = []
    assert campaign.run(args), capsys.readouterr().out
    assert sum(campaign.layouts.values()) == draws
    assert 0 < campaign.largest_errors["fp64"] < 1e-9


def forget_norms() -> None:
    """Leave out the all-reduce of the gradients of norms under sequence parallelism, and the check of copies."""
    from megatron import mpu
    from megatron.checkpointing import save
    from megatron.training import health

    declare = mpu.declare

    def without_sequence(*args: Any, sequence: Any = None, **more: Any) -> Any:
        return declare(*args, **more)

    mpu.declare = without_sequence  # type: ignore[assignment]
    for module in (health, save):
        module.check_replicas = lambda engine: None  # type: ignore[attr-defined]


def test_a_missing_all_reduce_is_found_and_shrunk(start: Start) -> None:
    fuzzer = start(forget_norms)
    chosen = {"--family": "gpt2", "tp": 2, "sp": True, "gas": 3, "--z-loss": 0.01, "--num-layers": 1, "--lr": 0.1}
    found = fuzzer.run(case_of(chosen))
    assert found.outcome.kind == "differs", found.outcome.message
    smallest, last = shrink(fuzzer, chosen, found)
    assert smallest == {"--family": "gpt2", "tp": 2, "sp": True}
    assert "grad_norm" in last.outcome.message
