"""Checks of the packages that read, write and hash files, draw random numbers and compare documents."""

import hashlib
import io
import json
import random
import struct
import tempfile
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from data_utils.dedup import shingles
from data_utils.documents import read_texts
from data_utils.near_duplicates import minhash_signature
from data_utils.streams import open_bytes
from megatron.checkpointing.checksums import BLAKE3
from megatron.checkpointing.stream import LazyTensor
from megatron.tokenizer.segment import SEPARATOR, segmenter
from megatron_tools.convert.hf_folder import HFTensorReader, write_tensors
from tests.materials import SAMPLE

# SHA-256 of the numbers that numpy 2.4.6 draws in `check_random_numbers`
NUMBERS = "cd8b0498dedf8b2a981928306f1bcae393c7e7876857150b84833977c4bb310f"
# SHA-256 of the signature that rensa 0.5.0 gives to the sentence in `check_signature`
SIGNATURE = "f620503c4f49dc15739c42f5a59556580ed11f44bfb58d5e16583080ece7cb7b"
# From the test vectors of BLAKE3: hash of 102,400 bytes 0, 1, ... 250, 0, 1, ...
BLAKE3_OF_102400 = "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def check_words() -> None:
    """Compare rjieba's words with those of jieba on the bundled corpus and on ambiguous sentences."""
    fast = segmenter("rjieba")
    slow = segmenter("jieba")
    given = [
        *islice(read_texts([str(SAMPLE)]), 60),
        "来AddPort请求新端口，应用到GPU大型机",
        "达至年近6，年近6岁，B年近达至",
    ]
    for text in given:
        cut = fast(text)
        assert cut == slow(text), f"other words than jieba's: {text[:40]}"
        assert cut.replace(SEPARATOR, "") == text, f"text is lost: {text[:40]}"


def check_random_numbers() -> None:
    """Compare the numbers of a seed with those of numpy 2.4.6: shuffles, permutations, choices, integers and floats."""
    order = np.arange(1000, dtype=np.int32)
    np.random.default_rng([1234, 116, 0, 1]).shuffle(order)
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([1234, 7])))
    drawn = [rng.permutation(500), rng.choice(1000, 100, replace=False), rng.integers(0, 1 << 63, 50, np.uint64)]
    drawn += [rng.random(100), rng.normal(size=100), rng.poisson(3.0, 100)]
    digest = _digest(b"".join(each.tobytes() for each in (order, *drawn)))
    assert digest == NUMBERS, f"the numbers differ from those of 2.4.6 (SHA-256 {digest[:12]})"


def check_safetensors() -> None:
    """Read a file that was written byte by byte after the specification: length of the header, JSON, values."""
    header = json.dumps({
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [2], "data_offsets": [24, 28]},
    }).encode()  # fmt: skip
    header += b" " * (-len(header) % 8)
    content = (
        struct.pack("<Q", len(header)) + header + struct.pack("<6f", *range(6)) + struct.pack("<2H", 0x3FC0, 0xC000)
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.safetensors").write_bytes(content)
        reader = HFTensorReader(Path(folder))
        assert torch.equal(reader.read("a"), torch.arange(6.0).view(2, 3)), "other values in fp32"
        assert reader.read("b").tolist() == [1.5, -2.0], "other values in bf16"


def check_our_safetensors() -> None:
    """Read a file of this project with the functions of the package."""
    from safetensors.torch import load_file

    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}
    entries = [LazyTensor(name, tuple(t.shape), t.dtype, lambda t=t: t) for name, t in weights.items()]
    with tempfile.TemporaryDirectory() as folder:
        write_tensors(Path(folder), entries, 1 << 30)
        found = load_file(Path(folder) / "model.safetensors")
    assert found.keys() == weights.keys(), f"other tensors: {list(found)}"
    assert all(torch.equal(found[name], weights[name]) for name in weights), "other values"


def check_blake3() -> None:
    """Compare the checksum of a file, computed with threads and in pieces, with the published test vector."""
    data = bytes(i % 251 for i in range(102400))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data"
        path.write_bytes(data)
        assert BLAKE3.hash_file(path) == BLAKE3_OF_102400, "another checksum of a file"
    pieces = BLAKE3.new_hash()
    for begin in range(0, len(data), 1000):
        pieces.update(data[begin : begin + 1000])
    assert pieces.hexdigest() == BLAKE3_OF_102400, "another checksum of pieces"


def _read(content: bytes) -> bytes:
    """Return what our reader makes of a file with this content."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/data.zst"
        Path(path).write_bytes(content)
        with open_bytes(path) as file:
            return file.read()


def _raw_frame(data: bytes) -> bytes:
    """Return a frame of RFC 8878 with one raw block, without content size and checksum, and a window of 1 KiB."""
    block = struct.pack("<I", len(data) << 3 | 1)[:3]
    return b"\x28\xb5\x2f\xfd" + b"\x00" + b"\x00" + block + data


def check_known_frames() -> None:
    """Read frames that were written byte by byte after RFC 8878: two with data, an empty one, one to be skipped."""
    skipped = struct.pack("<II", 0x184D2A50, 3) + b"xyz"
    content = _raw_frame(b"first\n") + _raw_frame(b"") + skipped + _raw_frame("第二\n".encode())
    assert _read(content) == "first\n第二\n".encode(), "other bytes than those of the frames"


def check_unknown_sizes() -> None:
    """Read frames that zstandard wrote as streams, without the size of their content, and with several threads."""
    import zstandard

    parts = [random.Random(i).randbytes(1000) * 300 for i in range(3)]
    content = b""
    for part in parts:
        buffer = io.BytesIO()
        writer = zstandard.ZstdCompressor(write_checksum=True, threads=2).stream_writer(buffer, closefd=False)
        writer.write(part)
        writer.close()
        frame = buffer.getvalue()
        known = zstandard.get_frame_parameters(frame).content_size
        assert known == zstandard.CONTENTSIZE_UNKNOWN, "the frame has a size"
        content += frame
    assert _read(content) == b"".join(parts), "other bytes than those that were compressed"


def check_parquet() -> None:
    """Read the documents of a .parquet file with several row groups, a null and a column of another type."""
    import pyarrow
    from pyarrow import parquet

    given = [f"document {i} 文档" * i for i in range(1, 40)]
    table = pyarrow.table({"number": list(range(39)), "text": given})
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/data.parquet"
        parquet.write_table(table, path, row_group_size=7, compression="zstd")
        assert list(read_texts([path])) == given, "other documents"


def check_similarity() -> None:
    """Compare the share of equal numbers of two signatures with the exact similarity, within four deviations."""
    dice = random.Random(5)
    for shared in (20, 60, 90):
        first = [str(dice.random()) for _ in range(1000)]
        second = first[: shared * 10] + [str(dice.random()) for _ in range(1000 - shared * 10)]
        exact = shared / (200 - shared)
        found = float((minhash_signature(first) == minhash_signature(second)).mean())
        deviation = (exact * (1 - exact) / 128) ** 0.5
        assert abs(found - exact) < 4 * deviation, f"estimate {found:.2f} of a similarity of {exact:.2f}"


def check_signature() -> None:
    """Compare the signature of a document with that of rensa 0.5.0: other signatures drop other documents."""
    found = minhash_signature(shingles("The river runs slowly to the sea. 春天来了，河水慢慢流向大海。" * 3))
    digest = _digest(found.tobytes())
    assert digest == SIGNATURE, f"the signature differs from that of 0.5.0 (SHA-256 {digest[:12]})"


CHECKS = {
    "rjieba": {"words of jieba": check_words},
    "numpy": {"random numbers of a seed": check_random_numbers},
    "safetensors": {"tensors of known bytes": check_safetensors, "tensors of our files": check_our_safetensors},
    "blake3": {"checksum of a file": check_blake3},
    "zstandard": {"frames of known bytes": check_known_frames, "several frames of unknown size": check_unknown_sizes},
    "pyarrow": {"documents of a .parquet file": check_parquet},
    "rensa": {"estimated similarity": check_similarity, "signature of a document": check_signature},
}
