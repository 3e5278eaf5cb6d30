"""Runs whose corpus and checkpoints are in object storage train as runs on local files do, whatever the server does."""

import contextlib
import hashlib
import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from safetensors.numpy import save_file

from megatron import storage
from megatron.checkpointing import CheckpointError, CheckpointReader, latest_checkpoint, remote, uploads
from megatron.checkpointing.files import TENSORS
from megatron.checkpointing.stream import open_tensors
from megatron.checkpointing.uploads import make_room
from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron.storage import RemotePath, StorageError, to_path
from megatron.tasks import TASKS
from megatron.training import inputs, train
from tests.object_server import BUCKET, FaultyServer, s3_server
from tests.support import FULL, covering, ends_of_ranks, on_ranks

from .runs import Start, losses_of, make, run_all, whole_tensors

FLAGS = "--precision fp32 --batch-size 2 --save-interval 2 --keep-last 2 --train-iters"


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyServer]:
    with s3_server() as server:
        yield server


@pytest.fixture
def remote_data(server: FaultyServer, tiny_data: str) -> str:
    for end in (".bin", ".idx"):
        to_path(f"{BUCKET}/tiny{end}").upload(Path(tiny_data + end))
    return f"{BUCKET}/tiny"


def _train(env: dict[str, str], starts: list[Start], data: str, vocab_file: str) -> None:
    os.environ.update(env)
    run_all(starts, data, vocab_file)


def _train_both(
    env: dict[str, str], folder: Path, flags: str, url: str, data: tuple[str, str], vocab_file: str
) -> None:
    _train(env, [Start("gpt2", folder / "local", flags)], data[0], vocab_file)
    node = folder / f"node{os.environ['RANK']}"  # the second run directory is not shared: each rank is a machine
    node.mkdir(exist_ok=True)
    os.chdir(node)
    _train(env, [Start("gpt2", Path("run"), f"{flags} --save {url}")], data[1], vocab_file)


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
    return [path.name for path in to_path(url).glob("*")]


def whole_ones(url: str) -> list[str]:
    """Return the names of the checkpoints that have an index. Storage in memory keeps names of deleted folders."""
    return [path.name for path in to_path(url).glob("iter_*") if (path / "checkpoint.json").exists()]


def test_a_run_in_a_bucket_is_the_local_run_and_resumes_in_another_layout(
    server: FaultyServer, remote_data: str, tiny_data: str, vocab_file: str, tmp_path: Path
) -> None:
    env, url = environment(server, tmp_path), f"{BUCKET}/run"
    data = tiny_data, remote_data
    on_ranks(2, _train_both, env, tmp_path, f"{FLAGS} 4 --pipe-parallel-size 2", url, data, vocab_file)
    assert (
        losses_of(tmp_path / "node0/run") == losses_of(tmp_path / "local") and len(losses_of(tmp_path / "local")) == 4
    )
    assert [name for name in names(url) if name.startswith("iter")] == ["iter_0000002", "iter_0000004"]
    changes = [words.split()[:2] for words in server.faults.requests if "/run/" in words]
    written = [name.removeprefix("/bucket/run/") for verb, name in changes if verb == "PUT"]
    # All tensors are there before checkpoint.json.
    assert written[-3:] == ["iter_0000004/BLAKE3SUMS", "iter_0000004/checkpoint.json", "latest"]
    found = whole_tensors(fetched(to_path(url) / "iter_0000004", tmp_path))
    expected = whole_tensors(tmp_path / "local/checkpoints/iter_0000004")
    assert found.keys() == expected.keys()
    assert all((found[name] == expected[name]).all() for name in expected)
    assert [*tmp_path.glob("node*/run/upload/**/*.safetensors")] == []

    server.faults.requests.clear()
    other = f"{FLAGS} 6 --model-parallel-size 2 --override-lr-schedule"
    on_ranks(2, _train_both, env, tmp_path, other, url, data, vocab_file)
    assert (
        losses_of(tmp_path / "node0/run") == losses_of(tmp_path / "local") and len(losses_of(tmp_path / "local")) == 6
    )
    assert [name for name in names(url) if name.startswith("iter")] == ["iter_0000004", "iter_0000006"]
    deleted = [
        words.split()[1] for words in server.faults.requests if words.startswith("DELETE /bucket/run/iter_0000002")
    ]
    assert deleted[0] == "/bucket/run/iter_0000002/checkpoint.json" and len(deleted) == 4


def _stand_in(protocol: str, stamp: str) -> list[str]:
    """Let `protocol` name a file system in memory; return the list of the objects that will be written.

    Its objects have the version `stamp`, as those of the real file system.
    """
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    written: list[str] = []

    class StandIn(MemoryFileSystem):  # type: ignore[misc]
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            assert not path.startswith("/") or "://" not in path
            return str(super()._strip_protocol(path.removeprefix(f"{protocol}://")))

        def info(self, path: str, **more: Any) -> dict[str, Any]:
            found = super().info(path, **more)
            found.pop("created", None)
            if found["type"] == "file":
                found[stamp] = hashlib.sha256(self.cat_file(path)).hexdigest()
            return dict(found)

        def pipe_file(self, path: str, *args: Any, **more: Any) -> None:
            written.append(path)
            super().pipe_file(path, *args, **more)

        def put_file(self, local: str, path: str, *args: Any, **more: Any) -> None:
            written.append(path)
            super().put_file(local, path, *args, **more)

    StandIn.protocol = (protocol,)
    fsspec.register_implementation(protocol, StandIn, clobber=True)
    return written


PLACES = {"memory": ("memory://bucket", "created"), "gs": ("gs://bucket/deep", "etag"),
          "hf": ("hf://datasets/user/repo", "blob_id")}  # fmt: skip


def _in_memory(folder: str, data: str, vocab_file: str, protocol: str) -> str:
    words, (base, stamp) = io.StringIO(), PLACES[protocol]
    url, written = f"{base}/run", [] if protocol == "memory" else _stand_in(protocol, stamp)
    for end in (".bin", ".idx"):
        RemotePath(f"{base}/tiny{end}").upload(Path(data + end))
    assert RemotePath(f"{base}/tiny.bin").stamp()[1].startswith(f"{stamp} ")
    os.environ["MEGATRON_CACHE_DIR"] = f"{folder}/cache"
    with contextlib.redirect_stdout(words):
        for name, flags in (
            ("whole", f"{FLAGS} 6 --save {url}-whole"),
            ("run", f"{FLAGS} 4 --save {url}"),
            ("run", f"{FLAGS} 6 --save {url} --override-lr-schedule"),
            ("tuned", f"{FLAGS} 2 --load {url} --finetune"),
        ):
            with make(Start("gpt2", Path(folder, name), flags), f"{base}/tiny", vocab_file) as run:
                train(run)
    assert whole_ones(url) == ["iter_0000004", "iter_0000006"]
    if protocol != "memory":
        last = [path for path in written if "/run/iter_0000006/" in path]
        assert last[0].endswith(TENSORS) and last[-1] == f"{url}/iter_0000006/checkpoint.json"
        with pytest.raises(StorageError, match=f"could not read {base}/tiny.bin.*the answer has"):
            RemotePath(f"{base}/tiny.bin").read_range(0, 1 << 40)
    return words.getvalue()


@pytest.mark.parametrize("protocol", covering(list(PLACES), lambda protocol: protocol != "gs"))
def test_one_process_can_use_memory_and_load_from_a_url(
    protocol: str, tiny_data: str, vocab_file: str, tmp_path: Path
) -> None:
    pytest.importorskip("fsspec")
    words = on_ranks(1, _in_memory, str(tmp_path), tiny_data, vocab_file, protocol)[0]
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "whole") and len(losses_of(tmp_path / "run")) == 6
    assert "resumed at iteration 4" in words
    assert f"this run starts with the weights of {PLACES[protocol][0]}/run/iter_0000006" in words
    assert losses_of(tmp_path / "tuned")[0] < losses_of(tmp_path / "whole")[0] - 0.01


def _saved_again(folder: str, data: str, vocab_file: str) -> str:
    """Stop while the only checkpoint is saved again: before and after the old one is deleted. Then resume."""
    url, words = RemotePath("memory://bucket/again"), io.StringIO()

    def train_until(name: str, iteration: int) -> None:
        with make(Start("gpt2", Path(folder, name), f"{FLAGS} {iteration} --save {url}"), data, vocab_file) as run:
            train(run)

    def cut(path: RemotePath, target: RemotePath) -> None:
        if path.name == "checkpoint.json":
            raise StorageError("cut")
        copy(path, target)

    copy = RemotePath.copy_to
    with contextlib.redirect_stdout(words):
        train_until("run", 2)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(StorageError, match="cut"):
            patch.setattr(RemotePath, "copy_to", cut)
            make_room(url / "iter_0000002")
        newest = latest_checkpoint(url)
        assert newest == url / "iter_0000002"
        CheckpointReader(newest).verify()
        make_room(url / "iter_0000002")
        newest = latest_checkpoint(url)
        assert newest is not None and newest.name == "iter_0000002.old.tmp" and whole_ones(str(url)) == [newest.name]
        CheckpointReader(newest).verify()
        train_until("run", 4)
    assert whole_ones(str(url)) == ["iter_0000004"] and not names(f"{url}/iter_0000002.old.tmp")
    return words.getvalue()


def test_saving_the_only_checkpoint_again_always_leaves_one(tiny_data: str, vocab_file: str, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    words = on_ranks(1, _saved_again, str(tmp_path), tiny_data, vocab_file)[0]
    assert "resumed at iteration 2" in words
    on_ranks(1, run_all, [Start("gpt2", tmp_path / "whole", f"{FLAGS} 4")], tiny_data, vocab_file)
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "whole")


def _killed(env: dict[str, str], start: Start, when: str, data: str, vocab_file: str) -> None:
    """Kill this rank while iteration 4 is uploaded: before its tensors, or on rank 0 before checkpoint.json."""

    def upload(files: list[Path], folder: RemotePath) -> None:
        if folder.name == "iter_0000004" and when == "tensors" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        remote.upload_files(files, folder)

    def write_bytes(path: RemotePath, data: Any) -> int:
        if str(path).endswith("iter_0000004/checkpoint.json"):
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, data)

    write = RemotePath.write_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uploads, "upload_files", upload)
        patch.setattr(RemotePath, "write_bytes", write_bytes)
        _train(env, [start], data, vocab_file)


@pytest.mark.parametrize("when", covering(["tensors", "index"], "index".__eq__))
def test_a_killed_upload_leaves_the_older_checkpoint(
    when: str, server: FaultyServer, remote_data: str, vocab_file: str, tmp_path: Path
) -> None:
    env, url = environment(server, tmp_path), f"{BUCKET}/killed-{when}"
    start = Start("gpt2", tmp_path / "run", f"{FLAGS} 6 --pipe-parallel-size 2 --save {url}")
    ends = ends_of_ranks(2, _killed, env, start, when, remote_data, vocab_file)
    assert -signal.SIGKILL in [end.code for end in ends]
    assert "iter_0000004" in names(url) and "checkpoint.json" not in names(f"{url}/iter_0000004")
    newest = latest_checkpoint(to_path(url))
    assert newest is not None and newest.name == "iter_0000002"
    CheckpointReader(newest).verify()
    (to_path(url) / "iter_0000099/pipe00-model00-data00.safetensors").write_bytes(b"left by another killed run")
    if when == "index":
        return
    on_ranks(2, _train, env, [start], remote_data, vocab_file)
    assert [name for name in names(url) if name.startswith("iter")] == ["iter_0000004", "iter_0000006"]
    whole = Start("gpt2", tmp_path / "whole", f"{FLAGS} 6 --pipe-parallel-size 2 --save {url}-whole")
    on_ranks(2, _train, env, [whole], remote_data, vocab_file)
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "whole")


def test_errors_of_the_server_delay_a_run_and_an_outage_fails_only_a_save(
    server: FaultyServer, remote_data: str, vocab_file: str, tmp_path: Path
) -> None:
    env, url = environment(server, tmp_path), f"{BUCKET}/errors"
    start = Start("gpt2", tmp_path / "run", f"{FLAGS} 4 --async-save --save {url}")
    server.faults.every, server.faults.delay = 20, 0.005
    try:
        on_ranks(1, _train, env, [start], remote_data, vocab_file)
    finally:
        server.faults.__init__()  # type: ignore[misc]
    assert [name for name in names(url) if name.startswith("iter")] == ["iter_0000002", "iter_0000004"]
    start = Start("gpt2", tmp_path / "run", f"{FLAGS} 8 --save {url}")
    words = on_ranks(1, _outage, env, start, remote_data, vocab_file)
    assert f"could not save {url}/iter_0000006: could not write {url}/iter_0000006/" in words[0]
    assert "training continues, and the next save tries again" in words[0]
    assert [name for name in names(url) if name.startswith("iter")] == ["iter_0000004", "iter_0000008"]


def _outage(env: dict[str, str], start: Start, data: str, vocab_file: str) -> str:
    """Run `start` while no object of iteration 6 can be written; return what it printed."""

    def put_file(fs: Any, local: str, url: str, *args: Any, **more: Any) -> Any:
        if "iter_0000006" in url:
            raise OSError("503 Service Unavailable")
        return put(fs, local, url, *args, **more)

    os.environ.update(env)
    import s3fs

    put = s3fs.S3FileSystem.put_file
    words = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(words):
        patch.setattr(s3fs.S3FileSystem, "put_file", put_file)
        patch.setattr(storage, "FIRST_WAIT", 0.01)
        with make(start, data, vocab_file) as run:
            train(run)
    return words.getvalue()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"--data-path {BUCKET}/none", f"there is no {BUCKET}/none.idx and no {BUCKET}/none.bin"),
        pytest.param("--data-path s3://no-bucket/x", "there is no s3://no-bucket/x.idx", marks=FULL),
        ("--save s3://no-bucket/run", "--save s3://no-bucket/run: there is no s3://no-bucket/run/write-test"),
        (f"--load {BUCKET}/none", f"--load {BUCKET}/none holds no checkpoint"),
        ("--data-path gs://bucket/x", "--data-path gs://bucket/x: could not look for gs://bucket/x.idx: gs:// needs"),
        (f"--save {BUCKET}/run --key", "--save s3://bucket/run: could not write s3://bucket/run/write-test"),
        pytest.param(
            f"--data-path {BUCKET}/x --key",
            f"--data-path {BUCKET}/x: could not look for {BUCKET}/x.idx: access was",
            marks=FULL,
        ),
        (f"--data-path {BUCKET}/x --url", f"--data-path {BUCKET}/x: could not look for {BUCKET}/x.idx: Could not conn"),
    ],
)
def test_wrong_places_give_one_sentence_before_training(
    flags: str, message: str, server: FaultyServer, tiny_data: str, vocab_file: str, tmp_path: Path
) -> None:
    env, words = environment(server, tmp_path), flags.split()
    env |= {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"} if words[-1] == "--url" else {}
    server.faults.only_key = "another" if words[-1] == "--key" else None
    words = [word for word in words if word not in ("--url", "--key")]
    words += [] if "--data-path" in words else ["--data-path", tiny_data]
    try:
        ends = ends_of_ranks(1, _wrong, env, [*words, "--run-dir", str(tmp_path / "run")], vocab_file)
    finally:
        server.faults.only_key = None
    assert message in ends[0].stderr
    assert not (tmp_path / "run").exists()


def _wrong(env: dict[str, str], flags: list[str], vocab_file: str) -> None:
    os.environ.update(env)
    storage.FIRST_WAIT = 0.01
    task = TASKS["gpt2"]()
    inputs.require_inputs(task, parse([*flags, "--vocab-file", vocab_file], task.defaults))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--save s3://bucket/run", "--save s3://bucket/run needs --run-dir"),
        ("--run-dir s3://bucket/run", "--run-dir s3://bucket/run must be a folder on this machine"),
    ],
)
def test_the_run_directory_is_local(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(flags.split(), TASKS["gpt2"]().defaults)


def test_a_damaged_index_and_a_shortened_file_are_refused(server: FaultyServer, tmp_path: Path) -> None:
    path = to_path(f"{BUCKET}/damage/x{TENSORS}")
    assert isinstance(path, RemotePath)
    local = tmp_path / "x"
    save_file({"a": np.arange(12.0).reshape(4, 3)}, local)
    path.upload(local)
    np.testing.assert_array_equal(open_tensors(path).get_slice("a")[slice(1, 3), slice(0, 2)], [[3, 4], [6, 7]])
    server.faults.requests.clear()
    open_tensors(path).get_slice("a")[slice(1, 2),]
    assert server.faults.requests[-1].endswith(f"bytes={local.stat().st_size - 72}-{local.stat().st_size - 49}")
    for data in (local.read_bytes()[:-1], b"", b"\xff" * 100, b"version https://git-lfs"):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=str(path)):
            open_tensors(path)
