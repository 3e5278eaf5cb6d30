"""docs/reliability.md and tests/drills/faults.py list the same faults, and each fault has an existing test."""

import re

import pytest

from tests.drills.faults import FAULTS
from tests.support import ROOT


def rows(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition("HOSTS_TABLE")[0]  # measured faults follow
    return [row for row in re.findall(r"^\| (.+?) \|", text, flags=re.MULTILINE) if row not in ("fault", "故障", "---")]


def test_the_page_names_every_fault() -> None:
    assert sorted(rows("reliability.md")) == sorted(FAULTS)
    assert len(rows("reliability_zh.md")) == len(FAULTS) >= 30


@pytest.mark.parametrize("fault", FAULTS)
def test_each_has_a_drill(fault: str) -> None:
    for test in FAULTS[fault]:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text() if name else (ROOT / path).is_file(), test
