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
    relocated,
    with_kept_tokenizer,
)
from megatron.config.command_line import parse
from megatron.data.fingerprints import END_BYTES, corpus_fingerprint
from megatron.tokenizer.sibling_files import read_eos_ids
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


def test_settings_of_a_run_that_was_moved(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    (before / "data").mkdir(parents=True)
    (before / "my.model").touch()
    config = parse(["--run-dir", str(before), "--data-path", "0.7", str(before / "data/x"), "0.3", "/elsewhere/y",
                    "--vocab-file", str(before / "my.model")])  # fmt: skip
    copy_tokenizer(str(before / "my.model"), before)
    shutil.move(before, after)
    found = relocated(config, after)
    assert found.data.data_path == ("0.7", str(after / "data/x"), "0.3", "/elsewhere/y")
    assert found.data.vocab_file == str(after / "tokenizer" / "my.model")
    assert found.log.run_dir == str(after)
    quoted = parse(["--run-dir", str(before), "--train-data-path", f"0.7 {before}/x 0.3 /elsewhere/y",
                    "--valid-data-path", f"web=0.5 {before}/v 0.5 w", f"books={before}/my book"])  # fmt: skip
    words = relocated(quoted, after).data
    assert words.train_data_path == (f"0.7 {after}/x 0.3 /elsewhere/y",)
    assert words.valid_data_path == (f"web=0.5 {after}/v 0.5 w", f"books={after}/my book")
    checkpoint = after / "checkpoints" / "iter_0000001"
    assert with_kept_tokenizer(config, checkpoint).data.vocab_file == str(after / "tokenizer" / "my.model")
    assert with_kept_tokenizer(config, tmp_path / "x" / "y").data.vocab_file == config.data.vocab_file


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
