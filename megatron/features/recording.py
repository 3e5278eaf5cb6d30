"""The flags `--trace` and `--profile` in the training loop: record iterations and write files to the run directory."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from tds import timeline, trace
from tds.align import measure_offset

from .. import mpu
from ..config import Config
from ..ranks.rank_0 import is_rank_0, print_rank_0
from ..training.feature import Feature
from ..training.run_state import Run
from . import profile

# With more ranks, a run does not merge the timelines, as the merged file would have hundreds of megabytes.
# tools/draw_schedule.py can merge them later.
MOST_MERGED = 64


def rank_metadata(config: Config, engine: Any) -> dict[str, Any]:
    """Return metadata for this rank's timeline, such as its stage and the pipeline schedule."""
    mesh = mpu.get_mesh()
    layout = config.parallel
    rank = dist.get_rank()
    metadata: dict[str, Any] = {"rank": rank, "ranks": dist.get_world_size(), "stage": mesh.pipe.rank}
    metadata |= {"stages": layout.stages, "replica": mesh.data.rank, "model": mesh.model.rank}
    metadata |= {
        "pipeline": layout.pipe_parallel_size > 0,
        "schedule": layout.pipeline_schedule,
        "extra_warmup": layout.pipeline_extra_warmup,
        "chunks": layout.virtual_pipeline_size,
    }
    metadata |= {"micros": config.train.gas, "device": engine.device.type}
    position = f"stage {mesh.pipe.rank}, replica {mesh.data.rank}, model {mesh.model.rank}"
    return metadata | {"name": f"rank {rank} ({position})"}


class Recorder(Protocol):
    """Protocol of recorders whose method `iteration` is called before every iteration."""

    def iteration(self, number: int) -> bool | None:
        """Prepare for iteration `number`; return True if the preparation must not count as time of the iteration."""


class Recording(Feature):
    """Feature that calls the recorder of --trace or --profile before each iteration."""

    def start(self, run: Run) -> None:
        self._run = run
        self._stack = ExitStack()
        context = record_iterations(run.config, run.run_dir, run.engine.deepspeed, run.state.iteration)
        self._recorder = self._stack.enter_context(context)

    def before_step(self, iteration: int) -> None:
        # Starting or writing a profile takes seconds, which are no time of the iteration.
        if self._recorder.iteration(iteration):
            self._run.log.restart_timer()

    def close(self, error: BaseException | None) -> None:
        if error is None:
            self._stack.close()
        else:
            # The contexts must see the error: they then write their events without waiting for other ranks.
            self._stack.__exit__(type(error), error, error.__traceback__)


@contextmanager
def record_iterations(config: Config, run_dir: Path, engine: Any, iteration: int) -> Iterator[Recorder]:
    """Context that records iterations with --trace or --profile; yields the recorder.

    iteration: number of iterations that the run has done before this start.
    Entering and leaving the context are collectives.
    """
    if not config.log.profile:
        with record_timeline(config, run_dir, engine) as tracer:
            yield tracer
        return
    folder = run_dir / profile.FOLDER
    # The first iterations after a start are slower than usual.
    skipped = iteration + profile.SKIP_ITERATIONS
    first, last = config.log.profile_range or (skipped + 1, skipped + profile.PROFILE_ITERATIONS)
    if is_rank_0() and folder.is_dir():
        # Delete the files of an earlier start, which may have had more ranks.
        for old in [*folder.glob("rank_*.json"), *folder.glob("torch_*.json.gz")]:
            old.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    recorder = profile.Profile(engine.device, folder, rank_metadata(config, engine), first, last)
    try:
        yield recorder
    except BaseException:
        # `finish` would wait for other ranks, which may have ended.
        recorder.stop()
        raise
    recorder.finish()
    if not recorder.done:
        print_rank_0(f"warning: --profile recorded nothing, as this start did not reach iterations {first} to {last}")


@contextmanager
def record_timeline(config: Config, run_dir: Path, engine: Any) -> Iterator[trace.Tracer]:
    """Context that records a timeline with --trace; yields the recorder.

    Entering and leaving the context are collectives. After an error, each rank writes its recorded events
    without waiting for other ranks.
    """
    folder = run_dir / timeline.FOLDER
    first, last = config.log.trace_range or (None, None)
    path = folder / timeline.trace_file_name(dist.get_rank())
    if is_rank_0():
        # Delete the files of an earlier start, which may have had more ranks.
        for old in folder.glob("rank_*.json"):
            old.unlink()
    recorder = trace.Tracer(engine.device, path, rank_metadata(config, engine), first, last)
    # The offset of this rank's clock from rank 0. It is measured again at the end, as clocks drift.
    recorder.clock.append(measure_offset(engine.device))
    trace.start(recorder)  # from here on, events of the engine go to this recorder
    try:
        yield recorder
    except BaseException:
        trace.stop()
        recorder.try_to_write(wait=False)
        raise
    trace.stop()
    recorder.clock.append(measure_offset(engine.device))
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
