"""Checks of this machine and its installed packages."""

import importlib
import importlib.metadata
import os
import re
import resource
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from data_utils.cli import usable_cores

from .finding import Findings, failed, ok, warning

# Package -> (oldest supported, newest tested by scripts/test_versions.sh). pyproject.toml has the same oldest
# versions.
SUPPORTED = {"torch": ("2.11", "2.15.0"), "deepspeed": ("0.19", "0.19.8"), "numpy": ("2.0", "2.5.5")}
# Training refuses to start with this or a later release. It relies on internals of DeepSpeed, which a new release may
# change so that gradients are wrong.
TOO_NEW = {"deepspeed": "0.20"}
OLDEST_PYTHON = (3, 11)
MIN_OPEN_FILES = 256
FEW_OPEN_FILES = 4096
SHARED_MEMORY = "/dev/shm"
MIN_SHARED_MEMORY = 2**30


def version_key(text: str) -> tuple[int, ...]:
    """Parse a version for comparison: `2.13.0+cpu` -> (2, 13, 0)."""
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = re.match("[0-9]+", part)
        # A part such as rc1 begins with no digit and ends the version.
        if digits is None:
            break
        numbers.append(int(digits[0]))
    return tuple(numbers)


def check_python() -> Findings:
    """Check the version of the interpreter."""
    installed = ".".join(map(str, sys.version_info[:3]))
    oldest = ".".join(map(str, OLDEST_PYTHON))
    if sys.version_info[:2] < OLDEST_PYTHON:
        yield failed("Python", f"is {installed}", f"use {oldest} or newer")
    else:
        yield ok("Python", installed)


def check_packages() -> Findings:
    """Check the versions of required packages without importing them."""
    for name, (oldest, newest) in SUPPORTED.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield failed(
                name, "is not installed", f"pip install -r requirements.txt, or pip install '{name}>={oldest}'"
            )
            continue
        first_refused = TOO_NEW.get(name)  # None if training refuses no new release of this package
        remedy = f"pip install '{name}>={oldest}'"
        if first_refused:
            remedy = f"pip install '{name}>={oldest},<{first_refused}'"
        if version_key(installed) < version_key(oldest):
            yield failed(name, f"{installed} is too old", remedy)
        elif first_refused and version_key(installed) >= version_key(first_refused):
            yield failed(name, f"{installed} is too new", remedy)
        elif version_key(installed) > version_key(newest):
            yield warning(
                name,
                f"{installed} is newer than {newest}, the newest tested version",
                f"pip install {name}=={newest} if a run behaves strangely",
            )
        else:
            yield ok(name, installed)


def check_import(name: str) -> Findings:
    """Check that package `name` can be imported.

    The import fails, for example, if torch lacks a library or if DeepSpeed was built for another torch.
    """
    try:
        version = importlib.import_module(name).__version__
    except Exception as error:  # a broken installation may raise anything
        message = " ".join(str(error).split())[:200]
        hint = "as described on https://pytorch.org" if name == "torch" else f"(pip install --force-reinstall {name})"
        yield failed(
            f"import {name}",
            f"{type(error).__name__}: {message}",
            f"install {name} again {hint}; until then, checks that need it are skipped",
        )
    else:
        yield ok(f"import {name}", version)


def check_devices(built_for: str | None, usable: bool, present: bool) -> Findings:
    """Check that this build of torch fits the machine's devices.

    built_for: kind of accelerator that torch was built for, None for a CPU build. usable: whether torch finds an
    accelerator. present: whether the machine has a GPU.
    """
    if usable:
        yield ok("devices", f"torch is built for {built_for or 'accelerators'} and finds a device")
    elif present and built_for is None:
        yield failed(
            "devices",
            "there is a GPU, but this torch was built for CPUs only",
            "install the build of torch for your driver (https://pytorch.org)",
        )
    elif present:
        yield failed(
            "devices",
            f"there is a GPU, but torch does not find it, although it is built for {built_for}",
            "check nvidia-smi, the driver version and CUDA_VISIBLE_DEVICES",
        )
    elif built_for:
        yield warning(
            "devices",
            f"torch was built for {built_for}, but this machine has no such device: ranks run on the CPU",
            "if the run is meant to use the CPU, ignore this warning",
        )
    else:
        yield ok("devices", "CPU")


def check_hidden_package(ours: Path, paths: Sequence[str]) -> Findings:
    """Check `paths` for other packages named `megatron`, which hide this project's package if they come first.

    ours: folder of this project's package.
    """
    precedes_ours = True  # Python imports the first package that it finds
    for entry in paths:
        folder = Path(entry or ".", "megatron")  # an empty entry is the working directory
        if not folder.is_dir():
            continue
        if folder.resolve() == ours.resolve():
            precedes_ours = False
        elif (folder / "__init__.py").is_file():  # a folder without __init__.py hides no package
            break
    else:
        yield ok("package megatron", "only this project's")
        return
    if precedes_ours:
        yield failed(
            "package megatron",
            f"{folder} precedes this project's package in Python's path and hides it",
            "uninstall that package (pip uninstall megatron-core), remove its folder from PYTHONPATH or use another "
            "environment",
        )
    else:
        yield warning(
            "package megatron",
            f"Python's path also contains another package named megatron: {folder}",
            "start scripts from this project's folder, or use an environment without the other package",
        )


def check_compiler() -> Findings:
    """Check for the C++ compiler that --compile needs on a CPU."""
    chosen = os.environ.get("CXX")  # if set, torch.compile uses this compiler
    names = [chosen] if chosen else ["c++", "g++", "clang++"]
    for name in names:
        path = shutil.which(name)
        if path:
            yield ok("compiler", path)
            return
    yield failed(
        "compiler",
        f"--compile needs a C++ compiler, but there is no {chosen or 'c++, g++ or clang++'}",
        "install a compiler (apt install g++) or omit --compile",
    )


def check_threads(ranks_here: int, on_cpu: bool) -> Findings:
    """Check that the ranks on this machine together have no more threads than it has cores."""
    cores = usable_cores()
    omp_threads = os.environ.get("OMP_NUM_THREADS")
    threads_per_rank = 1  # the launcher sets OMP_NUM_THREADS to 1 if it is not set
    if omp_threads is not None:
        # 0 stands for an invalid number, which is reported below.
        threads_per_rank = int(omp_threads) if omp_threads.isdecimal() else 0
    total_threads = ranks_here * threads_per_rank
    if threads_per_rank < 1:
        yield failed(
            "threads",
            f"OMP_NUM_THREADS={omp_threads} is not a number of threads",
            "unset OMP_NUM_THREADS, or set it to a positive whole number",
        )
    elif on_cpu and total_threads > cores:
        words = f"{ranks_here} ranks with {omp_threads or 1} threads each share {cores} cores"
        yield warning("threads", words, "set OMP_NUM_THREADS=1, and use at most one rank per core if speed matters")
    else:
        yield ok("threads", f"{ranks_here} ranks, {cores} cores, OMP_NUM_THREADS {omp_threads or 'not set'}")


def check_open_files() -> Findings:
    """Check the limit of open files, `ulimit -n`."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        yield ok("open files", "unlimited")
    elif limit < MIN_OPEN_FILES:
        yield failed("open files", f"ulimit -n is {limit}", "run ulimit -n 65536 before the launch")
    elif limit < FEW_OPEN_FILES:
        yield warning("open files", f"ulimit -n is {limit}, low for many ranks or corpora", "run ulimit -n 65536")
    else:
        yield ok("open files", str(limit))


def check_shared_memory() -> Findings:
    """Check that enough shared memory is free for NCCL."""
    if not Path(SHARED_MEMORY).is_dir():  # only Linux has this folder
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free >= MIN_SHARED_MEMORY:
        yield ok("shared memory", f"{free / 1e9:.1f} GB free")
        return
    words = f"{SHARED_MEMORY} has {free / 1e6:.0f} MB free"
    yield warning("shared memory", words, "start the container with --shm-size=8g or --ipc=host")
