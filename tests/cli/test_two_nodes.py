"""Two nodes run run_gpt2.sh: on a shared disk, one of them prepares the data; on local disks, each does."""

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.support import FULL, ROOT, free_port

# A script that sources _prepare.sh with the variables that _run.sh sets; its `python` function simulates slow tools.
SCRIPT = """
set -euo pipefail
ROOT={root} AT= NAME=gpt2 ME=run_gpt2.sh CORPUS={root}/corpus/sample.jsonl RUN_DIR=$1 VOCAB_SIZE=10 CLEAN=0
VOCAB_FILE=$RUN_DIR/tokenizer.model
source "$ROOT/scripts/_prepare.sh"
python() {{
    echo "$1" >>"$RUN_DIR/calls"
    if [ "$1" = "$fails" ]; then return 3; fi
    sleep 0.7
    if [ "$1" = tools/train_tokenizer.py ]; then touch "$VOCAB_FILE"; else touch "$DATA_PATH.idx"; fi
    [ "${{2:-}}" != fail ]
}}
declare -A user_set
if [ -n "${{2:-}}" ]; then
    user_set[${{2%%=*}}]=${{2#*=}}
    printf -v "${{2%%=*}}" %s "${{2#*=}}"
fi
fails=${{3:-}}
prepare_corpus
echo "has $DATA_PATH"
"""


def prepare(folder: Path, *more: str) -> "subprocess.Popen[str]":
    argv = ["bash", "-c", SCRIPT.format(root=ROOT), "prepare", str(folder), *more]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_one_of_two_nodes_prepares(tmp_path: Path) -> None:
    said = sorted((p.communicate(timeout=60)[0] for p in [prepare(tmp_path), prepare(tmp_path)]), key=len)
    assert said[0] == f"has {tmp_path}/data/corpus_text_document\n"
    assert re.match(rf"run_gpt2.sh: waiting for process \d+ on \S+ to prepare {tmp_path}/data", said[1])
    assert said[1].endswith(said[0])
    assert (tmp_path / "calls").read_text().split() == ["tools/train_tokenizer.py", "tools/preprocess_data.py"]
    assert (tmp_path / "data" / "source").read_text() == "corpus/sample.jsonl\n"
    assert not (tmp_path / "data" / "preparing").exists()
    for given, end in (
        ("VOCAB_SIZE=10", said[0]),
        ("VOCAB_SIZE=20", "data was prepared with VOCAB_SIZE=10, not 20; set another RUN_DIR=\n"),
        ("CLEAN=1", "data was prepared with CLEAN=0, not 1; set another RUN_DIR=\n"),
        ("ENCODING=gb18030", "data was prepared with ENCODING=auto, not gb18030; set another RUN_DIR=\n"),
    ):
        assert prepare(tmp_path, given).communicate(timeout=60)[0].endswith(end)


@pytest.mark.parametrize(("of_job", "job"), [("", ""), ("", "101"), ("100", "101")])
def test_whoever_fails_or_dies_lets_the_next_one_prepare(of_job: str, job: str, tmp_path: Path) -> None:
    """A start outside SLURM, in an allocation, and in another job than that of the process which died."""
    failed = prepare(tmp_path, "", "tools/train_tokenizer.py")
    failed.communicate(timeout=60)
    assert failed.returncode == 3
    assert not (tmp_path / "data" / "preparing").exists()
    (tmp_path / "calls").unlink()
    (tmp_path / "data" / "preparing").mkdir()
    table = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}-{os.readlink('/proc/self/ns/pid')}"
    (tmp_path / "data" / "preparing" / "by").write_text(f"{os.uname().nodename} {2**22 - 1} {table} {of_job}\n")
    first = prepare(tmp_path, f"SLURM_JOB_ID={job}")
    while not (tmp_path / "calls").exists():
        time.sleep(0.01)
    other = prepare(tmp_path, "VOCAB_SIZE=20").communicate(timeout=60)[0]
    assert other.endswith("data was prepared with VOCAB_SIZE=10, not 20; set another RUN_DIR=\n")
    said = first.communicate(timeout=60)[0]
    assert f"process {2**22 - 1} ended while it prepared {tmp_path}/data" in said
    assert "has " in said


@pytest.mark.parametrize("is_users", [False, True])
def test_an_unfinished_preparation_is_used_again_with_the_same_settings_only(tmp_path: Path, is_users: bool) -> None:
    train, tokenize = "tools/train_tokenizer.py", "tools/preprocess_data.py"
    tokenizer = tmp_path / "tokenizer.model"
    if is_users:
        tokenizer.touch()
    calls = []
    for setting in ("VOCAB_SIZE=10", "VOCAB_SIZE=10", "VOCAB_SIZE=20"):
        prepare(tmp_path, setting, tokenize).communicate(timeout=60)
        calls.append((tmp_path / "calls").read_text().split())
        (tmp_path / "calls").unlink()
    trained = [tokenize] if is_users else [train, tokenize]
    assert calls == [trained, [tokenize], trained]
    assert tokenizer.exists()


@FULL
@pytest.mark.parametrize("disk", ["shared", "apart"])
def test_two_launches(tmp_path: Path, disk: str) -> None:
    port = str(free_port())
    small = {
        "TRAIN_ITERS": "2",
        "NLAYERS": "2",
        "NHIDDEN": "32",
        "NHEADS": "2",
        "SEQ_LENGTH": "32",
        "VOCAB_SIZE": "3000",
    }
    small |= {
        "NNODES": "2",
        "GPUS_PER_NODE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    nodes = []
    for rank in "01":
        here = tmp_path if disk == "shared" else tmp_path / rank
        here.mkdir(exist_ok=True)
        env = {**os.environ, **small, "NODE_RANK": rank, "RUN_DIR": "run"}
        script = ["bash", str(ROOT / "scripts" / "run_gpt2.sh"), "--save-interval", "0", "--no-save-at-end"]
        if disk == "shared":
            script = script[:2]
        nodes.append(
            subprocess.Popen(script, cwd=here, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    said = [node.communicate(timeout=500)[0] for node in nodes]
    if disk == "shared":
        assert [node.returncode for node in nodes] == [0, 0], said
        assert sum("run_gpt2.sh: waiting for process" in words for words in said) == 1, said
        assert "saved run/checkpoints/iter_0000002" in said[0], said
    else:  # the run saves no checkpoint, since a checkpoint needs a disk that all ranks share
        assert nodes[1].returncode == 0, said
        assert not any("waiting for process" in words for words in said), said
    assert "2 ranks on cpu: pipe 2" in said[0], said
    assert "iteration 2/2 | loss" in said[0], said
