"""In thousands of trials, a randomly corrupted file is either reported or still readable with valid content."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from data_utils.documents import chunks, documents
from data_utils.files import find_files
from data_utils.indexed_writer import IndexedDatasetBuilder
from data_utils.streams import BadLine, InputError
from megatron.data.gpt2_dataset import build_train_valid_test_datasets
from megatron.data.indexed_dataset import DatasetError, IndexedDataset

VOCAB = 300


def corrupt(content: bytes, rng: random.Random) -> bytes:
    """Return `content` with one to three random changes: a bit flipped, a number changed, bytes removed or inserted."""
    raw = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(raw)) if raw else 0
        kind = rng.choice(["bit", "byte", "number", "cut", "insert", "truncate"])
        if kind == "bit" and raw:
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == "byte" and raw:
            raw[at] = rng.choice([0, 1, 127, 128, 255])
        elif kind == "number":
            value = rng.choice([0, 1, -1, 2**31 - 1, -(2**31), 2**63 - 1, 2**40])
            raw[at : at + 8] = value.to_bytes(8, "little", signed=True)
        elif kind == "cut":
            del raw[at : at + rng.randint(1, 16)]
        elif kind == "insert":
            raw[at:at] = rng.randbytes(rng.randint(1, 16))
        else:
            del raw[at:]
    return bytes(raw)


def read_all(prefix: str) -> list[list[int]]:
    """Check that every training sample of a dataset has valid token ids; return all sequences of the dataset."""
    indexed = IndexedDataset(prefix)
    found = [indexed[i].tolist() for i in range(len(indexed))]
    assert [len(each) for each in found] == indexed.sizes.tolist()
    (train, *_), _ = build_train_valid_test_datasets(prefix, "1", 16, seed=1, vocab_size=VOCAB)
    assert train is not None
    for n in range(train.samples_per_epoch + 1):
        text = train[n]["text"]
        assert text.shape == (17,)
        assert int(text.min()) >= 0
        assert int(text.max()) < VOCAB
    return found


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("ending", ["idx", "bin"])
def test_damaged_pairs(tmp_path: Path, ending: str, dtype: type[np.integer]) -> None:
    """A damaged .bin/.idx pair is either refused or readable with valid token ids, in 6,000 trials."""
    rng = np.random.default_rng(5)
    with IndexedDatasetBuilder(tmp_path / "x", dtype) as builder:
        for d in range(12):
            builder.add_document(rng.integers(0, VOCAB, 3 * d))
    whole = read_all(str(tmp_path / "x"))
    good = (tmp_path / f"x.{ending}").read_bytes()
    dice, refused, harmless = random.Random(7), 0, 0
    for _ in range(1500):
        bad = corrupt(good, dice)
        (tmp_path / f"x.{ending}").write_bytes(bad)
        try:
            found = read_all(str(tmp_path / "x"))
        except DatasetError as error:
            assert str(tmp_path / "x") in str(error)
            refused += 1
            continue
        harmless += 1
        if ending == "idx":
            assert [t for each in found for t in each] == [t for each in whole for t in each]
        else:
            assert [len(each) for each in found] == [len(each) for each in whole]
    assert refused > 1000 or ending == "bin"
    assert refused > 500
    assert harmless > 0 or ending == "idx"


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".txt", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst"])
def test_damaged_text(tmp_path: Path, ending: str) -> None:
    """Reading a damaged text file gives documents, bad lines with line numbers, or an error that names the file."""
    import gzip
    import lzma

    zstandard = pytest.importorskip("zstandard")
    texts = [f"第{i}行 line {i} — “text” \\ \t" for i in range(30)]
    if ending == ".json":
        content = json.dumps([{"text": t} for t in texts], ensure_ascii=False, indent=1).encode()
    elif ending == ".csv":
        content = ("id,text\n" + "".join(f'{i},"{t}"\n' for i, t in enumerate(texts))).encode()
    elif ending == ".txt":
        content = "\n\n".join(texts).encode()
    else:
        content = "".join(json.dumps({"text": t}, ensure_ascii=i % 2 == 0) + "\n" for i, t in enumerate(texts)).encode()
    pack = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress}.get(os.path.splitext(ending)[1])
    content = pack(content) if pack else content
    path = tmp_path / f"x{ending}"
    dice = random.Random(11)
    for trial in range(301):
        path.write_bytes(corrupt(content, dice) if trial else content)
        try:
            found = [d for c in chunks(find_files([str(path)])[0], 256) for d in documents(c)]
        except InputError as error:
            assert str(path) in str(error)
            continue
        for each in found:
            if isinstance(each, BadLine):
                assert each.path == str(path)
                assert each.line >= 1
            else:
                each[0].encode()
        if not trial:
            assert [d[0] for d in found] == texts
