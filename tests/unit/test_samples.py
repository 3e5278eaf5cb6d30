import multiprocessing
import os
import pickle
import random
import time
from collections import Counter
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_utils.indexed_writer import IndexedDatasetBuilder
from megatron.data import sample_order as module
from megatron.data.blend import BlendedDataset
from megatron.data.endless import Endless, pack
from megatron.data.gpt2_dataset import GPT2Dataset, build_train_valid_test_datasets
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.sample_order import SampleOrder, Windows
from megatron.data.sampler import ConsecutiveSampler, build_loader
from megatron.data.splits import parse_split, split_documents
from megatron.ranks.errors import one_line_error
from megatron.seeds import seed_generators
from tests.sentences import SENTENCES
from tests.support import command


@pytest.fixture
def indexed(tmp_path: Path) -> IndexedDataset:
    """A dataset of 100 documents; token k of document d has the unique value 100 d + k."""
    rng = np.random.default_rng(3)
    with IndexedDatasetBuilder(tmp_path / "x", np.int32) as builder:
        for d in range(100):
            builder.add_document(100 * d + np.arange(int(rng.integers(0, 60))))
    return IndexedDataset(tmp_path / "x")


def test_an_epoch_is_the_documents_once(indexed: IndexedDataset) -> None:
    """An epoch concatenates all documents in shuffled order, each once, and cuts them into samples."""
    dataset = GPT2Dataset(indexed, range(10, 90), seq_length=16, seed=1, part="train")
    for number in (0, 1, 5):
        epoch = dataset.order.epoch(number)
        line = np.concatenate([indexed[10 + int(d)] for d in epoch.order])
        first = number * dataset.samples_per_epoch
        for at in range(dataset.samples_per_epoch):
            begin = int(epoch.samples[at]) * 16
            assert dataset[first + at]["text"].tolist() == line[begin : begin + 17].tolist()
        assert sorted(epoch.samples.tolist()) == list(range(dataset.samples_per_epoch))
        assert sorted(epoch.order.tolist()) == list(range(80))
        assert len(line) - dataset.samples_per_epoch * 16 - 1 < 16


def test_every_token_is_a_target_at_most_once(indexed: IndexedDataset) -> None:
    dataset = GPT2Dataset(indexed, range(100), seq_length=16, seed=1, part="train")
    seen = Counter(int(t) for n in range(dataset.samples_per_epoch) for t in dataset[n]["text"][1:])
    assert max(seen.values()) == 1


def test_a_sample_is_a_pure_function_of_its_number(indexed: IndexedDataset) -> None:
    dataset = GPT2Dataset(indexed, range(100), seq_length=16, seed=1, part="train")
    numbers = np.random.default_rng(0).integers(0, 20 * dataset.samples_per_epoch, 200)
    first = {int(n): dataset[int(n)]["text"].tolist() for n in numbers}
    again = GPT2Dataset(indexed, range(100), seq_length=16, seed=1, part="train")
    assert {n: again[n]["text"].tolist() for n in sorted(first)} == first


def test_epochs_seeds_and_parts_are_shuffled_differently(indexed: IndexedDataset) -> None:
    def first(seed: int, part: str, epoch: int) -> list[int]:
        dataset = GPT2Dataset(indexed, range(100), seq_length=16, seed=seed, part=part)
        return dataset[epoch * dataset.samples_per_epoch]["text"].tolist()

    found = [first(1, "train", 0), first(1, "train", 1), first(2, "train", 0), first(1, "valid", 0)]
    assert len({tuple(each) for each in found}) == 4


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=SENTENCES["16_tokens_do_not_fill_one"]):
        SampleOrder(lambda: np.array([10, 6]), 16, seed=1, stream="train")
    assert SampleOrder(lambda: np.array([10, 7]), 16, seed=1, stream="train").per_epoch == 1


@pytest.mark.parametrize("documents", [0, 1, 2, 3, 10, 19, 20, 1000])
@pytest.mark.parametrize("split", ["949,50,1", "1", "98,2", "0,1,1", "1,1,1"])
def test_splits_cover_every_document_once(split: str, documents: int) -> None:
    shares = parse_split(split)
    ranges = split_documents(shares, documents)
    assert [d for part in ranges for d in part] == list(range(documents))
    for share, part in zip(shares, ranges, strict=True):
        assert abs(len(part) - share * documents) <= 2
        assert share or not part
    if documents >= 10:
        assert all(part for share, part in zip(shares, ranges, strict=True) if share)


@pytest.mark.parametrize("split", ["", "a,b", "-1,2", "0,0", "1,2,3,4", "inf"])
def test_bad_splits_are_refused(split: str) -> None:
    with pytest.raises(ValueError, match="--split"):
        parse_split(split)


def test_a_part_that_stays_empty_says_so(indexed: IndexedDataset) -> None:
    (train, valid, test), notes = build_train_valid_test_datasets(indexed.prefix, "97,2,1", 64, seed=1)
    assert train is not None
    assert valid is None or test is None
    assert any("is empty" in note for note in notes)


def test_a_part_without_documents_is_empty_not_everything(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "one", np.int32) as builder:
        builder.add_document(np.arange(500))
    (train, valid, test), notes = build_train_valid_test_datasets(str(tmp_path / "one"), "8,1,1", 16, seed=1)
    assert train is not None
    assert (valid, test) == (None, None)
    assert [note.split(":")[0] for note in notes] == [
        f"the {part} part of {tmp_path / 'one'} (0 of 1 documents) is empty" for part in ("valid", "test")
    ]


def test_ids_outside_the_vocabulary_are_refused(indexed: IndexedDataset) -> None:
    with pytest.raises(DatasetError, match=SENTENCES["outside_the_vocabulary_of_500"]):
        build_train_valid_test_datasets(indexed.prefix, "1", 16, seed=1, vocab_size=500)


@pytest.mark.parametrize(("ranks", "batch", "gas"), [(1, 8, 1), (1, 2, 4), (2, 2, 2), (4, 2, 1), (8, 1, 1)])
def test_an_iteration_has_the_same_samples_in_every_layout(ranks: int, batch: int, gas: int) -> None:
    iterators = [iter(ConsecutiveSampler(batch, gas, rank, ranks, consumed_samples=16)) for rank in range(ranks)]
    for iteration in range(2, 5):
        found = [n for it in iterators for _ in range(gas) for n in next(it)]
        assert found == list(range(8 * iteration, 8 * iteration + 8))


def test_a_dataset_travels_without_its_epochs(indexed: IndexedDataset) -> None:
    dataset = GPT2Dataset(indexed, range(100), seq_length=16, seed=1, part="train")
    small = len(pickle.dumps(dataset))
    blend = BlendedDataset([dataset, dataset], ["0.5", "0.5"])
    first = [blend[n]["text"].tolist() for n in range(40)]
    assert len(pickle.dumps(dataset)) == small
    copy = pickle.loads(pickle.dumps(blend))
    assert [copy[n]["text"].tolist() for n in range(40)] == first


def orders_of(prefix: str) -> list[str]:
    return sorted(path.name for path in Path(f"{prefix}.orders").glob("*"))


def test_a_large_epoch_is_a_file_that_all_map(
    indexed: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sample order of a large epoch is stored beside the data, in a file that all processes memory-map.

    If the data folder is read-only, the file is in the temporary folder. If that folder is unusable, too, each process
    keeps the order in memory.
    """

    def dataset() -> GPT2Dataset:
        return GPT2Dataset(indexed, range(10, 100), seq_length=16, seed=1, part="train")

    small = dataset()
    numbers = range(0, 4 * small.samples_per_epoch, 7)
    expected = [small[n]["text"].tolist() for n in numbers]
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("megatron.data.sample_order.SMALL_EPOCH", 50)
    assert [dataset()[n]["text"].tolist() for n in numbers[:3]] == expected[:3]
    first = orders_of(indexed.prefix)
    assert len(first) == 1
    large = dataset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SampleOrder, "_fill_arrays", None)  # fails if the order is computed again
        assert [pickle.loads(pickle.dumps(large))[n]["text"].tolist() for n in numbers[:3]] == expected[:3]
    assert [large[n]["text"].tolist() for n in numbers] == expected
    assert len(orders_of(indexed.prefix)) == 2, "the epoch before the last is not needed"
    assert not (set(first) & set(orders_of(indexed.prefix)))
    assert large.sample_ids(0, 100).tolist() == small.sample_ids(0, 100).tolist()
    before = len(orders_of(indexed.prefix))
    others = GPT2Dataset(indexed, range(10, 100), seq_length=17, seed=1, part="train")
    others[0]
    assert len(orders_of(indexed.prefix)) == before + 1, "of its own"
    assert capsys.readouterr().err == ""

    for path in Path(f"{indexed.prefix}.orders").glob("*"):
        path.unlink()
    Path(f"{indexed.prefix}.orders").rmdir()
    Path(f"{indexed.prefix}.orders").write_text("")  # a file in place of the folder simulates a read-only disk
    assert [dataset()[n]["text"].tolist() for n in numbers[:3]] == expected[:3]
    assert "it is written to" in capsys.readouterr().err
    assert [dataset()[n]["text"].tolist() for n in numbers[:3]] == expected[:3]
    assert capsys.readouterr().err == "", "said once"

    monkeypatch.setattr("tempfile.tempdir", f"{indexed.prefix}.orders")  # a file instead of a folder, so unusable
    assert [dataset()[n]["text"].tolist() for n in numbers[:3]] == expected[:3]
    assert "every process keeps a copy in memory" in capsys.readouterr().err


def test_ids_of_earlier_epochs_need_no_files(indexed: IndexedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run compares the ids of all samples since the first one."""
    small = GPT2Dataset(indexed, range(100), 16, 1, "train")
    count = 3 * small.samples_per_epoch + 5
    expected = small.sample_ids(0, count).tolist()
    monkeypatch.setattr("megatron.data.sample_order.SMALL_EPOCH", 50)
    large = GPT2Dataset(indexed, range(100), 16, 1, "train")
    assert large.sample_ids(0, count).tolist() == expected
    assert not orders_of(indexed.prefix)
    large[count]  # the epoch in use, which is a file
    assert large.sample_ids(0, count).tolist() == expected
    assert len(orders_of(indexed.prefix)) == 1
    assert pickle.loads(pickle.dumps(large)).sample_ids(0, count).tolist() == expected


def test_an_order_file_of_another_node_stays(indexed: IndexedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both nodes write their copy on a shared disk; the first one may be mapped when the second one is complete."""
    monkeypatch.setattr("megatron.data.sample_order.SMALL_EPOCH", 50)
    GPT2Dataset(indexed, range(100), 16, 1, "train")[0]
    (path,) = Path(f"{indexed.prefix}.orders").glob("*.order")
    other = path.rename(path.with_suffix(".other"))  # the copy of the other node, which this node does not see yet
    fill = SampleOrder._fill_arrays

    def fill_meanwhile(*args: Any) -> None:
        fill(*args)
        other.rename(path)

    monkeypatch.setattr(SampleOrder, "_fill_arrays", fill_meanwhile)
    inode = other.stat().st_ino
    GPT2Dataset(indexed, range(100), 16, 1, "train")[0]
    assert path.stat().st_ino == inode
    assert orders_of(indexed.prefix) == [path.name]


def test_the_order_of_a_large_epoch_is_on_the_disk_before_it_has_its_name(
    indexed: IndexedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure, a file of the right size must not contain zeros."""
    monkeypatch.setattr("megatron.data.sample_order.SMALL_EPOCH", 50)
    flushed: dict[int, bytes] = {}  # inode -> content
    fsync = os.fsync

    def recorded(file: int) -> None:
        fsync(file)
        status = os.fstat(file)
        flushed[status.st_ino] = os.pread(file, status.st_size, 0)

    monkeypatch.setattr(os, "fsync", recorded)
    GPT2Dataset(indexed, range(100), 16, 1, "train")[0]
    (path,) = Path(f"{indexed.prefix}.orders").glob("*.order")
    assert flushed[path.stat().st_ino] == path.read_bytes()


def _first(prefix: str, folder: str, ready: Barrier, made: "Synchronized[int]") -> list[int]:
    import megatron.data.sample_order as module

    module.SMALL_EPOCH = 50
    os.environ["TMPDIR"] = folder
    honest = SampleOrder._fill_arrays

    def fill(self: SampleOrder, *args: Any) -> None:
        with made.get_lock():
            made.value += 1
        time.sleep(0.2)
        honest(self, *args)

    SampleOrder._fill_arrays = fill  # type: ignore[method-assign]
    ready.wait()
    return GPT2Dataset(IndexedDataset(prefix), range(100), 16, 1, "train")[3]["text"].tolist()


def test_one_process_makes_the_file(indexed: IndexedDataset, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready, made = context.Barrier(4), context.Value("i", 0)
    expected = GPT2Dataset(indexed, range(100), 16, 1, "train")[3]["text"].tolist()
    results = context.SimpleQueue()

    def rank() -> None:
        results.put(_first(indexed.prefix, str(tmp_path), ready, made))

    ranks = [context.Process(target=rank) for _ in range(4)]
    for each in ranks:
        each.start()
    assert [results.get() for _ in ranks] == [expected] * 4
    for each in ranks:
        each.join(60)
    assert made.value == 1
    assert len(orders_of(indexed.prefix)) == 1


@pytest.mark.slow
def test_a_mapped_epoch_costs_a_process_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapped order of 3 million documents takes less than 20 MB of memory; the dataset pickles to 5 kB at most."""
    documents = 3_000_000
    sizes = np.full(documents, 3, np.int32)
    with IndexedDatasetBuilder(tmp_path / "x", np.uint8) as builder:
        builder.add_batch(np.zeros(3 * documents, np.uint8), sizes, np.ones(documents, np.int32))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    data = GPT2Dataset(IndexedDataset(tmp_path / "x"), range(documents), 16, 1, "train")
    assert len(pickle.dumps(data)) < 5000
    data[0]
    code = (
        "import sys\n"
        "from megatron.data.gpt2_dataset import GPT2Dataset\n"
        "from megatron.data.indexed_dataset import IndexedDataset\n"
        "def memory(): return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('RssAnon'))\n"
        "i = IndexedDataset(sys.argv[1])\n"
        "i[0]; before = memory()\n"
        f"d = GPT2Dataset(i, range({documents}), 16, 1, 'train')\n"
        "d.order._fill_arrays = None\n"
        "for n in range(50): d[n]\n"
        "print(memory() - before)"
    )
    done = command("python", "-c", code, str(tmp_path / "x"), env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 20_000, "kB; most of it are some pieces of the lengths, which do not grow"


@pytest.mark.slow
def test_the_number_of_workers_changes_nothing(indexed: IndexedDataset) -> None:
    dataset = GPT2Dataset(indexed, range(100), seq_length=16, seed=1, part="train")

    def first(workers: int) -> list[list[list[int]]]:
        iterator = iter(build_loader(dataset, ConsecutiveSampler(2, 2, 0, 1), workers))
        return [next(iterator)["text"].tolist() for _ in range(6)]

    assert first(0) == first(2)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32])
def test_a_negative_id_in_the_middle_of_a_corpus_is_refused(tmp_path: Path, dtype: type[np.integer]) -> None:
    """A vocabulary that is larger than the dtype's range allows any positive id, but no negative one."""
    with IndexedDatasetBuilder(tmp_path / "x", dtype) as builder:
        for _ in range(20):
            builder.add_document([1] * 10)
    path = tmp_path / "x.bin"
    tokens = np.fromfile(path, dtype)
    tokens[100] = -3
    tokens.tofile(path)
    windows = Windows(IndexedDataset(tmp_path / "x"), range(20), 10, 1, "train", vocab_size=50_257)
    with pytest.raises(DatasetError, match="token id -3"):
        for n in range(windows.order.per_epoch):
            windows.read(n)


def test_few_long_documents_are_released_as_well(indexed: IndexedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    released = list[int]()
    monkeypatch.setattr(module, "release_pages", lambda array: released.append(len(array)))
    monkeypatch.setattr(module, "SMALL_EPOCH", len(indexed) + 1)  # fewer than documents and samples
    windows = Windows(indexed, range(100), 16, 1, "train")
    windows.read(0)
    windows._release_mapped()
    assert len(indexed.tokens) in released


class Strange:
    """A data set of tensors of all kinds, of which one is a slice of a large one; sample 2 cannot be sent."""

    def __init__(self) -> None:
        self.table = np.arange(1 << 20)

    def __getitem__(self, n: int) -> dict[str, Any]:
        grid = torch.arange(24, dtype=torch.bfloat16).view(4, 6) + n
        sample = {
            "slice": torch.from_numpy(self.table)[n : n + 2],
            "columns": grid[:, ::2].T,
            "scalar": torch.tensor(float(n), dtype=torch.float64, requires_grad=True),
            "mask": grid[0] > 2,
            "none": torch.empty(0, 3),
            "number": n,
            "name": f"sample {n}",
        }
        return sample | {"number": lambda: n} if n == 2 else sample


def test_workers_send_samples_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = iter(build_loader(Strange(), ConsecutiveSampler(2, 1, 0, 1)))
    sent = iter(build_loader(Strange(), ConsecutiveSampler(2, 1, 0, 1), 1))
    want, found = next(expected), next(sent)
    assert found.keys() == want.keys() and found["name"] == want["name"] == ["sample 0", "sample 1"]
    for name in want.keys() - {"name"}:
        torch.testing.assert_close(found[name], want[name], rtol=0, atol=0)
    found["slice"].add_(1)  # memory of its own
    assert len(pack([Strange()[0]])) < 3000, "a slice is sent alone"
    with pytest.raises(ValueError, match="cannot send"):
        next(sent)


class Drawn:
    """A data set whose samples are numbers from the generators of torch, NumPy and Python."""

    def __getitem__(self, n: int) -> Any:
        return {"drawn": torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])}


def test_a_sample_draws_the_same_on_every_rank_that_reads_it() -> None:
    """Stages, workers and a resumed run read sample n after other numbers of samples than a run in one process."""

    def rows(sampler: ConsecutiveSampler, count: int, seed: int = 1) -> list[list[float]]:
        batches = iter(build_loader(Drawn(), sampler, seed=seed))
        return [row for _ in range(count) for row in next(batches)["drawn"].tolist()]

    whole = rows(ConsecutiveSampler(2, 1, 0, 1), 4)
    assert rows(ConsecutiveSampler(1, 2, 0, 1, consumed_samples=2), 6) == whole[2:]
    assert rows(ConsecutiveSampler(1, 1, 1, 2), 4) == whole[1::2]
    assert len({value for row in whole for value in row}) == 8 * 3
    assert rows(ConsecutiveSampler(2, 1, 0, 1), 4, seed=2) != whole


class _Faulty:
    """A data set of 10 samples with a bug: it looks up a word that it does not have."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, n: int) -> str:
        return ["a", "b"][n + 4]


def test_an_index_error_of_a_data_set_names_its_place() -> None:
    line = _Faulty.__getitem__.__code__.co_firstlineno + 1
    with pytest.raises(ValueError, match="list index out of range") as raised:
        Endless(_Faulty(), seed=1)[3]
    assert f"{__file__}, line {line}, in __getitem__" in one_line_error(raised.value)


def test_samples_leave_the_random_numbers_of_the_model_alone() -> None:
    seed_generators(5)
    expected = torch.rand(()).item(), np.random.rand(), random.random()
    batches = iter(build_loader(Drawn(), ConsecutiveSampler(2, 1, 0, 1)))
    seed_generators(5)
    next(batches)
    assert (torch.rand(()).item(), np.random.rand(), random.random()) == expected


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 24), st.integers(0, 2), st.integers(0, 200)
)
@settings(max_examples=120, deadline=None)
def test_the_order_equals_a_slow_obvious_one(sizes: list[int], length: int, overlap: int, n: int) -> None:
    """The sample order equals a simple implementation, which concatenates shuffled documents and cuts windows."""
    if sum(sizes) < length + overlap:
        return
    order = SampleOrder(lambda: np.array(sizes, np.int32), length, seed=3, stream="train", overlap=overlap)
    number, at = divmod(n, order.per_epoch)
    documents = np.random.default_rng([3, *b"train", number, 0]).permutation(len(sizes))
    samples = np.random.default_rng([3, *b"train", number, 1]).permutation(order.per_epoch)
    line = [(int(d), k) for d in documents for k in range(sizes[d])]
    begin = int(samples[at]) * length
    found = [(d, k) for d, start, stop in order.pieces(n) for k in range(start, stop)]
    assert found == line[begin : begin + length + overlap]
    assert order.sample_ids(n, 3).tolist() == [
        m // order.per_epoch * order.per_epoch + int(order.epoch(m // order.per_epoch).samples[m % order.per_epoch])
        for m in range(n, n + 3)
    ]


@given(
    st.integers(0, 1000),
    st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=5),
)
@settings(max_examples=100, deadline=None)
def test_a_sampler_goes_on_with_the_very_next_sample(start: int, runs: list[tuple[int, int, int]]) -> None:
    """After a change of ranks, batch size or accumulation steps, samplers resume with the next unread sample."""
    at, seen = start, []
    for ranks, batch, gas in runs:
        iterators = [iter(ConsecutiveSampler(batch, gas, rank, ranks, at)) for rank in range(ranks)]
        for _ in range(2):
            seen += [n for it in iterators for _ in range(gas) for n in next(it)]
        at += 2 * ranks * batch * gas
    assert seen == list(range(start, at))


def test_no_signal_reaches_the_processes_that_read() -> None:
    """`block_signals` keeps signals blocked while data-loader workers start, even if Python unblocks them meanwhile."""
    code = (
        "import multiprocessing, signal\n"
        "from megatron.data.workers import block_signals\n"
        "with block_signals():\n"
        "    multiprocessing.get_context('spawn').Semaphore()\n"
        "    print(*sorted(number.name for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])))\n"
        "print(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))\n"
    )
    assert command("python", "-c", code).stdout.split() == ["SIGINT", "SIGTERM", "SIGUSR1", "0"]
