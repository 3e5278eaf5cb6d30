"""The commands in the README and in docs/ work, and the transcripts in these pages match the scripts' output."""

import json
import re
from pathlib import Path

import pytest

from docs.site import transcript
from tests.sentences import SENTENCES
from tests.support import FULL, ROOT, command

READMES = ("README.md", "README_zh.md")
# Variables for a few iterations of a tiny model, so that each command takes seconds.
SMALL = {"TRAIN_ITERS": "4", "NLAYERS": "2", "NHIDDEN": "32", "NHEADS": "2", "SEQ_LENGTH": "32", "VOCAB_SIZE": "3000"}
# The `bash` blocks of these pages run in this order in one folder. Other tests cover llama.md and launching.md.
LONG = (
    "docs/start.md",
    "docs/layouts.md",
    "docs/checkpoints.md",
    "docs/howto.md",
    "docs/experts.md",
    "docs/own_model.md",
    "docs/tds.md",
    "docs/planning.md",
    "docs/reliability.md",
    "docs/scaling.md",
)


def blocks(page: str, language: str = "bash") -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def run(script: str, folder: Path, name: str) -> str:
    """Run a shell script with `folder` in place of runs/; return its output.

    RUN_DIR is set to `folder`/`name` if the script does not set it.
    """
    script = script.replace("runs/", f"{folder}/")
    if "RUN_DIR=" not in script:
        script = f"export RUN_DIR={folder}/{name}\n{script}"
    done = command("bash", "-euc", script, env=SMALL, timeout=600)
    assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.parametrize("readme", READMES)
def test_the_first_command_stands_at_the_top(readme: str) -> None:
    lines = (ROOT / readme).read_text(encoding="utf-8").splitlines()
    assert "bash scripts/run_gpt2.sh" in lines[:26]  # below the figure and the poems
    assert len(lines) <= 130, "the README is a front page; move details to a page in docs/"


@pytest.mark.parametrize("pages", [READMES, ("docs/parity.md", "docs/parity_zh.md")], ids=lambda pages: pages[0])
def test_both_languages_show_the_same_numbers(pages: tuple[str, str]) -> None:
    tables = [
        re.findall(r"^\|.*\d\.\d{6}.*\|$", (ROOT / p).read_text(encoding="utf-8"), flags=re.MULTILINE) for p in pages
    ]
    numbers = [[re.findall(r"\d\.\d{6}", row) for row in table] for table in tables]
    assert numbers[0] == numbers[1]
    assert len(numbers[0]) == (5 if pages is READMES else 42)


def test_the_front_page_shows_rows_of_the_whole_table() -> None:
    whole: dict[str, str] = {}
    for row in (ROOT / "docs/parity.md").read_text(encoding="utf-8").splitlines():
        whole.setdefault(row.split(" | ")[0], row)  # the first table, that of SGD
    rows = [
        row for row in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if re.search(r"\d\.\d{6}", row)
    ]
    for row in rows:
        assert set(re.findall(r"\d\.\d{6}", row)) <= set(re.findall(r"\d\.\d{6}", whole[row.split(" | ")[0]])), row


def test_every_page_with_commands_is_run() -> None:
    run_here = {"README.md", "docs/llama.md", "docs/launching.md", "docs/t5.md", *LONG}
    pages = {
        str(path.relative_to(ROOT))
        for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    }
    assert {page for page in pages if blocks(page) and not page.endswith("_zh.md")} == run_here


def test_the_commands_run(tmp_path: Path) -> None:
    """The `bash` blocks of the README and of docs/t5.md run; that of docs/t5.md with a smaller model."""
    assert blocks("README.md") == ["bash scripts/run_gpt2.sh\n"]
    # Run the first command with its default model, to compare its output with the page.
    printed = transcript.run("gpt2", str(tmp_path / "default"), "--exit-interval", "10")
    as_the_page_shows_it(printed)
    said = ["\n".join(printed)]
    said += [run(block, tmp_path, "t5") for block in blocks("docs/t5.md")]
    assert all("unigram entropy" in text for text in said)
    other = command(
        "bash", "scripts/run_gpt2.sh", env={**SMALL, "RUN_DIR": f"{tmp_path}/default", "CORPUS": "README.md"}
    )
    assert other.returncode == 2
    assert SENTENCES["a_run_on_corpus_sample_jsonl"] in other.stderr


@FULL
@pytest.mark.timeout(1800)
def test_the_commands_of_all_other_pages_run(tmp_path: Path) -> None:
    """The `bash` blocks of the pages in LONG run, each page in its own shell. All use the same run directory."""
    for page in LONG:
        run("\n".join(["source .venv/bin/activate", *blocks(page)]), tmp_path, "default")
    mine = json.loads((tmp_path / "mine" / "config.json").read_text())  # a run of docs/start.md
    assert (mine["optim"]["lr"], mine["train"]["train_iters"]) == (1e-3, 5)


def as_the_page_shows_it(printed: list[str]) -> None:
    """Check the output up to iteration 10 against the README's transcript.

    Lines must agree except for times, speed and memory; losses may differ by rounding.
    """
    page, lines = transcript.on_page("README.md", "gpt2"), list(transcript.shown("gpt2", printed))
    assert page == transcript.on_page("README_zh.md", "gpt2")
    # "..." stands for omitted lines. Which lines are omitted depends on the machine, so "..." is not compared.
    both = [[line for line in each if line != "..."] for each in (page, lines)]
    tenth = next(i for i, line in enumerate(both[0]) if " 10/500" in line)
    shapes = [[transcript.shape(line) for line in each[: tenth + 1]] for each in both]
    assert shapes[0] == shapes[1], "update the page: python -m docs.site.transcript gpt2"
    losses = [
        float(re.search(r"loss +(\d+\.\d+)", next(x for x in each if " 10/500" in x))[1])  # type: ignore[index]
        for each in (page, lines)
    ]
    assert abs(losses[0] - losses[1]) < 5e-3  # different CPUs round differently


@FULL
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", list(transcript.PAGES))
def test_the_whole_transcript_is_what_the_script_prints(name: str, tmp_path: Path) -> None:
    """The final losses of a complete run are within 0.15 nats of the page's transcript; CPUs round differently."""
    page, printed = (
        transcript.on_page(transcript.PAGES[name][0], name),
        list(transcript.shown(name, transcript.run(name, str(tmp_path / "run")))),
    )
    facts = [{line[:34].strip(): line[34:] for line in each if "nats/token" in line} for each in (page, printed)]
    assert facts[0].keys() == facts[1].keys() and facts[0]
    for fact, said in facts[0].items():
        numbers = [[float(x) for x in re.findall(r"\d+\.\d{3}", each)] for each in (said, facts[1][fact])]
        assert all(abs(a - b) < 0.15 for a, b in zip(*numbers, strict=True)), fact


def test_the_script_refuses_a_wrong_python_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup.sh", "scripts/_torch.sh", "requirements.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\ncase "$1" in -V) echo "Python 3.8.1";; *) exit 1;; esac\n')
    old.chmod(0o755)
    for python, message in (
        (str(old), "Python 3.8.1, but Python 3.11 to 3.14 is needed"),
        ("nopython", "no Python found"),
    ):
        done = command("bash", str(tmp_path / "scripts" / "setup.sh"), env={"PYTHON": python})
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_setup_is_silent_when_done() -> None:
    done = command("bash", "scripts/setup.sh")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_mistake_stops_the_script(tmp_path: Path) -> None:
    done = command("bash", "scripts/run_gpt2.sh", "--hidden-sise", "3", env={**SMALL, "RUN_DIR": str(tmp_path)})
    assert done.returncode == 2
    assert "did you mean --hidden-size?" in done.stderr.splitlines()[-1]
