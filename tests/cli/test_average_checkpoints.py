"""tools/average_checkpoints.py agrees with torch's AveragedModel, and the tools read its checkpoints and --ema."""

import errno
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megatron.checkpointing import forks
from megatron.checkpointing.checksums import BLAKE3
from megatron_tools.convert import average_checkpoints, average_flags, convert_checkpoint, convert_flags
from megatron_tools.convert.average_checkpoints import normalized_weights
from tests.checkpoints.runs import Start, run_all, whole_tensors
from tests.cli.test_tools import fails
from tests.support import command, covering, on_ranks


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, tiny_data: str, vocab_file: str) -> Path:
    """A run on two ranks that has saved four checkpoints with averages of its weights."""
    path = tmp_path_factory.mktemp("runs") / "gpt2"
    flags = "--num-layers 2 --batch-size 2 --train-iters 4 --save-interval 1 --ema-decay 0.5 --precision fp32"
    on_ranks(2, run_all, [Start("gpt2", path, f"{flags} --model-parallel-size 2")], tiny_data, vocab_file)
    return path


def _weights(checkpoint: Path, kind: str = "weight") -> dict[str, torch.Tensor]:
    tensors = whole_tensors(checkpoint).items()
    return {key.removeprefix(f"{kind}."): torch.tensor(value) for key, value in tensors if key.startswith(f"{kind}.")}


class _Stored:
    """A checkpoint in memory: a weight `a`, and a frozen weight `n` of integers."""

    def __init__(self, a: float, n: int) -> None:
        self.path = "memory"
        self._values = {"weight.a": torch.tensor([a]), "weight.n": torch.tensor([n]), "exp_avg.a": torch.tensor([9.0])}
        self.tensors = {key: {"shape": list(value.shape)} for key, value in self._values.items()}

    def read_whole(self, key: str) -> torch.Tensor:
        return self._values[key]

    def dtype(self, key: str) -> torch.dtype:
        return self._values[key].dtype


def test_integers_are_those_of_the_last_checkpoint() -> None:
    readers: Any = [_Stored(1.0, 5), _Stored(3.0, 2654435761)]
    entries = {entry.name: entry for entry in average_checkpoints.averaged_entries(readers, [0.25, 0.75])}
    assert {name: entry.build().tolist() for name, entry in entries.items()} == {
        "weight.a": [2.5],
        "weight.n": [2654435761],
    }
    assert entries["weight.n"].dtype == torch.int64


def _done(*argv: str) -> str:
    done = command("python", *argv)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _averaged(checkpoints: list[Path], kind: str, **how: Any) -> dict[str, torch.Tensor]:
    """Return torch's average over the weights of the checkpoints, oldest first."""
    every = [_weights(path, kind) for path in checkpoints]
    models = [torch.nn.ParameterList(weights.values()) for weights in every]
    average = AveragedModel(models[0], **how)
    for model in models:
        average.update_parameters(model)
    return dict(zip(every[0], (p.detach() for p in average.module.parameters()), strict=True))


@pytest.mark.parametrize("kind", covering(["weight", "ema"], lambda kind: kind == "weight"))
def test_the_average_is_that_of_torch_and_tools_read_it(kind: str, run_dir: Path, tmp_path: Path) -> None:
    """--last 3 with equal weights is SWA, and --decay is the EMA that begins with the oldest checkpoint."""
    checkpoints = sorted((run_dir / "checkpoints").glob("iter_*"))[-3:]
    ema = kind == "ema"
    flags, how = ([], {}) if not ema else (["--decay", "0.25", "--ema"], {"multi_avg_fn": get_ema_multi_avg_fn(0.25)})
    load = ["--load", str(run_dir), "--last", "3"]
    said = _done("tools/average_checkpoints.py", *load, *flags, "--output", str(tmp_path / "out"))
    expected, found = _averaged(checkpoints, kind, **how), _weights(tmp_path / "out" / "iter_0000000")
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-8)
    index = json.loads((tmp_path / "out/iter_0000000/checkpoint.json").read_text())
    assert index["optimizer"]["moments"] == []
    assert index["state"]["iteration"] == 0
    assert [Path(each["checkpoint"]).name for each in index["average_of"]] == [path.name for path in checkpoints]
    assert all(path.name in said for path in checkpoints)
    if ema:
        return
    _done("tools/convert_checkpoint.py", "--load", str(tmp_path / "out"), "--output", str(tmp_path / "hf"))
    exported = load_file(tmp_path / "hf" / "model.safetensors")["transformer.ln_f.weight"]
    torch.testing.assert_close(exported, expected["final_norm.norm.weight"], rtol=1e-6, atol=1e-8)


def test_the_tools_use_the_average_of_a_run(run_dir: Path, tmp_path: Path, corpus: Path) -> None:
    """A checkpoint whose weights are the run's average gives the numbers that --ema gives."""
    one = str(run_dir / "checkpoints" / "iter_0000004")
    _done("tools/average_checkpoints.py", "--load", one, one, "--ema", "--output", str(tmp_path / "out"))
    found = []
    for load, flags in ((str(tmp_path / "out"), ()), (one, ("--ema",)), (one, ())):
        path = tmp_path / "found.json"
        score = ("tools/evaluate.py", "--input", str(corpus), "--quiet", "--json", str(path), "--load", load, *flags)
        _done(*score)
        found.append(json.loads(path.read_text())["loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-7)
    assert found[0] != pytest.approx(found[2], rel=1e-7)
    _done("tools/convert_checkpoint.py", "--load", one, "--ema", "--output", str(tmp_path / "hf"))
    exported = load_file(tmp_path / "hf" / "model.safetensors")["transformer.ln_f.weight"]
    assert exported.equal(_weights(Path(one), "ema")["final_norm.norm.weight"])
    loads = (str(tmp_path / "out"), ()), (one, ("--ema",))
    asked = "tools/generate.py", "--prompt", "a", "--max-new-tokens", "4", "--temperature", "0", "--load"
    words = [_done(*asked, load, *flags) for load, flags in loads]
    assert words[0] == words[1]


def test_bad_requests_are_refused(run_dir: Path, tmp_path: Path) -> None:
    tool, out = "tools/average_checkpoints.py", ("--output", str(tmp_path / "out"))
    assert "--last" in fails(tool, "--load", str(run_dir), *out)
    assert "--last 9" in fails(tool, "--load", str(run_dir), "--last", "9", *out)
    one = str(run_dir / "checkpoints" / "iter_0000004")
    assert "--weights" in fails(tool, "--load", one, one, "--weights", "1", *out)
    _done(tool, "--load", one, one, *out)
    assert "--ema" in fails("tools/evaluate.py", "--load", out[1], "--ema", "--input", one)


def test_damaged_checkpoints_and_weights_that_are_not_finite_are_named(run_dir: Path, tmp_path: Path) -> None:
    tool, out = "tools/average_checkpoints.py", ("--output", str(tmp_path / "out"))
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    third, last = (copy / "checkpoints" / f"iter_{number:07d}" for number in (3, 4))
    assert "--output" in fails(tool, "--load", str(last), str(third), "--output", str(last.parent / "averaged"))
    file = next(path for path in third.glob("*.safetensors") if "weight.final_norm.norm.weight" in load_file(path))
    tensors = load_file(file)
    tensors["weight.final_norm.norm.weight"][0] = math.nan
    save_file(tensors, file)
    sums = third / "BLAKE3SUMS"
    lines = sums.read_text().splitlines()
    renewed = [f"{BLAKE3.hash_file(file)}  {file.name}" if line.endswith(f"  {file.name}") else line for line in lines]
    sums.write_text("\n".join(renewed) + "\n")
    said = fails(tool, "--load", str(copy), "--last", "3", *out)
    assert third.name in said
    assert "final_norm.norm.weight" in said
    (last / "checkpoint.json").unlink()
    assert str(last / "checkpoint.json") in fails(tool, "--load", str(copy), "--last", "2", *out)
    assert not any(tmp_path.glob("out/iter_*/*"))


def test_shares_add_up_to_one() -> None:
    assert normalized_weights(4, None, None) == [0.25] * 4
    assert normalized_weights(3, [1, 2, 1], None) == [0.25, 0.5, 0.25]
    assert np.sum(normalized_weights(5, None, 0.9)) == pytest.approx(1)
    for weights in ([0, 0], [1, -1], [1, float("nan")], [1e308, 1e308]):
        with pytest.raises(ValueError, match="--weights"):
            normalized_weights(2, weights, None)
    with pytest.raises(ValueError, match="--decay"):
        normalized_weights(2, None, 1.0)


def test_the_newest_checkpoints_are_those_with_the_largest_numbers(tmp_path: Path) -> None:
    """From iteration 10,000,000 on, names have more digits."""
    names = ["iter_0000001", "iter_9999999", "iter_10000000"]
    for name in names:
        (tmp_path / name).mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for finder in ("find_checkpoint", "latest_checkpoint"):
            patch.setattr(average_checkpoints, finder, lambda _: tmp_path / names[-1])
        assert [path.name for path in average_checkpoints.newest_checkpoints(str(tmp_path), 2)] == names[1:]


@pytest.mark.parametrize("tool", ["average", "upcycle"])
def test_the_output_appears_at_once_or_not_at_all(
    tool: str, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full in the last step; the same command succeeds later."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    out, load = tmp_path / "out", ["--load", str(run_dir)]
    module: Any = average_checkpoints if tool == "average" else convert_checkpoint
    flags: Any = average_flags if tool == "average" else convert_flags
    more = ["--last", "2"] if tool == "average" else ["--upcycle", "2"]
    args = flags.build_parser().parse_args([*load, *more, "--output", str(out)])
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(module, "_copy_tokenizer" if tool == "average" else "_write_settings", full)
        module.main(args)
    assert list(tmp_path.iterdir()) == []
    module.main(flags.build_parser().parse_args([*load, *more, "--output", str(out)]))
    assert {"iter_0000000", "latest", "tokenizer"} <= {path.name for path in out.iterdir()}
    if tool == "upcycle":
        vocab_file = json.loads((out / "settings.json").read_text())["data"]["vocab_file"]
        assert Path(vocab_file).is_file() and Path(vocab_file).parent == out / "tokenizer"


def test_last_leaves_out_checkpoints_that_the_run_has_abandoned(
    tmp_path: Path, tiny_data: str, vocab_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a resume from an earlier checkpoint, later ones are of another branch, until the run saves them again."""
    run_dir = tmp_path / "run"
    flags = "--num-layers 1 --batch-size 2 --precision fp32"
    first = Start("gpt2", run_dir, f"{flags} --train-iters 5 --save-interval 1")
    on_ranks(1, run_all, [first], tiny_data, vocab_file)
    (run_dir / "checkpoints" / "latest").write_text("iter_0000002")
    second = Start("gpt2", run_dir, f"{flags} --train-iters 9 --save-interval 3")
    on_ranks(1, run_all, [second], tiny_data, vocab_file)
    names = [path.name for path in average_checkpoints.newest_checkpoints(str(run_dir), 5)]
    assert names == [f"iter_{iteration:07d}" for iteration in (1, 2, 3, 6, 9)]
    with pytest.raises(ValueError, match="--last 6"):
        average_checkpoints.newest_checkpoints(str(run_dir), 6)
    third = second._replace(flags=f"{flags} --train-iters 12 --save-interval 3 --keep-last 5")
    on_ranks(1, run_all, [third], tiny_data, vocab_file)
    kept = [f"iter_{iteration:07d}" for iteration in (2, 3, 6, 9, 12)]
    assert sorted(path.name for path in (run_dir / "checkpoints").glob("iter_*")) == kept
    for reader in (forks.CheckpointReader, None):  # each index is read once
        monkeypatch.setattr(forks, "CheckpointReader", reader)
        assert [path.name for path in average_checkpoints.newest_checkpoints(str(run_dir), 5)] == kept
