"""scripts/run_*.sh report mistakes before they install packages, prepare data or train."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from megatron.features import early_check
from tests.support import ROOT, command

NAMES = ("gpt2", "llama", "t5")
LISTED = [line.split()[0] for line in (ROOT / "scripts" / "variables.txt").read_text().splitlines()]
INTERNAL = {"TORCH_CPP_LOG_LEVEL", "TORCH_EXTENSIONS_DIR"}  # torch reads these variables, the scripts only pass them on


@pytest.mark.parametrize("name", NAMES)
def test_help_needs_nothing(name: str, tmp_path: Path) -> None:
    done = command(
        "bash",
        f"scripts/run_{name}.sh",
        "--help",
        env={"PYTHON": "/no/python", "RUN_DIR": str(tmp_path / "r"), "CDPATH": "."},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"bash scripts/run_{name}.sh" in done.stdout
    assert all(re.search(rf"^  {variable} ", done.stdout, flags=re.MULTILINE) for variable in LISTED)


def test_every_variable_that_is_read_is_listed() -> None:
    texts = [
        path.read_text()
        for path in (ROOT / "scripts").glob("*.sh")
        if path.name[:4] in ("_run", "_pre", "run_", "setu", "_tor")
    ]
    read = {name for text in texts for name in re.findall(r"\$\{([A-Z][A-Z_]+):-", text)}
    assert {name for name in read - INTERNAL if not name.startswith("SLURM_")} == set(LISTED)


@pytest.mark.parametrize(
    ("env", "argv", "words"),
    [
        ({"TRAIN_ITER": "5"}, [], "unknown variable TRAIN_ITER; did you mean TRAIN_ITERS?"),
        ({"BATCH_SIZE": "5"}, [], "did you mean BATCHSIZE?"),
        ({"HIDDEN_SIZE": "64"}, [], "unknown variable HIDDEN_SIZE; did you mean NHIDDEN?"),
        ({"VARIANT": "qwen3"}, [], "VARIANT is for run_t5.sh and run_llama.sh"),
        ({"MODEL_SIZE": "9b"}, [], "gpt2 has no MODEL_SIZE=9b; choose one of 1.3B 2.7B 3.7B 345M small"),
        ({}, ["--hidden-sise", "3"], "unknown argument --hidden-sise; did you mean --hidden-size?"),
        ({"NHEADS": "3"}, ["--lr", "0.1"], "--num-attention-heads 3"),
        ({"GPUS_PER_NODE": "two"}, [], "GPUS_PER_NODE=two must be a whole number of at least 1"),
        ({"GPUS_PER_NODE": "0"}, [], "GPUS_PER_NODE=0 must be a whole number of at least 1"),
        ({"NNODES": "2", "NODE_RANK": "2"}, [], "NODE_RANK=2 must be below NNODES=2"),
        ({"GPUS_PER_NODE": "2", "MP_SIZE": "4"}, [], "start a multiple of 4 ranks"),
        ({"CONFIG_JSON": "nix.json"}, [], "--deepspeed-config nix.json: there is no such file"),
        ({"HOSTFILE": "no/hosts"}, [], "HOSTFILE=no/hosts cannot be read"),
        ({"HOSTFILE": "README.md"}, [], "HOSTFILE=README.md, line "),
        ({"VOCAB_FILE": "nix.model"}, [], "VOCAB_FILE=nix.model does not exist"),
        ({"DATA_PATH": "nix"}, [], "DATA_PATH= needs VOCAB_FILE=, the tokenizer that it was prepared with"),
        ({"CORPUS": "README.md", "DATA_PATH": "nix", "VOCAB_FILE": "README.md"}, [], "CORPUS=README.md has no effect"),
        (
            {"CLEAN": "1", "DATA_PATH": "nix", "VOCAB_FILE": "README.md"},
            [],
            "CLEAN=1 has no effect beside DATA_PATH=nix",
        ),
        (
            {"VOCAB_SIZE": "900", "VOCAB_FILE": "README.md"},
            [],
            "VOCAB_SIZE=900 has no effect beside VOCAB_FILE=README.md",
        ),
        ({"CLEAN": "no"}, [], "CLEAN=no must be 1 to clean CORPUS, or 0"),
        ({"MASTER_PORT": "99999"}, [], "MASTER_PORT=99999 must be at most 65535"),
        ({"VOCAB_SIZE": "30k"}, [], "VOCAB_SIZE=30k must be a whole number of at least 300"),
        ({"SAMPLING": "--temprature=0"}, [], "SAMPLING: unknown argument --temprature; did you mean --temperature?"),
        ({}, ["--run-dir", "runs/x"], "set the variable RUN_DIR= instead of the flag --run-dir"),
        ({}, ["--vocab-file=x.model"], "set the variable VOCAB_FILE= instead of the flag --vocab-file"),
        ({}, ["--train-data-path", "x"], "or --train-data-path, not both"),
        ({"PP_SIZE": "1"}, ["--zero-stage", "3"], "ZeRO stage 3 cannot be used with a pipeline"),
    ],
)
def test_a_mistake_costs_nothing(env: dict[str, str], argv: list[str], words: str, tmp_path: Path) -> None:
    """A wrong variable or flag is reported before anything starts; variables of other programs are ignored."""
    around = {"RUN_DIR": str(tmp_path / "run"), "MKL_NUM_THREADS": "1", "WORLD_SIZE": "1"}
    done = command("bash", "scripts/run_gpt2.sh", *argv, env={**around, **env})
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--deepspeed-config", "{file}"], "ds.json, line 1: JSON does not allow a comma"),
        (["--load", "nix"], "--load nix holds no checkpoint: there is no such folder"),
        (["--eval-tasks", "x=nix.jsonl"], "--eval-tasks x=nix.jsonl: there is no file nix.jsonl"),
        (["--precision", "auto", "--zero-stage", "0"], None),
        (["--precision", "auto", "--overlap-param-gather"], None),  # on a device on which auto is bf16
    ],
)
def test_files_are_checked_before_a_corpus_is_prepared(
    argv: list[str],
    words: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"fp16": true,,}')
    words_of_flags = [word.format(file=file) for word in argv]
    monkeypatch.setattr("sys.argv", ["early_check", "gpt2", "2", "--vocab-file", "none.model", *words_of_flags])
    with nullcontext() if words is None else pytest.raises(SystemExit):
        early_check.main()
    assert (words or "") in capsys.readouterr().err


def files_of(name: str, at: Path, **env: str) -> tuple[str, str, str, str]:
    """Return RUN_DIR, CORPUS and VOCAB_SIZE as scripts/_run.sh chooses them in a checkout at `at`, and its output."""
    text = (ROOT / "scripts" / "_run.sh").read_text()
    part = text[text.index("# ---- files") : text.index("CONFIG_JSON=")]
    begin = "".join(
        f"{key}={value!r}\n" for key, value in {"NAME": name, "ME": f"run_{name}.sh", "AT": f"{at}/", **env}.items()
    )
    done = command("bash", "-euc", f'{begin}{part}\nprintf \'%s\\n\' "$RUN_DIR" "$CORPUS" $VOCAB_SIZE')
    assert done.returncode == 0, done.stderr
    *said, run_dir, corpus, size = done.stdout.splitlines()
    return run_dir.replace(f"{at}/", ""), corpus.replace(f"{at}/", ""), size, "\n".join(said)


def test_each_preset_has_a_directory_and_a_vocabulary(tmp_path: Path) -> None:
    sample = "corpus/sample.jsonl"
    assert files_of("gpt2", tmp_path) == ("runs/gpt2", sample, "4000", "")
    assert files_of("gpt2", tmp_path, VARIANT="x", MODEL_SIZE="345M") == ("runs/gpt2_345M", sample, "4000", "")
    assert files_of("llama", tmp_path, VARIANT="llama")[0] == "runs/llama"
    assert files_of("llama", tmp_path, VARIANT="qwen3", MODEL_SIZE="8b")[0] == "runs/llama_qwen3_8b"
    assert files_of("t5", tmp_path, MODEL_SIZE="base", CORPUS="my.jsonl")[1:3] == ("my.jsonl", "30000")
    assert files_of("t5", tmp_path, MODEL_SIZE="base", CORPUS="my.jsonl", VOCAB_SIZE="9", RUN_DIR="r") == (
        "r", "my.jsonl", "9", "",
    )  # fmt: skip
    (tmp_path / "runs/t5/checkpoints").mkdir(parents=True)
    (tmp_path / "runs/t5/data").mkdir()
    (tmp_path / "runs/t5/data/source").write_text("my/text.jsonl\n")
    assert files_of("t5", tmp_path) == ("runs/t5", "my/text.jsonl", "4000", "")
    *_, said = files_of("t5", tmp_path, MODEL_SIZE="base")
    assert "starting a new run in" in said and "runs/t5 resumes" in said


@pytest.mark.parametrize("name", ["full", "performance"])
def test_a_corpus_needs_its_tokenizer(name: str, tmp_path: Path) -> None:
    for ending in (".bin", ".idx"):
        (tmp_path / f"data{ending}").touch()
    argv = [f"scripts/train_{name}.sh", f"--data_path={tmp_path}/data"]
    done = command("bash", *argv, env={"RUN_DIR": str(tmp_path / "run")})
    assert done.returncode == 2 and "--data_path needs VOCAB_FILE=" in done.stderr
