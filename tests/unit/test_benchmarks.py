"""Output of the benchmarks is parsed into tables, bars and a plot."""

import argparse
import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from docs.site.results import results
from megatron.config.flags import build_parser
from tests.sentences import SENTENCES
from tests.support import ROOT, command, covering

TEXT = """\
2 stages, 8 micro-batches

| contender | tokens/s, median (lowest to highest) | ours / it, by round |
| --- | --- | --- |
| ours | 1,254 (1,249 to 1,255) | 1.00 (1.00 to 1.00) |
| peer | 207 (168 to 224) | 1.23 (1.11 to 1.51) |
| alone | 300 (290 to 310) |  |

| over | +% |
| --- | --- |
| zb-h1 | -1.5% (-3.7% to 0.3%) |
"""


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("suite")


@pytest.fixture
def plan_memory(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("plan_memory")


def test_tables_are_read(suite: ModuleType) -> None:
    first, second = suite.tables(TEXT)
    assert [row["contender"] for row in first] == ["ours", "peer", "alone"]
    assert suite.bars(first) == (
        "ours / it, by round",
        [("ours", 1.0, 1.0, 1.0), ("peer", 1.23, 1.11, 1.51)],
    )
    assert suite.bars(second) == ("+%", [("zb-h1", -1.5, -3.7, 0.3)])


def test_a_picture_is_drawn(suite: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    suite.draw([{"section": "x", "tables": suite.tables(TEXT)}], tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_every_section_names_a_script(suite: ModuleType) -> None:
    for line in suite.SECTIONS.values():
        assert (ROOT / "benchmarks" / line.split()[0]).is_file()


def test_a_section_by_name_and_an_unknown_one(tmp_path: Path) -> None:
    done = command("python", "benchmarks/suite.py", "--sections", "gpu", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "benchmarks.json").read_text())
    assert found["results"][0]["command"] == "python benchmarks/gpu.py"
    assert "torch" in found["here"]
    assert "python benchmarks/gpu.py" in (tmp_path / "benchmarks.md").read_text()
    done = command("python", "benchmarks/suite.py", "--sections", "dq")
    assert done.returncode == 2
    assert SENTENCES["no_section_dq"] in done.stderr


def test_results_name_commands_that_exist(suite: ModuleType) -> None:
    """Each row of a table in results.toml has a cell per column, and commands name existing sections and scripts."""
    for found in results()["table"].values():
        assert {len(row) for row in found["rows"]} == {len(found["columns"])}
        cells = [found.get("command", ""), *(str(cell) for row in found["rows"] for cell in row)]
        for sections in re.findall(r'make bench SECTIONS="([^"]*)"', "\n".join(cells)):
            assert set(sections.split()) <= set(suite.SECTIONS)
        for script in re.findall(r"python ([\w/]+\.py)", "\n".join(cells)):
            assert (ROOT / script).is_file()


def _options(tool: str) -> set[str]:
    """Return the flags of a tool and of its commands."""
    module = re.findall(r"from (\S+) import cli", (ROOT / "tools" / f"{tool}.py").read_text())[0]
    found = set[str]()
    parsers = [importlib.import_module(module).build_parser()]
    for parser in parsers:
        for action in parser._actions:
            found.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers.extend(action.choices.values())
    return found


@pytest.mark.parametrize("path", sorted(ROOT.glob("benchmarks/*.sh")), ids=lambda path: path.name)
def test_scripts_pass_flags_that_tools_have(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    settings = set(build_parser()._option_string_actions)
    for tool, words in re.findall(r"tools/(\w+)\.py(.*)", text):
        known = settings | _options(tool) if tool != "launch" else settings | {"--standalone", "--nproc-per-node"}
        assert set(re.findall(r"(?<=\s)--[a-z][\w-]*", words)) <= known, tool


def table_of_memory() -> dict[str, list[Any]]:
    """Return the rows of the table plan-memory in results.toml by case."""
    rows = results()["table"]["plan-memory"]["rows"]
    return {row[0]: row[1:] for row in rows}


def test_the_table_of_memory_holds_what_is_predicted(
    plan_memory: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All cases of the benchmark are in the table, with the numbers that the planner gives today."""
    monkeypatch.setattr("megatron.estimate.sizes.emulates_matmul", lambda dtype: dtype == torch.float16)
    rows = table_of_memory()
    assert list(rows) == list(plan_memory.CASES)
    for case, (ranks, measured, predicted, error) in rows.items():
        found = plan_memory.predict(ranks, plan_memory.flags_of(case, str(tmp_path))).total / 1e6
        assert f"{found:.1f}" == predicted
        assert error == f"{float(predicted) / float(measured) - 1:+.1%}"


@pytest.mark.parametrize("case", covering(sorted(table_of_memory()), lambda case: False))
def test_the_table_of_memory_holds_what_is_measured(plan_memory: ModuleType, case: str) -> None:
    """The meter needs a C++ compiler. Threads of gloo release some tensors earlier or later, hence the 2 %."""
    found = plan_memory.compare(case)["measured"] / 1e6
    assert found == pytest.approx(float(table_of_memory()[case][1]), rel=0.02)
