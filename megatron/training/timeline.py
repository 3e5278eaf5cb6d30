"""The flags `--trace` and `--profile` in the training loop: record iterations and write files to the run directory."""

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

# With more ranks, a run does not merge the timelines, as the merged file would have hundreds of megabytes.
# tools/draw_schedule.py can merge them later.
MOST_MERGED = 64


def about(config: Config, engine: Any) -> dict[str, Any]:
    """Return metadata for this rank's timeline, such as its stage and the pipeline schedule."""
    mesh = mpu.get_mesh()
    p = config.parallel
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
    """Protocol of recorders whose method `iteration` is called before every iteration."""

    def iteration(self, number: int) -> bool | None:
        """Prepare for iteration `number`; return True if the preparation must not count as time of the iteration."""


class Recording(Hook):
    """Hook that calls the recorder of --trace or --profile before each iteration."""

    def __init__(self, recorder: Recorder | None, log: TrainingLog) -> None:
        self._recorder = recorder
        self._log = log

    def before_step(self, iteration: int) -> None:
        if self._recorder and self._recorder.iteration(iteration):
            self._log.restart()


@contextmanager
def recorded(config: Config, run_dir: Path, engine: Any, iteration: int) -> Iterator[Recorder | None]:
    """Context that records iterations with --trace or --profile; yields the recorder, or None without these flags.

    iteration: number of iterations that the run has done before this start.
    With one of these flags, entering and leaving the context are collectives.
    """
    if not config.log.profile:
        with traced(config, run_dir, engine) as tracer:
            yield tracer
        return
    folder = run_dir / profile.FOLDER
    first, last = config.log.profiled or (iteration + profile.AFTER + 1, iteration + profile.AFTER + profile.COUNT)
    if is_rank_0() and folder.is_dir():
        # Delete the files of an earlier start, which may have had more ranks.
        for old in [*folder.glob("rank_*.json"), *folder.glob("torch_*.json.gz")]:
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
        print_rank_0(f"warning: --profile recorded nothing, as this start did not reach iterations {first} to {last}")


@contextmanager
def traced(config: Config, run_dir: Path, engine: Any) -> Iterator[trace.Tracer | None]:
    """Context that records a timeline with --trace; yields the recorder, or None without this flag.

    With --trace, entering and leaving the context are collectives. After an error, each rank writes its recorded events
    without waiting for other ranks.
    """
    if not config.log.trace:
        yield None
        return
    folder = run_dir / timeline.FOLDER
    first, last = config.log.traced or (None, None)
    path = folder / timeline.name_of(dist.get_rank())
    if is_rank_0():
        # Delete the files of an earlier start, which may have had more ranks.
        for old in folder.glob("rank_*.json"):
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
            print_rank_0(f"warning: the timelines of the ranks cannot be merged: {error}")
            return
        print_rank_0(
            f"wrote the timeline of {merged.ranks} ranks to {merged.path}; their clocks are aligned to within "
            f"{merged.error_us:.0f} us"
        )
