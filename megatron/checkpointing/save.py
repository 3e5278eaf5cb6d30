"""Saving: every rank writes its share, at once or in the background, and rank 0 makes the whole of it valid."""

import contextlib
import json
import math
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron import mpu
from megatron.atomic import remove
from megatron.config import Config
from megatron.config.fields import describe
from megatron.model.layers import global_parameters
from megatron.ranks.agreement import check_replicas
from megatron.ranks.errors import RunError, on_all_ranks
from megatron.ranks.rank_0 import is_rank_0, print_rank_0
from tds import optimizer_state as zero_state
from tds.pipe import is_pipeline

from .buffers import Buffers, survey
from .files import FORMAT, WEIGHT, publish
from .retention import prune
from .state import TrainState
from .stream import Entry, Slot, StreamWriter, write_entries
from .whole import check_whole

SLOW_SECONDS = 300.0  # a large share on a slow disk takes as long; a note does no harm then
Place = dict[str, Any]  # of a piece in its whole: dim, begin, end, shape


class _Part(NamedTuple):
    """A parameter, what there is of it (its weight, its moments), whether this rank writes it, and whether other stages do as well."""

    name: str
    parameter: nn.Parameter
    kinds: list[str]
    mine: bool
    shared: bool = False


def index_text(
    state: TrainState,
    config: Config,
    fingerprint: str,
    tensors: dict[str, Any],
    optimizer: dict[str, Any] | None = None,
    rng_seed: int | None = None,
) -> str:
    """checkpoint.json."""
    content = {
        "format": FORMAT,
        "state": asdict(state),
        "rng_seed": rng_seed,
        "optimizer": optimizer or {"step": 0, "moments": [], "loss_scaler": {}},
        "tokenizer": fingerprint,
        "positions": config.positions,
        "config": config.to_dict(),
        "tensors": tensors,
    }
    return json.dumps(content, indent=1)


@contextlib.contextmanager
def named_if_slow(path: Path) -> Iterator[None]:
    """Around the writing of `path`: print a note when it has taken `SLOW_SECONDS`, as on a disk that does not answer."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    words = (
        f"note: rank {rank} has been writing {path} for {SLOW_SECONDS:g} s; if its disk does not answer, the checkpoint is never "
        f"valid, and the next save waits for it"
    )
    timer = threading.Timer(SLOW_SECONDS, lambda: print(words, flush=True))
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # no thread for a note is no reason to fail
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class SaveError(RunError):
    """The disk did not take a checkpoint; another time it may."""


class Saver:
    """Saves the checkpoints of a run into `folder`.

    background: training goes on as soon as this rank's share is copied; a thread writes it.
    All ranks must make the same calls.
    """

    def __init__(self, folder: str, engine: Any, config: Config, fingerprint: str, background: bool = False) -> None:
        self.folder, self.engine, self.config = Path(folder), engine, config
        self.fingerprint, self.background = fingerprint, background
        self._pending: tuple[Path, dict[str, Any]] | None = None  # final folder, what the index needs of that moment
        self._thread: threading.Thread | None = None
        self._reports: list[dict[str, Any]] = []
        self._buffers: Buffers | None = None
        self._warned: set[str] = set()
        self._expected: dict[str, list[int]] = {}
        self._steps: dict[str, int] = {}
        self._problem: Exception | None = None  # one that `on_all_ranks` knows

    def save(self, state: TrainState, wait: bool = False) -> None:
        """A checkpoint of now. In the background, unless `wait`, it is valid once `finish` was called."""
        if self.pending:
            self.finish()
        self.begin(state)
        if wait or not self.background:
            self.finish()

    @property
    def pending(self) -> bool:
        """A save has begun that `finish` has not ended; alike on all ranks."""
        return self._pending is not None

    @property
    def busy(self) -> bool:
        """This rank's share is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, state: TrainState) -> None:
        """Write this rank's share of a checkpoint of `state.iteration`, or copy it and let a thread write. Raises RunError.

        What goes wrong with this rank's own share, `finish` says on all ranks.
        """
        assert not self.pending, "finish() comes before the next begin()"
        check_replicas(self.engine)
        final = self.folder / f"iter_{state.iteration:07d}"
        temporary = _temporary(final)

        def prepare() -> None:
            if is_rank_0():
                remove(temporary)
                temporary.mkdir(parents=True)

        self._guard(prepare, temporary)
        module = self.engine.module
        known = _gather((zero_state.get_step(self.engine), zero_state.moment_names(self.engine), survey(module)))
        optimizer: dict[str, Any] = {
            "step": max(step for step, _, _ in known),
            "moments": sorted({name for _, names, _ in known for name in names}),
            "loss_scaler": zero_state.get_loss_scaler(self.engine),
        }
        self._pending = (final, {"state": TrainState(**asdict(state)), "optimizer": optimizer})
        mesh = mpu.get_mesh()
        path = temporary / f"pipe{mesh.pipe.rank:02d}-model{mesh.model.rank:02d}-data{mesh.data.rank:02d}.safetensors"
        parts = _parts(self.engine, optimizer["moments"])
        self._buffers = Buffers(module, [told for _, _, told in known])
        self._warn(self._buffers.warnings)
        self._expected = _expected(parts) | self._buffers.expected
        self._steps = _steps(self.engine, parts, optimizer["step"])
        self._reports, self._problem = [], None
        values = _values(self.engine, parts)
        if not self.background:
            self._write(path, parts, values)
            return
        try:
            copies = _copies(values)
            self._thread = threading.Thread(target=self._write, args=(path, parts, copies), daemon=True)
            self._thread.start()
        except Exception as error:  # no memory, no thread: the others must hear of it
            self._thread, self._problem = None, _named(error)

    def _warn(self, lines: Iterable[str]) -> None:
        """Print each of these lines once in a run."""
        for line in lines:
            if line not in self._warned:
                self._warned.add(line)
                print_rank_0(line)

    def _write(self, path: Path, parts: list[_Part], values: Iterable[tuple[str, Tensor]]) -> None:
        assert self._buffers is not None
        try:
            with named_if_slow(path):
                written = [
                    _write_share(path, parts, values),
                    self._buffers.write(path.with_stem(f"{path.stem}-buffers")),
                ]
            self._reports = [report for report in written if report]
        except Exception as error:
            self._problem = _named(error)

    def finish(self) -> Path:
        """Wait for every rank's share, then make the checkpoint valid. Returns its folder. Raises RunError alike on all ranks."""
        assert self._pending is not None
        final, content = self._pending
        temporary = _temporary(final)
        if self._thread is not None:
            self._thread.join()
        self._pending = self._thread = None

        def settle() -> None:
            if self._problem is not None:
                raise self._problem

        self._guard(settle, temporary)
        told = _gather((self._reports, self._expected, self._steps), to_all=False)
        reports = [report for each, _, _ in told for report in each]
        expected = {key: shape for _, each, _ in told for key, shape in each.items()}
        if steps := {name: step for _, _, each in told for name, step in each.items()}:
            content["optimizer"]["steps"] = steps

        def make_valid() -> None:
            if is_rank_0():
                seed = mpu.get_rng().seed
                tensors = _merge(reports)
                content["optimizer"]["without_moments"] = _without_moments(tensors, content["optimizer"]["moments"])
                check_whole(temporary, tensors, expected)
                text = index_text(
                    config=self.config, fingerprint=self.fingerprint, tensors=tensors, rng_seed=seed, **content
                )
                with named_if_slow(final):
                    publish(final, temporary, text, {report["file"]: report["sha256"] for report in reports})

        self._guard(make_valid, temporary)
        print_rank_0(f"saved {final}")
        kept = self.config.checkpoint
        for note in prune(self.folder, kept.keep_last, kept.keep_every) if is_rank_0() else []:
            print_rank_0(f"note: {note}")
        return final

    def _guard(self, action: Any, temporary: Path) -> None:
        """Run on all ranks; where it fails on one, no half-written folder stays. Raises SaveError if only disks are to blame."""
        grave = False

        def noted() -> None:
            nonlocal grave
            try:
                action()
            except ValueError:
                grave = True
                raise

        try:
            on_all_ranks(noted)
        except RunError as error:
            kind = RunError if any(_gather(grave)) else SaveError
            if is_rank_0():
                shutil.rmtree(temporary, ignore_errors=True)
            raise kind(
                f"could not save {temporary.with_suffix('')}: {error}; earlier checkpoints are as they were"
            ) from None


def save_checkpoint(folder: str, engine: Any, state: TrainState, config: Config, fingerprint: str) -> Path:
    """Write a checkpoint of `state.iteration` into `folder`; all ranks must call this. Returns its own folder there.

    Raises RunError on every rank if any rank cannot write; earlier checkpoints stay as they are.
    """
    saver = Saver(folder, engine, config, fingerprint)
    saver.begin(state)
    return saver.finish()


def write_checkpoint(final: Path, entries: Sequence[Entry], config: Config, fingerprint: str) -> None:
    """A checkpoint of whole weights from elsewhere, before any training: one process, one tensor at a time."""
    temporary = _temporary(final)
    remove(temporary)
    temporary.mkdir(parents=True)
    name = "weights.safetensors"
    try:
        sums = {name: write_entries(temporary / name, entries)}
        tensors = {
            e.name: {"shape": list(e.shape), "dim": 0, "pieces": [{"file": name, "begin": 0, "end": e.shape[0]}]}
            for e in entries
        }
        publish(final, temporary, index_text(TrainState(), config, fingerprint, tensors), sums)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _named(error: Exception) -> Exception:
    """What went wrong, as an error that ranks tell each other of: of what no user can have meant, with its kind."""
    if isinstance(error, (OSError, ValueError)):
        return error
    return ValueError(f"{type(error).__name__} {describe(error)}" if str(error) else type(error).__name__)


def _copies(values: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Of all of them, on the CPU. Goes through to the end whatever happens, as reading may be a collective."""
    copied: list[tuple[str, Tensor]] = []
    problem: Exception | None = None
    for key, value in values:
        if problem is None:
            try:
                copied.append((key, value.to("cpu", copy=True)))
            except Exception as error:
                problem = error
                copied.clear()
    if problem is not None:
        raise problem
    return copied


def _temporary(final: Path) -> Path:
    return final.with_name(final.name + ".tmp")


def _parts(engine: Any, moments: list[str]) -> list[_Part]:
    """Every parameter of this rank; its data-parallel copies share out the writing, the largest first."""
    mesh = mpu.get_mesh()
    every = list(global_parameters(engine.module))
    load = [0] * mesh.data.size
    writer = {}
    for name, parameter in sorted(every, key=lambda item: -math.prod(mpu.spec_of(item[1]).local_shape)):
        writer[name] = load.index(min(load))
        load[writer[name]] += math.prod(mpu.spec_of(parameter).local_shape)
    parts = []
    for name, parameter in every:
        _, begin, end = mpu.spec_of(parameter).rows  # a rank may hold nothing but padding of the vocabulary
        mine = writer[name] == mesh.data.rank and mpu.counts_here(parameter, mesh.model.rank) and begin < end
        if name.startswith("loss_fn."):  # on all stages, but only the last one learns it
            mine = mine and mesh.pipe.rank == mesh.pipe.size - 1
        kinds = [WEIGHT, *(moments if zero_state.has_moments(engine, parameter) else [])]
        parts.append(_Part(name, parameter, kinds, mine, _is_on_every_stage(engine.module, name)))
    return parts


def _is_on_every_stage(model: Any, name: str) -> bool:
    """Return whether `name` is outside of the layers of a PipelineModule: in a tied module, or held by the PipelineModule itself."""
    return is_pipeline(model) and not hasattr(model, "named_layers") and name.split(".")[0] not in model.fwd_map


def _expected(parts: list[_Part]) -> dict[str, list[int]]:
    """key -> shape of the whole of what a checkpoint must hold by what this rank knows: all weights, and the moments it writes."""
    return {
        f"{kind}.{part.name}": list(mpu.spec_of(part.parameter).full_shape)
        for part in parts
        for kind in (part.kinds if part.mine else [WEIGHT])
    }


def _without_moments(tensors: Mapping[str, Any], moments: Sequence[str]) -> list[str]:
    """Return the weights that the optimizer has no state for: those that are frozen or never had a gradient."""
    names = (key.removeprefix(f"{WEIGHT}.") for key in tensors if key.startswith(f"{WEIGHT}."))
    return sorted(name for name in names if moments and f"{moments[0]}.{name}" not in tensors)


def _steps(engine: Any, parts: list[_Part], most: int) -> dict[str, int]:
    """By name, how often the optimizer has stepped the parameters that this rank writes, where that is less than `most`."""
    steps = {part.name: zero_state.step_of(engine, part.parameter) for part in parts if part.mine}
    return {name: step for name, step in steps.items() if step is not None and step != most}


def _values(engine: Any, parts: list[_Part]) -> Iterator[tuple[str, Tensor]]:
    """This rank's share, one tensor at a time. Under ZeRO each is a collective: go through to the end."""
    for name, parameter, kinds, mine, _ in parts:
        for kind in kinds:
            weight = kind == WEIGHT
            value = zero_state.get_weight(parameter) if weight else zero_state.get_moment(engine, parameter, kind)
            if mine:
                yield f"{kind}.{name}", mpu.spec_of(parameter).without_padding(value)


def _write_share(path: Path, parts: list[_Part], values: Iterable[tuple[str, Tensor]]) -> dict[str, Any] | None:
    """The file of this rank; None where it has nothing to write. Raises OSError, and ValueError for a weight that is not finite."""
    values = iter(values)
    learned = {part.name for part in parts if part.parameter.requires_grad}
    shared = {part.name for part in parts if part.shared}
    slots, places, learns = [], {}, set()
    for name, parameter, kinds, *_ in (part for part in parts if part.mine):
        spec = mpu.spec_of(parameter)
        dim, begin, end = spec.rows
        shape = list(spec.local_shape)
        shape[dim] = end - begin
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        for kind in kinds:
            slots.append(Slot(f"{kind}.{name}", tuple(shape), dtype))
            places[f"{kind}.{name}"] = {
                "dim": dim,
                "begin": begin,
                "end": end,
                "shape": list(spec.full_shape),
            }
    try:
        if not slots:
            return None
        with StreamWriter(path, slots) as writer:
            for key, value in values:
                writer.add(key, value)
                kind, name = key.split(".", 1)
                if kind == WEIGHT and name in learned and not _finite(value):
                    raise ValueError(f"the weight {name} is not finite")
                if name in shared and kind != WEIGHT and value.count_nonzero():
                    learns.add(name)
    finally:
        for _ in values:  # reading may be a collective, and the others wait for this rank
            pass
    return {"file": path.name, "sha256": writer.sha256, "tensors": places, "learns": learns}


def _finite(x: Tensor) -> bool:
    """Without a tensor of answers, which would need memory."""
    return not x.numel() or all(map(math.isfinite, (each.item() for each in torch.aminmax(x))))


def _merge(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """key -> its whole shape and the pieces that make it up.

    What is on several stages without being tied (a weight next to a tied one, a weight of the PipelineModule itself) counts where it learns.
    """
    merged: dict[str, Any] = {}
    for report in reports:
        for key, place in report["tensors"].items():
            entry = merged.setdefault(key, {"shape": place["shape"], "dim": place["dim"], "pieces": {}})
            if place["begin"] not in entry["pieces"] or key.split(".", 1)[1] in report["learns"]:
                piece = {"file": report["file"], "begin": place["begin"], "end": place["end"]}
                entry["pieces"][place["begin"]] = piece
    return {key: {**entry, "pieces": list(entry["pieces"].values())} for key, entry in merged.items()}


def _gather(report: Any, to_all: bool = True) -> list[Any]:
    """Those of all ranks: on all of them, or on rank 0, which writes the index, and nothing on the others."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [report]
    reports: list[Any] = [None] * dist.get_world_size() if to_all or is_rank_0() else []
    if to_all:
        dist.all_gather_object(reports, report)
    else:
        dist.gather_object(report, reports or None)
    return reports
