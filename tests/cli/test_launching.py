"""docs/launching.md and its Chinese version have the same commands and name existing files; the `bash` blocks run."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sentences import SENTENCES
from tests.support import FULL, ROOT

PAGES = ("launching.md", "launching_zh.md")
SMALL = {"NLAYERS": "2", "NHIDDEN": "32", "NHEADS": "2", "SEQ_LENGTH": "32", "VOCAB_SIZE": "3000"}


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_both_languages_are_one_page() -> None:
    ours, theirs = (page(name) for name in PAGES)
    fenced = r"```.*?```"
    blocks = [re.findall(fenced, text, flags=re.DOTALL) for text in (ours, theirs)]
    assert blocks[0] == blocks[1] and len(blocks[0]) == 6
    spans = [set(re.findall(r"`([^`]+)`", re.sub(fenced, "", text, flags=re.DOTALL))) for text in (ours, theirs)]
    assert spans[0] == spans[1]
    counts = [
        [len(re.findall(rf"^{mark}", text, flags=re.MULTILINE)) for mark in ("#", "- ", "[|]")]
        for text in (ours, theirs)
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", PAGES)
def test_what_it_names_exists(name: str) -> None:
    text = page(name)
    assert all((ROOT / "docs" / target).exists() for target in re.findall(r"\]\(([^)#]+)", text))
    assert all((ROOT / path).exists() for path in re.findall(r"\b(?:scripts|docker|tools|tests)/[\w/]+\.\w+", text))
    listed = (ROOT / "scripts" / "variables.txt").read_text(encoding="utf-8")
    for variable in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GPUS_PER_NODE", "HOSTFILE", "RUN_DIR"):
        assert variable in text and f"{variable} " in listed
    assert "--signal=B:USR1@300" in (ROOT / "scripts" / "run_slurm.sh").read_text(encoding="utf-8")


@FULL
def test_two_nodes_as_it_stands(tmp_path: Path) -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", page(PAGES[0]), flags=re.DOTALL)
    script = block.replace("runs/two", str(tmp_path / "two"))
    done = subprocess.run(
        ["bash", "-euc", script], cwd=ROOT, env={**os.environ, **SMALL}, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert SENTENCES["2_ranks_on_cpu"] in done.stdout and "iteration 5/5" in done.stdout


RANKS = """
set -euo pipefail
ROOT={root} AT= HOSTFILE= NNODES=1 NODE_RANK=0 MASTER_PORT=1 MASTER_ADDR=x GPUS_PER_NODE=2
source "$ROOT/scripts/_launch.sh"
PATH={folder}:$PATH
launch train.py
echo "goes on"
"""
# A stand-in for the launcher. It is Python, since a bash that traps signals can hang while it waits for a child.
LAUNCHER = f"""#!{sys.executable}
import signal, sys, time

def stop(number, frame):
    print("heard", signal.Signals(number).name[3:], flush=True)
    time.sleep(0.2)
    sys.exit(CODE)

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, stop)
signal.signal(signal.SIGUSR1, lambda *_: print("heard USR1", flush=True))
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("number", "code", "left"),
    [(signal.SIGTERM, 143, 143), (signal.SIGINT, 130, 130), (signal.SIGTERM, 0, 143), (signal.SIGHUP, 1, 1)],
)
def test_a_script_passes_signals_on_and_waits(number: int, code: int, left: int, tmp_path: Path) -> None:
    """A run_*.sh script forwards signals, e.g. SIGTERM from `docker stop`, to the launcher and ends after it."""
    (tmp_path / "python").write_text(LAUNCHER.replace("CODE", str(code)))
    (tmp_path / "python").chmod(0o755)
    script = RANKS.format(root=ROOT, folder=tmp_path)
    # env resets all signals, since a shell cannot trap a signal that its parent ignores, e.g. SIGHUP under nohup.
    shell = subprocess.Popen(["env", "--default-signal", "bash", "-c", script], stdout=subprocess.PIPE, text=True)
    assert shell.stdout is not None and shell.stdout.readline() == "ready\n"
    shell.send_signal(signal.SIGUSR1)
    assert shell.stdout.readline() == "heard USR1\n"
    time.sleep(0.1)
    shell.send_signal(number)
    assert shell.communicate(timeout=20)[0] == f"heard {signal.Signals(number).name.removeprefix('SIG')}\n"
    assert shell.returncode == left
