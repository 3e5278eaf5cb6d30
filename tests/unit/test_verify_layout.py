"""tools/verify_layout.py in one process: flags that it refuses, and the source and versions that it prints."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

import megatron.ranks.source as source
from megatron.ranks.source import package_versions, source_hash
from megatron_tools.verify.compare import Comparison, Verdict
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
