"""Runs whose corpus and checkpoints are in object storage train as runs on local files do, whatever the server does."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.storage import RemotePath, place
from tests.object_server import FaultyServer, s3_server
from tests.support import on_ranks

from .runs import Start, losses_of, run_all, whole_tensors

FLAGS = "--precision fp32 --batch-size 2 --save-interval 2 --keep-last 2 --train-iters"
BUCKET = "s3://bucket"


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyServer]:
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        place(BUCKET).request("make", lambda fs, url: fs.mkdir(url))
        yield server


@pytest.fixture
def remote_data(server: FaultyServer, tiny_data: str) -> str:
    for end in (".bin", ".idx"):
        place(f"{BUCKET}/tiny{end}").upload(Path(tiny_data + end))
    return f"{BUCKET}/tiny"


def _train(env: dict[str, str], starts: list[Start], data: str, vocab_file: str) -> None:
    os.environ.update(env)
    run_all(starts, data, vocab_file)


def environment(server: FaultyServer, tmp_path: Path) -> dict[str, str]:
    return {**server.environment, "MEGATRON_CACHE_DIR": str(tmp_path / "cache")}


def fetched(checkpoint: Path, tmp_path: Path) -> Path:
    """Copy a checkpoint out of the bucket, for tests that read it with other code than this project's."""
    local = tmp_path / "fetched" / checkpoint.name
    local.mkdir(parents=True)
    for path in checkpoint.glob("*"):
        assert isinstance(path, RemotePath)
        path.download(local / path.name)
    return local


def names(url: str) -> list[str]:
    return [path.name for path in place(url).glob("*")]


def test_a_run_in_a_bucket_is_the_local_run_and_resumes_in_another_layout(
    server: FaultyServer, remote_data: str, tiny_data: str, vocab_file: str, tmp_path: Path
) -> None:
    env, url = environment(server, tmp_path), f"{BUCKET}/run"
    pipe = "--pipe-parallel-size 2"
    here = [Start("gpt2", tmp_path / "local", f"{FLAGS} {n} {pipe} --lr-decay-iters 6") for n in (4,)]
    there = [Start("gpt2", tmp_path / "remote", f"{FLAGS} 4 {pipe} --lr-decay-iters 6 --save {url}")]
    on_ranks(2, _train, env, here, tiny_data, vocab_file)
    on_ranks(2, _train, env, there, remote_data, vocab_file)
    assert losses_of(tmp_path / "remote") == losses_of(tmp_path / "local") and len(losses_of(tmp_path / "local")) == 4
    assert [name for name in names(url) if name.startswith("iter")] == ["iter_0000002", "iter_0000004"]
    found = whole_tensors(fetched(place(url) / "iter_0000004", tmp_path))
    expected = whole_tensors(tmp_path / "local/checkpoints/iter_0000004")
    assert found.keys() == expected.keys()
    assert all((found[name] == expected[name]).all() for name in expected)
    assert [*(tmp_path / "remote" / "upload").rglob("*.safetensors")] == []

    other = f"{FLAGS} 6 --model-parallel-size 2 --override-lr-schedule"
    on_ranks(2, _train, env, [Start("gpt2", tmp_path / "local", other)], tiny_data, vocab_file)
    on_ranks(2, _train, env, [Start("gpt2", tmp_path / "remote", f"{other} --save {url}")], remote_data, vocab_file)
    assert losses_of(tmp_path / "remote") == losses_of(tmp_path / "local") and len(losses_of(tmp_path / "local")) == 6
    assert [name for name in names(url) if name.startswith("iter")] == ["iter_0000004", "iter_0000006"]
