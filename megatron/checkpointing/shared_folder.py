"""Check that all hosts of a run share the folder of its checkpoints, before the first step."""

import contextlib
import os
import socket
import time
import uuid
from pathlib import Path

import torch.distributed as dist

from megatron.config import Config
from megatron.config.messages import describe_error
from megatron.ranks.errors import RunError
from megatron.ranks.objects import broadcast_from_rank_0, gather_objects
from megatron.ranks.rank_0 import is_rank_0, print_notes
from megatron.storage import RemotePath

from .leftovers import PROBE_PREFIX

VISIBILITY_TIMEOUT = 30.0  # seconds until a new file is taken as missing; NFS caches the entries of a folder this long


def check_shared(folder: Path, config: Config) -> None:
    """Raise RunError on all ranks if a host does not see what rank 0 writes to `folder`, or cannot write there.

    Print a note instead if the run is not to save checkpoints, or if rank 0 itself cannot write to its disk, since the
    first save may find the disk repaired.
    """
    settings = config.checkpoint
    flag = "--save" if settings.save else "--run-dir"
    saves = settings.save_interval or settings.save_at_end or settings.exit_interval
    # All ranks use the random name of rank 0, which writes the file; all get its error, None if there is none.
    probe = folder / broadcast_from_rank_0(f"{PROBE_PREFIX}{uuid.uuid4().hex}")
    write_error = broadcast_from_rank_0(_write_probe(probe) if is_rank_0() else None)
    if write_error and isinstance(folder, RemotePath):
        raise RunError(write_error)
    if write_error:
        print_notes([f"no test whether all nodes share {folder}: {write_error}"])
        return
    # One rank of each host looks for the file, except on the host of rank 0.
    takes_part = os.environ.get("LOCAL_RANK", "0") == "0" and not is_rank_0()
    try:
        own_problem = _find_problem(probe, flag) if takes_part else None
        problems = gather_objects(own_problem)
    finally:  # after the collective, so all ranks have looked for the file
        if is_rank_0():
            _delete_probe(probe)
    problem = next(filter(None, problems), None)  # that of the lowest rank with a problem
    if problem and saves:
        raise RunError(problem)
    if problem:
        print_notes([problem])


def _write_probe(path: Path) -> str | None:
    """Write a small file; return what went wrong, if anything."""
    try:
        path.write_bytes(path.name.encode())
    except OSError as error:
        return f"{socket.gethostname()} cannot write to {path.parent}: {describe_error(error)}"
    return None


def _delete_probe(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _find_problem(probe: Path, flag: str) -> str | None:
    """Return why this host cannot take part in saves to the folder of `probe`, which rank 0 has written; else None."""
    folder = probe.parent
    try:
        is_visible = _wait_for(probe)
    except OSError as error:
        return f"{socket.gethostname()} cannot read {folder}: {describe_error(error)}"
    if not is_visible and isinstance(folder, RemotePath):
        return (
            f"{flag} {folder}: {socket.gethostname()} does not see what rank 0 writes there; give all nodes the same "
            "endpoint and account of the storage"
        )
    if not is_visible:
        return (
            f"{flag} {folder} is not on a disk that all nodes share: {socket.gethostname()} does not see what rank 0 "
            "writes there; give a folder on a shared disk, or a URL of object storage"
        )
    own_probe = probe.with_name(f"{probe.name}-{dist.get_rank()}")
    write_error = _write_probe(own_probe)
    _delete_probe(own_probe)
    return write_error


def _wait_for(probe: Path) -> bool:
    """Return whether the file appears within VISIBILITY_TIMEOUT seconds."""
    end = time.monotonic() + VISIBILITY_TIMEOUT
    while not probe.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
        if not isinstance(probe, RemotePath):
            with contextlib.suppress(OSError):
                os.listdir(probe.parent)  # opening a folder makes an NFS client ask the server for its entries
    return True
