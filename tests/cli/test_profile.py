"""--profile on a pipeline writes a Chrome trace of torch's operators for each rank."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron.features.profile import Profile
from tests.support import command

MODEL = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --batch-size 2 --gas 2 --split 1"
RUN = "--train-iters 5 --eval-iters 0 --save-interval 0 --no-save-at-end --no-tensorboard --cpu-matmul torch"


def test_a_profile_has_the_operators_of_each_rank(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    launch = "tools/launch.py --standalone --nproc-per-node 2 pretrain_gpt2.py"
    files = f"--data-path {tiny_data} --vocab-file {vocab_file} --run-dir {tmp_path}"
    flags = f"{MODEL} {RUN} --pipe-parallel-size 2 --partition-method type:Block --profile --profile-iterations 3-4"
    counts = []
    for _ in range(2):  # torch's profiler may drop all events of a rank (pytorch/pytorch issue 192021)
        done = command("python", *f"{launch} {flags} {files}".split())
        assert done.returncode == 0, done.stderr
        assert str(tmp_path / "profile") in done.stdout
        paths = sorted((tmp_path / "profile").iterdir())
        assert [path.name for path in paths] == ["torch_00000.json.gz", "torch_00001.json.gz"]
        counts = []
        for path in paths:
            with gzip.open(path, "rt") as file:
                names = [event.get("name") for event in json.load(file)["traceEvents"]]
            counts.append(names.count("aten::addmm"))
        if all(counts):
            break
    # Two iterations of two micro-batches. The two column-parallel matmuls of a layer add their bias.
    assert counts == [2 * 2 * 2, 2 * 2 * 2]


def test_iterations_need_the_flag() -> None:
    with pytest.raises(ConfigError, match="--profile-iterations needs --profile"):
        parse(["--profile-iterations", "3-4"])


@pytest.mark.parametrize(("iteration", "reason"), [(0, "did not reach"), (4, "began after")])
def test_the_warning_of_a_start_without_a_profile_has_its_reason(
    iteration: int,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    config = parse(["--profile", "--profile-iterations", "3-4", "--train-iters", "9"])
    run: Any = SimpleNamespace(config=config, run_dir=tmp_path, state=SimpleNamespace(iteration=iteration))
    feature = Profile()
    feature.start(run)
    feature.close(None)
    printed = capsys.readouterr().out
    assert f"{reason} iterations 3 to 4" in printed
