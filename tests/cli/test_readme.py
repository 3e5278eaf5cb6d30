"""What the READMEs say runs, and what they point to exists."""

import re
from pathlib import Path

import pytest

from tests.support import ROOT, command

READMES = ("README.md", "README_zh.md")
# A few iterations of a model that is smaller still, so that the commands take seconds.
SMALL = {"TRAIN_ITERS": "4", "NLAYERS": "2", "NHIDDEN": "32", "NHEADS": "2", "SEQ_LENGTH": "32", "VOCAB_SIZE": "3000"}


def blocks(readme: str, language: str) -> list[str]:
    text = (ROOT / readme).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize("readme", READMES)
def test_the_first_command_stands_at_the_top(readme: str) -> None:
    lines = (ROOT / readme).read_text(encoding="utf-8").splitlines()
    assert "bash scripts/run_gpt2.sh" in lines[:30]
    assert "bash scripts/run_t5.sh" in lines


@pytest.mark.parametrize("readme", READMES)
def test_links_lead_somewhere(readme: str) -> None:
    text = (ROOT / readme).read_text(encoding="utf-8")
    targets = [t for t in re.findall(r"\]\(([^)#]+)", text) if not t.startswith("http")]
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_both_languages_show_the_same_commands_and_numbers() -> None:
    for language in ("bash", "console"):
        ours, theirs = ([re.sub(r" *#.*", "", block) for block in blocks(readme, language)] for readme in READMES)
        assert ours == theirs
    tables = [
        re.findall(r"^\|.*\d\.\d{6}.*\|$", (ROOT / r).read_text(encoding="utf-8"), flags=re.MULTILINE) for r in READMES
    ]
    numbers = [[re.findall(r"\d\.\d{6}", row) for row in table] for table in tables]
    assert numbers[0] == numbers[1]
    assert len(numbers[0]) == 30


def test_the_commands_run(tmp_path: Path) -> None:
    """Every block marked `bash`, line for line, but into a folder of the test and with a smaller model."""
    said = []
    for block in blocks("README.md", "bash"):
        script = block.replace("runs/", f"{tmp_path}/")
        if "RUN_DIR=" not in script:
            name = "t5" if "run_t5" in script else "default"
            script = f"export RUN_DIR={tmp_path}/{name}\n{script}"
        done = command("bash", "-euc", script, env=SMALL)
        assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        said.append(done.stdout)
    assert all("unigram entropy" in text for text in said[:2])
    other = command(
        "bash", "scripts/run_gpt2.sh", env={**SMALL, "RUN_DIR": f"{tmp_path}/default", "CORPUS": "README.md"}
    )
    assert other.returncode == 2
    assert "holds a run on corpus/sample.jsonl, not on README.md" in other.stderr
    assert '"lr": 0.001' in (tmp_path / "mine" / "config.json").read_text()
    assert '"train_iters": 5' in (tmp_path / "mine" / "config.json").read_text()


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
