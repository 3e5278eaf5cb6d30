"""Advice on optional packages that are not installed."""

import importlib.util
import shlex
import shutil
import sys
from pathlib import Path


def is_installed(name: str) -> bool:
    """Return whether a package is installed. A folder of this name in the current folder is none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def pip_install(requirement: str) -> str:
    """Return the shell command that installs a package, such as `pip install ray`, for the Python that is running.

    If its environment is not activated, `pip` in the shell belongs to another Python, so the command names this one,
    such as `.venv/bin/python -m pip install ray`.
    """
    command = f"pip install {shlex.quote(requirement)}"
    pip = shutil.which("pip")
    if pip and Path(pip).parent == Path(sys.executable).parent:
        return command
    interpreter = Path(sys.executable)
    if interpreter.is_relative_to(Path.cwd()):
        interpreter = interpreter.relative_to(Path.cwd())
    return f"{shlex.quote(str(interpreter))} -m {command}"
