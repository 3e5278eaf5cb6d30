"""Options of pytest, and fixtures that all tests share: a tokenizer and small corpora."""

import json
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from .materials import SAMPLE, random_corpus, small_tokenizer

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and tools would split the tables that tests read
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Shells let background jobs ignore SIGINT. Ranks would inherit that, but tests of Ctrl-C need the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Hypothesis draws the same examples in every run, so that failures repeat; HYPOTHESIS_SEED=random draws new ones.
settings.register_profile("project", derandomize=os.environ.get("HYPOTHESIS_SEED") != "random", database=None)
settings.load_profile("project")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="run the whole of the large grids, not a part that covers each kind"
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help="run what is in one process and fast, and a few layouts: what a change breaks first",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    kept = [item for item in items if not item.get_closest_marker("full")]
    if config.getoption("--quick"):
        kept = [item for item in kept if item.get_closest_marker("quick") or _is_quick(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _is_quick(item: pytest.Item) -> bool:
    return "/unit/" in item.path.as_posix() and not item.get_closest_marker("slow")


@pytest.fixture(scope="session")
def sample_corpus() -> Path:
    return SAMPLE


@pytest.fixture(scope="session")
def vocab_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory, vocab_file: str) -> str:
    return random_corpus(tmp_path_factory.mktemp("data"), vocab_file)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """The path of a JSON-lines file with 40 short documents."""
    path = tmp_path / "corpus.jsonl"
    lines = [{"text": f"第{i}篇文章。\nDocument number {i}. " + "词" * (i % 7)} for i in range(40)]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path
