"""Files in object storage: s3://, gs://, hf://, memory:// and the other protocols of fsspec.

`to_path` turns what a flag names into a path. Functions that only read, list or look for files take both kinds of path.
"""

import errno
import fnmatch
import functools
import io
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any, TypeVar

from .packages import pip_install

T = TypeVar("T")
# Attempts of a request. A server that is overloaded (503) is asked less often and after longer waits.
ATTEMPTS = 4
BUSY_ATTEMPTS = 3
FIRST_WAIT = 0.5  # seconds before the second attempt; each later wait is twice as long, or 4 times after a 503
DEADLINE = 120.0  # seconds after its beginning in which a request may be repeated
PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "abfs": "adlfs", "az": "adlfs",
    "oci": "ocifs", "oss": "ossfs",
}  # fmt: skip
# Keys of `info` whose values change with an object.
VERSION_KEYS = ("ETag", "etag", "blob_id", "md5Hash", "LastModified", "mtime", "created")
# Kinds of object storage, whose URLs begin with a bucket or an account.
STORES = frozenset(PACKAGES) | {"abfss", "adl", "r2", "hdfs", "memory"}
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
MISSPELLED = "s3a?|gcs|gs|hdfs|s?ftp|https?|file"  # schemes that are recognized without their colon
# Text that begins like a URL: a scheme and ":/", a kind of object storage and ":", or a scheme and "//".
_LIKE_URL = re.compile(rf"([a-z][a-z0-9+.-]+):/|({'|'.join(STORES)}):|({MISSPELLED})//|://", re.IGNORECASE)
_PERMANENT_ERRORS = (
    IsADirectoryError, NotADirectoryError, ImportError, NotImplementedError, ValueError, TypeError,
)  # fmt: skip


class StorageError(OSError):
    """A failed request to object storage; the message names the URL."""


class PathError(ValueError):
    """A text is no path: it looks like a URL with a mistake, or it is a URL where only this machine is possible."""


def is_url(text: str | os.PathLike[str]) -> bool:
    """Return whether `text` names a place in object storage."""
    return isinstance(text, RemotePath) or (isinstance(text, str) and bool(_URL.match(text)))


def to_path(text: str | os.PathLike[str]) -> Path:
    """Return the path that a flag names: a `RemotePath` for a URL, else a `Path` on this machine.

    Raises PathError for a text that looks like a URL with a mistake.
    """
    if isinstance(text, Path):
        return text
    checked = check_location(os.fspath(text))
    return RemotePath(checked) if is_url(checked) else Path(checked)


def check_location(text: str) -> str:
    """Return a path or URL, its scheme in lower case. Raises PathError if it looks like a URL with a mistake."""
    if mistake := _find_mistake(text):
        raise PathError(f"{text} looks like a URL, but {mistake}")
    if not is_url(text):
        # "./s3:/x" is a file on this machine. But Path() drops the "./", and a later check would take s3:/x for a URL
        # with a mistake. An absolute path cannot be mistaken.
        return os.path.abspath(text) if _LIKE_URL.match(os.path.normpath(text)) else text
    scheme, colon, rest = text.partition(":")
    return scheme.lower() + colon + rest


def require_local(text: str) -> str:
    """Return a path on this machine. Raises PathError for URLs, and for texts that look like one with a mistake."""
    if is_url(check_location(text)):
        raise PathError(f"{text} must be a path on this machine")
    return text


def _find_mistake(text: str) -> str | None:
    """Return what is wrong with a text that looks like a URL; None for correct URLs and for paths on this machine."""
    stripped = text.strip(" \t\r\n\"'")
    match = _LIKE_URL.match(stripped)
    if not match:
        return None
    scheme = (match[1] or match[2] or match[3] or "").lower()  # each form of _LIKE_URL has its own group
    after_scheme = stripped[len(scheme) :]
    rest = after_scheme.lstrip(":/")  # bucket/key, for each of s3://bucket/key, s3:/bucket/key and s3:bucket/key
    if scheme in ("file", "local"):
        return f"a path on this machine has no scheme; give /{rest}"
    if not scheme or not rest:
        return f"it names no {'bucket' if scheme else 'scheme'}; give one such as s3://bucket/{rest or 'folder'}"
    corrected = f"{scheme}://{rest}"
    if stripped != text:
        return f"it is not one; did you mean {corrected} without the spaces or quotes around it?"
    has_empty_bucket = scheme in STORES and after_scheme.startswith(":///")
    if has_empty_bucket or not _URL.match(stripped):  # for example, s3:///key or s3:/bucket/key
        return f"it is not one; did you mean {corrected}?"
    parts = rest.removesuffix("/").split("/")
    names = [part for part in parts if part not in ("", ".")]
    if names != parts:  # a path drops these parts, so it would name another object
        return f"its path has an empty part or a dot; did you mean {scheme}://{'/'.join(names)}?"
    return None


class RemotePath(PosixPath):
    """Path of an object in object storage, or of all objects whose names begin with it, as if it were a folder.

    It has the methods of `Path` that this project needs. Using it as a path on this machine raises TypeError.
    `request` alone repeats failed requests, so attempts do not multiply. In the end, it raises StorageError.
    """

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":/")  # a path has a single slash, as in s3:/bucket
        return f"{scheme.lower()}://{rest.lstrip('/')}"

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is not a path on this machine")

    def request(self, verb: str, call: Callable[[Any, str], T]) -> T:
        """Return `call(file system, URL)`; repeat it if it fails for a reason that may pass.

        verb: what the call does, as in "read", for the error message.
        """
        url = str(self)
        begin = time.monotonic()
        attempt = 0
        while True:
            attempt += 1
            try:
                return call(_file_system(url.partition("://")[0], os.getpid()), url)
            except FileNotFoundError as error:
                # s3fs raises it for a missing bucket, too. Only then does its text tell more than the URL.
                detail = f": {_error_text(error)}" if "bucket does not exist" in str(error) else ""
                raise FileNotFoundError(f"there is no {url}{detail}") from None
            except Exception as error:
                delay = _retry_delay(error, attempt, time.monotonic() - begin)
                if delay is None:  # no further attempt
                    raise StorageError(f"could not {verb} {url}: {_failure_reason(error, attempt)}") from None
            time.sleep(delay)

    def info(self) -> dict[str, Any]:
        """Return what the storage knows of the object. Raises FileNotFoundError if there is none."""
        return self.request("look for", lambda fs, url: fs.info(url))

    def stamp(self) -> tuple[int, str]:
        """Return (size in bytes, version) of the object; the version changes with the object's content."""
        info = self.info()
        version = next((f"{name} {info[name]}" for name in VERSION_KEYS if info.get(name)), "")
        return int(info["size"] or 0), version

    def stat(self, **_: Any) -> Any:
        """Return an object whose `st_size` is the size in bytes. Raises FileNotFoundError."""
        return SimpleNamespace(st_size=self.stamp()[0])

    def _kind(self) -> str | None:
        """Return "file", "directory" or another word of fsspec; None if there is no such object or folder."""
        try:
            return str(self.info()["type"])
        except FileNotFoundError:
            return None

    def exists(self, **_: Any) -> bool:
        """Return whether there is an object, or a folder of objects, of this name."""
        return self._kind() is not None

    def is_file(self, **_: Any) -> bool:
        """Return whether there is an object of this name."""
        return self._kind() == "file"

    def is_dir(self, **_: Any) -> bool:
        """Return whether there are objects in a folder of this name."""
        return self._kind() == "directory"

    def glob(self, pattern: str, **_: Any) -> Iterator["RemotePath"]:  # type: ignore[override]
        """Yield the entries of this folder whose name matches `pattern`."""
        try:
            urls = self.request("list", lambda fs, url: fs.ls(url, detail=False))
        except FileNotFoundError:
            return
        for name in sorted(url.rstrip("/").rpartition("/")[2] for url in urls):
            if fnmatch.fnmatchcase(name, pattern):
                yield self / name

    def resolve(self, strict: bool = False) -> "RemotePath":
        """Return this path: URLs are absolute, and object storage has no links."""
        return self

    def absolute(self) -> "RemotePath":
        """Return this path: URLs are absolute."""
        return self

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Do nothing: object storage has no folders."""

    def read_range(self, begin: int, end: int) -> bytes:
        """Return bytes `begin` to `end` - 1 of the object."""
        if begin >= end:
            return b""
        size = end - begin
        return self.request("read", lambda fs, url: _check_size(fs.cat_file(url, start=begin, end=end), size))

    def read_bytes(self) -> bytes:
        """Return the content of the object."""
        data: bytes = self.request("read", lambda fs, url: fs.cat_file(url))
        return data

    def read_text(self, encoding: str | None = None, errors: str | None = None, newline: str | None = None) -> str:
        """Return the content of the object as text."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def open(self, *_: Any, **__: Any) -> Any:
        """Open the object for reading bytes."""
        return _RemoteFile(self)

    def download(self, local: Path) -> None:
        """Copy the object into the file `local`."""
        self.request("read", lambda fs, url: fs.get_file(url, str(local)))

    def upload(self, local: Path) -> None:
        """Copy the file `local` into the object. The object appears when all of it is there."""
        self.request("write", lambda fs, url: fs.put_file(str(local), url))

    def copy_to(self, target: "RemotePath") -> None:
        """Copy the object into the object `target` of the same storage, without a download."""
        self.request("copy", lambda fs, url: fs.cp_file(url, str(target)))

    def write_bytes(self, data: Any) -> int:
        """Write an object. It appears when all of it is there."""
        self.request("write", lambda fs, url: fs.pipe_file(url, bytes(data)))
        return len(data)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object. Raises FileNotFoundError if there is none, unless `missing_ok` is set."""
        try:
            self.request("delete", lambda fs, url: fs.rm_file(url))
        except FileNotFoundError:
            if not missing_ok:
                raise


class _RemoteFile(io.RawIOBase):
    """An object opened for reading: every read is one request."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._size = path.stamp()[0]
        self._position = 0

    def __enter__(self) -> "_RemoteFile":
        return self

    def readable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position of the next read; return it."""
        origins = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}
        self._position = offset + origins[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read bytes into `buffer`; return their number, 0 at the end of the object."""
        end = min(self._position + len(buffer), self._size)
        data = self._path.read_range(self._position, end)
        size = len(data)
        buffer[:size] = data
        self._position += size
        return size


@functools.cache
def _file_system(protocol: str, process: int) -> Any:
    """Return the file system of a protocol. `process` keeps a forked process from using its parent's connections."""
    try:
        import fsspec
        from fsspec.config import conf
    except ImportError:
        raise ImportError(f"this needs the package fsspec: {pip_install('fsspec')}") from None
    # Other processes may change the storage at any time, so no listing may come from a cache.
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if PACKAGES.get(protocol) == "s3fs":
        # `request` repeats failed requests. Repetitions of botocore, the package below s3fs, would multiply with its
        # own. What the user has configured for fsspec is kept.
        user_options = conf.get(protocol, {}).get("config_kwargs", {})
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1, "mode": "standard"}, **user_options}
    try:
        file_system = fsspec.filesystem(protocol, **options)
        if hasattr(file_system, "retries"):  # repetitions of the package itself, such as s3fs
            file_system.retries = 1
        return file_system
    except ImportError:
        if protocol not in PACKAGES:
            raise  # the message of fsspec names the package
        package = PACKAGES[protocol]
        raise ImportError(f"{protocol}:// needs the package {package}: {pip_install(package)}") from None


def _check_size(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise ConnectionError(f"the answer has {len(data)} bytes instead of {size}")
    return data


def _is_refusal(error: Exception) -> bool:
    """Return whether the storage refused access. S3 answers HEAD requests with expired credentials by 400 only."""
    refused = isinstance(error, PermissionError) or "Credentials" in type(error).__name__
    return refused or (isinstance(error, OSError) and error.errno == errno.EINVAL and "Bad Request" in str(error))


def _retry_delay(error: Exception, attempt: int, spent: float) -> float | None:
    """Return the seconds to wait before the next attempt of a request, or None if there is none.

    attempt: number of the attempt that failed, from 1. spent: seconds since the first attempt began.
    """
    max_attempts = ATTEMPTS
    growth = 2
    if isinstance(error, OSError) and error.errno == errno.EBUSY:  # status 503
        max_attempts = min(BUSY_ATTEMPTS, ATTEMPTS)  # a test may lower ATTEMPTS
        growth = 4
    delay = float(FIRST_WAIT * growth ** (attempt - 1))
    is_over = attempt >= max_attempts or spent + delay > DEADLINE
    is_permanent = isinstance(error, _PERMANENT_ERRORS) or _is_refusal(error)  # a repetition would be of no use
    return None if is_over or is_permanent else delay


def _failure_reason(error: Exception, attempts: int) -> str:
    if _is_refusal(error):
        return (
            f"access was refused ({_error_text(error)}); check the credentials, which come from the environment and "
            "may have expired"
        )
    if isinstance(error, (ImportError, ValueError)):
        return _error_text(error)
    return f"{_error_text(error)} (after {attempts} attempt{'s' if attempts > 1 else ''})"


def _error_text(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
