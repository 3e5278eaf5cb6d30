"""Nodes that do not share the folder of the checkpoints are refused before the first step."""

import contextlib
import errno
import io
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.checkpointing import shared_folder
from megatron.checkpointing.shared_folder import check_shared
from megatron.config.command_line import parse
from megatron.ranks.errors import RunError
from megatron.storage import to_path
from tests.support import on_ranks

NOTHING_SAVED = ["--save-interval", "0", "--no-save-at-end"]


def _check(folders: list[str], saves: bool, readonly: int | None) -> str:
    """Check folders[rank], as if each rank were on its own node; return the error, or else the notes."""
    os.environ["LOCAL_RANK"] = "0"
    shared_folder.VISIBILITY_TIMEOUT = 0.5
    folder = to_path(folders[dist.get_rank()])
    notes = io.StringIO()
    with contextlib.redirect_stdout(notes), pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == readonly:
            patch.setattr(Path, "write_bytes", _refuse)
        try:
            check_shared(folder, parse(["--save", str(folder), "--run-dir", "run", *([] if saves else NOTHING_SAVED)]))
        except RunError as error:
            return f"refused: {error}"
    return notes.getvalue()


def _refuse(path: Path, data: bytes) -> int:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def check(folders: list[str], saves: bool = True, readonly: int | None = None) -> list[str]:
    return on_ranks(2, _check, folders, saves, readonly)


def test_a_shared_folder_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "iter_0000001").mkdir()
    assert check([str(tmp_path)] * 2) == ["", ""]
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000001"]


def test_separate_folders_are_refused_unless_nothing_is_saved(tmp_path: Path) -> None:
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    for folder in folders:
        Path(folder).mkdir()
    for words in check(folders):
        assert words.startswith("refused: ") and "--save" in words
    noted, silent = check(folders, saves=False)
    assert noted.startswith("note: ") and silent == ""
    assert not any(any(Path(folder).iterdir()) for folder in folders)


@pytest.mark.parametrize("readonly", [0, 1])
def test_a_folder_that_a_node_cannot_write(readonly: int, tmp_path: Path) -> None:
    """The first save reports a full or read-only disk of rank 0, as before; other nodes are refused."""
    words = check([str(tmp_path)] * 2, readonly=readonly)
    if readonly == 0:
        assert words[0].startswith("note: ") and words[1] == ""
    else:
        assert all(each.startswith("refused: ") for each in words)


def test_object_storage_that_is_not_the_same_everywhere() -> None:
    """With memory://, each process has a storage of its own."""
    for words in check(["memory://bucket/run"] * 2):
        assert words.startswith("refused: ") and "memory://bucket/run" in words
