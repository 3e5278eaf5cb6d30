"""Compilation of the stand-in's library, once for each version of its source and of torch."""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = ROOT / "build" / "cuda_stand_in"
SOURCES = "device.cpp", "operations.cpp"
# The source uses interfaces of torch that differ between releases, such as CUDAHooksInterface.
TORCH_RELEASES = ("2.13",)
FLAGS = "-std=c++20", "-O1", "-fPIC", "-w"


class Missing(Exception):
    """Raised if the stand-in cannot be built here; the message says in one sentence what is missing."""


def torch_folder() -> Path:
    """Return the folder of torch, without an import of torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Missing("torch is not installed")
    return Path(spec.origin).parent


def library() -> Path:
    """Return the path of the library, which is compiled if it is not in the cache. Raises Missing."""
    release = importlib.metadata.version("torch")
    if not release.startswith(tuple(f"{known}." for known in TORCH_RELEASES)):
        raise Missing(f"torch {release} is installed, but the stand-in needs torch {' or '.join(TORCH_RELEASES)}")
    if (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        raise Missing(f"torch {release} is a build with CUDA, but the stand-in needs the build for CPUs")
    path = CACHE / f"stand_in_{_digest(release)}.so"
    if not path.exists():
        _compile(path)
    return path


def _digest(release: str) -> str:
    """Return a name for the library that changes with its source, its flags and the release of torch."""
    parts = [release.encode(), " ".join(FLAGS).encode()]
    parts += [(HERE / name).read_bytes() for name in ("stand_in.h", *SOURCES)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(path: Path) -> None:
    """Compile the library into `path`."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler or not shutil.which(compiler):
        raise Missing("there is no C++ compiler: install g++, or set CXX")
    include = torch_folder() / "include"
    headers = [f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"]
    libraries = [f"-L{torch_folder() / 'lib'}", "-ltorch_cpu", "-lc10"]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        sources = [str(HERE / name) for name in SOURCES]
        command = [compiler, *FLAGS, *headers, "-shared", *sources, *libraries, "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Missing(f"{compiler} cannot compile the stand-in: {_first_error(done.stderr)}")
        made.rename(path)  # a library that another process loads is complete


def _first_error(output: str) -> str:
    """Return the first line with an error in a compiler's output."""
    lines = output.strip().splitlines() or ["no output"]
    errors = [line for line in lines if "error" in line]
    return (errors or lines)[0].strip()
