"""Checks of s3fs by this project's reads and writes of objects, on an S3 server in another process."""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.storage import _file_system, to_path
from tests.support import ROOT

BUCKET = "s3://bucket"
SERVER = """
import json, sys
from tests.object_server import FaultyServer
server = FaultyServer()
print(json.dumps(server.environment), flush=True)
sys.stdin.read()
"""


@contextmanager
def server() -> Iterator[None]:
    """Run an S3 server with the installed packages, not with the release under watch, and an empty bucket."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True) as process:
        assert process.stdout and process.stdin
        before = dict(os.environ)
        os.environ.update(json.loads(process.stdout.readline()))
        _file_system.cache_clear()  # its connections are those to the server of another check
        try:
            to_path(BUCKET).request("make", lambda fs, url: fs.makedirs(url, exist_ok=True))
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)
            process.stdin.close()


def check_listing() -> None:
    """A folder lists an object after its first write, the new content after the second, and nothing after removal."""
    folder = to_path(f"{BUCKET}/run")
    first = folder / "first.txt"
    assert [*folder.glob("*")] == [] and not first.exists(), "a folder that was not written has entries"
    first.write_bytes(b"one")
    (folder / "deep" / "second.txt").write_bytes(b"two")
    assert [path.name for path in folder.glob("*")] == ["deep", "first.txt"], "other names than those written"
    assert folder.is_dir() and first.is_file(), "a folder is no folder, or an object no file"
    stamp = first.stamp()
    first.write_bytes(b"three")
    assert first.read_bytes() == b"three" and first.stamp() != stamp, "the old content, or no new version"
    first.unlink()
    assert [path.name for path in folder.glob("*")] == ["deep"] and not first.exists(), "a removed object is listed"


def check_ranges() -> None:
    """Ranges of an object, also its last byte and the whole of it, are the bytes that were written."""
    data = random.Random(2).randbytes(100_000)
    path = to_path(f"{BUCKET}/ranges.bin")
    path.write_bytes(data)
    for begin, end in ((0, 1), (0, 100_000), (99_999, 100_000), (17, 65_553), (5, 5)):
        assert path.read_range(begin, end) == data[begin:end], f"other bytes from {begin} to {end}"
    with path.open() as file:
        file.seek(-10, os.SEEK_END)
        assert file.read() == data[-10:], "other bytes at the end"


def check_large() -> None:
    """A file of 60 MB, which is uploaded in several parts, comes back."""
    data = random.Random(3).randbytes(1_000_000) * 60
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "given").write_bytes(data)
        path = to_path(f"{BUCKET}/large.bin")
        path.upload(Path(folder) / "given")
        assert path.stamp()[0] == len(data), "another size"
        path.copy_to(to_path(f"{BUCKET}/copy.bin"))
        to_path(f"{BUCKET}/copy.bin").download(Path(folder) / "found")
        assert (Path(folder) / "found").read_bytes() == data, "other bytes"


def on_server(check: Callable[[], None]) -> Callable[[], None]:
    """Return the check with a server of its own."""

    def run() -> None:
        with server():
            check()

    return run


CHECKS = {
    "s3fs": {
        "listing after a write": on_server(check_listing),
        "ranged reads": on_server(check_ranges),
        "a file of several parts": on_server(check_large),
    }
}
