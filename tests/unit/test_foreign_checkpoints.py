"""Files and folders that no save has written are never lost, even if they have the name of a checkpoint."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.checkpointing import prune
from megatron.checkpointing.checksums import SHA256
from megatron.checkpointing.files import INDEX, publish, temporary_folder
from megatron.checkpointing.leftovers import delete_leftovers
from megatron.checkpointing.remote import delete_checkpoint
from megatron.storage import RemotePath

NAME = "iter_0000020"


def save(folder: Path, name: str, content: str = "new") -> None:
    """Publish a checkpoint with one file of tensors."""
    final = folder / name
    temporary = temporary_folder(final)
    temporary.mkdir(parents=True)
    (temporary / "weights.safetensors").write_text(content)
    publish(final, temporary, "{}", SHA256, {})


def foreign_folder(path: Path) -> None:
    (path / "inner").mkdir(parents=True)
    (path / "mine.txt").write_text("mine")


def foreign_file(path: Path) -> None:
    path.write_text("mine")


def dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def link_to_a_checkpoint(path: Path) -> None:
    save(path.parent / "elsewhere", NAME, "mine")
    path.symlink_to(path.parent / "elsewhere" / NAME)


def content_of(path: Path) -> dict[str, str]:
    """Return the text of each file and the target of each link in `path`, by name."""
    if path.is_symlink():
        linked = path / "weights.safetensors"
        return {"": str(path.readlink()), "linked": linked.read_text() if linked.is_file() else ""}
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return {str(each.relative_to(path)): each.read_text() for each in files}


@pytest.mark.parametrize("make", [foreign_folder, foreign_file, dangling_link, link_to_a_checkpoint])
def test_what_is_in_the_place_of_a_new_checkpoint_is_kept(
    make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = []
    for number in (1, 2):
        if number == 2:
            (tmp_path / NAME).rename(tmp_path / "iter_0000010")
        make(tmp_path / NAME)
        before.append(content_of(tmp_path / NAME))
        capsys.readouterr()
        save(tmp_path, NAME)
        assert (tmp_path / NAME / "weights.safetensors").read_text() == "new"
        assert f"{NAME}.kept-{number}" in capsys.readouterr().out
    delete_leftovers(tmp_path)
    prune(tmp_path, 1, None)
    assert [content_of(tmp_path / f"{NAME}.kept-{number}") for number in (1, 2)] == before
    assert not list(tmp_path.glob("*.tmp"))


def test_an_earlier_save_of_the_iteration_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, NAME, "old")
    save(tmp_path, NAME)
    (tmp_path / "iter_0000030").mkdir()
    save(tmp_path, "iter_0000030")
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAME, "iter_0000030", "latest"]
    assert not capsys.readouterr().out


def test_pruning_and_cleaning_spare_what_no_save_has_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign_folder(tmp_path / "iter_0000005")
    foreign_file(tmp_path / "iter_0000006")
    foreign_file(tmp_path / "iter_0000007.tmp")
    (tmp_path / "iter_0000008.tmp").mkdir()
    for number in (10, 20, 30):
        save(tmp_path, f"iter_{number:07}")
    assert prune(tmp_path, 1, None) == []
    delete_leftovers(tmp_path)
    names = sorted(path.name for path in tmp_path.glob("iter_*"))
    assert names == ["iter_0000005", "iter_0000006", "iter_0000007.tmp.kept-1", "iter_0000030"]
    assert content_of(tmp_path / "iter_0000005") == {"mine.txt": "mine"}
    assert "iter_0000007.tmp.kept-1" in capsys.readouterr().out


def test_what_users_have_put_into_a_checkpoint_outlives_it(tmp_path: Path) -> None:
    """Pruning, a second save of an iteration and the clean-up after a crash delete only what saves have written."""

    def annotate(folder: Path) -> None:
        (folder / "hf").mkdir()
        (folder / "hf" / "model.safetensors").write_text("export")
        (folder / "NOTES.md").write_text("mine")

    save(tmp_path, "iter_0000010")
    annotate(tmp_path / "iter_0000010")
    (tmp_path / "iter_0000010" / "certificate.json").write_text("{}")  # saves of earlier versions wrote this file
    save(tmp_path, NAME)
    assert prune(tmp_path, 1, None) == []
    annotate(tmp_path / NAME)
    save(tmp_path, NAME)
    crashed = tmp_path / "iter_0000030.tmp"
    crashed.mkdir()
    annotate(crashed)
    for name in ("a.safetensors", f"{INDEX}.17-ab.tmp"):
        (crashed / name).write_text("own")
    delete_leftovers(tmp_path)
    kept = [f"{name}.kept-1" for name in ("iter_0000010", NAME, "iter_0000030")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, NAME, "latest"])
    for name in kept:
        assert content_of(tmp_path / name) == {"NOTES.md": "mine", "hf/model.safetensors": "export"}


def test_pruning_spares_a_link_to_a_checkpoint(tmp_path: Path) -> None:
    link_to_a_checkpoint(tmp_path / "iter_0000010")
    before = content_of(tmp_path / "iter_0000010")
    for number in (20, 30):
        save(tmp_path, f"iter_{number:07}")
    assert prune(tmp_path, 1, None) == []
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000010", "iter_0000030"]
    assert content_of(tmp_path / "iter_0000010") == before


def test_foreign_objects_in_storage_are_spared(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    checkpoint = RemotePath(f"memory://bucket/{tmp_path.name}/{NAME}")
    for name in ("mine.txt", INDEX, "SHA256SUMS", "pipe00-model00-data00.safetensors"):
        (checkpoint / name).write_bytes(b"x")
    delete_checkpoint(checkpoint)
    assert [path.name for path in checkpoint.glob("*")] == ["mine.txt"]
