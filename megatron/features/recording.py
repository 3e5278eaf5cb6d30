"""The flag `--trace`: records the timeline of iterations and writes files to the run directory."""

import contextlib
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tds import timeline, trace
from tds.align import measure_offset

from .. import mpu
from ..ranks.rank_0 import is_rank_0, print_rank_0
from ..training.feature import Feature
from ..training.run_state import Run

# With more ranks, a run does not merge the timelines, as the merged file would have hundreds of megabytes.
# tools/draw_schedule.py can merge them later.
MOST_MERGED = 64


def rank_metadata(run: Run) -> dict[str, Any]:
    """Return metadata for this rank's timeline, such as its stage and the pipeline schedule."""
    mesh = mpu.get_mesh()
    layout = run.config.parallel
    rank = dist.get_rank()
    position = f"stage {mesh.pipe.rank}, replica {mesh.data.rank}, model {mesh.model.rank}"
    return {
        "rank": rank,
        "ranks": dist.get_world_size(),
        "stage": mesh.pipe.rank,
        "stages": layout.stages,
        "replica": mesh.data.rank,
        "model": mesh.model.rank,
        "pipeline": layout.pipe_parallel_size > 0,
        "schedule": layout.pipeline_schedule,
        "extra_warmup": layout.pipeline_extra_warmup,
        "chunks": layout.virtual_pipeline_size,
        "micros": run.config.train.gas,
        "device": run.device.type,
        "name": f"rank {rank} ({position})",
    }


def delete_earlier(folder: Path, pattern: str) -> None:
    """On rank 0, delete the files of an earlier start, which may have had more ranks."""
    if is_rank_0():
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):  # such as files of another user
                path.unlink()


class Recording(Feature):
    """Feature that records a timeline of this rank with --trace. Its start and its end are collectives."""

    def start(self, run: Run) -> None:
        bounds = run.config.log.trace_range  # the first and the last iteration to record, if given
        self._has_recorded = False
        self._folder = run.run_dir / timeline.FOLDER
        self._device = run.device
        path = self._folder / timeline.trace_file_name(dist.get_rank())
        wanted = range(bounds[0], bounds[1] + 1) if bounds else None
        self._recorder = trace.Tracer(self._device, path, rank_metadata(run), wanted)
        # The offset of this rank's clock from rank 0. It is measured again at the end, as clocks drift.
        self._recorder.clock.append(measure_offset(self._device))
        trace.start(self._recorder)  # from here on, events of the engine go to this recorder

    def before_step(self, iteration: int) -> None:
        self._recorder.iteration(iteration)
        if self._has_recorded or not self._recorder.is_recording:
            return
        self._has_recorded = True
        delete_earlier(self._folder, "rank_*.json")

    def close(self, error: BaseException | None) -> None:
        recorder = self._recorder
        trace.stop()
        if not self._has_recorded:  # the files of an earlier start stay
            return
        if error is not None:  # other ranks may have ended
            recorder.try_to_write(wait=False)
            return
        recorder.clock.append(measure_offset(self._device))
        recorder.try_to_write()
        dist.barrier()
        if is_rank_0() and dist.get_world_size() <= MOST_MERGED:
            try:
                merged = timeline.merge(self._folder)
            except (OSError, ValueError, MemoryError) as failure:
                print_rank_0(f"warning: the timelines of the ranks cannot be merged: {failure}")
                return
            print_rank_0(
                f"wrote the timeline of {merged.ranks} of {dist.get_world_size()} ranks to {merged.path}; their clocks "
                f"are aligned to within {merged.error_us:.0f} us"
            )
