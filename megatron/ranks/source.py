"""Identity of the code that runs: a hash of its source, and the versions of Python and of the packages it uses."""

import hashlib
import os
import platform
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import megatron
import tds

PACKAGES = ("torch", "deepspeed", "numpy", "safetensors", "tokenizers", "sentencepiece")
KERNEL_PACKAGES = ("triton", "apex", "flash-attn", "transformer-engine")  # optional packages that compute
# Environment variables by which libraries choose kernels, number formats or the order of sums.
KERNEL_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
# Beginnings of file names; "<" begins names such as <string> and <frozen importlib>, which are no files.
_LIBRARIES = (*{sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}, "<")


def source_files() -> dict[str, Path]:
    """Return all Python files of the packages megatron and tds from where this process imports them, by relative path.

    Files that the process has not imported are included.
    """
    files = {}
    for package in (megatron, tds):
        folder = Path(str(package.__file__)).parent
        for file in folder.rglob("*.py"):
            files[file.relative_to(folder.parent).as_posix()] = file
    return dict(sorted(files.items()))


def source_hash(script: str | None = None) -> str:
    """Return the SHA-256 of paths and contents of `source_files()`, followed by the content of an entry script.

    script: path of the entry script, or None. The script's own path does not change the hash.
    """
    digest = hashlib.sha256()
    for name, file in source_files().items():
        digest.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    if script is not None:
        digest.update(f"script\0{hashlib.sha256(Path(script).read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def is_library_file(filename: str) -> bool:
    """Return whether a file belongs to the standard library or to an installed package."""
    installed = "site-packages" in filename or "dist-packages" in filename
    return installed or filename.startswith(_LIBRARIES)


def user_file_hashes() -> dict[str, str]:
    """Return the SHA-256 of the entry script and of each module that the user wrote, keyed by `script` or module name.

    Those are the modules that this process has imported from Python files outside the standard library, the installed
    packages and this project's megatron and tds, whose files `source_hash` covers.
    """
    hashes = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")  # not by the module's own `__getattr__`
        # Skip built-in and compiled modules and libraries, then this project's modules and files that do not exist.
        if not isinstance(file, str) or not file.endswith(".py") or is_library_file(file):
            continue
        if name.partition(".")[0] in ("megatron", "tds") or not os.path.isfile(file):
            continue
        label = "script" if name == "__main__" else f"module {name}"
        hashes[label] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return hashes


def kernel_choices() -> dict[str, str]:
    """Return the versions of optional packages that compute, and the environment variables that choose kernels."""
    choices = {}
    for name in KERNEL_PACKAGES:
        try:
            choices[f"the version of {name}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            choices[f"the version of {name}"] = "not installed"
    for name in KERNEL_VARIABLES:
        choices[f"the environment variable {name}"] = os.environ.get(name, "not set")
    return choices


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of `PACKAGES`, by name."""
    return {"Python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}
