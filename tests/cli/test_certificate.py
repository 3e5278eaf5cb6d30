"""A certificate of tools/verify_layout.py travels with checkpoints and exports, and `--check` repeats its run."""

import json
from pathlib import Path

import pytest

from megatron.checkpointing import CheckpointReader, find_checkpoint
from megatron.checkpointing.certificate import read_certificate
from megatron.checkpointing.files import CheckpointError
from tests.support import FULL, command

TOOL = "tools/verify_layout.py"
SMALL = ["--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16"]


def _fails(*argv: str) -> str:
    done = command("python", *argv)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def flags(tiny_data: str, vocab_file: str) -> list[str]:
    return [*SMALL, "--batch-size", "2", "--data-path", tiny_data, "--vocab-file", vocab_file]


@pytest.fixture(scope="module")
def certificate(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("certificate") / "tp2.json"
    argv = [TOOL, "pretrain_gpt2.py", "--layouts", "tp 2", "--steps", "1", "--certificate", str(path), "--", *flags]
    done = command("python", *argv)
    assert done.returncode == 0, done.stderr
    assert f"certificate -> {path} (passed)" in done.stdout
    return path


def test_it_travels_with_checkpoints_and_exports(certificate: Path, flags: list[str], tmp_path: Path) -> None:
    run, exported = tmp_path / "run", tmp_path / "exported"
    train = ["pretrain_gpt2.py", *flags, "--hidden-size", "32", "--train-iters", "1", "--eval-iters", "0"]
    done = command("python", *train, "--no-tensorboard", "--certificate", str(certificate), "--run-dir", str(run))
    assert done.returncode == 0, done.stderr
    checkpoint = find_checkpoint(str(run))
    assert (checkpoint / "certificate.json").read_bytes() == certificate.read_bytes()
    CheckpointReader(checkpoint).verify()

    done = command("python", "tools/convert_checkpoint.py", "--load", str(run), "--output", str(exported))
    assert done.returncode == 0, done.stderr
    assert (exported / "certificate.json").read_bytes() == certificate.read_bytes()

    (checkpoint / "certificate.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"certificate\.json is damaged"):
        CheckpointReader(checkpoint).verify()


def test_a_run_refuses_the_certificate_of_another_script(certificate: Path, flags: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = _fails("pretrain_llama.py", *flags, "--certificate", str(certificate), "--run-dir", str(run))
    assert f"--certificate {certificate} is not that of this run: the source has changed" in said
    assert "pretrain_llama.py had the hash" in said and not (run / "checkpoints").exists()


@FULL
def test_a_check_names_what_has_changed(certificate: Path, tmp_path: Path) -> None:
    """The repeated numbers are the recorded ones to the last digit, as the machine is the same."""
    content = json.loads(certificate.read_text())
    assert set(content["layouts"][0]["weights"]) == set(content["layouts"][0]["gradients"])
    assert "layers.1.mlp.dense_h_to_4h.weight" in content["layouts"][0]["gradients"]
    content |= {"source": "0" * 64, "versions": content["versions"] | {"torch": "1.0"}}
    old = tmp_path / "old.json"
    old.write_text(json.dumps(content))
    said = _fails(TOOL, "--check", str(old))
    assert "the source has changed: tds, megatron or pretrain_gpt2.py had the hash 000000000000" in said
    assert "the version of torch was 1.0 and is now" in said
    assert "differences: all " in said and "NOT CONFIRMED" in said


@FULL
def test_a_failed_comparison_is_recorded_as_failed(flags: list[str], tmp_path: Path) -> None:
    path = tmp_path / "failed.json"
    argv = ["pretrain_gpt2.py", "--layouts", "tp 2", "--steps", "1", "--tolerance", "1e-12", "--certificate", str(path)]
    assert f"certificate -> {path} (NOT PASSED)" in _fails(TOOL, *argv, "--", *flags)
    found = read_certificate(path)
    assert not found.passed and found.failed == ["tp 2"] and found.layouts[0].words
    assert "did not pass" in _fails(
        "pretrain_gpt2.py", *flags, "--certificate", str(path), "--run-dir", f"{tmp_path}/r"
    )


def test_wrong_arguments_have_one_sentence(certificate: Path, tmp_path: Path) -> None:
    none = str(tmp_path / "none" / "c.json")
    for argv, words in {
        ("--check", none): f"there is no certificate {none}",
        ("--check", str(certificate), "pretrain_gpt2.py"): "leave out pretrain_gpt2.py",
        ("--check", str(certificate), "--steps", "5"): "leave out --steps",
        ("pretrain_gpt2.py", "--certificate", none): f"--certificate {none}: there is no folder {tmp_path}/none",
        (): "give an entry script",
    }.items():
        (line,) = _fails(TOOL, *argv).splitlines()
        assert words in line
