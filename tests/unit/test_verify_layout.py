"""tools/verify_layout.py in one process: flags that it refuses, and the source and versions that it prints."""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megatron.ranks.source as source
from megatron.ranks.source import package_versions, source_hash
from megatron_tools.verify.compare import Comparison, Verdict, relative_error
from megatron_tools.verify.recorder import Recorder
from megatron_tools.verify.verify_layout import print_identity, refuse_layout_flags


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('training')\n")
    return str(path)


def test_the_hash_covers_paths_and_contents(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("1")
    two.write_text("2")
    hashes = set()
    for files in ({"a.py": one, "b.py": two}, {"a.py": two, "b.py": one}, {"a.py": one, "c.py": two}, {"a.py": one}):
        monkeypatch.setattr(source, "source_files", lambda files=files: files)
        hashes |= {source_hash(), source_hash(script)}
    assert len(hashes) == 8


@pytest.mark.parametrize("flag", ["--gas", "--global-batch-size=8", "--context-parallel-size"])
def test_flags_that_layouts_set_are_refused(flag: str) -> None:
    with pytest.raises(ValueError, match=flag.partition("=")[0]):
        refuse_layout_flags(["--num-layers", "2", flag, "2"])
    refuse_layout_flags(["--num-layers", "2", "--batch-size", "4"])


def test_source_and_versions_are_printed(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = source_hash(script)
    print_identity(script, before)
    printed = capsys.readouterr().out
    assert before[:12] in printed
    assert all(version in printed for version in package_versions().values())
    Path(script).write_text("print('something else')\n")
    with pytest.raises(ValueError, match=script):
        print_identity(script, before)


def test_a_loss_that_is_not_a_number_is_an_infinite_difference() -> None:
    """The difference of another step does not hide the loss."""
    found = Verdict("tp 2")
    reference, other = SimpleNamespace(losses=[1.0, 1.0]), SimpleNamespace(losses=[1.0, math.nan])
    Comparison._compare_losses(SimpleNamespace(reference=reference, run=other, tolerance=1e-4), found)  # type: ignore[arg-type]
    assert (found.loss_error, found.loss_differs_at) == (math.inf, 2)


def test_equal_infinite_values_do_not_differ_and_hide_no_other_difference() -> None:
    mask = torch.full((4, 4), -torch.inf).triu(1)
    assert relative_error(mask.clone(), mask) == 0.0
    expected = torch.tensor([-math.inf, 3.0, 4.0, 0.0])
    # RMS of the difference: sqrt(1 / 4). RMS of the finite values: sqrt(25 / 4).
    assert relative_error(torch.tensor([-math.inf, 3.0, 4.0, 1.0]), expected) == pytest.approx(1 / 5)
    for other in (1.0, math.inf, math.nan):
        assert relative_error(torch.tensor([other, 3.0, 4.0, 0.0]), expected) == math.inf


def test_imaginary_parts_are_compared() -> None:
    ones = torch.ones(4)
    value = torch.complex(ones, ones)
    assert relative_error(value.conj(), value) == pytest.approx(2**0.5)
    assert relative_error(value.clone(), value) == 0.0


def test_the_gradient_of_a_complex_weight_keeps_its_imaginary_part(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 1, True)
    for _ in range(2):
        recorder._add_gradient("weight", torch.tensor([1.0 + 2.0j]))
    assert recorder.gradients["weight"].tolist() == [2.0 + 4.0j]


class Recomputed(nn.Module):
    """Two linear layers whose activations are recomputed; torch ends the recomputation within the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_only_an_error_within_a_module_names_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("failed")

    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    model = Recomputed()
    recorder = Recorder(tmp_path, 3, True)
    recorder._model = model
    for name, module in model.named_modules():
        module.register_forward_pre_hook(partial(recorder._enter_module, name))
        module.register_forward_hook(partial(recorder._leave_module, name))
    recorder._run_pass(0, 0, lambda: model(torch.ones(1, 2))).sum().backward()
    recorder._original_train_batch = fail
    for run in (lambda: recorder._train_batch(None, 0.1), lambda: recorder._run_pass(1, 0, fail)):
        with pytest.raises(RuntimeError, match="failed"):
            run()
        assert not list(tmp_path.iterdir())
    model.inner[0].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="failed"):
        recorder._run_pass(1, 0, lambda: model(torch.ones(1, 2)))
    assert (tmp_path / "stopped0").read_text() == "inner.0"
