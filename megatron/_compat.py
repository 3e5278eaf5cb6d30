"""The door to `megatron_compat`, the package beside the core for scripts and flags of other frameworks.

Only this module of the core names the package. What it holds is loaded on first use; a run of this project's own
scripts and flags uses only its table of names.
"""

from importlib import import_module
from typing import Any


def compat(module: str) -> Any:
    """Return a module of `megatron_compat`, such as `flags.translate`."""
    return import_module(f"megatron_compat.{module}")
