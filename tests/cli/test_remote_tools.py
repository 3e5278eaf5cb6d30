"""The tools read runs and corpora in object storage, and report refused access in one sentence."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.storage import to_path
from tests.object_server import BUCKET, FaultyServer, s3_server
from tests.support import command

SMALL = [
    "--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16",
    "--batch-size", "2", "--precision", "fp32", "--eval-iters", "0", "--no-tensorboard", "--split", "1,0,0",
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyServer]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def env(server: FaultyServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {**server.environment, "MEGATRON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def run_dir(env: dict[str, str], tiny_data: str, vocab_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run whose corpus, checkpoints and tokenizer are in object storage only."""
    folder = tmp_path_factory.mktemp("remote")
    for end in (".bin", ".idx", ".json"):
        if Path(tiny_data + end).exists():
            to_path(f"{BUCKET}/text{end}").upload(Path(tiny_data + end))  # type: ignore[attr-defined]
    vocab = folder / Path(vocab_file).name
    shutil.copy(vocab_file, vocab)
    flags = ["--data-path", f"{BUCKET}/text", "--vocab-file", str(vocab), "--save", "S3://bucket/run"]
    flags += ["--run-dir", str(folder / "run"), "--train-iters", "2", "--save-interval", "1"]
    done = command("python", "pretrain_gpt2.py", *SMALL, *flags, env=env)
    assert done.returncode == 0, done.stderr
    vocab.unlink()
    shutil.rmtree(folder / "run" / "tokenizer")
    return folder / "run"


def succeeds(env: dict[str, str], *argv: str) -> str:
    done = command("python", *argv, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("load", ["run", "url"])
def test_models_of_a_remote_run(load: str, env: dict[str, str], run_dir: Path, tmp_path: Path) -> None:
    where = str(run_dir) if load == "run" else f"{BUCKET}/run"
    succeeds(env, "tools/convert_checkpoint.py", "--load", where, "--output", str(tmp_path / "hf"))
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["n_layer"] == 2
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    average = str(tmp_path / "average")
    succeeds(env, "tools/average_checkpoints.py", "--load", where, "--last", "2", "--output", average)
    for each in (where, average) if load == "run" else (where,):
        succeeds(env, "tools/generate.py", "--load", each, "--prompt", "a", "--max-new-tokens", "2")


def test_the_doctor_and_the_report_of_a_remote_run(env: dict[str, str], run_dir: Path) -> None:
    words = command("python", "tools/doctor.py", "--run-dir", str(run_dir), "--json", env=env)
    found = {each["check"]: each for each in json.loads(words.stdout)}
    assert "Traceback" not in words.stderr
    assert found["checkpoint"]["state"] == found["disk"]["state"] == found["run lock"]["state"] == "ok", words.stdout
    assert f"{BUCKET}/run/iter_0000002" in found["checkpoint"]["words"]
    succeeds(env, "tools/report.py", str(run_dir))


def test_corpora_in_object_storage(env: dict[str, str], run_dir: Path, tiny_data: str, tmp_path: Path) -> None:
    for name in ("info", "verify"):
        succeeds(env, "tools/inspect_data.py", name, f"{BUCKET}/text.bin")
    argv = ["tools/inspect_data.py", "merge", f"{BUCKET}/text", f"{BUCKET}/text", "--output", str(tmp_path / "both")]
    succeeds(env, *argv)
    assert (tmp_path / "both.bin").read_bytes() == 2 * Path(f"{tiny_data}.bin").read_bytes()
    done = command("python", "tools/inspect_data.py", "split", f"{BUCKET}/text", env=env)
    assert done.returncode == 1 and "--output" in done.stderr and len(done.stderr.splitlines()) == 1


def test_refused_access_is_not_called_missing(env: dict[str, str], run_dir: Path, server: FaultyServer) -> None:
    """S3 answers a HEAD request with expired credentials by 400 and no reason."""
    server.faults.every, server.faults.status = 1, "400 Bad Request"
    try:
        done = command("python", "tools/generate.py", "--load", f"{BUCKET}/run", "--prompt", "a", env=env)
        flags = ["--data-path", f"{BUCKET}/text", "--save", f"{BUCKET}/run", "--run-dir", str(run_dir)]
        run = command("python", "pretrain_gpt2.py", *SMALL, *flags, env=env)
    finally:
        server.faults.__init__()  # type: ignore[misc]
    for each in (done, run):
        assert each.returncode and "credentials" in each.stderr and "Traceback" not in each.stderr
        assert "are missing:" not in each.stderr
