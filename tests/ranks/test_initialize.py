"""Collectives have one timeout during start-up and another in training; a report shows where hanging ranks are."""

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron import mpu
from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron.engines.watch import StepWatch
from megatron.features.memory_estimate import memory_advice
from megatron.ranks import initialize
from megatron.ranks.errors import one_line_error
from megatron.ranks.initialize import initialize_megatron
from tds.diagnose import Watchdog, out_of_memory
from tds.messages import error_text, shortened
from tests.checkpoints.runs import Start, make
from tests.support import ends_of_ranks, on_ranks


def _late() -> float:
    initialize_megatron(parse(["--startup-timeout-minutes", "0.05", "--pipe-parallel-size", "2"]))
    begin = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="(?i)timed out"):
            dist.all_reduce(torch.ones(1), group=mpu.get_pipe_parallel_group())
    else:
        time.sleep(6)
    return time.monotonic() - begin


def test_a_rank_that_does_not_come_ends_the_wait() -> None:
    """--startup-timeout-minutes limits how long ranks wait for a late rank, in the world group or a pipeline group."""
    waited, _ = on_ranks(2, _late)
    assert 2 < waited < 6


def _steps() -> float:
    config = parse(["--distributed-timeout-minutes", "0.02"])
    initialize_megatron(config)
    initialize.WATCHDOG_MARGIN = 1.0
    initialize.use_step_timeout(config)
    begin = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="(?i)timed out"):
            dist.all_reduce(torch.ones(1), group=dist.new_group())
    else:
        dist.new_group()
        time.sleep(4)
    return time.monotonic() - begin


def test_steps_have_a_timeout_of_their_own() -> None:
    """--distributed-timeout-minutes limits waits in training steps, also in groups that are created later."""
    waited, _ = on_ranks(2, _steps)
    assert 1 < waited < 4


class Mute(ArithmeticError):
    def __str__(self) -> str:
        raise KeyError("no words")


def forward(kind: str) -> None:
    if dist.get_rank() == 1 and kind == "sleep":
        time.sleep(30)
    if dist.get_rank() == 1 and kind == "raise":
        raise ArithmeticError("the layer broke")
    if dist.get_rank() == 1 and kind == "mute":
        raise Mute
    if dist.get_rank() == 1 and kind == "long":
        raise ArithmeticError("the layer broke" + 200_000 * "x")
    dist.all_reduce(torch.ones(1))


def _watched(kind: str) -> None:
    dist.barrier()  # it completes, so the report must not list it as pending
    watch = StepWatch(2.0, torch.device("cpu"))
    with watch.step("training"):
        for _ in range(2):
            watch.micro_batch()
            forward(kind)


@pytest.mark.parametrize("kind", ["sleep", "raise", "mute", "long"])
def test_a_run_without_a_pipeline_says_where_each_rank_stands(kind: str) -> None:
    ends = ends_of_ranks(2, _watched, kind, timeout=40)
    assert [end.code for end in ends] == [1, 1]
    report = ends[0].stderr
    assert "run stopped: rank " in report
    for rank in range(2):
        assert f"--- rank {rank}, training, micro-batch 0 of the step number 1 since the start, for" in report
    assert "in forward" in report
    waits = "    begun and not ended: gloo:all_reduce number 2 of the group default_pg (float [1])\n"
    assert report.count("begun and not ended") == report.count(waits) == 1, report
    assert ("ArithmeticError: the layer broke" in report) == (kind in ("raise", "long"))
    assert ("rank 1 raised Mute" in report) == (kind == "mute")
    assert "does not answer" not in report and len(report) < 30_000


def test_an_error_without_words_has_a_description() -> None:
    """An exception whose `__str__` raises is described by its class, by tds and by the entry scripts."""
    for found in (error_text(Mute()), one_line_error(Mute())):
        assert "KeyError" in found
    assert "Mute" in one_line_error(Mute())
    assert shortened("abc" * 1000, 20) == "abcabcabcabcabc ... (2980 characters left out) ... bcabc"


def test_why_ranks_did_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node1")
    monkeypatch.setenv("MASTER_PORT", "6000")
    monkeypatch.setenv("WORLD_SIZE", "4")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    with pytest.raises(dist.DistNetworkError) as taken:
        dist.TCPStore("127.0.0.1", store.port, 1, is_master=True)
    assert initialize.describe_rendezvous_error(taken.value) == (
        "port 6000 is in use by another process: give another one (MASTER_PORT)"
    )
    with pytest.raises(dist.DistStoreError) as missing:
        dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=timedelta(seconds=1))
    assert initialize.describe_rendezvous_error(missing.value).startswith(
        "the 4 ranks did not all meet at node1:6000 (Timed out after"
    )


def test_several_ranks_without_a_rank_number_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without RANK, each process would take itself for the only one."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE=2.* RANK "):
        initialize.world_size()
    monkeypatch.setenv("RANK", "0")
    assert initialize.world_size() == 2
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert initialize.world_size() == 1
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):  # mpirun and srun set no RANK
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert initialize.world_size() == 1
            patch.setenv(name, "4")
            with pytest.raises(ConfigError, match=f"{name}=4.* RANK "):
                initialize.world_size()


def test_want_of_memory_has_a_sentence() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(10**15)
    assert str(out_of_memory(error.value)).startswith("is out of memory ([enforce fail")
    assert out_of_memory(RuntimeError("another")) is None
    advice = memory_advice(10**9, 10**9, parse(["--batch-size", "3"]), "bf16")
    assert "take 18 GB" in advice
    assert "lower --batch-size 3" in advice
    muon = memory_advice(10**9, 10**9, parse(["--optimizer", "muon"]), "fp32", num_muon=75 * 10**7)
    assert "take 13 GB" in muon  # 16 GB with two moments for all weights
    for precision, size in (("fp32", "take 7 GB"), ("bf16", "take 6 GB")):
        frozen = memory_advice(10**9, 25 * 10**7, parse([]), precision)
        assert size in frozen, "a frozen weight has no gradient, moments and master weight"


def _advice_of_a_run_with_frozen_weights(folder: str, data: str, vocab_file: str) -> str:
    flags = f"--precision fp32 --param-groups {folder}/groups.json"
    with make(Start("gpt2", Path(folder) / "run", flags), data, vocab_file):
        return Watchdog.advice


def test_a_run_counts_its_frozen_weights(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    advice = {}
    rules: dict[str, Any] = {"none": {"lr_factor": 0.5}, "frozen": {"frozen": True}}
    for name, rule in rules.items():
        (tmp_path / "groups.json").write_text(json.dumps([{"pattern": "embedding.*", **rule}]))
        (advice[name],) = on_ranks(1, _advice_of_a_run_with_frozen_weights, str(tmp_path), tiny_data, vocab_file)
    sizes = {name: float(words.split("take ")[1].split()[0]) for name, words in advice.items()}
    assert sizes["frozen"] < 0.6 * sizes["none"], "most weights of this model are in the embedding"
