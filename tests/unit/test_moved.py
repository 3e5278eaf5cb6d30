"""Old import paths of moved modules work for one more version, with one warning each."""

import subprocess
import sys
import warnings
from importlib import import_module

import pytest

from megatron.compat.moved import MOVED
from tests.support import ROOT


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_gives_the_moved_module(old: str) -> None:
    """An import from a moved module's old path gives the module's public names and a warning with the new path."""
    sys.modules.pop(old, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        alias, home = import_module(old), import_module(MOVED[old])
    assert [each.category for each in caught if MOVED[old] in str(each.message)] == [FutureWarning]
    public = [name for name in vars(home) if not name.startswith("_")]
    assert public and all(getattr(alias, name) is getattr(home, name) for name in public)


def test_an_old_command_runs() -> None:
    """`python -m` still runs a command at its old path, with one warning."""
    command = [sys.executable, "-m", "megatron.commands.plan", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--cluster" in done.stdout
    assert done.stderr.count("FutureWarning") == 1 and "megatron_tools.plan.plan" in done.stderr
