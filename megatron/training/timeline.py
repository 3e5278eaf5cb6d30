"""`--trace`: a timeline of every rank in the run directory, from the first to the last iteration of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from tds import timeline, trace
from tds.align import distance

from .. import mpu
from ..config import Config
from ..ranks.rank_0 import is_rank_0, print_rank_0
from . import profile
from .hooks import Hook
from .log import TrainingLog

MOST_MERGED = 64  # ranks; with more, the merged file has hundreds of megabytes (tools/draw_schedule.py writes it)


def about(config: Config, engine: Any) -> dict[str, Any]:
    """Return the metadata that a reader of this rank's timeline needs."""
    mesh, p = mpu.get_mesh(), config.parallel
    rank = dist.get_rank()
    found: dict[str, Any] = {"rank": rank, "ranks": dist.get_world_size(), "stage": mesh.pipe.rank, "stages": p.stages}
    found |= {"replica": mesh.data.rank, "model": mesh.model.rank, "pipeline": p.pipe_parallel_size > 0}
    found |= {
        "schedule": p.pipeline_schedule,
        "extra_warmup": p.pipeline_extra_warmup,
        "chunks": p.virtual_pipeline_size,
    }
    found |= {"micros": config.train.gas, "device": engine.device.type}
    place = f"stage {mesh.pipe.rank}, replica {mesh.data.rank}, model {mesh.model.rank}"
    return found | {"name": f"rank {rank} ({place})"}


class Recorder(Protocol):
    """Recorder that is notified of every iteration before it begins."""

    def iteration(self, number: int) -> bool | None:
        """Prepare for iteration `number`; return True if this took time that must not count as iteration time."""


class Recording(Hook):
    """Hook that calls the recorder of --trace or --profile before each iteration."""

    def __init__(self, recorder: Recorder | None, log: TrainingLog) -> None:
        self._recorder, self._log = recorder, log

    def before_step(self, iteration: int) -> None:
        if self._recorder and self._recorder.iteration(iteration):
            self._log.restart()


@contextmanager
def recorded(config: Config, run_dir: Path, engine: Any, iteration: int) -> Iterator[Recorder | None]:
    """Record the iterations after `iteration` as --trace or --profile asks; yields None without these flags.

    With one of these flags, entering and leaving the context are collectives.
    """
    if not config.log.profile:
        with traced(config, run_dir, engine) as tracer:
            yield tracer
        return
    folder = run_dir / profile.FOLDER
    first, last = config.log.profiled or (iteration + profile.AFTER + 1, iteration + profile.AFTER + profile.COUNT)
    if is_rank_0() and folder.is_dir():
        for old in [
            *folder.glob("rank_*.json"),
            *folder.glob("torch_*.json.gz"),
        ]:  # left by an earlier start, perhaps with another number of ranks
            old.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    recorder = profile.Profile(engine.device, folder, about(config, engine), first, last)
    try:
        yield recorder
    except BaseException:
        recorder.stop()
        raise
    recorder.finish()
    if not recorder.done:
        print_rank_0(f"warning: --profile recorded nothing: this start did not run iterations {first} to {last}")


@contextmanager
def traced(config: Config, run_dir: Path, engine: Any) -> Iterator[trace.Tracer | None]:
    """Record a timeline inside the context if --trace is set.

    With --trace, entering and leaving the context are collectives. After an error each rank writes, alone, the events
    that it has recorded.
    """
    if not config.log.trace:
        yield None
        return
    folder = run_dir / timeline.FOLDER
    first, last = config.log.traced or (None, None)
    path = folder / timeline.name_of(dist.get_rank())
    if is_rank_0():
        for old in folder.glob("rank_*.json"):  # left by an earlier start, perhaps with another number of ranks
            old.unlink()
    recorder = trace.Tracer(engine.device, path, about(config, engine), first, last)
    recorder.clock.append(distance(engine.device))
    trace.start(recorder)
    try:
        yield recorder
    except BaseException:
        trace.stop()
        recorder.try_to_write(wait=False)
        raise
    trace.stop()
    recorder.clock.append(distance(engine.device))
    recorder.try_to_write()
    dist.barrier()
    if is_rank_0() and dist.get_world_size() <= MOST_MERGED:
        try:
            merged = timeline.merge(folder)
        except (OSError, ValueError, MemoryError) as error:
            print_rank_0(f"warning: the timelines cannot be merged: {error}")
            return
        print_rank_0(f"timeline of {merged.ranks} ranks in {merged.path}, clocks aligned to {merged.error_us:.0f} us")
