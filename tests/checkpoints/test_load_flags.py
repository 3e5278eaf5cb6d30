"""--finetune, --no-load-optim, --no-load-rng and --override-* have exactly their documented effects."""

import contextlib
import io
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from data_utils.documents import read_texts
from data_utils.run_data import load_config
from data_utils.tokenizer_training import train_sentencepiece
from megatron import mpu
from megatron.checkpointing import CheckpointError, find_start, resume
from megatron.checkpointing.changes import training_notes
from megatron.checkpointing.load import _notes_on_flags
from megatron.checkpointing.state import TrainState
from megatron.checkpointing.wanted import Wanted
from megatron.config.command_line import parse, with_values
from megatron.data.gpt2_dataset import build_train_valid_test_datasets
from megatron.data.indexed_dataset import IndexedDataset
from megatron.ranks.errors import RunError
from megatron.tasks import TASKS
from megatron.training.inputs import MissingInputs, require_inputs
from megatron.training.run_folder import settings_to_save
from tests.materials import SAMPLE
from tests.sentences import SENTENCES
from tests.support import RankFailure, on_ranks

from .runs import Start, losses_of, run_all, whole_tensors

DROPOUT = "--hidden-dropout 0.1"
BASE = f"{DROPOUT} --precision fp32 --batch-size 2"


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory, tiny_data: str, vocab_file: str) -> Path:
    run_dir = tmp_path_factory.mktemp("before")
    on_ranks(1, run_all, [Start("gpt2", run_dir, f"{BASE} --train-iters 3")], tiny_data, vocab_file)
    return run_dir


def go(run_dir: Path, flags: str, data: str, vocab_file: str) -> None:
    on_ranks(1, run_all, [Start("gpt2", run_dir, f"{BASE} {flags}", save_first=True)], data, vocab_file)


def index(run_dir: Path, iteration: int) -> dict[str, Any]:
    path = run_dir / "checkpoints" / f"iter_{iteration:07d}" / "checkpoint.json"
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights(run_dir: Path, iteration: int) -> dict[str, bytes]:
    whole = whole_tensors(run_dir / "checkpoints" / f"iter_{iteration:07d}")
    return {key: value.tobytes() for key, value in whole.items() if key.startswith("weight.")}


def test_finetune_takes_weights_alone_and_then_goes_on(
    before: Path, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """--finetune loads only weights, even with another --seq-length; a second start resumes the fine-tuning run."""
    flags = f"--load {before} --finetune --seq-length 20 --max-position-embeddings 24 --seed 5"
    go(tmp_path, f"{flags} --train-iters 2", tiny_data, vocab_file)
    assert weights(tmp_path, 0) == weights(before, 3)
    first = index(tmp_path, 0)
    assert (first["optimizer"]["moments"], first["state"]["consumed_samples"]) == ([], 0)
    assert first["rng_seed"] == mpu.derive_seed(5, "dropout")
    assert index(tmp_path, 2)["optimizer"]["step"] == 2
    go(tmp_path, f"{flags} --train-iters 4", tiny_data, vocab_file)
    assert index(tmp_path, 4)["optimizer"]["step"] == 4
    assert index(tmp_path, 4)["state"]["consumed_samples"] == 8
    assert len(losses_of(tmp_path)) == 4


def test_no_load_optim_forgets_the_moments_alone(before: Path, tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    go(tmp_path / "kept", f"--load {before} --train-iters 4", tiny_data, vocab_file)
    go(tmp_path / "new", f"--load {before} --train-iters 4 --no-load-optim", tiny_data, vocab_file)
    assert index(tmp_path / "kept", 4)["optimizer"]["step"] == 4
    assert index(tmp_path / "new", 4)["optimizer"]["step"] == 1
    assert weights(tmp_path / "new", 3) == weights(before, 3)
    assert losses_of(tmp_path / "new") == losses_of(tmp_path / "kept"), "both runs have the same samples and dropout"
    assert weights(tmp_path / "new", 4) != weights(tmp_path / "kept", 4)
    # After --no-load-optim, Adam's moments are zero, so its first step changes each weight by lr * sign(gradient).
    old, new = (whole_tensors(tmp_path / "new" / "checkpoints" / f"iter_000000{i}") for i in (3, 4))
    name = "weight.layers.0.attention.dense.bias"
    np.testing.assert_allclose(np.abs(new[name] - old[name]), 1e-3, rtol=2e-2)


def test_what_these_flags_discard_is_noted() -> None:
    reader: Any = SimpleNamespace(path="ck/iter_0000003", optimizer={"moments": ["exp_avg"], "step": 3}, rng_seed=7)
    assert list(_notes_on_flags(reader, Wanted())) == []
    optim, rng = _notes_on_flags(reader, Wanted(optimizer=False, rng=False))
    assert "--no-load-optim" in optim and "step 3" in optim and "--no-load-rng" in rng
    reader.rng_seed = mpu.get_rng().seed
    reader.optimizer["moments"] = []
    assert list(_notes_on_flags(reader, Wanted(optimizer=False, rng=False))) == []


@pytest.mark.parametrize(
    ("checkpoint", "is_kept"), [(None, False), ("run/checkpoints/iter_0000003", False), ("base", True)]
)
def test_config_json_has_what_was_given(checkpoint: str | None, is_kept: bool) -> None:
    """Flags for the checkpoint of --load are kept for a restart before the first save. Others act on one start."""
    flags = ["--load", "base", "--finetune", "--no-load-optim", "--batch-size-schedule", "0:4", "--train-samples", "40"]
    given = parse(flags)
    resumed = {"lr_decay_iters": 6, "data_stages": ("0: a",), "batch_size_schedule": "0:8", "gas": 8, "train_iters": 7}
    saved = settings_to_save(given, with_values(given, resumed), Path(checkpoint) if checkpoint else None, Path("run"))
    expected = parse(flags if is_kept else [*flags, "--no-finetune", "--load-optim"])
    assert saved == with_values(expected, {"gas": 8, "train_iters": 7})


def test_weights_that_were_never_trained_here_have_no_schedule(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """A checkpoint of iteration 0, e.g. a converted one, does not impose its learning-rate schedule on the run."""
    go(tmp_path / "first", "--train-iters 1 --lr 5e-4", tiny_data, vocab_file)
    start = tmp_path / "first" / "checkpoints" / "iter_0000000"
    go(tmp_path / "new", f"--load {start} --train-iters 2 --lr 2e-3", tiny_data, vocab_file)
    assert [row["lr"] for row in rows(tmp_path / "new")] == [2e-3] * 2
    assert json.loads((tmp_path / "new" / "config.json").read_text())["optim"]["lr"] == 2e-3
    assert index(tmp_path / "new", 2)["config"]["optim"]["lr"] == 2e-3


def test_another_sgd_needs_new_moments(before: Path, tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    with pytest.raises(RankFailure, match="--optimizer.*--no-load-optim"):
        go(tmp_path, f"--load {before} --optimizer sgd --train-iters 4", tiny_data, vocab_file)
    go(tmp_path, f"--load {before} --optimizer sgd --train-iters 4 --no-load-optim", tiny_data, vocab_file)
    # Beside --load, the flag counts at the first start only. The error says so, as its advice would not help otherwise.
    with pytest.raises(RankFailure, match="--optimizer sgd.*--no-load-optim.*--load"):
        go(tmp_path, f"--load {before} --optimizer adam --train-iters 6 --no-load-optim", tiny_data, vocab_file)
    go(tmp_path, "--optimizer adam --train-iters 6 --no-load-optim", tiny_data, vocab_file)


def test_a_static_loss_scale_is_that_of_the_run(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """A resumed run takes a static fp16 loss scale from the ds_config, and a dynamic one from the checkpoint."""
    scales = {
        "low": {"loss_scale": 128},
        "high": {"loss_scale": 1024},
        "moving": {"loss_scale": 0, "initial_scale_power": 9, "loss_scale_window": 1, "hysteresis": 1},
    }
    for name, scale in scales.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"fp16": {"enabled": True, **scale}}))

    def start(name: str, way: str, iterations: int) -> Start:
        flags = f"--batch-size 2 --precision auto --deepspeed-config {tmp_path / way}.json --train-iters {iterations}"
        return Start("gpt2", tmp_path / name, flags)

    pairs = {
        "raised": "low high",
        "lowered": "high low",
        "fixed": "moving low",
        "freed": "low moving",
        "whole": "moving moving",
    }
    starts = [start(name, way, n) for name, pair in pairs.items() for n, way in zip((2, 4), pair.split(), strict=True)]
    on_ranks(1, run_all, starts, tiny_data, vocab_file)
    found = {name: [row["loss_scale"] for row in rows(tmp_path / name)] for name in pairs}
    assert found["raised"] == [128, 128, 1024, 1024]
    assert found["lowered"] == [1024, 1024, 128, 128]
    assert found["fixed"][2:] == [128, 128]
    assert found["freed"] == [128, 128, *found["whole"][:2]]
    assert len(set(found["whole"])) == 4, "it goes on to rise"


def test_dropout_goes_on_by_the_seed_of_the_checkpoint(
    before: Path, tmp_path: Path, tiny_data: str, vocab_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = f"--load {before} --train-iters 4 --seed 99"
    with pytest.raises(RankFailure, match="6 samples .* --override-data"):
        go(tmp_path / "refused", more, tiny_data, vocab_file)
    go(tmp_path / "saved", f"{more} --override-data", tiny_data, vocab_file)
    go(tmp_path / "new", f"{more} --override-data --no-load-rng", tiny_data, vocab_file)
    assert index(tmp_path / "saved", 4)["rng_seed"] == mpu.derive_seed(1234, "dropout")
    assert index(tmp_path / "new", 4)["rng_seed"] == mpu.derive_seed(99, "dropout")
    assert losses_of(tmp_path / "saved") != losses_of(tmp_path / "new"), "the runs differ in their dropout"
    load_config(str(tmp_path / "saved"))
    assert "other ones before sample 6" in capsys.readouterr().out


def test_another_tokenizer(before: Path, tmp_path: Path, tiny_data: str) -> None:
    other = str(tmp_path / "other.model")
    train_sentencepiece((text[::-1] for text in read_texts([str(SAMPLE)])), other, 3000)
    more = f"--load {before} --train-iters 4"
    with pytest.raises(RankFailure, match="--override-tokenizer"):
        go(tmp_path / "refused", more, tiny_data, other)
    go(tmp_path / "new", f"{more} --override-tokenizer", tiny_data, other)


def test_beside_a_checkpoint_of_its_own(before: Path, tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """A run with checkpoints of its own resumes from them and ignores --load, whose folder may be gone.

    A resume with another --split still needs --override-data.
    """
    base, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(before, base)
    load = f"--load {base} --override-data"
    go(run, f"{load} --split 7,3 --train-iters 4", tiny_data, vocab_file)
    go(run, f"{load} --split 6,4 --train-iters 5", tiny_data, vocab_file)
    assert index(run, 5)["optimizer"]["step"] == 5
    shutil.rmtree(base)
    with pytest.raises(RankFailure, match="samples .* --override-data"):
        go(run, f"--load {base} --split 5,5 --train-iters 6", tiny_data, vocab_file)
    argv = ["--load", str(base), "--data-path", tiny_data, "--vocab-file", vocab_file]
    task = TASKS["gpt2"]()
    for own in (["--run-dir", str(run)], ["--save", str(run / "checkpoints")]):
        require_inputs(task, parse([*argv, *own]))
    for other in ([], ["--run-dir", str(tmp_path / "new")]):
        with pytest.raises(MissingInputs, match=SENTENCES["base_holds_no_checkpoint_there_is"]):
            require_inputs(task, parse([*argv, *other]))


def test_another_split_with_as_many_samples(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """A resume with other --split proportions is refused, even if they give the same number of samples.

    Multiplying all numbers of --split by 2 keeps the proportions, so it is accepted.
    """
    total = IndexedDataset(tiny_data).num_documents

    def of(n: int) -> int:
        split = f"{n},{total - n}"
        (train, *_), _ = build_train_valid_test_datasets([tiny_data], split, 512, 1234, 3000)
        return int(train.samples_per_epoch)

    n = next(n for n in range(total // 2, total - 1) if of(n) == of(n + 1))
    more = "--seq-length 512 --train-iters"
    go(tmp_path, f"{more} 1 --split {n},{total - n}", tiny_data, vocab_file)
    other = f"{more} 2 --split {n + 1},{total - n - 1}"
    with pytest.raises(RankFailure, match="samples .* --override-data"):
        go(tmp_path, other, tiny_data, vocab_file)
    go(tmp_path, f"{more} 2 --split {2 * n},{2 * (total - n)}", tiny_data, vocab_file)
    go(tmp_path, f"{other} --override-data --train-iters 3", tiny_data, vocab_file)


def test_finetune_without_load_is_refused(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    with pytest.raises(RankFailure, match="--finetune needs --load"):
        go(tmp_path, "--finetune", tiny_data, vocab_file)


def test_another_corpus_with_documents_as_long(before: Path, tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """A corpus with other tokens in documents of the same lengths is refused; a copy of the corpus is accepted."""
    for name in ("same", "other"):
        for ending in (".bin", ".idx"):
            shutil.copyfile(f"{tiny_data}{ending}", tmp_path / f"{name}{ending}")
    tokens = np.fromfile(tmp_path / "other.bin", dtype=np.uint16)
    tokens[: len(tokens) // 2] = tokens[: len(tokens) // 2][::-1]
    tokens.tofile(tmp_path / "other.bin")
    more = f"--load {before} --train-iters 4"
    go(tmp_path / "new", more, str(tmp_path / "same"), vocab_file)
    with pytest.raises(RankFailure, match="6 samples .* --override-data"):
        go(tmp_path / "refused", more, str(tmp_path / "other"), vocab_file)


def test_a_first_start_may_spell_its_own_folder_in_any_way(
    tmp_path: Path, tiny_data: str, vocab_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts for Megatron-LM pass one folder to --save and --load, which does not exist yet."""
    monkeypatch.chdir(tmp_path)
    task = TASKS["gpt2"]()
    inputs = ["--data-path", tiny_data, "--vocab-file", vocab_file]
    for load in ("ck", "ck/", "./ck", str(tmp_path / "ck")):
        require_inputs(task, parse(["--save", "ck", "--load", load, *inputs]))
    require_inputs(task, parse(["--run-dir", "run", "--load", "run/checkpoints/", *inputs]))
    with pytest.raises(MissingInputs):
        require_inputs(task, parse(["--save", "ck", "--load", "other", *inputs]))


def test_a_corpus_without_its_bin_file_is_not_suggested_for_itself(
    tmp_path: Path, vocab_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("zh.idx").touch()
    config = parse(["--data-path", "zh", "--vocab-file", vocab_file])
    with pytest.raises(MissingInputs) as found:
        require_inputs(TASKS["gpt2"](), config)
    assert "zh.bin" in str(found.value) and "zh?" not in str(found.value)
    Path("zh_text_document.idx").touch()
    with pytest.raises(MissingInputs, match=r"zh_text_document\?"):
        require_inputs(TASKS["gpt2"](), config)


def test_what_changes_the_losses_of_a_resumed_run_is_noted() -> None:
    """The number of replicas and dropout are those of the command, not of the checkpoint."""
    shape = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --vocab-size 100 --batch-size 2"

    def notes(before: str, now: str, world_size: int) -> list[str]:
        configs = [parse([*shape.split(), *flags.split()], {"family": "gpt2"}, world_size) for flags in (before, now)]
        state = TrainState(iteration=10, consumed_samples=160)
        return list(training_notes(*configs, state, world_size))

    assert notes("--gas 4", "--gas 4 --lr 1 --num-workers 3 --logits-chunk-size 7", 2) == []
    (batch_note,) = notes("--gas 4", "--gas 4", 4)
    assert "32 samples" in batch_note and "16 " in batch_note
    (dropout_note,) = notes("--gas 4 --hidden-dropout 0", "--gas 4 --hidden-dropout 0.2 --weight-decay 0.1", 2)
    assert "--hidden-dropout" in dropout_note and "--weight-decay" in dropout_note
    assert "--gas" not in dropout_note
    assert notes("--gas 4", "--batch-size-schedule 0:4", 2) == []  # has a note of its own


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("--skip-step-sigma 6", "--skip-step-sigma 1"),
        ("", "--skip-step-sigma 6"),
        ("--skip-step-sigma 6 --skip-step-window 64", "--skip-step-sigma 6 --skip-step-window 128"),
        ("--optimizer muon --muon-ns-dtype fp32", "--optimizer muon --muon-ns-dtype bf16"),
    ],
)
def test_a_changed_setting_of_steps_is_named_with_its_values(before: str, now: str) -> None:
    shape = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --vocab-size 100"
    saved, config = (parse([*shape.split(), *flags.split()], {"family": "gpt2"}) for flags in (before, now))
    state = TrainState(iteration=10, consumed_samples=40)
    assert list(training_notes(saved, saved, state, 1)) == []
    (note,) = training_notes(saved, config, state, 1)
    changed_flag, value = now.split()[-2:]
    assert changed_flag in note and value in note


def _start_in_own_folder(folder: str, load: str) -> list[tuple[str | None, bool]]:
    """Start twice on ranks with other working directories, without and with a checkpoint; return what each loads."""
    rank = dist.get_rank()
    os.chdir(Path(folder) / str(rank))
    save = Path(folder) / "0" / "run"
    config = parse(["--save", str(save), "--load", load, "--no-load-optim"])
    found = []
    with contextlib.redirect_stdout(io.StringIO()):
        for name in ("", "iter_0000002"):
            if name and rank == 0:
                (save / name).mkdir()
                (save / "latest").write_text(f"{name}\n")
            start = find_start(config, str(save))
            found.append((start.path and start.path.name, start.wanted.optimizer))
    return found


def test_rank_0_decides_whether_load_names_the_folder_of_the_run(tmp_path: Path) -> None:
    """A relative --load, or a link, may name another folder on another node."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    (tmp_path / "0" / "run").mkdir()
    expected = [(None, False), ("iter_0000002", False)]
    assert on_ranks(2, _start_in_own_folder, str(tmp_path), "run", timeout=60) == [expected, expected]


@pytest.mark.parametrize("folder", ["there", "nowhere"])
def test_a_missing_checkpoint_ends_the_first_start_if_it_must_exist(folder: str, tmp_path: Path) -> None:
    """Without the flag, one command with equal --save and --load starts and resumes a run."""
    (tmp_path / "there").mkdir()
    save = str(tmp_path / folder)
    flags = ["--save", save, "--load", save]
    assert find_start(parse(flags), save).path is None
    with pytest.raises(RunError, match=f"--load {save}"):
        find_start(parse([*flags, "--exit-on-missing-checkpoint"]), save)


def _fail_to_read_again(problem: type[Exception]) -> str:
    """Resume on all ranks, of which rank 1 cannot read checkpoint.json again after the load; return the error."""

    def unreadable(path: Path) -> Any:
        if dist.get_rank() == 1:
            raise problem(f"{path} is gone")
        return SimpleNamespace()

    config = parse([])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.checkpointing.load.load_checkpoint", lambda *_: TrainState(3, 6))
        patch.setattr("megatron.checkpointing.resume.CheckpointReader", unreadable)
        patch.setattr("megatron.checkpointing.resume.plain_config", lambda _: config)
        with pytest.raises(RunError) as error:
            resume.start_or_resume(resume.Start(Path("nowhere/iter_0000003"), Wanted()), config, None, "", None)
    return str(error.value)


@pytest.mark.parametrize("problem", [OSError, CheckpointError])
def test_a_checkpoint_that_one_rank_cannot_read_again_ends_all(problem: type[Exception]) -> None:
    for words in on_ranks(2, _fail_to_read_again, problem, timeout=60):
        assert words.startswith("rank 1: ") and "iter_0000003 is gone" in words


def test_a_load_of_the_run_itself_keeps_the_flags_of_loading(before: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron-LM's commands name one folder by --save and --load; another --load only counts for the first start."""
    save = str(before / "checkpoints")
    flags = ["--save", save, "--no-load-optim"]
    for own in (save, str(before)):
        assert not find_start(parse([*flags, "--load", own, "--run-dir", str(before)]), save).wanted.optimizer
        with pytest.raises(RunError, match="--finetune"):
            find_start(parse([*flags, "--load", own, "--run-dir", str(before), "--finetune"]), save)
    assert capsys.readouterr().out == ""
    assert find_start(parse([*flags, "--load", "elsewhere"]), save).wanted.optimizer
    assert "--load elsewhere --no-load-optim" in capsys.readouterr().out


def test_a_run_directory_is_loaded_although_checkpoints_go_elsewhere_now(tmp_path: Path) -> None:
    """One command starts and resumes a run, so --load of its own directory may name no checkpoint yet."""
    run_dir = tmp_path / "run"
    config = parse(["--run-dir", str(run_dir), "--load", str(run_dir)])
    elsewhere = tmp_path / "elsewhere"
    assert resume.find_loaded(str(run_dir), config, elsewhere) is None
    strict = with_values(config, {"exit_on_missing_checkpoint": True})
    for load, settings in ((str(run_dir), strict), (str(tmp_path / "other"), config)):
        with pytest.raises(CheckpointError):
            resume.find_loaded(load, settings, elsewhere)
    checkpoint = run_dir / "checkpoints" / "iter_0000005"
    checkpoint.mkdir(parents=True)
    (checkpoint.parent / "latest").write_text("iter_0000005\n")
    assert resume.find_loaded(str(run_dir), config, elsewhere) == checkpoint
