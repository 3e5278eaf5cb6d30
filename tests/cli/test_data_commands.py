"""The commands about data stages, documents, named validation sets, batch sizes and object storage run as shown.

These pages use names such as data/zh_text_document, so their commands are in `console` blocks. This test makes the
files with these names, and adds flags for a few iterations of a tiny model.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_utils.indexed_writer import IndexedDatasetBuilder
from megatron.storage import to_path
from tests.object_server import BUCKET, s3_server
from tests.support import FULL, ROOT, command

from .test_readme import SMALL

SECTIONS = {
    "docs/data.md": ("Data stages", "Documents of a run", "Loss by corpus", "Corpora in object storage"),
    "docs/checkpoints.md": ("Checkpoints in object storage",),
    "docs/howto.md": (
        "... keep corpus and checkpoints in S3?",
        "... let the batch size grow during a run?",
        "... change the data of a run?",
    ),
}
CORPORA = ("zh", "en", "code", "web", "a", "b", "second")
TINY = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --batch-size 2 --train-iters 8 "
    "--eval-iters 1 --log-interval 1 --no-tensorboard"
)
# What a few iterations cannot reach -> what they can.
NUMBERS = {"1M:": "6:", "--iteration 100": "--iteration 2", "--train-iters 1000": "--train-iters 10"}
NUMBERS |= {"0:256 500M:512 2B:1024": "0:8 16_samples:16", "--train-samples 10000000": "--train-samples 48"}


def commands(page: str, heading: str) -> list[str]:
    """Return the commands in the first `console` block of a section that run Python or a script of this project."""
    text = (ROOT / page).read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    block = re.search(r"^```console\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE)
    assert block, (page, heading)
    return [line for line in block[1].splitlines() if re.search(r"\b(python|bash) \w", line)]


def test_there_are_commands() -> None:
    assert [len(commands(page, each)) for page, names in SECTIONS.items() for each in names] == [3, 3, 1, 1, 1, 1, 1, 2]


@FULL
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", SECTIONS)
def test_the_commands_run(page: str, tmp_path: Path, vocab_file: str) -> None:
    (tmp_path / "data").mkdir()
    for seed, name in enumerate(CORPORA):
        with IndexedDatasetBuilder(str(tmp_path / "data" / f"{name}_text_document"), np.uint16) as builder:
            for document in range(40):
                builder.add_document(np.random.default_rng([seed, document]).integers(10, 2000, 60))
    shutil.copyfile(vocab_file, tmp_path / "zh.model")
    (tmp_path / "documents.txt").write_text("17\n")
    stages = [{"samples": 0, "data": {str(tmp_path / "data/zh_text_document"): 1}}]
    (tmp_path / "stages.json").write_text(json.dumps(stages))
    base = "--data-path data/zh_text_document --vocab-file zh.model"
    with s3_server() as server:
        for end in (".bin", ".idx"):
            to_path(f"{BUCKET}/zh_text_document{end}").upload(tmp_path / f"data/zh_text_document{end}")
        run(
            f"python pretrain_gpt2.py {base} {TINY} --pipe-parallel-size 0 --run-dir runs/gpt2 --exit-interval 2",
            tmp_path,
        )
        if page == "docs/howto.md":
            run("RUN_DIR=runs/mine bash scripts/run_gpt2.sh --exit-interval 2", tmp_path)
        for heading in SECTIONS[page]:
            for line in commands(page, heading):
                run(shown(line), tmp_path, server.environment | {"MEGATRON_CACHE_DIR": str(tmp_path / "cache")})


def shown(line: str) -> str:
    """Return a command of a page with smaller numbers and, if it trains, flags for a tiny model."""
    for number, smaller in NUMBERS.items():
        line = line.replace(number, smaller)
    if not line.startswith("python pretrain_") or "--load" in line:
        return line
    flags = TINY if "--train-iters" not in line else TINY.replace("--train-iters 8", "")
    if "--run-dir" not in line:
        flags += f" --run-dir runs/{len(line)}"  # a new run for each command
    else:
        line = re.sub(r"--run-dir runs/\w+", "--run-dir runs/storage", line)
    if "-path" not in line and "--data-stages" not in line:
        flags += " --data-path data/zh_text_document"
    if "--vocab-file" not in line:
        flags += " --vocab-file zh.model"
    return f"{line.removesuffix(' ...')} {flags}"


def run(line: str, folder: Path, env: dict[str, str] | None = None) -> None:
    """Run a command with the files of `folder` in place of those that the pages name."""
    line = re.sub(r"(?<![\w/])(data/\w+_text_document|zh\.model|stages\.json|documents\.txt)", rf"{folder}/\1", line)
    line = line.replace("runs/", f"{folder}/runs/").replace("stages.png", f"{folder}/stages.png")
    words = shlex.split(line)
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    argv = words[len(variables) :]
    done = command(*argv, env={**SMALL, **(env or {}), **variables}, timeout=600)
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
