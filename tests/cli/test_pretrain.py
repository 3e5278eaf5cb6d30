"""pretrain_gpt2.py trains and resumes from the command line, and reports every mistake in one sentence."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_utils.indexed_writer import IndexedDatasetBuilder
from megatron.tokenizer import load_tokenizer
from tests.sentences import SENTENCES
from tests.support import FULL, ROOT, command, covering, losses, train_gpt2


@pytest.fixture(scope="module")
def flags(tiny_data: str, vocab_file: str) -> list[str]:
    return [
        "--data-path",
        tiny_data,
        "--vocab-file",
        vocab_file,
        "--split",
        "8,2",
        "--num-layers",
        "2",
        "--hidden-size",
        "16",
        "--num-attention-heads",
        "2",
        "--seq-length",
        "16",
        "--batch-size",
        "2",
        "--log-interval",
        "1",
        "--eval-iters",
        "2",
        "--precision",
        "fp32",
        "--no-tensorboard",
        "--train-iters",
        "6",
        "--save-interval",
        "2",
        "--lr",
        "1e-2",
        "--partition-method",
        "type:Block",
    ]


def launch(world: int, *argv: str) -> Any:
    if world == 1:
        return command("python", "pretrain_gpt2.py", *argv)
    return command(
        "python", "tools/launch.py", "--standalone", "--nproc-per-node", str(world), "pretrain_gpt2.py", *argv
    )


def said(done: Any, code: int) -> str:
    """Check that a run failed with exit code `code`, one sentence and no traceback; return the sentence."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return str(lines[0])


def test_a_run_says_what_it_does_and_leaves_what_it_promises(tmp_path: Path, flags: list[str]) -> None:
    done = launch(2, *flags, "--pipe-parallel-size", "2", "--run-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "", "warnings of libraries must be suppressed"
    assert SENTENCES["2_ranks_on_cpu_pipe_2"] in done.stdout
    assert "iteration 6/6 | loss" in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "config.json", "metrics.jsonl", "tokenizer"]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if row["split"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert {"lr", "grad_norm", "consumed_samples", "consumed_tokens", "tokens_per_second", "tflops", "mfu", "memory_mb",
            "loss_scale"} <= rows[0].keys()  # fmt: skip
    (valid,) = (row for row in rows if row["split"] == "valid")
    assert valid["ppl"] == pytest.approx(np.exp(valid["lm_loss"]))
    assert (tmp_path / "checkpoints" / "latest").read_text().splitlines()[0] == "iter_0000006"


@pytest.mark.parametrize(
    ("world", "layout"),
    covering(
        [(1, []), (2, ["--pipe-parallel-size", "2"]), (2, ["--zero-stage", "2", "--precision", "bf16"])],
        lambda case: "--pipe-parallel-size" in case[1],
        True,
    ),
)
def test_the_same_command_continues(tmp_path: Path, flags: list[str], world: int, layout: list[str]) -> None:
    """A run that stops and resumes has exactly the losses of an uninterrupted one, with dropout on."""
    flags = [*flags, *layout, "--lr-decay-iters", "6"]
    whole = losses(train_gpt2(world, tmp_path / "whole", *flags))
    first = losses(train_gpt2(world, tmp_path / "cut", *flags, "--train-iters", "4"))
    both = losses(train_gpt2(world, tmp_path / "cut", *flags))
    assert first == whole[:4]
    assert both == whole
    again = train_gpt2(world, tmp_path / "cut", *flags)  # starting a finished run again must change nothing
    assert losses(again) == whole
    assert [row["iteration"] for row in again if row["split"] == "valid"] == [4, 6]


def test_what_does_not_change_the_model_may_change_on_resume(tmp_path: Path, flags: list[str]) -> None:
    """Flags for kernels, recomputation and garbage collection may change on resume; losses stay the same."""
    more = [
        *flags,
        "--hidden-dropout",
        "0",
        "--attention-dropout",
        "0",
        "--lr-decay-iters",
        "6",
        "--save-interval",
        "0",
    ]
    whole = losses(train_gpt2(1, tmp_path / "whole", *more, "--train-iters", "4"))
    train_gpt2(1, tmp_path / "cut", *more, "--train-iters", "2")
    changed = [
        "--reference-ops",
        "cross-entropy",
        "--checkpoint-activations",
        "--cpu-matmul",
        "torch",
        "--manual-gc-interval",
        "1",
    ]
    found = losses(train_gpt2(1, tmp_path / "cut", *more, *changed, "--train-iters", "4"))
    np.testing.assert_allclose(found, whole, rtol=1e-6)


@FULL
def test_every_layout_continues_every_other(tmp_path: Path, flags: list[str]) -> None:
    """A run that is resumed in another layout after every iteration has the losses of one process.

    The layouts combine ZeRO stages, pipelines and tensor parallelism.
    """
    flags = [*flags, "--lr-decay-iters", "6", "--hidden-dropout", "0", "--attention-dropout", "0", "--gas", "2"]
    halves = [*flags, "--gas", "1"]
    layouts = [
        (1, flags),
        (2, [*halves, "--zero-stage", "3"]),
        (2, [*flags, "--pipe-parallel-size", "2"]),
        (4, [*halves, "--model-parallel-size", "2", "--zero-stage", "1"]),
        (4, [*flags, "--pipe-parallel-size", "2", "--model-parallel-size", "2"]),
        (2, [*halves, "--zero-stage", "2"]),
    ]
    whole = losses(train_gpt2(1, tmp_path / "whole", *flags))
    for iteration, (world, argv) in enumerate(layouts, start=1):
        found = losses(train_gpt2(world, tmp_path / "relay", *argv, "--train-iters", str(iteration)))
    np.testing.assert_allclose(found, whole, rtol=1e-5)


def test_tensorboard_events_without_its_chatter(tmp_path: Path, flags: list[str]) -> None:
    pytest.importorskip("tensorboard")
    kept = [flag for flag in flags if flag != "--no-tensorboard"]
    done = launch(1, *kept, "--train-iters", "1", "--run-dir", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_help_lists_every_setting_with_examples() -> None:
    done = command("python", "pretrain_gpt2.py", "--help")
    assert done.returncode == 0
    assert "--pipe-parallel-size" in done.stdout
    assert "examples:" in done.stdout


def test_flags_after_the_defaults_win_and_show_in_config_json(tmp_path: Path, flags: list[str]) -> None:
    train_gpt2(1, tmp_path, *flags, "--lr", "1e-3", "--train-iters", "1")
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["optim"]["lr"], config["train"]["train_iters"], config["model"]["vocab_size"]) == (1e-3, 1, 3000)


def test_reading_ahead_in_worker_processes_changes_nothing(tmp_path: Path, flags: list[str]) -> None:
    flags = [*flags, "--eval-iters", "0"]
    done = launch(1, *flags, "--num-workers", "2", "--run-dir", str(tmp_path / "workers"))
    assert (done.returncode, done.stderr) == (0, "")
    rows = [json.loads(line) for line in (tmp_path / "workers" / "metrics.jsonl").read_text().splitlines()]
    assert losses(rows) == losses(train_gpt2(1, tmp_path / "none", *flags))


def test_wall_clock_breakdown_takes_effect(tmp_path: Path, flags: list[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"wall_clock_breakdown": true, "steps_per_print": 3}')
    flags = [*flags, "--deepspeed-config", str(path)]
    at = flags.index("--log-interval")
    del flags[at : at + 2]
    for world, layout in ((1, []), (2, ["--pipe-parallel-size", "2"])):
        rows = train_gpt2(world, tmp_path / f"run{world}", *flags, *layout)
        assert [row["iteration"] for row in rows if row["split"] == "train"] == [3, 6]
        assert all(ms > 0 for row in rows if row["split"] == "train" for ms in row["timers_ms"].values())
        parts = (
            {"train batch", "Forward", "Backward", "SendActivation", "RecvGrad"} if layout else {"forward", "backward"}
        )
        assert parts <= rows[0]["timers_ms"].keys()


def test_starting_does_not_load_torchs_compiler() -> None:
    """Starting a run does not import torch's compiler, which would take each rank seconds."""
    code = (
        "import sys, megatron.tasks, megatron.training.entry; assert 'deepspeed' in sys.modules; "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert command("python", "-c", code).returncode == 0


def test_without_a_compiler_a_run_goes_on(tmp_path: Path, flags: list[str]) -> None:
    argv = [*flags, "--train-iters", "1", "--compile", "--run-dir", str(tmp_path)]
    done = command("python", "pretrain_gpt2.py", *argv, env={"CXX": "/no/compiler"})
    assert (done.returncode, done.stderr) == (0, "")
    assert SENTENCES["compile_has_no_effect_no_c_compiler"] in done.stdout


# ------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("world", "argv", "message"),
    [
        (1, ["--hiden-size", "3"], "unknown argument --hiden-size; did you mean --hidden-size?"),
        (
            2,
            ["--model-parallel-size", "2", "--num-attention-heads", "1"],
            "--num-attention-heads 1 cannot be split over",
        ),
        (2, ["--pipe-parallel-size", "2", "--num-layers", "1"], "--pipe-parallel-size 2 is more than --num-layers 1"),
        (1, ["--compile", "--zero-stage", "3"], "--compile cannot be used with ZeRO stage 3"),
        (3, ["--pipe-parallel-size", "2"], "3 ranks cannot be divided into replicas"),
        (1, ["--deepspeed-config", "/no/ds.json"], "cannot read /no/ds.json"),
    ],
)
def test_what_is_wrong_on_the_command_line_exits_2(
    tmp_path: Path, flags: list[str], world: int, argv: list[str], message: str
) -> None:
    assert message in said(launch(world, *flags, *argv, "--run-dir", str(tmp_path / "run")), 2)
    assert not (tmp_path / "run").exists()


def test_a_contradicting_ds_config(tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 7}')
    more = ["--pipe-parallel-size", "2", "--deepspeed-config", str(tmp_path / "ds.json")]
    sentence = said(launch(2, *flags, *more), 2)
    assert "train_batch_size = 7" in sentence
    assert "--batch-size 2 x --gas 1 x (2 ranks" in sentence


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data-path", "/no/corpus"], "there is no /no/corpus.idx"),
        (["--vocab-file", "/no/file.model"], "there is no vocabulary file /no/file.model"),
        (["--vocab-file", str(ROOT / "README.md")], "README.md is not a sentencepiece model"),
        (["--seq-length", "100000"], "do not fill one sample of 100000 + 1"),
        (["--split", "x"], "--split 'x' must be one to three"),
        (["--load", "/no/checkpoints"], "--load /no/checkpoints holds no checkpoint"),
        (["--vocab-size", "10"], "--vocab-size 10 is less than the 3000 tokens"),
    ],
)
def test_what_is_wrong_with_the_input_exits_1(tmp_path: Path, flags: list[str], argv: list[str], message: str) -> None:
    assert message in said(launch(1, *flags, "--run-dir", str(tmp_path), *argv), 1)


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_a_truncated_corpus(tmp_path: Path, flags: list[str], tiny_data: str, ending: str) -> None:
    for each in ("bin", "idx"):
        shutil.copy(f"{tiny_data}.{each}", tmp_path / f"x.{each}")
    os.truncate(tmp_path / f"x.{ending}", 1000)
    assert f"x.{ending}" in said(
        launch(1, *flags, "--data-path", str(tmp_path / "x"), "--run-dir", str(tmp_path / "r")), 1
    )


def test_data_of_another_tokenizer(tmp_path: Path, flags: list[str], tiny_data: str) -> None:
    for each in ("bin", "idx"):
        shutil.copy(f"{tiny_data}.{each}", tmp_path / f"x.{each}")
    (tmp_path / "x.json").write_text('{"fingerprint": "another"}')
    sentence = said(launch(1, *flags, "--data-path", str(tmp_path / "x"), "--run-dir", str(tmp_path / "r")), 1)
    assert "was made with another tokenizer" in sentence
    with IndexedDatasetBuilder(tmp_path / "y", np.uint16) as builder:
        for document in (np.full(400, 7), np.full(100, 8), np.array([9, 9, 60000])):
            builder.add_document(document)
    sentence = said(launch(1, *flags, "--data-path", str(tmp_path / "y"), "--run-dir", str(tmp_path / "r")), 1)
    assert "token id 60000 (token 502, in document 2), outside the vocabulary of 3000" in sentence


def test_a_run_directory_that_cannot_be_written(tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    sentence = said(launch(2, *flags, "--run-dir", str(tmp_path / "file" / "run")), 1)
    assert "cannot write to the run directory" in sentence
    (tmp_path / "checkpoints").write_text("in the way")
    sentence = said(launch(2, *flags, "--run-dir", str(tmp_path)), 1)
    assert (
        "checkpoints is not a folder, so it cannot hold checkpoints: move it away, or pass another --save" in sentence
    )


@pytest.mark.parametrize(
    "damage", covering(["flip", "cut", "remove", "json", "latest"], ["flip", "latest"].__contains__)
)
def test_a_damaged_checkpoint_is_named(tmp_path: Path, flags: list[str], damage: str) -> None:
    layout = ["--pipe-parallel-size", "2", "--run-dir", str(tmp_path)]
    train_gpt2(2, tmp_path, *flags, *layout, "--train-iters", "2")
    folder = tmp_path / "checkpoints" / "iter_0000002"
    victim = folder / "pipe01-model00-data00.safetensors"
    if damage == "flip":
        content = bytearray(victim.read_bytes())
        content[-5] ^= 1
        victim.write_bytes(bytes(content))
    elif damage == "cut":
        os.truncate(victim, victim.stat().st_size - 1)
    elif damage == "remove":
        victim.unlink()
    elif damage == "json":
        os.truncate(folder / "checkpoint.json", 100)
    else:
        (tmp_path / "checkpoints" / "latest").write_text("iter_0000009\n")
    sentence = said(launch(2, *flags, *layout), 1)
    named = {"json": "checkpoint.json", "latest": "iter_0000009"}.get(damage, victim.name)
    assert named in sentence


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Path:
    """The directory of a run of one iteration, with what a crash during a save leaves."""
    folder = tmp_path_factory.mktemp("other")
    train_gpt2(1, folder, *flags, "--train-iters", "1")
    (folder / "checkpoints" / "iter_0000002.tmp").mkdir()
    return folder


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--hidden-size", "32"], "--hidden-size is 16 in the checkpoint and 32 in this run"),
        pytest.param(["--num-layers", "3"], "--num-layers is 2 in the checkpoint and 3 in this run", marks=FULL),
        (["--activation", "relu"], "--activation is gelu-tanh in the checkpoint and relu in this run"),
        (["--seq-length", "8"], "--max-position-embeddings is 16 in the checkpoint and 8 in this run"),
        (
            ["--seq-length", "8", "--max-position-embeddings", "16"],
            "--seq-length is 16 in the checkpoint and 8 in this run",
        ),
        (["--optimizer", "sgd"], "has the state of --optimizer adam, but this run uses sgd"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    trained: Path, flags: list[str], argv: list[str], message: str
) -> None:
    before = {path: path.read_bytes() if path.is_file() else b"" for path in trained.rglob("*")}
    assert message in said(launch(1, *flags, *argv, "--run-dir", str(trained)), 1)
    after = {path: path.read_bytes() if path.is_file() else b"" for path in trained.rglob("*")}
    assert after == before, "a refused start must not change any file"


def test_generation_continues_the_prompt(tmp_path: Path, flags: list[str], vocab_file: str) -> None:
    """tools/generate.py works with a run directory that was moved and whose original tokenizer file is gone."""
    shutil.copy(vocab_file, tmp_path / "my.model")
    more = ["--pipe-parallel-size", "2", "--train-iters", "1", "--vocab-file", str(tmp_path / "my.model")]
    train_gpt2(2, tmp_path / "before", *flags, *more)
    (tmp_path / "my.model").unlink()
    shutil.move(tmp_path / "before", tmp_path / "after")
    argv = [
        "tools/generate.py",
        "--load",
        str(tmp_path / "after"),
        "--prompt",
        "春天",
        "--num-samples",
        "2",
        "--max-new-tokens",
        "20",
    ]
    first, again = command("python", *argv, "--json"), command("python", *argv, "--json")
    assert first.returncode == 0, first.stderr
    texts = [json.loads(line)["text"] for line in first.stdout.splitlines()]
    assert len(texts) == 2
    assert all(text.startswith("春天") for text in texts)
    assert first.stdout == again.stdout


@FULL
def test_a_blend_goes_on_in_another_layout(tmp_path: Path, flags: list[str], tiny_data: str, vocab_file: str) -> None:
    """A run on a blend of corpora resumes in another layout with the right samples; other data are refused."""
    eod = load_tokenizer(vocab_file).eod
    with IndexedDatasetBuilder(tmp_path / "other", np.uint16) as builder:
        for i in range(40):
            builder.add_document([*range(300, 330 + i), eod])
    blend = [*flags, "--data-path", "0.7", tiny_data, "0.3", str(tmp_path / "other")]

    def position(run: str, iteration: int) -> tuple[int, int]:
        path = tmp_path / run / "checkpoints" / f"iter_{iteration:07d}" / "checkpoint.json"
        state = json.loads(path.read_text())["state"]
        return state["consumed_samples"], state["sample_hash"]

    train_gpt2(1, tmp_path / "whole", *blend, "--batch-size", "4", "--train-iters", "4")
    train_gpt2(2, tmp_path / "cut", *blend, "--pipe-parallel-size", "2", "--batch-size", "4", "--train-iters", "2")
    train_gpt2(2, tmp_path / "cut", *blend, "--batch-size", "1", "--gas", "2", "--train-iters", "4")
    assert position("cut", 4) == position("whole", 4)
    assert position("cut", 4)[0] == 16
    done = launch(1, *flags, "--batch-size", "4", "--train-iters", "5", "--run-dir", str(tmp_path / "cut"))
    assert "16 samples" in said(done, 1)
    assert "--override-data" in said(done, 1)
    more = ["--batch-size", "4", "--run-dir", str(tmp_path / "cut")]
    done = launch(1, *flags, *more, "--train-iters", "5", "--override-data")
    assert done.returncode == 0, done.stderr
    assert launch(1, *flags, *more, "--train-iters", "6").returncode == 0, "a later resume needs no --override-data"
    done = launch(1, *blend, "--batch-size", "4", "--train-iters", "6", "--run-dir", str(tmp_path / "whole"))
    assert done.returncode == 0


def test_a_damaged_id_stops_the_run(tmp_path: Path, flags: list[str], tiny_data: str) -> None:
    """A token id outside the vocabulary stops the run when the id is read, even if the check at the start missed it."""
    for each in ("bin", "idx"):
        shutil.copy(f"{tiny_data}.{each}", tmp_path / f"x.{each}")
    tokens = np.memmap(tmp_path / "x.bin", np.uint16, "r+")
    tokens[2000] = 65535
    tokens.flush()
    script = tmp_path / "unchecked.py"  # a file, so that `command` forks
    code = "import megatron.data.index_check as g, pretrain_gpt2; g.check_ids = lambda *_: None; pretrain_gpt2.main()"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}")
    argv = [*flags, "--data-path", str(tmp_path / "x"), "--run-dir", str(tmp_path / "r"), "--batch-size", "100"]
    sentence = said(command("python", str(script), *argv), 1)
    assert "token id 65535 in one of the documents [" in sentence


def test_the_newest_checkpoints_stay(tmp_path: Path, flags: list[str]) -> None:
    more = ["--save-interval", "1", "--keep-last", "2", "--keep-every", "3"]
    train_gpt2(2, tmp_path, *flags, *more, "--pipe-parallel-size", "2", "--train-iters", "6")
    found = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert found == ["iter_0000003", "iter_0000005", "iter_0000006", "latest"]


def test_signals_save_and_stop_in_order(tmp_path: Path, flags: list[str]) -> None:
    """A signal to one rank makes both ranks save after the next iteration; the resumed run has the same losses.

    SIGUSR1 saves; SIGTERM saves and stops.
    """
    argv = [*flags, "--save-interval", "0", "--train-iters", "8", "--pipe-parallel-size", "2", "--eval-iters", "0"]
    code = """
import os, signal, sys, megatron.training.log as t
from megatron.tasks import GPT2
from megatron.training import run
honest = t.TrainingLog.after_step
def add(self, *args):
    honest(self, *args)
    at = self.run.state.iteration
    if os.environ["RANK"] == "1" and sys.argv[1] == "signals":
        if at == 2: os.kill(os.getpid(), signal.SIGUSR1)
        if at == 5: os.kill(os.getpid(), signal.SIGTERM)
t.TrainingLog.after_step = add
run(GPT2(), sys.argv[2:])
"""
    script = tmp_path / "train.py"
    script.write_text(code)

    def go(kind: str, run: str, *more: str) -> Any:
        base = ["tools/launch.py", "--standalone", "--nproc-per-node", "2", str(script), kind]
        done = command("python", *base, *argv, *more, "--run-dir", str(tmp_path / run), env={"PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "stopped after iteration 6 as requested; run the same command to resume" in go("signals", "cut")
    saved = sorted(path.name for path in (tmp_path / "cut" / "checkpoints").iterdir())
    assert saved == ["iter_0000003", "iter_0000006", "latest"]
    assert "resumed at iteration 6" in go("none", "cut")
    go("none", "whole")
    cut, whole = ((tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in ("cut", "whole"))
    assert losses(list(map(json.loads, cut))) == losses(list(map(json.loads, whole)))
    assert "stopped after iteration 2 as requested;" in go("none", "short", "--exit-duration-in-mins", "0")
