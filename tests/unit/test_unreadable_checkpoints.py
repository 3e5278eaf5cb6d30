"""Errors about checkpoints, locks and models that cannot be read name the file, its state and the way back."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.checkpointing import CheckpointError, CheckpointReader, find_checkpoint, latest_checkpoint
from megatron.checkpointing.checksums import SHA256
from megatron.checkpointing.files import publish, temporary_folder
from megatron.checkpointing.lookup import resume_advice
from megatron.checkpointing.sums import check_file, read_sums
from megatron.locks.run_lock import RunLock
from megatron_tools.convert.hf_folder import HFTensorReader


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three checkpoints; `latest` names the last of them."""
    for number in (10, 20, 30):
        final = tmp_path / f"iter_{number:07}"
        temporary = temporary_folder(final)
        temporary.mkdir()
        (temporary / "weights.safetensors").write_text(str(number))
        sums = {"weights.safetensors": SHA256.hash_file(temporary / "weights.safetensors")}
        publish(final, temporary, "{}", SHA256, sums)
    return tmp_path


def zeros(folder: Path) -> None:
    (folder / "latest").write_bytes(bytes(80))


def no_name(folder: Path) -> None:
    (folder / "latest").write_text("")


def a_folder(folder: Path) -> None:
    (folder / "latest").unlink()
    (folder / "latest").mkdir()


@pytest.mark.parametrize("damage", [zeros, no_name, a_folder])
def test_a_damaged_latest_names_the_newest_checkpoint(damage: Callable[[Path], None], folder: Path) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match="iter_0000030") as caught:
        latest_checkpoint(folder)
    assert str(folder / "latest") in str(caught.value) and str(caught.value).isprintable()


def gone(path: Path) -> None:
    shutil.rmtree(path)


def dangling(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to("/nowhere/else")


def other_sums(path: Path) -> None:
    (path / "SHA256SUMS").write_text("")


@pytest.mark.parametrize(
    ("damage", "words"), [(gone, "is missing"), (dangling, "/nowhere/else"), (other_sums, "sha256sum -c")]
)
def test_an_unreadable_checkpoint_leads_to_the_one_before(
    damage: Callable[[Path], None], words: str, folder: Path
) -> None:
    damage(folder / "iter_0000030")
    with pytest.raises(CheckpointError, match=f"{words}.* iter_0000020, .*{folder / 'latest'}"):
        latest_checkpoint(folder)


def test_damaged_files_lead_to_the_checkpoint_before_and_never_in_circles(folder: Path) -> None:
    names = []
    for number in (30, 20, 10):
        path = folder / f"iter_{number:07}" / "weights.safetensors"
        content = read_sums(path.parent)["weights.safetensors"]
        path.write_text("damaged")
        with pytest.raises(CheckpointError) as caught:
            check_file(path, SHA256, content)
        names.append(str(caught.value).partition("resume from ")[2].partition(",")[0])
    assert names == ["iter_0000020", "iter_0000010", "iter_0000030"]
    shutil.rmtree(folder / "iter_0000020")
    shutil.rmtree(folder / "iter_0000030")
    (folder / "iter_0000010" / "SHA256SUMS").write_text("damaged\n")
    with pytest.raises(CheckpointError, match=f"line 1.* {folder} has no other checkpoint"):
        CheckpointReader(folder / "iter_0000010")


def test_a_damaged_checkpoint_of_load_leads_to_a_flag_as_latest_does_not_count(folder: Path) -> None:
    (folder / "iter_0000030" / "SHA256SUMS").write_text("damaged\n")
    with pytest.raises(CheckpointError, match=f"--load {folder}/iter_0000020"):
        CheckpointReader(find_checkpoint(str(folder / "iter_0000030")))


def test_iterations_of_eight_digits_are_newer_than_those_of_seven(folder: Path) -> None:
    for number, old in ((9_998_000, 10), (9_999_000, 20), (10_000_000, 30)):
        (folder / f"iter_{old:07}").rename(folder / f"iter_{number}")
    assert resume_advice(folder / "iter_9999000").startswith("to resume from iter_9998000,")
    assert resume_advice(folder / "iter_10000000").startswith("to resume from iter_9999000,")
    (folder / "latest").unlink()
    with pytest.raises(CheckpointError, match="to resume from iter_10000000,"):
        latest_checkpoint(folder)


def test_a_lock_that_is_a_folder_and_a_dangling_run_directory_are_named(tmp_path: Path) -> None:
    (tmp_path / "run" / "run.lock").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"run\.lock is a folder"):
        RunLock(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "link", tmp_path / "link" / "checkpoints"):
        with pytest.raises(ValueError, match=f"{tmp_path / 'link'} is a link to {tmp_path / 'nowhere'}, "):
            RunLock(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "run"]


def test_a_hugging_face_folder_with_dangling_links_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("../../blobs/abc")
    with pytest.raises(ValueError, match=r"model\.safetensors is a link to \.\./\.\./blobs/abc, "):
        HFTensorReader(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(ValueError, match=r"model-1\.safetensors is a link to "):
        HFTensorReader(tmp_path).shape("a")


def test_another_tokenizer_is_named_by_its_path(tmp_path: Path) -> None:
    reader: Any = SimpleNamespace(path=tmp_path, tokenizer="a" * 64)
    CheckpointReader.check_tokenizer(reader, "a" * 64, vocab_file="run/tokenizer/t.model")
    with pytest.raises(CheckpointError, match=r"that of run/tokenizer/t\.model is bbbb"):
        CheckpointReader.check_tokenizer(reader, "b" * 64, vocab_file="run/tokenizer/t.model")
