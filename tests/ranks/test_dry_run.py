"""--dry-run N checks a run of N ranks in one process: it says what the run needs, refuses what the run would refuse,
and writes nothing."""

import contextlib
import importlib.util
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing.stream import LazyTensor
from megatron.checkpointing.write import write_checkpoint
from megatron.config.command_line import parse
from megatron.config.ds_config import resolve
from megatron.estimate.per_rank import rank_memory
from megatron.estimate.sizes import stages_of
from megatron.features.dry_run_checks import check_run
from megatron.tasks.gpt2 import GPT2
from megatron.tasks.t5 import T5
from megatron.training.entry import run
from tests.conformance.engines import remembered_groups
from tests.support import RankFailure, on_ranks

SIZES = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --batch-size 2 --train-iters 3 --precision fp32 "
    "--split 90,10,0 --no-tensorboard"
)
FAMILIES = {"gpt2": "--seq-length 24", "t5": "--enc-seq-length 32 --dec-seq-length 16"}


def _dry_run(family: str, flags: str) -> str:
    task: Any = T5() if family == "t5" else GPT2()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run(task, flags.split(), exit=False)
    return printed.getvalue()


@pytest.mark.parametrize(
    ("family", "ranks", "layout"),
    [
        ("gpt2", 1, ""),
        ("gpt2", 8, "--pipe-parallel-size 2 --model-parallel-size 2 --gas 4"),
        ("gpt2", 8192, "--pipe-parallel-size 4 --model-parallel-size 4 --gas 64 --pipeline-schedule zb-h1"),
        ("gpt2", 4, "--num-experts 4 --expert-parallel-size 4 --zero-stage 1"),
        ("t5", 12, "--pipe-parallel-size 3 --gas 4"),
        ("t5", 4, "--zero-stage 2"),
        ("gpt2", 4, "--pipe-parallel-size 2 --gas 4 --partition-method uniform"),
    ],
)
def test_a_dry_run_says_what_a_run_needs_and_leaves_nothing(
    family: str, ranks: int, layout: str, tiny_data: str, vocab_file: str, tmp_path: Path
) -> None:
    flags = f"{SIZES} {FAMILIES[family]} {layout}"
    given = f"{flags} --data-path {tiny_data} --vocab-file {vocab_file} --run-dir {tmp_path / 'run'} --dry-run {ranks}"
    (printed,) = on_ranks(1, _dry_run, family, given)
    assert not (tmp_path / "run").exists()
    assert "no mistake" in printed
    if "uniform" in layout:  # needs the built model
        return
    config = parse(f"--family {family} {flags} --vocab-size 3000".split(), None, ranks)
    stages = stages_of(config)
    memory = rank_memory(config, resolve(config, ranks, False), ranks, False, stages)
    assert len(memory) == config.parallel.stages
    assert f"{ranks:,} ranks" in printed and f"global batch {config.train_batch_size(ranks):,}" in printed
    layers = [line for line in printed.splitlines() if "transformer layers" in line]
    assert 1 <= len(layers) <= len(stages)


@pytest.mark.parametrize(
    ("ranks", "more", "words"),
    [
        (6, "--model-parallel-size 4", "--model-parallel-size"),
        (2, "--data-path {here}/absent", "absent"),
        (2, "--save {here}/file/checkpoints", "--save"),
        (2, "--train-iters 3 --vocab-size 5", "--vocab-size"),
        (2, "--eval-tasks {here}/absent.jsonl", "--eval-tasks"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would_refuse(
    ranks: int, more: str, words: str, tiny_data: str, vocab_file: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    flags = f"{SIZES} --seq-length 24 --data-path {tiny_data} --vocab-file {vocab_file} --run-dir {tmp_path / 'run'}"
    with pytest.raises(RankFailure, match=words):
        on_ranks(1, _dry_run, "gpt2", f"{flags} {more.format(here=tmp_path)} --dry-run {ranks}")


@pytest.mark.parametrize("name", ["wandb", "swanlab", "mlflow", "tensorboard"])
def test_a_dry_run_refuses_a_writer_whose_package_is_missing(
    name: str, tiny_data: str, vocab_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = f"{SIZES} --seq-length 24 --data-path {tiny_data} --vocab-file {vocab_file} --run-dir {tmp_path / 'run'}"
    config = parse(f"{flags} --{name}".split(), GPT2().defaults)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == name else find_spec(wanted))
    with pytest.raises(ValueError, match=f"--{name} needs the package {name}"):
        check_run(GPT2(), config, 2)


def test_a_dry_run_is_one_process(tiny_data: str, vocab_file: str) -> None:
    flags = f"{SIZES} --seq-length 24 --data-path {tiny_data} --vocab-file {vocab_file} --dry-run 2"
    with pytest.raises(RankFailure, match="--dry-run"):
        on_ranks(2, _dry_run, "gpt2", flags)


def _dry_runs(folder: str, commands: list[str]) -> list[str]:
    """Return what each dry run in `folder` prints, or the error that ends it."""
    os.chdir(folder)
    results = []
    with remembered_groups() as begin:
        for command in commands:
            begin()
            try:
                results.append(_dry_run("gpt2", command))
            except ValueError as error:
                results.append(str(error))
    return results


def test_a_dry_run_looks_for_the_checkpoint_where_the_run_does(tiny_data: str, vocab_file: str, tmp_path: Path) -> None:
    flags = f"{SIZES} --seq-length 24 --data-path {tiny_data} --vocab-file {vocab_file} --dry-run 2"
    saved = parse(f"{SIZES} --hidden-size 32 --seq-length 24 --vocab-size 3000".split())
    weight = LazyTensor("weight.x", (1,), torch.float32, lambda: torch.ones(1))
    write_checkpoint(tmp_path / "saved" / "iter_0000500", [weight], saved, "")
    (tmp_path / "begun").mkdir()
    began_with = {"checkpoint": {"save": f"{tmp_path}/saved"}, "log": {"run_dir": f"{tmp_path}/begun"}}
    (tmp_path / "begun" / "config.json").write_text(json.dumps(began_with))
    # A run that names no directory gets a new one, so it does not see the missing checkpoint of this run.
    (tmp_path / "runs" / "gpt2" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "gpt2" / "checkpoints" / "latest").write_text("iter_0000900\n")
    commands = [flags, f"{flags} --save {tmp_path}/saved", f"{flags} --run-dir {tmp_path}/begun"]
    ((new, other_model, without_save),) = on_ranks(1, _dry_runs, str(tmp_path), commands)
    assert "no mistake" in new
    assert "--hidden-size is 32 in the checkpoint and 16 in this run" in other_model
    assert f"--save {tmp_path}/saved" in without_save


def _dry_runs_after_a_run(folder: str, flags: str, changes: list[str]) -> list[str]:
    with remembered_groups() as begin:
        begin()
        with contextlib.redirect_stdout(io.StringIO()):
            run(GPT2(), flags.split(), exit=False)
    return _dry_runs(folder, [f"{flags} --dry-run 1 {change}" for change in changes])


def test_a_dry_run_compares_the_consumed_samples(tiny_data: str, vocab_file: str, tmp_path: Path) -> None:
    flags = f"{SIZES} --seq-length 24 --data-path {tiny_data} --vocab-file {vocab_file} --run-dir {tmp_path / 'run'}"
    changes = ["", "--seed 5", "--seed 5 --override-data", f"--load {tmp_path / 'run'} --no-load-optim"]
    ((same, other_seed, overridden, without_moments),) = on_ranks(
        1, _dry_runs_after_a_run, str(tmp_path), f"{flags} --eval-iters 0", changes
    )
    assert "no mistake" in same and "no mistake" in overridden and "no mistake" in without_moments
    assert "--override-data" in other_seed and "no mistake" not in other_seed
