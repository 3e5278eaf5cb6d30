"""public_names.txt lists all public names, so that adding or removing a name is a deliberate decision."""

from importlib import import_module
from pathlib import Path

import pytest

from megatron import mpu

MODULES = (
    "data_utils",
    "megatron",
    "megatron.mpu",
    "megatron.training",
    "megatron.model",
    "megatron.tasks",
    "megatron.tokenizer",
    "tds",
)
LIST = Path(__file__).with_name("public_names.txt")


def names() -> list[str]:
    found = []
    for module in map(import_module, MODULES):
        own = [*getattr(module, "__all__", []), *getattr(module, "_HOMES", []), *getattr(module, "_NEW_NAMES", [])]
        found += [f"{module.__name__}.{name}" for name in own]
    return sorted(set(found))


def test_public_names_are_those_of_the_list() -> None:
    """The code has exactly the public names in public_names.txt. CONTRIBUTING.md describes how to remove a name."""
    assert names() == LIST.read_text(encoding="utf-8").split()


def test_every_one_is_there() -> None:
    for name in names():
        module, _, last = name.rpartition(".")
        assert getattr(import_module(module), last) is not None


def test_old_names_work_with_one_warning_that_names_the_new_one() -> None:
    with pytest.warns(DeprecationWarning, match="skip_init") as given:
        assert mpu.undrawn is mpu.skip_init  # type: ignore[attr-defined]
    assert len(given) == 1
