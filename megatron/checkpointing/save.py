"""Saving of checkpoints: every rank writes its share of the tensors; rank 0 writes checkpoint.json and publishes it."""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron import mpu
from megatron.atomic import remove
from megatron.config import Config
from megatron.ranks.objects import gather_objects
from megatron.ranks.rank_0 import is_rank_0, print_notes, print_rank_0
from megatron.ranks.replicas import check_replicas
from megatron.storage import RemotePath, to_path
from tds import optimizer_state as zero_state

from .buffers import SavedBuffers
from .failures import discard_on_failure
from .files import FORMAT, publish, temporary_folder
from .share import Report, Share, local_parts, share_file_name, written_values
from .slow import warn_if_slow
from .state import TrainState
from .survey import add_moment_lists, collect_facts, common_checksum, differing_steps, gather_on_rank_0, optimizer_entry
from .whole import check_complete

JsonObject = dict[str, Any]  # an object of checkpoint.json, or of a report


@dataclass
class _PendingSave:
    """A checkpoint that is being saved: its final folder, what of checkpoint.json is known, and this rank's share."""

    final: Path
    state: TrainState
    optimizer: dict[str, Any]
    share: Share


class Saver:
    """Saver of a run's checkpoints into `folder`. All ranks must make the same calls.

    background: a thread copies this rank's share to the CPU and writes the copy. Training continues meanwhile; only an
    optimizer step, which changes the share, waits for the copy.
    staging: folder on this machine for files on their way to object storage; needed if `folder` is a URL. There, a
    thread uploads this rank's share after it has been written, so every save finishes in the background.
    """

    def __init__(
        self,
        folder: str,
        engine: Any,
        config: Config,
        fingerprint: str,
        background: bool = False,
        staging: Path | None = None,
    ) -> None:
        self.folder = to_path(folder)
        self.engine = engine
        self.config = config
        self.fingerprint = fingerprint
        self._pending: _PendingSave | None = None
        self._thread: threading.Thread | None = None
        self._warned = set[str]()  # warnings that were printed, so that later saves do not repeat them
        self._background_copy = self._uploads = None
        if background:
            from .background import BackgroundCopy

            self._background_copy = BackgroundCopy(engine)
        if isinstance(self.folder, RemotePath):
            from .uploads import Uploads

            assert staging is not None, "checkpoints in object storage need a folder for their files"
            self._uploads = Uploads(staging)

    def save(self, state: TrainState, wait: bool = False) -> None:
        """Save a checkpoint of `state`.

        wait: finish a background save before returning. Otherwise, the checkpoint becomes valid in `finish`.
        """
        self.begin(state)
        if wait or not (self._background_copy or self._uploads):
            self.finish()

    @property
    def is_pending(self) -> bool:
        """True from `begin` of a save until `finish`; the same on all ranks."""
        return self._pending is not None

    @property
    def is_writing(self) -> bool:
        """True while a background thread is writing this rank's share."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, state: TrainState) -> None:
        """Write this rank's share of a checkpoint; with background saves, start a thread that copies and writes it.

        Raises RunError if replicas differ or the folder cannot be made. If writing the share fails, `finish` raises the
        error on all ranks.
        """
        assert not self.is_pending, "finish() comes before the next begin()"
        zero_state.wait_for_weights(self.engine)  # an optimizer may still gather them
        check_replicas(self.engine)
        final = self.folder / f"iter_{state.iteration:07d}"
        temporary = temporary_folder(final)
        # The end of this block is a collective, so no rank writes before rank 0 has made the folder.
        with discard_on_failure(temporary):
            folder = temporary  # one folder for all ranks; `finish` renames it to `final`
            if self._uploads is not None:
                folder = self._uploads.prepare(final)  # a folder of this rank; its files are uploaded to `final`
            elif is_rank_0():
                remove(folder)
                folder.mkdir(parents=True)

        facts = gather_objects(collect_facts(self.engine))  # step count, moments, buffers, checksum of each rank
        optimizer = optimizer_entry(facts, self.engine)
        parts = local_parts(self.engine, optimizer["moments"])
        buffers = SavedBuffers(self.engine.module, [each.buffers for each in facts])
        for warning in buffers.warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                print_rank_0(warning)

        steps = differing_steps(self.engine, parts, optimizer["step"])  # such as those of weights frozen for a while
        share = Share(folder / share_file_name(), parts, buffers, common_checksum(facts), steps)
        # The state is copied, because training changes it during a background save.
        self._pending = _PendingSave(final, TrainState(**asdict(state)), optimizer, share)
        self._write(share, final)

    def _write(self, share: Share, final: Path) -> None:
        """Write the share here, or start the thread that writes or uploads it."""
        values = written_values(self.engine, share.parts)
        uploads = self._uploads

        def write_and_upload(copies: list[tuple[str, Tensor]]) -> None:  # runs in the thread that makes the copies
            share.write(copies)
            if uploads is not None:
                uploads.send(share, final)

        if self._background_copy is not None:
            self._thread = self._background_copy.start(values, write_and_upload, share.record_error)
            return
        share.write(values)
        if uploads is not None:
            self._thread = uploads.start(share, final)  # the files are complete here, so a thread uploads them

    def finish(self) -> Path:
        """Wait for every rank's share, publish the checkpoint and return its folder. Raises RunError on all ranks."""
        assert self._pending is not None
        pending = self._pending
        share = pending.share
        temporary = temporary_folder(pending.final)
        if self._thread is not None:
            self._thread.join()
        self._pending = None  # even if the save failed
        self._thread = None
        with discard_on_failure(temporary):
            if share.error is not None:  # an error of one rank is raised on all ranks
                raise share.error
        reports = gather_on_rank_0(share.report())
        with discard_on_failure(temporary):
            if is_rank_0():
                self._publish(pending, reports)
        print_rank_0(f"saved {pending.final}")
        settings = self.config.checkpoint
        if settings.keep_last is not None and is_rank_0():
            from .retention import prune

            forks = pending.state.forks
            print_notes(prune(self.folder, settings.keep_last, settings.keep_every, forks, settings.save_interval))
        return pending.final

    def _publish(self, pending: _PendingSave, reports: Sequence[Report]) -> None:
        """Merge the reports of all ranks, check that the checkpoint is complete, and publish it."""
        final = pending.final
        optimizer = pending.optimizer
        files: list[JsonObject] = []
        expected: dict[str, list[int]] = {}  # key -> shape of each tensor that must exist
        steps: dict[str, int] = {}  # name -> step count, where it differs from the optimizer's
        for report in reports:
            files += report.files
            expected |= report.expected
            steps |= report.steps
        tensors = _merge_tensors(files)
        check_complete(temporary_folder(final), tensors, expected)
        if steps:
            optimizer["steps"] = steps
        add_moment_lists(optimizer, files, tensors)  # names of the weights that lack moments or are frozen
        sums = {file["file"]: file["sum"] for file in files}
        seed = mpu.get_rng().seed
        text = index_text(pending.state, self.config, self.fingerprint, tensors, optimizer, seed)
        checksum = pending.share.checksum  # the algorithm, the same on all ranks; `sums` has the values
        with warn_if_slow(final):
            if isinstance(final, RemotePath):
                from .uploads import publish_remote

                publish_remote(final, text, checksum, sums)
            else:
                publish(final, temporary_folder(final), text, checksum, sums)


def index_text(
    state: TrainState,
    config: Config,
    fingerprint: str,
    tensors: JsonObject,
    optimizer: JsonObject | None = None,
    rng_seed: int | None = None,
    average_of: list[JsonObject] | None = None,
) -> str:
    """Return the text of checkpoint.json. average_of: the checkpoints whose average the weights are."""
    content = {
        "format": FORMAT,
        "state": state.to_dict(),
        "rng_seed": rng_seed,
        "optimizer": optimizer or {"step": 0, "moments": [], "loss_scaler": {}},  # imported weights have no such state
        "tokenizer": fingerprint,
        "positions": config.positions,
        "config": config.to_dict(),
        "tensors": tensors,
    }
    if average_of:
        content["average_of"] = average_of
    return json.dumps(content, indent=1)


def _merge_tensors(files: Sequence[Mapping[str, Any]]) -> JsonObject:
    """Return key -> full shape, split dimension and pieces of each tensor in the reports `files`.

    Several stages hold and write the parameters of the PipelineModule itself, and those parameters of a tied module
    that are not tied. For such a parameter, the result names the file of the stage on which it gets gradients.
    """
    tensors: JsonObject = {}
    pieces: dict[tuple[str, int], JsonObject] = {}  # (key, first row) -> piece
    for file in files:
        for key, placement in file["tensors"].items():
            begin = placement["begin"]
            name = key.split(".", 1)[1]  # e.g. "layers.0.mlp.weight" of "exp_avg.layers.0.mlp.weight"
            tensors.setdefault(key, {"shape": placement["shape"], "dim": placement["dim"], "pieces": []})
            # A stage on which the parameter gets gradients replaces another one.
            if (key, begin) not in pieces or name in file["with_gradient"]:
                pieces[key, begin] = {"file": file["file"], "begin": begin, "end": placement["end"]}
    for (key, _), piece in pieces.items():
        tensors[key]["pieces"].append(piece)
    return tensors


def save_checkpoint(folder: str, engine: Any, state: TrainState, config: Config, fingerprint: str) -> Path:
    """Write a checkpoint of `state.iteration` below `folder` and return its path; all ranks must call this.

    Raises RunError on every rank if any rank cannot write; earlier checkpoints stay intact.
    """
    saver = Saver(folder, engine, config, fingerprint)
    saver.begin(state)
    return saver.finish()
