"""Checkpoints saved to object storage: upload of each rank's files, and publication without renaming."""

import threading
from collections.abc import Mapping
from pathlib import Path

from megatron.atomic import remove
from megatron.ranks.rank_0 import is_rank_0, own_rank
from megatron.storage import RemotePath

from .checksums import Checksum
from .files import INDEX, format_sums, point_latest_to
from .lookup import complete_beside, latest_name
from .remote import delete_checkpoint, upload_files
from .share import Share
from .slow import warn_if_slow


class Uploads:
    """Files of this rank on their way to object storage. staging: folder on this machine for them."""

    def __init__(self, staging: Path) -> None:
        self.folder = staging / f"rank-{own_rank():05d}"

    def prepare(self, final: Path) -> Path:
        """Return the empty folder into which this rank writes its files; rank 0 makes room for the checkpoint `final`.

        Raises OSError.
        """
        assert isinstance(final, RemotePath)
        if is_rank_0():
            make_room(final)
        remove(self.folder)
        self.folder.mkdir(parents=True)
        return self.folder

    def start(self, share: Share, final: Path) -> threading.Thread | None:
        """Upload the share in a thread and return the thread; if threads are exhausted, upload here and return None."""
        thread = threading.Thread(target=self.send, args=(share, final), daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self.send(share, final)
            return None
        return thread

    def send(self, share: Share, final: Path) -> None:
        """Upload the written files of `share` to the checkpoint `final`, and delete them here."""
        if share.error is not None:
            return
        assert isinstance(final, RemotePath)
        files = [self.folder / report["file"] for report in share.file_reports]
        try:
            with warn_if_slow(final):
                upload_files(files, final)
                remove(self.folder)
        except Exception as error:
            share.record_error(error)


def publish_remote(final: RemotePath, index: str, checksum: Checksum, sums: Mapping[str, str]) -> None:
    """Turn the uploaded tensor files in `final` into a checkpoint, and make `latest` name it.

    The checkpoint counts as one as soon as checkpoint.json, which is written last, is there.
    """
    data = index.encode()
    digest = checksum.new_hash()
    digest.update(data)
    all_sums = {INDEX: digest.hexdigest(), **sums}
    (final / checksum.sums_name).write_bytes(format_sums(all_sums).encode())
    (final / INDEX).write_bytes(data)
    point_latest_to(final)
    for copy in final.parent.glob("iter_*.old.tmp"):  # see make_room
        delete_checkpoint(copy)


def make_room(final: RemotePath) -> None:
    """Delete what is at `final`, such as an earlier save of the same iteration.

    If `latest` names this checkpoint, it first gets the name of the newest of the other complete ones. If there is no
    other one, this checkpoint is copied, so that a run can always resume; `publish_remote` deletes the copy.
    """
    folder = final.parent
    if latest_name(folder) == final.name:
        others = complete_beside(final)
        successor = folder / others[-1] if others else _copy_as_old_save(final)
        point_latest_to(successor)
    delete_checkpoint(final)


def _copy_as_old_save(checkpoint: RemotePath) -> RemotePath:
    """Copy a checkpoint, so that a run can resume while it is replaced; return the copy."""
    copy = checkpoint.with_name(checkpoint.name + ".old.tmp")
    delete_checkpoint(copy)
    for path in sorted(checkpoint.glob("*"), key=lambda path: path.name == INDEX):  # the index is copied last
        path.copy_to(copy / path.name)
    return copy
