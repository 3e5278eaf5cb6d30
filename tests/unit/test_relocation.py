"""A run directory contains its tokenizer and works after it was moved."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from data_utils.chat_templates import tokenizer_template
from megatron.checkpointing.relocation import (
    copy_tokenizer,
    kept_tokenizer,
    with_kept_tokenizer,
    with_own_tokenizer,
)
from megatron.config import Config
from megatron.config.command_line import from_file, parse
from megatron.config.places import relocated
from megatron.data.fingerprints import END_BYTES, corpus_fingerprint
from megatron.tokenizer.load import find_vocab_file
from megatron.tokenizer.sibling_files import make_placeholder, read_eos_ids
from megatron_tools.convert import average_checkpoints
from megatron_tools.convert.hf_folder import is_hf_folder


def test_a_tokenizer_is_kept_with_the_files_that_belong_to_it(tmp_path: Path) -> None:
    source, home = tmp_path / "source", tmp_path / "home"
    source.mkdir()
    home.mkdir()
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json", "model.safetensors"):
        (source / name).write_text("{}" if name == "tokenizer_config.json" else name)
    assert kept_tokenizer(home, "anything") is None
    copy_tokenizer(str(source), home)  # copies tokenizer files, but no weights
    assert sorted(p.name for p in (home / "tokenizer").iterdir()) == [
        "merges.txt",
        "tokenizer_config.json",
        "vocab.json",
    ]
    assert kept_tokenizer(home, str(source)) == str(home / "tokenizer")
    assert kept_tokenizer(home, str(source / "vocab.json")) == str(home / "tokenizer" / "vocab.json")
    copy_tokenizer(str(home / "tokenizer" / "vocab.json"), home)  # source and destination are the same file
    for name in ("own.model", "other.model"):  # each file replaces the tokenizer before it
        (source / name).write_text(name)
        copy_tokenizer(str(source / name), home)
    assert kept_tokenizer(home, "/was/there/other.model") == str(home / "tokenizer" / "other.model")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [1, 2], "top_k": 3}, "config.json": {"eos_token_id": 1}}, [1, 2]),
        (
            {"generation_config.json": {"top_k": 3}, "config.json": {"model_type": "llama", "eos_token_id": [1, 3]}},
            [1, 3],
        ),
        ({"config.json": {"model": {}}}, None),
    ],
)
def test_templates_and_ends_are_kept_with_a_tokenizer(tmp_path: Path, files: dict[str, Any], expected: object) -> None:
    source, home = tmp_path / "source", tmp_path / "home"
    (source / "additional_chat_templates").mkdir(parents=True)
    home.mkdir()
    for name in ("vocab.json", "chat_template.jinja", "additional_chat_templates/rag.jinja"):
        (source / name).write_text(name)
    for name, content in files.items():
        (source / name).write_text(json.dumps(content))
    copy_tokenizer(str(source), home)
    kept = home / "tokenizer"
    assert tokenizer_template(str(kept)) == "chat_template.jinja"
    assert (kept / "additional_chat_templates" / "rag.jinja").read_text() == "additional_chat_templates/rag.jinja"
    assert read_eos_ids(kept / "vocab.json") == read_eos_ids(source / "vocab.json") == expected
    assert not is_hf_folder(kept)


@pytest.mark.parametrize("by_placeholder", [True, False])
def test_a_tokenizer_with_a_name_of_its_own_is_found_in_the_copy(tmp_path: Path, by_placeholder: bool) -> None:
    """An export has such a file and a tokenizer.json that only names it; --vocab-file may be its folder."""
    exported, run_dir = tmp_path / "exported", tmp_path / "run"
    exported.mkdir()
    run_dir.mkdir()
    (exported / "zh.model").write_text("a model")
    vocab_file = exported / "zh.model"
    if by_placeholder:
        (exported / "tokenizer.json").write_text(json.dumps(make_placeholder("zh.model"), indent=2))
        vocab_file = exported
    for _ in range(2):  # a resume
        copy_tokenizer(str(vocab_file), run_dir)
    shutil.rmtree(exported)
    kept = kept_tokenizer(run_dir, str(vocab_file))
    assert kept is not None and find_vocab_file(kept) == run_dir / "tokenizer" / "zh.model"
    (tmp_path / "tokenizer.json").write_text("{}")
    copy_tokenizer(str(tmp_path), run_dir)  # another tokenizer replaces all files
    assert [path.name for path in (run_dir / "tokenizer").iterdir()] == ["tokenizer.json"]


def _save_settings(run_dir: Path, *flags: str) -> Config:
    """Write the config.json of a run to its run directory; return its settings."""
    config = parse(["--run-dir", str(run_dir), *flags])
    (run_dir / "config.json").write_text(json.dumps(config.to_dict()))
    return config


def test_settings_of_a_run_that_was_moved(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    (before / "data").mkdir(parents=True)
    (before / "my.model").touch()
    data = ["--data-path", "0.7", f"{before}/data/x", "0.3", "/elsewhere/y", "--data-stages", f"0: {before}/a; 9: b"]
    config = _save_settings(before, *data, "--vocab-file", f"{before}/my.model", "--save", f"{before}/ck")
    copy_tokenizer(str(before / "my.model"), before)
    shutil.move(before, after)
    path = str(after / "config.json")
    notes: list[str] = []
    moved = parse(["--config", path], notify=notes.append)
    assert [str(before) in note and str(after) in note for note in notes] == [True]
    for found in (moved, from_file(path), parse(["--config", path, "--run-dir", str(after)])):
        assert found.data.data_path == ("0.7", f"{after}/data/x", "0.3", "/elsewhere/y")
        assert found.data.data_stages == parse(["--data-stages", f"0: {after}/a; 9: b"]).data.data_stages
        assert (found.log.run_dir, found.checkpoint.save) == (str(after), f"{after}/ck")
        assert found.data.vocab_file == f"{after}/my.model"
    assert with_own_tokenizer(moved, after).data.vocab_file == str(after / "tokenizer" / "my.model")
    checkpoint = after / "checkpoints" / "iter_0000001"
    assert with_kept_tokenizer(config, checkpoint).data.vocab_file == str(after / "tokenizer" / "my.model")
    assert with_kept_tokenizer(config, tmp_path / "x" / "y").data.vocab_file == config.data.vocab_file


def test_blends_and_named_sets_of_a_run_that_was_moved() -> None:
    values = {
        "train_data_path": ["0.7 runs/a/x 0.3 /elsewhere/y"],
        "valid_data_path": ["web=0.5 runs/a/v 0.5 w", "books=runs/a/my book"],
        "load": "s3://bucket/runs/a",
        "lr": 1.0,
    }
    assert relocated(values, "runs/a", "b") == {
        **values,
        "train_data_path": ["0.7 b/x 0.3 /elsewhere/y"],
        "valid_data_path": ["web=0.5 b/v 0.5 w", "books=b/my book"],
    }


def test_another_run_with_the_settings_of_a_run(tmp_path: Path) -> None:
    """It reads the same data with the same model, but does not save, load or skip what the run does."""
    first, second = tmp_path / "first", str(tmp_path / "second")
    first.mkdir()
    own = ["--save", f"{first}/ck", "--load", "base", "--finetune", "--skip-iterations", "2-3", "--override-data"]
    config = _save_settings(first, "--lr", "0.1", "--vocab-file", f"{first}/my.model", "--data-stages", "0: a", *own)
    flags = ["--config", str(first / "config.json")]
    notes: list[str] = []
    expected = ["--lr", "0.1", "--vocab-file", f"{first}/my.model", "--data-stages", "0: a", "--run-dir", second]
    assert parse([*flags, "--run-dir", second], notify=notes.append) == parse(expected)
    assert len(notes) == 1 and f"--save {first}/ck, --load base, --skip-iterations 2-3, --finetune" in notes[0]
    for same in ([], ["--run-dir", str(first)], ["--run-dir", f"{first}/../first"]):
        assert parse([*flags, *same]).checkpoint == config.checkpoint
    # A corpus on the command line is trained on, also if the run went through data stages.
    changed = parse([*flags, "--run-dir", second, "--data-path", "c"])
    assert (changed.data.data_stages, changed.data.paths) == (None, ("c",))
    # A short file is one that a user wrote, not one that a run has saved.
    (first / "config.json").write_text(json.dumps({"run_dir": "runs/x", "save": "ck"}))
    assert parse([*flags, "--run-dir", second]).checkpoint.save == "ck"
    assert parse(flags).log.run_dir == "runs/x"


def test_corpora_that_were_made_apart_look_apart(tmp_path: Path) -> None:
    def pair(name: str, content: bytes) -> str:
        for ending in ("bin", "idx"):
            (tmp_path / f"{name}.{ending}").write_bytes(content)
        return corpus_fingerprint(str(tmp_path / name))

    long = b"a" * 3 * END_BYTES
    assert pair("x", long) == pair("y", long)
    assert len({pair("x", long), pair("y", long + b"a"), pair("z", long[:-1] + b"b"), pair("w", b"b" + long[1:])}) == 4


def test_nothing_of_an_earlier_tokenizer_stays(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    first = ("tokenizer.json", "chat_template.jinja", "special_tokens_map.json")
    for folder, names in (("a", first), ("b", ("tokenizer.model",)), ("c", ("tokenizer.json",))):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(f"{folder} {name}")

    def kept(folder: str) -> list[str]:
        copy_tokenizer(str(tmp_path / folder), home)
        return sorted(path.read_text() for path in (home / "tokenizer").iterdir())

    assert kept("a") == sorted(f"a {name}" for name in first)
    assert kept("c") == ["c tokenizer.json"]  # a file of the same name, but another tokenizer
    kept("a")
    assert kept("b") == ["b tokenizer.model"]
    (home / "tokenizer" / "chat_template.jinja").write_text("the user's")
    assert kept("b") == ["b tokenizer.model", "the user's"], "the same tokenizer keeps what a user has added"
    assert [path.name for path in home.iterdir()] == ["tokenizer"]


def test_a_tokenizer_beside_the_folder_of_an_import_is_not_its_own(tmp_path: Path) -> None:
    foreign = tmp_path / "tokenizer"
    foreign.mkdir()
    for name in ("vocab.json", "merges.txt"):
        (foreign / name).write_text("{}")
    config = parse(["--vocab-file", "hf"])
    assert with_kept_tokenizer(config, tmp_path / "imported" / "iter_0000000").data.vocab_file == "hf"
    in_run = with_kept_tokenizer(config, tmp_path / "checkpoints" / "iter_0000000")
    assert in_run.data.vocab_file == str(foreign)


@pytest.mark.parametrize(("save", "is_found"), [("checkpoints", True), ("other", False)])
def test_an_average_of_a_relative_checkpoint_finds_the_tokenizer_of_its_run(
    save: str, is_found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's folder is two levels above a checkpoint in RUN/checkpoints only, also if it is named from there."""
    (tmp_path / "run/tokenizer").mkdir(parents=True)
    (tmp_path / "run/tokenizer/vocab.txt").write_text("a\n")
    (tmp_path / "run" / save / "iter_0000001").mkdir(parents=True)
    output = tmp_path / "average"
    output.mkdir()
    monkeypatch.chdir(tmp_path / "run" / save)
    average_checkpoints._copy_tokenizer(Path("iter_0000001"), output)
    assert (output / "tokenizer/vocab.txt").exists() == is_found
