"""Saving of checkpoints: every rank writes its share, at once or in a thread, and rank 0 publishes the checkpoint."""

import contextlib
import json
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron import mpu
from megatron.atomic import remove
from megatron.config import Config
from megatron.config.fields import describe
from megatron.ranks.agreement import all_ranks, check_replicas
from megatron.ranks.buffers import fingerprint_buffers
from megatron.ranks.errors import RunError
from megatron.ranks.objects import gather_objects
from megatron.ranks.rank_0 import is_rank_0, print_notes, print_rank_0
from megatron.storage import RemotePath, place
from tds import optimizer_state as zero_state

from .buffers import Buffers, savable
from .checksums import SHA256, preferred
from .files import FORMAT, discard, make_room, publish, publish_remote
from .remote import upload
from .retention import prune
from .share import Part, expected_shapes, list_moments, merge, parts_of, steps_of, values_of, write_share
from .state import TrainState
from .whole import check_complete

SLOW_SECONDS = 300.0  # writing time after which a note is printed; enough for a large share on a slow disk
Place = dict[str, Any]  # location of a piece in its tensor: dim, begin, end, shape


def index_text(
    state: TrainState,
    config: Config,
    fingerprint: str,
    tensors: dict[str, Any],
    optimizer: dict[str, Any] | None = None,
    rng_seed: int | None = None,
    average_of: list[dict[str, Any]] | None = None,
) -> str:
    """Return the text of checkpoint.json. average_of: the checkpoints whose average the weights are."""
    content = {
        "format": FORMAT,
        "state": state.to_dict(),
        "rng_seed": rng_seed,
        "optimizer": optimizer or {"step": 0, "moments": [], "loss_scaler": {}},
        "tokenizer": fingerprint,
        "positions": config.positions,
        "config": config.to_dict(),
        "tensors": tensors,
    } | ({"average_of": average_of} if average_of else {})
    return json.dumps(content, indent=1)


@contextlib.contextmanager
def named_if_slow(path: Path) -> Iterator[None]:
    """Print a note if the `with` block, which writes `path`, takes more than `SLOW_SECONDS`, as on a hanging disk."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    words = (
        f"note: rank {rank} has been writing {path} for {SLOW_SECONDS:g} s; if the disk hangs, this checkpoint never "
        "becomes valid, and the next save waits for it"
    )
    timer = threading.Timer(SLOW_SECONDS, lambda: print(words, flush=True))
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # failing to start a thread for the note must not fail the save
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class SaveError(RunError):
    """A checkpoint could not be written because of the disk; a later attempt may succeed."""


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
        self.folder = place(folder)
        self.engine = engine
        self.config = config
        self._staging = staging if isinstance(self.folder, RemotePath) else None
        self.fingerprint = fingerprint
        self.background = background
        # The checkpoint being saved: its final folder, and the part of checkpoint.json that is known so far.
        self._pending: tuple[Path, dict[str, Any]] | None = None
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()  # set while no copy is being made
        self._copied.set()
        if background:
            zero_state.before_step(engine, self._wait_for_copy)
        self._reports: list[dict[str, Any]] = []
        self._buffers: Buffers | None = None
        self._checksum = preferred()
        self._warned: set[str] = set()
        self._expected: dict[str, list[int]] = {}
        self._steps: dict[str, int] = {}
        self._problem: Exception | None = None  # error while writing this rank's share; `finish` raises it

    def save(self, state: TrainState, wait: bool = False) -> None:
        """Save a checkpoint of `state`.

        wait: finish a background save before returning. Otherwise, the checkpoint becomes valid in `finish`.
        """
        if self.pending:
            self.finish()
        self.begin(state)
        if wait or not (self.background or self._staging):
            self.finish()

    @property
    def pending(self) -> bool:
        """True from `begin` of a save until `finish`; the same on all ranks."""
        return self._pending is not None

    @property
    def busy(self) -> bool:
        """True while a background thread is writing this rank's share."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, state: TrainState) -> None:
        """Write this rank's share of a checkpoint; with background saves, start a thread that copies and writes it.

        Raises RunError if replicas differ or the folder cannot be made. If writing the share fails, `finish` raises the
        error on all ranks.
        """
        assert not self.pending, "finish() comes before the next begin()"
        zero_state.complete_weights(self.engine)
        check_replicas(self.engine)
        final = self.folder / f"iter_{state.iteration:07d}"
        temporary = temporary_of(final)

        with _guarded(temporary):
            self._make_folder(temporary)
        module = self.engine.module
        known = gather_objects(
            (
                zero_state.get_step(self.engine),
                zero_state.moment_names(self.engine),
                fingerprint_buffers(module, savable),
                preferred().name,
            )
        )
        # All ranks use the same algorithm, even if a package is missing on some of them.
        self._checksum = preferred() if len({name for *_, name in known}) == 1 else SHA256
        optimizer: dict[str, Any] = {
            "step": max(step for step, *_ in known),
            "moments": sorted({name for _, names, *_ in known for name in names}),
            "loss_scaler": zero_state.get_loss_scaler(self.engine),
        }
        self._pending = (final, {"state": TrainState(**asdict(state)), "optimizer": optimizer})
        mesh = mpu.get_mesh()
        name = f"pipe{mesh.pipe.rank:02d}-model{mesh.model.rank:02d}-data{mesh.data.rank:02d}"
        path = self._written / f"{name}.safetensors"
        parts = parts_of(self.engine, optimizer["moments"])
        self._buffers = Buffers(module, [held for _, _, held, _ in known])
        self._warn(self._buffers.warnings)
        self._expected = expected_shapes(parts) | self._buffers.expected
        self._steps = steps_of(self.engine, parts, optimizer["step"])
        self._reports = []
        self._problem = None
        values = values_of(self.engine, parts)
        if not self.background:
            self._write(path, parts, values)
            self._start_upload()
            return
        copied = zero_state.reads_copies(self.engine)
        try:
            # Read the values here, because reading a value may be a collective. Move copies off the device at once, as
            # it may have no memory for all of them.
            live = deque((key, value.cpu() if copied else value) for key, value in values)
            stream = zero_state.side_stream(self.engine.device)
            self._copied.clear()
            self._thread = threading.Thread(target=self._copy_and_write, args=(path, parts, live, stream), daemon=True)
            self._thread.start()
        # Memory or threads may be exhausted. Do not raise here: `finish` raises the error on all ranks.
        except Exception as error:
            self._copied.set()
            self._thread, self._problem = None, _named(error)

    def _copy_and_write(
        self, path: Path, parts: list[Part], live: deque[tuple[str, Tensor]], stream: AbstractContextManager[Any]
    ) -> None:
        copies = list[tuple[str, Tensor]]()
        try:
            with stream:
                while live:
                    key, value = live.popleft()
                    copies.append((key, value.to("cpu", copy=True)))
                    del value
        except Exception as error:  # for example, memory may be exhausted
            self._problem = _named(error)
        finally:
            live.clear()
            self._copied.set()
        if self._problem is None:
            self._write(path, parts, copies)
            self._upload()

    def _make_folder(self, temporary: Path) -> None:
        """Make the folder into which this rank writes: on all ranks `temporary`, or a folder of its own for uploads."""
        self._written = temporary
        if isinstance(temporary, RemotePath):
            assert self._staging is not None, "checkpoints in object storage need a folder for their files"
            self._written = self._staging / f"rank-{dist.get_rank() if dist.is_initialized() else 0:05d}"
            if is_rank_0():
                make_room(temporary)
        if is_rank_0() or self._staging:
            remove(self._written)
            self._written.mkdir(parents=True)

    def _start_upload(self) -> None:
        """Start the upload in a thread, without --async-save too."""
        if self._staging is None:
            return
        self._thread = threading.Thread(target=self._upload, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # threads may be exhausted
            self._thread = None
            self._upload()

    def _upload(self) -> None:
        """Upload this rank's share to object storage, if the checkpoint goes there."""
        if self._staging is None or self._problem is not None:
            return
        assert self._pending is not None
        final = self._pending[0]
        assert isinstance(final, RemotePath)
        try:
            with named_if_slow(final):
                upload([self._written / report["file"] for report in self._reports], final)
                remove(self._written)
        except Exception as error:
            self._problem = _named(error)

    def _wait_for_copy(self) -> None:
        self._copied.wait()

    def _warn(self, lines: Iterable[str]) -> None:
        """Print those of the warnings `lines` that this run has not printed before."""
        for line in lines:
            if line not in self._warned:
                self._warned.add(line)
                print_rank_0(line)

    def _write(self, path: Path, parts: list[Part], values: Iterable[tuple[str, Tensor]]) -> None:
        assert self._buffers is not None
        try:
            with named_if_slow(path):
                written = [
                    write_share(path, parts, values, self._checksum),
                    self._buffers.write(path.with_stem(f"{path.stem}-buffers"), self._checksum),
                ]
            self._reports = [report for report in written if report]
        except Exception as error:
            self._problem = _named(error)

    def finish(self) -> Path:
        """Wait for every rank's share, publish the checkpoint and return its folder. Raises RunError on all ranks."""
        assert self._pending is not None
        final, content = self._pending
        temporary = temporary_of(final)
        if self._thread is not None:
            self._thread.join()
        self._pending = self._thread = None

        with _guarded(temporary):
            if self._problem is not None:
                raise self._problem
        every = _gather_on_rank_0((self._reports, self._expected, self._steps))
        with _guarded(temporary):
            if is_rank_0():
                self._publish(final, temporary, content, every)
        print_rank_0(f"saved {final}")
        kept = self.config.checkpoint
        print_notes(prune(self.folder, kept.keep_last, kept.keep_every, content["state"].forks) if is_rank_0() else [])
        return final

    def _publish(self, final: Path, temporary: Path, content: dict[str, Any], every: list[Any]) -> None:
        """Check that the checkpoint is complete and publish it.

        every: for each rank, the tuple (reports of the written files, expected shapes, step counts).
        """
        reports = [report for each, _, _ in every for report in each]
        expected = {key: shape for _, each, _ in every for key, shape in each.items()}
        optimizer = content["optimizer"]
        tensors = merge(reports)
        if steps := {name: step for _, _, each in every for name, step in each.items()}:
            optimizer["steps"] = steps
        optimizer |= list_moments(reports, tensors, optimizer["moments"])
        check_complete(temporary, tensors, expected)
        text = index_text(content["state"], self.config, self.fingerprint, tensors, optimizer, mpu.get_rng().seed)
        sums = {each["file"]: each["sum"] for each in reports}
        with named_if_slow(final):
            if isinstance(final, RemotePath):
                publish_remote(final, text, self._checksum, sums)
            else:
                publish(final, temporary, text, self._checksum, sums)


@contextlib.contextmanager
def _guarded(temporary: Path) -> Iterator[None]:
    """Delete the temporary folder and raise an error on all ranks if the `with` block fails on any rank.

    Raises SaveError if all failures are OSErrors (such as a full disk), else RunError.
    """
    grave = False
    try:
        with all_ranks():
            try:
                yield
            except ValueError as error:
                grave = not isinstance(error.__cause__, OSError)
                raise
    except RunError as error:
        kind = RunError if any(gather_objects(grave)) else SaveError
        if is_rank_0():
            discard(temporary)
        raise kind(f"could not save {temporary.with_suffix('')}: {error}; earlier checkpoints are unchanged") from None


def save_checkpoint(folder: str, engine: Any, state: TrainState, config: Config, fingerprint: str) -> Path:
    """Write a checkpoint of `state.iteration` below `folder` and return its path; all ranks must call this.

    Raises RunError on every rank if any rank cannot write; earlier checkpoints stay intact.
    """
    saver = Saver(folder, engine, config, fingerprint)
    saver.begin(state)
    return saver.finish()


def _named(error: Exception) -> Exception:
    """Return `error` if it is an OSError or ValueError, which `all_ranks` handles, else a ValueError that names it."""
    if isinstance(error, (OSError, ValueError)):
        return error
    return ValueError(f"{type(error).__name__} {describe(error)}" if str(error) else type(error).__name__)


def temporary_of(final: Path) -> Path:
    """Return the folder to write a checkpoint to; in object storage, where nothing can be renamed, its final one."""
    return final if isinstance(final, RemotePath) else final.with_name(final.name + ".tmp")


def _gather_on_rank_0(report: Any) -> list[Any]:
    """Return the reports of all ranks on rank 0, which writes checkpoint.json, and an empty list on other ranks."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    reports = [report] * world if is_rank_0() else []
    if world > 1:
        dist.gather_object(report, reports or None)
    return reports
