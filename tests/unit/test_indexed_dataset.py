import gc
import hashlib
import json
import pickle
import struct
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_utils import indexed_writer
from data_utils.indexed_writer import IndexedDatasetBuilder
from megatron.data.indexed_dataset import DatasetError, IndexedDataset, best_dtype
from tests.sentences import SENTENCES
from tests.support import FULL, ROOT


def build(prefix: Path, documents: list[list[list[int]]], dtype: type = np.uint16) -> IndexedDataset:
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for sequences in documents:
            builder.add_document([t for s in sequences for t in s], [len(s) for s in sequences])
    return IndexedDataset(prefix)


def test_golden_bytes(tmp_path: Path) -> None:
    """.bin and .idx files have the bytes of Megatron-LM's format, here for documents of one and two sequences."""
    build(tmp_path / "x", [[[1, 2, 3], [4]], [[5, 65535]]])
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<6H", 1, 2, 3, 4, 5, 65535)
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 3)
    expected += struct.pack("<3i", 3, 1, 2) + struct.pack("<3q", 0, 6, 8) + struct.pack("<3q", 0, 2, 3)
    assert (tmp_path / "x.idx").read_bytes() == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx"]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_reads_what_it_wrote(tmp_path: Path, dtype: type) -> None:
    documents = [[[1, 2, 3], []], [[4]], [[5, 6], [7, 8, 9]]]
    dataset = build(tmp_path / "x", documents, dtype)
    assert dataset.dtype == dtype
    assert [dataset[i].tolist() for i in range(len(dataset))] == [s for d in documents for s in d]
    assert dataset.document_index.tolist() == [0, 2, 3, 5]
    assert dataset.document_ends().tolist() == [3, 4, 9]
    assert dataset[np.int64(2)].tolist() == [4]
    assert dataset[-1].tolist() == [7, 8, 9]
    assert dataset.get(4, offset=1, length=1).tolist() == [8]


ARRAYS = {
    np.uint8: st.integers(0, 255), np.int8: st.integers(-128, 127), np.uint16: st.integers(0, 65535),
    np.int32: st.integers(-(2**31), 2**31 - 1), np.int64: st.integers(-(2**63), 2**63 - 1),
}  # fmt: skip


@given(
    st.sampled_from(list(ARRAYS)).flatmap(
        lambda dtype: st.tuples(
            st.just(dtype), st.lists(st.lists(st.lists(ARRAYS[dtype], max_size=5), max_size=4), max_size=8)
        )
    )
)
@settings(max_examples=80, deadline=None)
def test_any_documents_come_back(drawn: tuple[type, list[list[list[int]]]]) -> None:
    """Datasets are read back as written, even with empty sequences or documents, extreme ids, or no documents."""
    dtype, documents = drawn
    with tempfile.TemporaryDirectory() as folder:
        dataset = build(Path(folder) / "x", documents, dtype)
        assert [dataset[i].tolist() for i in range(len(dataset))] == [s for d in documents for s in d]
        assert dataset.num_documents == len(documents)
        assert dataset.document_sizes(range(len(documents))).tolist() == [sum(map(len, d)) for d in documents]
        for d, sequences in enumerate(documents):
            if any(sequences):
                first = next(t for s in sequences for t in s)
                assert dataset.tokens[dataset.document_start(d)] == first


def test_a_writer_goes_on_where_another_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes and checksums equal one writer's if a second writer continues the files of a first at any document."""
    monkeypatch.setattr("data_utils.indexed_writer.BLOCK", 64)
    documents = [np.arange(n * 3 % 17) for n in range(60)]
    with IndexedDatasetBuilder(tmp_path / "whole", np.uint16) as whole:
        for document in documents:
            whole.add_document(document)
    for cut in (0, 1, 7, 59, 60):
        first = IndexedDatasetBuilder(tmp_path / "cut", np.uint16, "part")
        for document in documents[:cut]:
            first.add_document(document)
        state = first.state()
        first.add_document([9] * 40)  # a resume drops data after the saved state
        first.close()
        second = IndexedDatasetBuilder(tmp_path / "cut", np.uint16, "part", state)
        for document in documents[cut:]:
            second.add_document(document)
        second.finalize()
        for ending in ("bin", "idx"):
            assert (tmp_path / f"cut.{ending}").read_bytes() == (tmp_path / f"whole.{ending}").read_bytes()
        assert second.checksums == whole.checksums
        for ending in ("bin", "idx"):
            data = (tmp_path / f"cut.{ending}").read_bytes()
            blocks = [data[at : at + indexed_writer.BLOCK] for at in range(0, len(data), indexed_writer.BLOCK)]
            assert [hashlib.sha256(block).hexdigest() for block in blocks] == whole.checksums[ending]
    assert len(whole.checksums["bin"]) > 10


def test_one_token(tmp_path: Path) -> None:
    dataset = build(tmp_path / "x", [[[7]]])
    assert (len(dataset), dataset.num_tokens, dataset[0].tolist()) == (1, 1, [7])


CORE = """
import json, sys
sys.path[:] = [p for p in sys.path if p not in ("", sys.argv[1])]  # our package has the same name
import numpy, torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
documents, dtype = json.loads(sys.argv[2]), getattr(numpy, sys.argv[3])
builder = IndexedDatasetBuilder("theirs.bin", dtype=dtype)
for sequences in documents:
    builder.add_document(torch.tensor([t for s in sequences for t in s]), [len(s) for s in sequences])
builder.finalize("theirs.idx")
ours = IndexedDataset("ours")
print(json.dumps([[ours[i].tolist() for i in range(len(ours))], ours.document_indices.tolist()]))
"""


@pytest.mark.slow
@FULL  # takes 10 seconds
@pytest.mark.parametrize("dtype", [np.int32, np.uint16])
def test_megatron_core_reads_ours_and_we_read_theirs(tmp_path: Path, dtype: type) -> None:
    try:
        version("megatron-core")
    except PackageNotFoundError:
        pytest.skip("needs megatron-core")
    documents = [[[1, 2, 3]], [[4, 5], [6]], [[7] * 50]]
    sequences = [s for d in documents for s in d]
    build(tmp_path / "ours", documents, dtype)
    argv = [sys.executable, "-c", CORE, str(ROOT), json.dumps(documents), np.dtype(dtype).name]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [sequences, [0, 1, 3, 4]]
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"theirs{ending}").read_bytes() == (tmp_path / f"ours{ending}").read_bytes()
    theirs = IndexedDataset(tmp_path / "theirs")
    assert [theirs[i].tolist() for i in range(len(theirs))] == sequences


def test_offsets_beyond_4_gib(tmp_path: Path) -> None:
    """Offsets of 2.4 billion tokens (4.8 GB) do not overflow. The test's .bin is sparse, so it needs no disk space."""
    sizes = np.array([1_200_000_000, 1_200_000_000, 3], np.int32)
    pointers = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)[:-1] * 2])
    with open(tmp_path / "x.bin", "wb") as file:
        file.truncate(int(sizes.sum(dtype=np.int64)) * 2)
        file.seek(int(pointers[2]))
        file.write(np.array([7, 8, 9], np.uint16).tobytes())
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 3, 4)
    tail = np.array([0, 1, 2, 3], np.int64).tobytes()
    (tmp_path / "x.idx").write_bytes(header + sizes.tobytes() + pointers.astype(np.int64).tobytes() + tail)
    dataset = IndexedDataset(tmp_path / "x")
    assert dataset[2].tolist() == [7, 8, 9]
    assert dataset.document_ends().tolist() == [1_200_000_000, 2_400_000_000, 2_400_000_003]


def test_an_id_that_does_not_fit_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=SENTENCES["token_id_70000_does_not_fit"]),
        IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder,
    ):
        builder.add_document([1, 70000])
    assert list(tmp_path.iterdir()) == []


def test_reading_outside_is_refused(tmp_path: Path) -> None:
    dataset = build(tmp_path / "x", [[[1, 2]], [[3]]])
    with pytest.raises(IndexError, match=SENTENCES["sequence_2_does_not_exist"]):
        dataset[2]
    with pytest.raises(IndexError, match=SENTENCES["tokens_1_to_3_exceed_sequence"]):
        dataset.get(0, offset=1, length=2)


def test_survives_pickling_and_outlives_the_dataset(tmp_path: Path) -> None:
    dataset = build(tmp_path / "x", [[[1, 2]], [[3]]])
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy[1].tolist() == [3]
    kept = dataset[0]
    del dataset
    gc.collect()
    assert kept.tolist() == [1, 2]


@pytest.mark.parametrize("ending", ["bin", "idx"])
@pytest.mark.parametrize("damage", ["cut", "missing", "empty"])
def test_damaged_files_are_named(tmp_path: Path, ending: str, damage: str) -> None:
    build(tmp_path / "x", [[[1, 2]], [[3]]])
    path = tmp_path / f"x.{ending}"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if damage == "cut" else b"")
    with pytest.raises(DatasetError) as error:
        IndexedDataset(tmp_path / "x")
    assert f"x.{ending}" in str(error.value)


def test_another_format_is_refused(tmp_path: Path) -> None:
    build(tmp_path / "x", [[[1, 2]]])
    content = (tmp_path / "x.idx").read_bytes()
    (tmp_path / "x.idx").write_bytes(b"TNTIDX\x00\x00\x00" + content[9:])
    with pytest.raises(DatasetError, match=SENTENCES["megatron_s_mmididx_format"]):
        IndexedDataset(tmp_path / "x")


def test_dtype_is_chosen_as_megatron_does() -> None:
    assert best_dtype(65499) is np.uint16
    assert best_dtype(65500) is np.int32
