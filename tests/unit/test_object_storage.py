"""Corpora in object storage give the samples of a local corpus, through a bounded cache, and refuse changed objects."""

import contextlib
import os
import pickle
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_utils.indexed_writer import IndexedDatasetBuilder
from megatron import storage
from megatron.atomic import atomic_folder
from megatron.config.messages import describe_error
from megatron.data import (
    corpus_dataset,
    corpus_paths,
    cpm_triples,
    remote_tokens,
    sample_order,
    sft_dataset,
    t5_dataset,
)
from megatron.data.corpus_paths import TRIPLE_PARTS
from megatron.data.cpm_masking import mask_document
from megatron.data.fingerprints import corpus_fingerprint, made_with
from megatron.data.gpt2_dataset import GPT2Dataset
from megatron.data.indexed_dataset import LOSS_SUFFIX, DatasetError, IndexedDataset
from megatron.data.sampler import ConsecutiveSampler, build_loader
from megatron.data.t5_dataset import Objective, Specials
from megatron.storage import RemotePath, StorageError, to_path
from tests.object_server import FaultyServer, s3_server
from tests.support import ends_of_ranks, on_ranks

BLOCK = 4096
TOKENS = 40_000


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyServer]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=["s3", "memory"])
def bucket(request: pytest.FixtureRequest) -> str:
    """The URL of a folder in object storage."""
    if request.param == "s3":
        request.getfixturevalue("server").faults.__init__()
    else:
        pytest.importorskip("fsspec")
    return f"{request.param}://bucket/{request.node.name.replace('[', '-').rstrip(']')}"


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(remote_tokens, "BLOCK", BLOCK)
    monkeypatch.setattr(remote_tokens, "BLOCKS_PER_FILE", 4)
    monkeypatch.setattr(storage, "FIRST_WAIT", 0.01)
    monkeypatch.setenv("MEGATRON_CACHE_DIR", str(tmp_path / "cache"))


def local_corpus(folder: Path, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    prefix = str(folder / "text")
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        left = TOKENS
        while left:
            size = min(int(rng.integers(1, 900)), left)
            builder.add_document(rng.integers(0, 1000, size))
            left -= size
    Path(f"{prefix}.json").write_text('{"fingerprint": "none"}')
    return prefix


def upload(prefix: str, bucket: str) -> str:
    for end in (".bin", ".idx", ".json"):
        to_path(f"{bucket}/text{end}").upload(Path(prefix + end))
    return f"{bucket}/text"


def samples(dataset: Any, read_ahead: bool, count: int) -> list[dict[str, Any]]:
    sampler = ConsecutiveSampler(2, 2, 1, 2, consumed_samples=40)
    batches = iter(build_loader(dataset, sampler, read_ahead=read_ahead))
    return [next(batches) for _ in range(count)]


def test_samples_equal_those_of_the_local_corpus(bucket: str, tmp_path: Path) -> None:
    local = local_corpus(tmp_path)
    remote = upload(local, bucket)
    there, here = (GPT2Dataset(IndexedDataset(each), range(70), 128, 7, "train") for each in (remote, local))
    for read_ahead in (True, False):
        for found, expected in zip(samples(there, read_ahead, 30), samples(here, False, 30), strict=True):
            assert found.keys() == expected.keys()
            assert all((found[name] == expected[name]).all() for name in found)
    whole = np.fromfile(local + ".bin", np.uint16)
    tokens = IndexedDataset(remote).tokens
    for cut in (slice(None, 9), slice(-9, None), slice(BLOCK // 2 - 1, BLOCK // 2 + 1), slice(5, 5), slice(0, TOKENS)):
        np.testing.assert_array_equal(tokens[cut], whole[cut])
    assert corpus_fingerprint(remote) == corpus_fingerprint(local)
    assert made_with(remote) == {"fingerprint": "none"}


def test_only_the_blocks_that_are_read_are_downloaded_and_only_once(server: FaultyServer, tmp_path: Path) -> None:
    remote = upload(local_corpus(tmp_path), "s3://bucket/blocks")
    server.faults.requests.clear()

    def downloads() -> list[str]:
        return [each for each in server.faults.requests if each.startswith("GET /bucket/blocks/text.bin")]

    for _ in range(2):  # the second data set is that of another process of the node
        tokens = IndexedDataset(remote).tokens
        tokens[BLOCK : BLOCK + 10]  # block 2: a token has 2 bytes
        tokens[4 * BLOCK - 1 : 4 * BLOCK + 1]  # blocks 7 and 8
    assert downloads() == [f"GET /bucket/blocks/text.bin bytes={n * BLOCK}-{(n + 1) * BLOCK - 1}" for n in (2, 7, 8)]


def test_the_cache_stays_below_its_limit(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote, limit = upload(local_corpus(tmp_path), bucket), 16 * BLOCK
    monkeypatch.setenv("MEGATRON_CACHE_GB", str(limit / 1e9))
    tokens, most = IndexedDataset(remote).tokens, 0
    for begin in range(0, TOKENS, 500):
        tokens[begin : begin + 500]
        most = max(most, sum(path.stat().st_blocks * 512 for path in Path(tmp_path, "cache").glob("*/*")))
    assert limit // 2 < most <= limit < 2 * TOKENS
    np.testing.assert_array_equal(tokens[:TOKENS], np.fromfile(f"{tmp_path}/text.bin", np.uint16))
    monkeypatch.setenv("MEGATRON_CACHE_GB", "none")
    with pytest.raises(ValueError, match="MEGATRON_CACHE_GB=none"):
        IndexedDataset(remote)


def maps(cache: Path, of: str) -> int:
    """Return the number of lines of /proc/self/maps that name a file of the cache and match the pattern `of`."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len([line for line in lines if str(cache) in line and re.search(of, line)])


def test_a_warm_cache_is_one_array_that_outlives_its_files(bucket: str, tmp_path: Path) -> None:
    remote, cache = upload(local_corpus(tmp_path), bucket), tmp_path / "cache"
    whole = np.fromfile(f"{tmp_path}/text.bin", np.uint16)
    before = IndexedDataset(remote)
    np.testing.assert_array_equal(before.tokens[: TOKENS - BLOCK], whole[:-BLOCK])
    before.refresh()
    assert isinstance(before.tokens, remote_tokens.RemoteTokens)  # the last blocks are not there
    np.testing.assert_array_equal(before.tokens[-10:], whole[-10:])
    np.testing.assert_array_equal(before.tokens[-BLOCK:-10], whole[-BLOCK:-10])
    later = IndexedDataset(remote)  # another process of the node
    for indexed in (before, later):
        for begin in range(0, TOKENS, 1000):
            indexed.tokens[begin : begin + 1000]
        indexed.refresh()
        assert type(indexed.tokens) is np.ndarray
    held = later.tokens
    np.testing.assert_array_equal(held, whole)
    assert maps(cache, r"/\d$") == 2 * 5 and not held.flags.writeable  # 20 blocks in files of 4, mapped twice

    remote_tokens.evict(cache, 0)
    assert not [path for path in cache.glob("*/*") if path.name.isdigit()]
    np.testing.assert_array_equal(held, whole)
    np.testing.assert_array_equal(IndexedDataset(remote).tokens[:], whole)  # a new file replaces each deleted one
    np.testing.assert_array_equal(later.tokens[:], whole)
    before.refresh()
    later.refresh()
    assert isinstance(later.tokens, remote_tokens.RemoteTokens)
    np.testing.assert_array_equal(held, whole)
    assert maps(cache, r"\d \(deleted\)$") == 5
    del held, indexed
    assert maps(cache, r"\d \(deleted\)$") == 0
    np.testing.assert_array_equal(later.tokens[:], whole)


def test_a_file_that_is_deleted_and_made_again_gives_its_new_blocks(bucket: str, tmp_path: Path) -> None:
    remote = upload(local_corpus(tmp_path), bucket)
    whole = np.fromfile(f"{tmp_path}/text.bin", np.uint16)
    tokens, half = IndexedDataset(remote).tokens, BLOCK // 2
    tokens[:half]  # downloads block 0
    first = tokens[:half]  # maps its file
    remote_tokens.evict(tmp_path / "cache", 0)
    IndexedDataset(remote).tokens[half : 2 * half]  # another process downloads block 1 into a new file
    np.testing.assert_array_equal(tokens[half : 2 * half], whole[half : 2 * half])
    np.testing.assert_array_equal(first, whole[:half])
    np.testing.assert_array_equal(tokens[: 2 * half], whole[: 2 * half])


def test_a_cache_that_is_deleted_under_a_run_is_made_again(bucket: str, tmp_path: Path) -> None:
    remote = upload(local_corpus(tmp_path), bucket)
    whole = np.fromfile(f"{tmp_path}/text.bin", np.uint16)
    tokens = IndexedDataset(remote).tokens
    np.testing.assert_array_equal(tokens[:10], whole[:10])
    shutil.rmtree(tmp_path / "cache")
    np.testing.assert_array_equal(tokens[BLOCK : BLOCK + 10], whole[BLOCK : BLOCK + 10])
    np.testing.assert_array_equal(tokens[:10], whole[:10])
    assert list((tmp_path / "cache").rglob("0"))


def test_copies_of_indexes_are_part_of_the_cache(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote, cache = upload(local_corpus(tmp_path), bucket), tmp_path / "cache"
    IndexedDataset(remote).tokens[:]

    def evicted(limit: int) -> tuple[bool, bool]:
        """Return whether files of tokens, and the copy of the index, are still there."""
        remote_tokens.evict(cache, limit)
        names = [path.name for path in cache.glob("*/*")]
        return any(name.isdigit() for name in names), "whole" in names

    used = sum(path.stat().st_blocks * 512 for path in cache.glob("*/*"))
    count = len([path for path in cache.glob("*/*") if path.name.isdigit()])
    assert evicted(used) == (True, True)
    assert count == len([path for path in cache.glob("*/*") if path.name.isdigit()])
    assert evicted(used - 1) == (True, True)
    assert count > len([path for path in cache.glob("*/*") if path.name.isdigit()])
    assert evicted(1) == (False, True)  # a process may be opening the copy
    monkeypatch.setattr(remote_tokens, "RECENT_SECONDS", -1.0)
    (tmp_path / "cache/another/0").parent.mkdir()
    (tmp_path / "cache/another/0").write_bytes(b"a file of the user")
    assert evicted(1) == (True, False)


def _reading(env: dict[str, str], remote: str, cut: str) -> list[int]:
    """Read the corpus in random order; return the positions of windows that are wrong. cut: when to be killed."""
    os.environ.update(env)
    remote_tokens.BLOCK, remote_tokens.BLOCKS_PER_FILE = BLOCK, 4
    sync, left = os.fdatasync, 5

    def killed(file: int) -> None:
        nonlocal left
        left -= 1
        if not left and cut == "no byte":
            end = os.lseek(file, 0, os.SEEK_CUR)
            os.pwrite(file, bytes(BLOCK // 2), end - BLOCK // 2)  # as if half of the block had been written
            os.kill(os.getpid(), signal.SIGKILL)
        sync(file)
        if not left and cut == "no mark":
            os.kill(os.getpid(), signal.SIGKILL)

    whole = np.fromfile(env["WHOLE"], np.uint16)
    order = np.random.default_rng(os.getpid()).integers(0, TOKENS - 500, 200).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", killed if cut and os.environ["RANK"] == "0" else sync)
        indexed, wrong = IndexedDataset(remote), []
        for n, at in enumerate(order):
            wrong += [at] if (indexed.tokens[at : at + 500] != whole[at : at + 500]).any() else []
            if n % 20 == 0:
                indexed.refresh()
    return wrong


@pytest.mark.parametrize("cut", ["", "no byte", "no mark"])
def test_processes_share_a_small_cache_and_a_killed_one_leaves_no_wrong_tokens(
    cut: str, server: FaultyServer, tmp_path: Path
) -> None:
    remote = upload(local_corpus(tmp_path), f"s3://bucket/shared{cut.replace(' ', '-')}")
    env = {
        **server.environment, "MEGATRON_CACHE_DIR": str(tmp_path / "cache"), "WHOLE": f"{tmp_path}/text.bin",
        "MEGATRON_CACHE_GB": str(14 * BLOCK / 1e9),
    }  # fmt: skip
    if cut:
        ends = ends_of_ranks(1, _reading, env | {"MEGATRON_CACHE_GB": "1"}, remote, cut)
        assert ends[0].code == -signal.SIGKILL
        assert on_ranks(1, _reading, env | {"MEGATRON_CACHE_GB": "1"}, remote, "") == [[]]
    else:
        assert on_ranks(2, _reading, env, remote, "") == [[], []]


def test_a_cache_that_cannot_be_written_delays_only_the_first_reading(
    server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remote = upload(local_corpus(tmp_path), "s3://bucket/full")

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    tokens = IndexedDataset(remote).tokens
    for _ in range(2):
        np.testing.assert_array_equal(tokens[:], np.fromfile(f"{tmp_path}/text.bin", np.uint16))
        server.faults.requests.clear()
    assert not [each for each in server.faults.requests if each.startswith("GET")]
    assert f"a block of {remote}.bin is not kept in the cache" in capsys.readouterr().err
    monkeypatch.undo()
    assert not np.frombuffer(next((tmp_path / "cache").glob("*/0")).read_bytes()[4 * BLOCK :], np.uint8).any()


def test_threads_that_read_ahead_raise_the_error_of_their_data_set(bucket: str, tmp_path: Path) -> None:
    remote = upload(local_corpus(tmp_path), bucket)
    dataset = GPT2Dataset(IndexedDataset(remote), range(70), 128, 7, "train")
    to_path(f"{remote}.bin").write_bytes(b"short")  # the threads of the next evaluation open it
    with pytest.raises(StorageError, match=f"{remote}.bin"):
        samples(dataset, read_ahead=True, count=1)


def test_a_changed_object_is_refused(bucket: str, tmp_path: Path) -> None:
    remote = upload(local_corpus(tmp_path), bucket)
    indexed = IndexedDataset(remote)
    before, pickled = indexed.tokens[:10].copy(), pickle.dumps(indexed)
    os.makedirs(tmp_path / "other")
    upload(local_corpus(tmp_path / "other", seed=1), bucket)
    with pytest.raises(StorageError, match=f"{remote}.bin has changed"):
        indexed.tokens[-10:]
    with pytest.raises(StorageError, match=f"{remote}.bin has changed"):  # a data worker that starts later
        pickle.loads(pickled)
    to_path(f"{remote}.bin").write_bytes(b"short")
    with pytest.raises(StorageError, match=f"{remote}.bin has changed"):
        indexed.tokens[-10:]
    upload(str(tmp_path / "other/text"), bucket)
    indexed.tokens.release_pages()  # type: ignore[attr-defined]
    np.testing.assert_array_equal(indexed.tokens[:10], before)
    after = IndexedDataset(remote).tokens[:]  # a new run reads only the new object
    np.testing.assert_array_equal(after, np.fromfile(tmp_path / "other/text.bin", np.uint16))


def test_a_server_that_fails_or_is_slow_only_delays(server: FaultyServer, tmp_path: Path) -> None:
    remote = upload(local_corpus(tmp_path), "s3://bucket/slow")
    server.faults.__init__(every=12, delay=0.02)  # type: ignore[misc]
    try:
        found = IndexedDataset(remote).tokens[:]
    finally:
        server.faults.__init__()  # type: ignore[misc]
    np.testing.assert_array_equal(found, np.fromfile(f"{tmp_path}/text.bin", np.uint16))


@pytest.mark.parametrize(
    ("status", "code", "most"), [("503 Slow Down", "SlowDown", 3), ("500 Internal Server Error", "InternalError", 4)]
)
def test_only_one_layer_repeats_a_request(
    status: str, code: str, most: int, server: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server counts: neither s3fs nor botocore sends a request again."""
    server.faults.every, server.faults.status, server.faults.code = 1, status, code
    server.faults.requests.clear()
    waits: list[float] = []
    monkeypatch.setattr(storage.time, "sleep", waits.append)
    try:
        with pytest.raises(StorageError, match=f"after {most} attempts"):
            to_path("s3://bucket/refused").read_bytes()
    finally:
        sent = len(server.faults.requests)
        server.faults.__init__()  # type: ignore[misc]
    waits = [wait for wait in waits if wait]  # the server sleeps for 0 seconds
    assert sent == most and len(waits) == most - 1
    assert waits == sorted(waits) and len(set(waits)) == len(waits)


def test_a_server_that_never_answers_holds_a_request_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt takes 60 seconds, the time limit of botocore; the clock is that of the test."""
    now = [0.0]
    calls: list[float] = []

    def never(*_: Any) -> bytes:
        calls.append(now[0])
        now[0] += 60
        raise TimeoutError("Read timeout on endpoint URL")

    monkeypatch.setattr(storage.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    with pytest.raises(StorageError, match="after 2 attempts"):
        to_path("memory://bucket/x").request("read", never)  # type: ignore[attr-defined]
    assert len(calls) == 2 and now[0] < storage.DEADLINE + 60


def test_a_server_that_always_fails_ends_the_reading(
    server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = upload(local_corpus(tmp_path), "s3://bucket/down")
    tokens = IndexedDataset(remote).tokens
    monkeypatch.setattr(storage, "ATTEMPTS", 1)
    server.faults.every, server.faults.status = 1, "500 Internal Server Error"
    try:
        with pytest.raises(StorageError, match=f"{remote}.bin.*1 attempt"):
            tokens[:10]
    finally:
        server.faults.every = 0
    assert len(tokens[:10]) == 10  # nothing wrong was kept


def test_an_error_of_the_storage_is_reported_while_a_local_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    path = RemotePath("memory://bucket/interrupted.idx")
    path.write_bytes(b"1234")

    def interrupt(*_: Any, **__: Any) -> None:
        raise ConnectionError("the server closed the connection")

    monkeypatch.setattr(storage, "ATTEMPTS", 1)
    file_system = type(storage._file_system("memory", os.getpid()))
    for method in ("get_file", "cat_file"):
        monkeypatch.setattr(file_system, method, interrupt)
    expected = f"could not read {path}: the server closed the connection"
    with pytest.raises(StorageError, match=expected) as error:
        remote_tokens.local_copy(path)
    assert describe_error(error.value).startswith(expected)
    with pytest.raises(StorageError) as error, atomic_folder(tmp_path / "export"):
        path.read_bytes()
    assert describe_error(error.value).startswith(expected)
    # An error of the system gets the name of the file that it lacks.
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "export"))), atomic_folder(tmp_path / "export"):
        raise OSError(28, "No space left on device")


def test_missing_objects_buckets_and_packages_are_named(server: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DatasetError, match=r"there is no s3://bucket/none\.idx"):
        IndexedDataset("s3://bucket/none")
    with pytest.raises(FileNotFoundError, match="s3://no-bucket/x: The specified bucket does not exist"):
        to_path("s3://no-bucket/x").read_bytes()
    server.faults.only_key = "another key"
    try:
        with pytest.raises(StorageError, match="s3://bucket/none.idx: access was refused.*credentials"):
            IndexedDataset("s3://bucket/none")
    finally:
        server.faults.only_key = None
    for protocol, package in (("gs", "gcsfs"), ("oss", "ossfs")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(StorageError, match=f"{protocol}:// needs the package {package}: .*pip install {package}"):
            to_path(f"{protocol}://bucket/x").read_bytes()


def test_the_storage_copies_objects(bucket: str) -> None:
    path, copy = RemotePath(f"{bucket}/copied/x"), RemotePath(f"{bucket}/copy/y")
    path.write_bytes(b"content")
    path.copy_to(copy)
    assert copy.read_bytes() == path.read_bytes() == b"content"
    with pytest.raises(FileNotFoundError, match=f"there is no {bucket}/copied/z"):
        (path.parent / "z").copy_to(copy)


def test_a_url_is_no_local_path() -> None:
    path = to_path("s3://bucket/folder/name.bin")
    assert str(path) == "s3://bucket/folder/name.bin" == str(pickle.loads(pickle.dumps(path)))
    assert [str(path.parent), path.name, str(path.parent / "x")] == [
        "s3://bucket/folder",
        "name.bin",
        "s3://bucket/folder/x",
    ]
    with pytest.raises(TypeError, match="s3://bucket/folder/name.bin"):
        os.fspath(path)
    assert type(to_path("data/x")) is type(Path("data/x"))


@pytest.mark.parametrize(
    ("error", "failures", "calls"),
    [(OSError("503"), 3, 4), (OSError("503"), 4, 4), (PermissionError("no"), 1, 1), (FileNotFoundError("x"), 1, 1)],
)
def test_requests_are_repeated_unless_that_is_of_no_use(error: OSError, failures: int, calls: int) -> None:
    pytest.importorskip("fsspec")
    made = []

    def call(fs: Any, url: str) -> str:
        made.append(url)
        if len(made) <= failures:
            raise error
        return "done"

    path = RemotePath("memory://bucket/x")
    if failures < calls:
        assert path.request("read", call) == "done"
    else:
        with pytest.raises(OSError, match="memory://bucket/x"):
            path.request("read", call)
    assert made == ["memory://bucket/x"] * calls


def _built(kind: str, prefix: str) -> Any:
    if kind == "sft":
        return sft_dataset.build_train_valid_test_datasets(prefix, "1", 128, 3, 1, 1000)
    specials = Specials(3, 1000, tuple(range(1001, 1101)))
    if kind == "t5":
        return t5_dataset.build_train_valid_test_datasets(prefix, "1", Objective(), 128, None, specials, 1, 1000)
    return cpm_triples.build_train_valid_test_datasets(prefix, "1", 100, 60, specials, 1, 1000)


def corpus_of_kind(kind: str, folder: Path) -> str:
    """Write a corpus and a copy of it in object storage, memory://bucket/KIND; return the prefix of the former."""
    local = local_corpus(folder)
    source, rng = IndexedDataset(local), np.random.default_rng(1)
    endings = {"sft": [LOSS_SUFFIX], "t5": [], "triple": [f"_{part}" for part in TRIPLE_PARTS]}[kind]
    with contextlib.ExitStack() as stack:
        dtype = np.uint8 if kind == "sft" else np.int32
        builders = [stack.enter_context(IndexedDatasetBuilder(local + ending, dtype)) for ending in endings]
        for n in range(len(source)):
            document = source[n]
            masked = mask_document(document, 1000, 0.15, 3.0, (1, n)) if kind == "triple" else ()
            made = [rng.integers(0, 2, len(document))] if kind == "sft" else masked
            for builder, part in zip(builders, made, strict=True):
                builder.add_document(part)
    for ending in endings if kind == "triple" else ["", *endings]:
        for end in (".bin", ".idx"):
            RemotePath(f"memory://bucket/{kind}{ending}{end}").upload(Path(local + ending + end))
    return local


@pytest.mark.parametrize("kind", ["sft", "t5", "triple"])
def test_every_kind_of_corpus_can_be_remote(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    local = corpus_of_kind(kind, tmp_path)
    assert corpus_paths.is_triple(f"memory://bucket/{kind}") == (kind == "triple")
    (there, _, _), _ = _built(kind, f"memory://bucket/{kind}")
    (here, _, _), _ = _built(kind, local)
    for n in range(80):
        found, expected = there[n], here[n]
        assert found.keys() == expected.keys() and all((found[name] == expected[name]).all() for name in found)


@pytest.mark.parametrize("kind", ["sft", "t5", "triple"])
def test_reading_every_kind_of_corpus_lets_go_of_files_that_left_the_cache(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are deleted but mapped still take space, which the limit of the cache does not count."""
    pytest.importorskip("fsspec")
    monkeypatch.setattr(corpus_dataset, "RELEASE_INTERVAL", 4)
    monkeypatch.setattr(sample_order, "RELEASE_INTERVAL", 4)
    corpus_of_kind(kind, tmp_path)
    data, cache = _built(kind, f"memory://bucket/{kind}")[0][0], tmp_path / "cache"
    for n in range(100):
        data[n]
    pattern = r"/\d+( \(deleted\))?$"  # files of blocks; the copy of an index stays mapped
    assert maps(cache, pattern) > 0
    for file in cache.glob("*/[0-9]*"):
        file.unlink()
    for n in range(100, 110):
        data[n]
    files_read_since = len(list(cache.glob("*/[0-9]*")))
    assert maps(cache, r"/\d+ \(deleted\)$") == 0 < files_read_since
