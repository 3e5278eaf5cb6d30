"""Any damaged byte of a checkpoint is detected; full disks, crashes and pruning leave earlier checkpoints intact."""

import errno
import importlib
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing import CheckpointError, CheckpointReader, find_checkpoint, find_start
from megatron.config.command_line import parse
from megatron.ranks.errors import RunError
from tests.support import ROOT, RankFailure, covering, on_ranks

from .runs import MODELS, Start, run_all


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny_data: str, vocab_file: str) -> Path:
    """The checkpoints/ folder of a run with two pipeline stages."""
    run_dir = tmp_path_factory.mktemp("saved")
    flags = "--pipe-parallel-size 2 --precision fp32 --train-iters 2 --save-interval 1"
    on_ranks(2, run_all, [Start("gpt2", run_dir, flags)], tiny_data, vocab_file)
    return run_dir / "checkpoints"


def files_of(folder: Path) -> list[Path]:
    newest = folder / "iter_0000002"
    found = [folder / "latest", *sorted(newest.iterdir())]
    names = ["BLAKE3SUMS", "checkpoint.json", *(f"pipe0{i}-model00-data00.safetensors" for i in range(2))]
    assert [path.name for path in found] == ["latest", *names]
    return found


def refusal(folder: Path) -> str:
    try:
        CheckpointReader(find_checkpoint(str(folder))).verify()
    except CheckpointError as error:
        return str(error)
    return ""


def test_any_flipped_byte_is_found_and_the_file_is_named(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    assert refusal(folder) == ""
    dice = random.Random(3)
    for path in files_of(folder):
        good = path.read_bytes()
        places = range(len(good)) if len(good) < 500 else dice.sample(range(len(good)), 200)
        for at in places:
            raw = bytearray(good)
            raw[at] ^= 1 << dice.randrange(8)
            path.write_bytes(raw)
            assert path.name in refusal(folder), f"byte {at} of {path.name}"
        path.write_bytes(good)
    assert refusal(folder) == ""


def test_any_cut_or_missing_file_is_found_and_named(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    dice = random.Random(4)
    for path in files_of(folder):
        good = path.read_bytes()
        for length in {0, len(good) - 1, *(dice.randrange(len(good)) for _ in range(20))}:
            path.write_bytes(good[:length])
            # Two cuts leave `latest` valid: one removes the final newline, the other all but the checkpoint's name.
            harmless = path.name == "latest" and good[:length].strip() in (b"iter_0000002", good.strip())
            assert (path.name in refusal(folder)) != harmless, f"{path.name} cut to {length}"
        path.unlink()
        assert path.name in refusal(folder)
        path.write_bytes(good)
    shutil.rmtree(folder / "iter_0000002")
    assert "names iter_0000002, but " in refusal(folder) and "iter_0000001, write" in refusal(folder)
    (folder / "latest").write_text("iter_0000001\n")  # the error message tells the user to write this line
    assert refusal(folder) == ""


# ------------------------------------------------------------------------ disks that cannot be written


def _in_own_mounts(script: str) -> "subprocess.CompletedProcess[str]":
    """Run a shell script that may mount file systems; skip the test if unprivileged users cannot mount."""
    unshare = shutil.which("unshare")
    probe = [unshare or "unshare", "-Urm", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    if unshare is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("this system does not let a user mount a tmpfs of his own")
    return subprocess.run(
        [unshare, "-Urm", "sh", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


DISKS = [("full", "--async-save"), ("read-only", ""), ("full", ""), ("read-only", "--async-save")]


@pytest.mark.parametrize("how", covering(DISKS, DISKS[:1].__contains__))
def test_a_disk_that_takes_no_more(how: tuple[str, str], tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """A full or read-only disk ends the run with one sentence; the earlier checkpoint stays loadable."""
    obstacle, more = how
    disk, after = tmp_path / "disk", tmp_path / "after"
    disk.mkdir()
    argv = f"{MODELS['gpt2']} --data-path {tiny_data} --vocab-file {vocab_file} --precision fp32 --save {disk} "
    argv += f"--run-dir {tmp_path / 'run'} --batch-size 2 {more}"
    train = f"{sys.executable} pretrain_gpt2.py {argv}"
    # The disk has 1.5 MB and a checkpoint 0.9 MB, so only the first one fits.
    between = f"mount -o remount,ro {disk}" if obstacle == "read-only" else "true"
    script = f"""
        export OMP_NUM_THREADS=1
        mount -t tmpfs -o size=1500k tmpfs {disk}
        {train} --train-iters 2 || exit 90
        {between}
        {train} --train-iters 4; code=$?
        cp -r {disk} {after}
        exit $code"""
    done = _in_own_mounts(script)
    assert done.returncode == 1, (done.returncode, done.stderr)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    if obstacle == "full":
        assert f"could not save {disk}/iter_0000004: No space left on device" in lines[0]
        assert "earlier checkpoints are unchanged" in lines[0]
    else:
        assert f"cannot write to the folder of checkpoints {disk}: Read-only file system" in lines[0]
    assert sorted(path.name for path in after.iterdir()) == ["iter_0000002", "latest", "tokenizer"]
    assert refusal(after) == ""


OPEN = "megatron.checkpointing.stream.safe_open"  # opens each file of a finished checkpoint to check its header


def _save_with_failures(start: Start, broken: str, failures: int, data: str, vocab_file: str) -> str:
    """Do a run in which a function of a module fails `failures` times with EIO; return the error that ends the run."""
    module, name = broken.rsplit(".", 1)
    home = importlib.import_module(module)
    honest, left = getattr(home, name), [failures]

    def fails(*args: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EIO, "Input/output error")
        return honest(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(home, name, fails)
        try:
            run_all([start], data, vocab_file)
        except RuntimeError as error:
            assert isinstance(error.__cause__, RunError)
            return str(error.__cause__)
    return ""


@pytest.mark.parametrize("more", ["", "--async-save"])
@pytest.mark.parametrize("broken", [OPEN, "megatron.checkpointing.retention._names_to_delete"])
def test_an_error_of_the_disk_after_writing_is_tolerated(
    broken: str, more: str, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """Reading a finished checkpoint for its check, or deleting old ones, may fail as writing may."""
    start = Start("gpt2", tmp_path, f"--train-iters 3 --save-interval 1 --keep-last 1 --precision fp32 {more}")
    assert on_ranks(1, _save_with_failures, start, broken, 1, tiny_data, vocab_file) == [""]
    assert refusal(tmp_path / "checkpoints") == ""


@pytest.mark.parametrize(("failures", "ends"), [(1, False), (2, True)])
@pytest.mark.parametrize("more", ["", "--async-save"])
def test_the_last_save_is_repeated_and_must_succeed(
    more: str, failures: int, ends: bool, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    start = Start("gpt2", tmp_path, f"--train-iters 2 --save-interval 2 --no-save-at-end --precision fp32 {more}")
    (error,) = on_ranks(1, _save_with_failures, start, OPEN, failures, tiny_data, vocab_file)
    assert ("could not save" in error) == ends
    assert (tmp_path / "checkpoints" / "latest").exists() != ends


def test_pruning_never_takes_what_latest_names(saved: Path, tmp_path: Path) -> None:
    """Pruning keeps the checkpoint that `latest` names, even if a user changed `latest` to an older checkpoint."""
    from megatron.checkpointing import prune
    from megatron.checkpointing.files import point_latest_to

    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    point_latest_to(folder / "iter_0000001")
    prune(folder, 1, None)
    assert refusal(folder) == ""
    assert sorted(path.name for path in folder.iterdir()) == ["iter_0000001", "iter_0000002", "latest"]


def test_pruning_keeps_the_branch_that_goes_on(saved: Path, tmp_path: Path) -> None:
    """Pruning keeps checkpoints 4 and 5 if a user sets a run back from iteration 8 to 4 and the run saves 5."""
    from megatron.checkpointing import prune

    folder = tmp_path / "checkpoints"
    for n in (2, 3, 4, 5, 6, 8):
        shutil.copytree(saved / "iter_0000001", folder / f"iter_{n:07d}")
    (folder / "latest").write_text("iter_0000005\n")
    assert prune(folder, 2, None) == []
    assert sorted(int(path.name[5:]) for path in folder.glob("iter_*")) == [4, 5, 6, 8]
    (folder / "latest").write_text("iter_0000008\n")
    prune(folder, 2, None)
    assert sorted(int(path.name[5:]) for path in folder.glob("iter_*")) == [6, 8]


def test_pruning_keeps_what_was_saved_at_a_multiple_if_the_last_steps_were_skipped(tmp_path: Path) -> None:
    """The saves at iterations 4, 8, ... 20 have the numbers 4, 7, 11, 16 and 20; those at 8 and 16 must stay."""
    from megatron.checkpointing import prune

    for number in (4, 7, 11, 16, 20):
        name = f"iter_{number:07d}"
        (tmp_path / name).mkdir()
        (tmp_path / "latest").write_text(f"{name}\n")
        assert prune(tmp_path, 1, 8, save_interval=4) == []
    assert sorted(int(path.name[5:]) for path in tmp_path.glob("iter_*")) == [7, 16, 20]


def test_a_crash_while_the_same_iteration_is_saved_again(saved: Path, tmp_path: Path) -> None:
    """The old checkpoint of this iteration is restored if a run crashes while it saves an iteration again."""
    from megatron.checkpointing.leftovers import delete_leftovers, restore_replaced

    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    (folder / "iter_0000002").rename(folder / "iter_0000002.old.tmp")
    (folder / "iter_0000002.tmp").mkdir()
    assert "iter_0000002 is missing" in refusal(folder)
    restore_replaced(folder)
    delete_leftovers(folder)
    assert refusal(folder) == ""
    assert sorted(path.name for path in folder.iterdir()) == ["iter_0000001", "iter_0000002", "latest"]


def _enter_own_folder(folder: Path) -> None:
    os.chdir(folder / f"node{os.environ['RANK']}")  # each rank is a machine with its own disk


def _start(folder: Path) -> str:
    _enter_own_folder(folder)
    path = find_start(parse(["--load", "copy"]), "run").path
    return path.name if path else ""


def _finetune(folder: Path, data: str, vocab_file: str) -> None:
    _enter_own_folder(folder)
    flags = "--precision fp32 --pipe-parallel-size 2 --train-iters 1 --finetune --load copy"
    run_all([Start("gpt2", folder / "run", flags)], data, vocab_file)


def test_all_ranks_start_from_one_checkpoint(saved: Path, tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """Rank 0's `latest` decides, as a run that is training may replace it meanwhile; other copies are refused."""
    for node in range(2):
        shutil.copytree(saved, tmp_path / f"node{node}" / "copy")
    other = tmp_path / "node1" / "copy"
    (other / "latest").write_text("iter_0000001\n")
    assert on_ranks(2, _start, tmp_path) == ["iter_0000002", "iter_0000002"]
    on_ranks(2, _finetune, tmp_path, tiny_data, vocab_file)
    shutil.copytree(saved / "iter_0000001", other / "iter_0000002", dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RankFailure, match="iter_0000002/BLAKE3SUMS"):
        on_ranks(2, _finetune, tmp_path, tiny_data, vocab_file)


def test_a_crash_before_latest_gets_the_checksum_of_the_new_save(saved: Path, tmp_path: Path) -> None:
    """The new save of an iteration is complete, but `latest` still has the checksum of the earlier one."""
    from megatron.checkpointing.leftovers import delete_leftovers, restore_replaced

    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    shutil.copytree(folder / "iter_0000002", folder / "iter_0000002.old.tmp")
    shutil.copytree(saved / "iter_0000001", folder / "iter_0000002", dirs_exist_ok=True)  # another save
    assert "damaged" in refusal(folder)
    restore_replaced(folder)
    delete_leftovers(folder)
    assert refusal(folder) == ""
    assert sorted(path.name for path in folder.iterdir()) == ["iter_0000001", "iter_0000002", "latest"]
