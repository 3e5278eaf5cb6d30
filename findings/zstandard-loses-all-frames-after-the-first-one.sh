#!/usr/bin/env bash
# Surprise: three calls of python-zstandard read a .zst file with several frames up to the end of the first frame and report
#   nothing: decompress, decompressobj and read_to_iter. Appending to a .zst file, joining shards with cat and pzstd all
#   make such files. stream_reader is the opposite surprise: read_across_frames=False, the default, ends a single read()
#   at a frame, so read(1 MB) may be short in the middle of the file; a loop until b"" still gets all frames. pyarrow
#   reads the whole file.
# Versions: zstandard 0.25.0 (the newest release), pyarrow 26.0.1. Date: 2026-11-28.
# Belief: all calls agree, or the option read_across_frames decides, or a call that leaves data unread raises an error.
# Source: RFC 8878, section 3 (the content of a file is that of all its frames), and the documentation of read_across_frames.
#   The first-frame behaviour has been an open issue since 2018 (indygreg/python-zstandard, number 59).
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet zstandard==0.25.0 pyarrow==26.0.1
cat > "$work/program.py" <<'PY'
import io
import sys

import pyarrow
import zstandard

FRAMES = (4000, 3000, 2000)
with open("corpus.zst", "wb") as file:
    for lines in FRAMES:
        file.write(zstandard.compress(b'{"text": "one document"}\n' * lines))
with open("corpus.zst", "rb") as file:
    data = file.read()


def count(parts):
    """Return the number of lines in these bytes objects."""
    return sum(part.count(b"\n") for part in parts)


def loop(across):
    """Return the lines of each read(1 MB) of a stream_reader until it returns no bytes."""
    reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=across)
    found = []
    while part := reader.read(1 << 20):
        found.append(part.count(b"\n"))
    return found


fresh = zstandard.ZstdDecompressor
whole = {
    "zstandard.open": count([zstandard.open("corpus.zst", "rb").read()]),
    "stream_reader, read_across_frames=False, loop": sum(loop(False)),
    "stream_reader, read_across_frames=True, loop": sum(loop(True)),
    "pyarrow.CompressedInputStream": count([pyarrow.CompressedInputStream("corpus.zst", "zstd").read()]),
}
first = {
    "zstandard.decompress": count([zstandard.decompress(data)]),
    "ZstdDecompressor.decompress": count([fresh().decompress(data)]),
    "ZstdDecompressor.decompressobj": count([fresh().decompressobj().decompress(data)]),
    "ZstdDecompressor.read_to_iter": count(fresh().read_to_iter(io.BytesIO(data))),
}
print("zstandard", zstandard.__version__, "pyarrow", pyarrow.__version__)
print(f"the file has frames of {FRAMES} lines, {sum(FRAMES)} lines in all")
for name, lines in (whole | first).items():
    print(f"{name}: {lines} lines")
print("lines of each read(1 MB): read_across_frames=False", loop(False), "read_across_frames=True", loop(True))
print(f"belief: {sum(FRAMES)} lines in every row, or an error")
holds = set(whole.values()) == {sum(FRAMES)} and set(first.values()) == {FRAMES[0]}
holds = holds and loop(False) == list(FRAMES) and loop(True) == [sum(FRAMES)]
print("HOLDS: four ways read 9000 lines and four read 4000, without an error" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
"$work/venv/bin/python" program.py
