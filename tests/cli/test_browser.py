"""A browser draws the report, whose charts exist only after page.js has run. Skipped without chromium."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import FULL
from tests.unit.test_report import made, page_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"


def drawn(page: Path, profile: Path) -> str:
    """Return the document of a page after its scripts have run."""
    words = [str(CHROMIUM), *QUIET.split(), "--disable-component-update", "--disable-sync"]
    words += [f"--user-data-dir={profile}", "--virtual-time-budget=3000", "--dump-dom", page.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


@FULL
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_a_point_between_nans_is_drawn_and_the_end_is_marked(tmp_path: Path) -> None:
    folder = made(tmp_path / "a")
    first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    rows = []
    for iteration, loss in ((1, None), (2, 3.5), (3, None), (4, None)):
        rows.append(json.dumps({**first, "iteration": iteration, "lm_loss": loss}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(rows))
    page_of([folder])
    document = drawn(folder / "page.html", tmp_path / "profile")
    chart = document[document.index('id="chart-loss"') :].partition("</figure>")[0]
    assert chart.count("<circle") == 1
    assert "NaN from iteration 3" in chart.rpartition("</script>")[2]


@FULL
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_two_runs_have_two_colours_for_a_corpus(tmp_path: Path) -> None:
    folders = []
    for name in ("a", "b"):
        folder = made(tmp_path / name)
        kept = (folder / "metrics.jsonl").read_text().rpartition("\n")[0]
        for corpus in ("web", "books"):
            for iteration in (10, 20):
                kept += "\n" + json.dumps({"split": f"valid/{corpus}", "iteration": iteration, "lm_loss": 5.0})
        (folder / "metrics.jsonl").write_text(kept + "\n")
        folders.append(folder)
    page_of(folders)
    document = drawn(folders[0] / "page.html", tmp_path / "profile")
    chart = document[document.index('id="chart-corpora"') :].partition("</figure>")[0].rpartition("</script>")[2]
    paths = [each for each in chart.split("<path")[1:] if "stroke:var(--c" in each]
    colours = {each.partition("stroke:")[2].partition(";")[0] for each in paths}
    assert len(paths) == 4 and len(colours) == 2
    assert sum("stroke-dasharray" in each for each in paths) == 2
