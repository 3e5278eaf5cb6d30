"""The flag `--profile`: runs PyTorch's profiler on all ranks for a few iterations; each rank writes a Chrome trace.

`--profile` records every operator and kernel, which slows a run and fills a disk. The flag `--trace` records passes,
messages and collectives of all ranks on one clock. Recording one of these events takes hundreds of nanoseconds, so
`--trace` can stay on.
"""

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, supported_activities

from ..atomic import atomic_file, process_name
from ..ranks.rank_0 import print_rank_0
from ..training.feature import Feature
from ..training.run_state import Run
from .recording import delete_earlier

# Default of --profile-iterations: after a start or resume, skip the first number, which are slower, and profile the
# second.
SKIP_ITERATIONS = 5
PROFILE_ITERATIONS = 3


class Profile(Feature):
    """Feature that profiles this rank."""

    def start(self, run: Run) -> None:
        self._run = run
        skipped = run.state.iteration + SKIP_ITERATIONS
        default = (skipped + 1, skipped + PROFILE_ITERATIONS)
        self._first, self._last = run.config.log.profile_range or default
        folder = run.run_dir / "profile"
        self._begin = run.state.iteration + 1
        self._path = folder / f"torch_{dist.get_rank():05d}.json.gz"
        self._profiler: profile | None = None
        self._is_done = False

    def before_step(self, iteration: int) -> None:
        if self._profiler is not None and iteration > self._last:
            self._finish()
        elif self._profiler is None and self._first <= iteration <= self._last:
            activities = [ProfilerActivity.CPU]
            if self._run.device.type != "cpu":
                # Of the device, such as CUDA, besides those of the CPU.
                activities += supported_activities() - {ProfilerActivity.CPU}  # type: ignore[no-untyped-call]
            delete_earlier(self._path.parent, "torch_*.json.gz")
            self._profiler = profile(activities=activities, record_shapes=True, acc_events=True)
            self._profiler.start()
        else:
            return  # profiling neither starts nor ends here
        # Starting or writing a profile takes seconds, which are no time of the iteration.
        self._run.log.restart_timer()

    def close(self, error: BaseException | None) -> None:
        if self._profiler is not None:
            self._finish()
        elif error is None and not self._is_done:
            problem = "began after" if self._begin > self._last else "did not reach"
            iterations = f"iterations {self._first} to {self._last}"
            print_rank_0(f"warning: --profile recorded nothing, as this start {problem} {iterations}")

    def _finish(self) -> None:
        """Stop the profiler and write its file. Errors of the file do not end the run."""
        assert self._profiler is not None
        self._profiler.stop()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary_path = self._path.with_name(f"{process_name()}.tmp.json.gz")
            with atomic_file(self._path, temporary_path) as temporary:
                self._profiler.export_chrome_trace(str(temporary))
            print_rank_0(f"wrote the profile of each rank to {self._path.parent}")
        except (OSError, RuntimeError, MemoryError) as error:
            print(f"warning: the profile {self._path} cannot be written: {error}", flush=True)
        self._profiler = None
        self._is_done = True
