"""A malformed or malicious checkpoint.json is refused in one sentence, and cannot open files outside its folder."""

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron.checkpointing import CheckpointError, CheckpointReader, Wanted, find_checkpoint, plain_config
from megatron.checkpointing.contradictions import refuse_contradictions
from megatron.checkpointing.save import index_text
from megatron.checkpointing.state import TrainState
from megatron.config.command_line import parse
from tests.sentences import SENTENCES

PIECES = [{"file": "a.safetensors", "begin": 0, "end": 2}, {"file": "b.safetensors", "begin": 2, "end": 3}]
KEY = "weight.x"


def write(folder: Path, text: str) -> Path:
    """Write a checkpoint whose checkpoint.json is `text`, with one tensor in two files and correct checksums."""
    folder.mkdir(exist_ok=True)
    save_file({KEY: torch.ones(2, 2)}, folder / "a.safetensors")
    save_file({KEY: torch.ones(1, 2)}, folder / "b.safetensors")
    (folder / "checkpoint.json").write_text(text)
    names = ("a.safetensors", "b.safetensors", "checkpoint.json")
    sums = "".join(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    (folder / "SHA256SUMS").write_text(sums)
    return folder


def good() -> dict[str, Any]:
    tensors = {KEY: {"shape": [3, 2], "dim": 0, "pieces": copy.deepcopy(PIECES)}}
    content: dict[str, Any] = json.loads(index_text(TrainState(3, 12), parse([]), "0123", tensors))
    return content


def put(*where: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that sets a nested entry: put("a", "b", 3) sets content["a"]["b"] = 3."""

    def change(content: dict[str, Any]) -> None:
        *path, name, value = where
        at: Any = content
        for each in path:
            at = at[each]
        at[name] = value

    return change


T = ("tensors", KEY)
CRAFTED: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (put("state", "iteration", float("nan")), "NaN"),
    (put("state", "iteration", "3"), 'state.iteration must be a whole number, 0 or more, not "3"'),
    (put("state", "iteration", -1), "state.iteration must be"),
    (put("state", "iteration", True), "state.iteration must be"),
    (put("state", "consumed_samples", 1e300), "state.consumed_samples must be"),
    (put("state", "more", 1), "state has the unknown key 'more'"),
    (put("state", []), "state must be an object"),
    (put("rng_seed", "x"), "rng_seed must be"),
    (put("positions", None), "positions must be"),
    (put("tokenizer", 7), "tokenizer must be a text"),
    (put("optimizer", {}), "optimizer.step must be"),
    (put("optimizer", "moments", "exp_avg"), "optimizer.moments must be a list of names"),
    (put("optimizer", "loss_scaler", {"cur_scale": "x"}), "optimizer.loss_scaler must be an object of numbers"),
    (put("config", "model", 3), "config.model must be an object"),
    (put("config", "optim", "optimizer", None), "config.optim.optimizer must be a text"),
    (put("tensors", [1]), "tensors must be an object"),
    (put(*T, "dim", -1), "dim must be the index of one of the 2 dimensions, not -1"),
    (put(*T, "dim", 2), "dim must be the index of one of the 2 dimensions"),
    (put(*T, "shape", [3, 2**60]), "shape must be a list of sizes with a product of"),
    (put(*T, "shape", [3, "2"]), "shape must be"),
    (put(*T, "shape", []), "shape must be"),
    (put(*T, "pieces", []), "pieces must be a list"),
    (put(*T, "pieces", [PIECES[0], {**PIECES[1], "begin": 1}]), "a piece from row 2 on, found rows 1 to 3"),
    (put(*T, "pieces", [PIECES[0], PIECES[0], PIECES[1]]), "expected a piece from row 2 on"),
    (put(*T, "pieces", [PIECES[0]]), "must be 3, the size in"),
    (put(*T, "pieces", 1, "end", 2**70), "must be an object with file, begin and end"),
    (put(*T, "pieces", 1, "file", "../b.safetensors"), 'must be in the list of checksums, not "../b.safetensors"'),
    (put(*T, "pieces", 1, "file", None), "must be in the list of checksums"),
]


@pytest.mark.parametrize(("change", "message"), CRAFTED, ids=[message for _, message in CRAFTED])
def test_an_index_that_cannot_be(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    content = good()
    change(content)
    folder = write(tmp_path / "iter_0000003", json.dumps(content))
    with pytest.raises(CheckpointError) as error:
        CheckpointReader(folder)
    text = str(error.value)
    assert text.startswith(f"{folder / 'checkpoint.json'} cannot be read: ")
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "JSON object"),
        ("[" * 100000, "nested too deeply"),
        ('{"format": 3, "format": 3}', "'format' more than once"),
        ('{"format": 3}', "the key 'state' is missing"),
        ("{", "line 1: Expecting"),
        ('{"format": [3]}', "has format [3]; this version reads"),
    ],
)
def test_a_text_that_is_no_index(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        CheckpointReader(write(tmp_path / "iter_0000003", text))
    assert message in str(error.value)


def test_a_checkpoint_with_a_certificate_of_earlier_versions_is_read(tmp_path: Path) -> None:
    content = good()
    content["config"]["checkpoint"]["certificate"] = "certificate.json"
    folder = write(tmp_path / "iter_0000003", json.dumps(content))
    (folder / "certificate.json").write_text('{"certificate": 1}')
    digest = hashlib.sha256((folder / "certificate.json").read_bytes()).hexdigest()
    with (folder / "SHA256SUMS").open("a") as sums:
        sums.write(f"{digest}  certificate.json\n")
    reader = CheckpointReader(find_checkpoint(str(folder)))
    reader.verify()
    assert plain_config(reader) == parse(["--pipe-parallel-size", "0", "--no-sequence-parallel"])


def test_a_run_that_left_out_documents_resumes_only_with_other_data(tmp_path: Path) -> None:
    content = good()
    config = parse(["--pipe-parallel-size", "0", "--no-sequence-parallel"])
    content["config"]["data"]["without"] = None
    refuse_contradictions(CheckpointReader(write(tmp_path / "iter_0000003", json.dumps(content))), config, None)
    content["config"]["data"]["without"] = '[{"samples": 0, "documents": {"": ["17"]}}]'
    reader = CheckpointReader(write(tmp_path / "iter_0000003", json.dumps(content)))
    with pytest.raises(CheckpointError, match=r"--without .*inspect_data\.py drop.*--override-data"):
        refuse_contradictions(reader, config, None)
    refuse_contradictions(reader, config, None, Wanted(same_data=False))
    assert plain_config(reader) == config


def test_files_that_are_not_what_the_index_says(tmp_path: Path) -> None:
    text = json.dumps(good())
    whole = CheckpointReader(write(tmp_path / "whole", text))
    whole.verify()
    assert whole.read(KEY, 0, 1, 3).shape == (2, 2)
    for name, tensor in (("shape", torch.ones(1, 3)), ("dtype", torch.ones(1, 2, dtype=torch.complex64))):
        folder = write(tmp_path / name, text)
        save_file({KEY: tensor}, folder / "b.safetensors")
        with pytest.raises(CheckpointError, match=SENTENCES["holds_weight_x_as"]):
            CheckpointReader(folder).read(KEY, 0, 0, 3)
    folder = write(tmp_path / "key", text)
    save_file({"other": torch.ones(1, 2)}, folder / "b.safetensors")
    with pytest.raises(CheckpointError, match=SENTENCES["does_not_hold_weight_x"]):
        CheckpointReader(folder).read(KEY, 0, 0, 3)


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    content = good()
    content["config"]["model"]["num_layers"] = "many"
    with pytest.raises(CheckpointError, match=r"checkpoint\.json.*--num-layers"):
        plain_config(CheckpointReader(write(tmp_path / "iter_0000003", json.dumps(content))))


def test_names_that_lead_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("..\n")
    with pytest.raises(CheckpointError, match=SENTENCES["latest_is_damaged"]):
        find_checkpoint(str(tmp_path))
    for line in ("..", "a/b"):
        inside = write(tmp_path / "iter_0000003", json.dumps(good()))
        (inside / "SHA256SUMS").write_text(f"{'0' * 64}  {line}\n")
        with pytest.raises(CheckpointError, match=SENTENCES["line_1_is_damaged"]):
            CheckpointReader(inside)
