"""Writers of metrics to TensorBoard, Weights & Biases, SwanLab and MLflow, besides metrics.jsonl.

Each destination has its own flag. Its package is imported only if the destination is used.
"""

import contextlib
import os
import re
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..atomic import write_text
from ..config import Config
from ..config.messages import describe_error
from ..config.output import LogConfig
from ..data.workers import in_main_thread
from ..packages import is_installed, pip_install
from ..ranks.agreement import raise_on_all_ranks
from ..ranks.rank_0 import is_rank_0
from ..training.feature import Feature, Plan
from ..training.metrics import Writer
from ..training.run_state import Run

# Default project of Weights & Biases and SwanLab, and experiment of MLflow; WANDB_PROJECT, SWANLAB_PROJ_NAME and
# MLFLOW_EXPERIMENT_NAME override it.
PROJECT = "pretraining"
PACKAGES = "tensorboard", "wandb", "swanlab", "mlflow"  # each package has a flag of the same name


class Writers(Feature):
    """Feature that gives the numbers of each row of metrics.jsonl to the writers that the flags enable."""

    def prepare(self, plan: Plan) -> None:
        if is_rank_0():
            check_packages(plan.config.log)

    def start(self, run: Run) -> None:
        with raise_on_all_ranks():
            if is_rank_0():
                run.metrics.forward_to(build_writers(run.config, run.run_dir, run.state.iteration))


def check_packages(config: LogConfig) -> None:
    """Raise ValueError if a flag is set whose package is not installed."""
    for name in PACKAGES:
        is_requested = getattr(config, name) or (name == "tensorboard" and config.tensorboard_dir)
        if is_requested and not is_installed(name):
            raise ValueError(
                f"--{name} needs the package {name}: {pip_install(name)}; without it, leave out all flags --{name}*"
            )


def build_writers(config: Config, run_dir: Path, iteration: int) -> Iterator[Writer]:
    """Yield the writers that the flags enable, ready to write rows of iterations after `iteration`.

    Raises ValueError if a writer cannot start; those before it have then started, so the caller must close them.
    """
    log = config.log
    # Without --tensorboard and --no-tensorboard, TensorBoard is written if it is installed.
    is_usual = log.tensorboard is None and is_installed("tensorboard")
    wanted: dict[type[Writer], Any] = {
        TensorBoard: log.tensorboard or log.tensorboard_dir or is_usual,
        WeightsAndBiases: log.wandb,
        SwanLab: log.swanlab,
        MLflow: log.mlflow,
    }
    for writer_class, is_requested in wanted.items():
        if not is_requested:
            continue
        try:
            yield writer_class(config, run_dir, iteration)
        except Exception as error:  # packages raise errors of any type, e.g. for an unreachable server or a missing key
            raise ValueError(
                f"{writer_class.name} cannot start: {describe_error(error)}; to train without it, pass "
                f"--no-{writer_class.flag}, and leave other flags --{writer_class.flag}* out"
            ) from error


def flat_settings(config: Config) -> dict[str, Any]:
    """Return all settings as name -> value, without sections; no two sections have a setting of the same name."""
    return {name: value for section in config.to_dict().values() for name, value in section.items()}


def _service_run_id(path: Path, iteration: int, length: int) -> str:
    """Return the id of this run in a service such as Weights & Biases.

    The file `path` stores the id. A run that starts at iteration 0 gets a new id of `length` hexadecimal digits.
    """
    # A run that begins again is another run of the service, even in the same folder.
    if iteration and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    name = uuid.uuid4().hex[:length]
    write_text(path, name + "\n")
    return name


class TensorBoard:
    """Writer of TensorBoard event files. A resumed run hides old events of the iterations that it repeats.

    After an error of the disk, the next row goes to a new file, as the thread of TensorBoard's file has ended.
    """

    name, flag, retries = "TensorBoard", "tensorboard", True
    shows_texts = True

    def __init__(self, config: Config, run_dir: Path, iteration: int) -> None:
        self._folder = str(config.log.tensorboard_dir or run_dir / "tensorboard")
        # TensorBoard hides the events from this iteration on that an earlier start has written.
        self._board: Any = self._open(iteration + 1)
        rows = [f"    {name}: {value}" for name, value in flat_settings(config).items()]
        self._board.add_text("settings", "\n".join(rows), iteration)
        _silence_threads_of_tensorboard()

    def _open(self, purge_step: int | None = None) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self._folder, purge_step=purge_step)  # type: ignore[no-untyped-call]

    def write(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Write each number as a scalar, such as train/lm_loss, and wait until they are in the file."""
        self._board = self._board or self._open()  # after an error there is no file
        try:
            for name, value in numbers.items():
                # Only the row of samples has texts, which `shows_texts` asks for.
                add = self._board.add_text if isinstance(value, str) else self._board.add_scalar
                add(name, value, iteration)
            self._board.flush()
        except OSError:
            self.close()
            self._board = None
            raise

    def close(self) -> None:
        """Flush and close the event file."""
        if self._board is not None:
            with contextlib.suppress(OSError):  # every row is already in the file
                self._board.close()


def _silence_threads_of_tensorboard() -> None:
    """Print no traceback of TensorBoard's threads: they pass their errors on to `TensorBoard.write`."""
    original = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not type(args.thread).__module__.startswith("tensorboard."):
            original(args)

    threading.excepthook = hook


class WeightsAndBiases:
    """Writer to Weights & Biases. A resumed training run resumes its wandb run.

    WANDB_MODE=offline keeps the wandb run on the local disk. The other environment variables of wandb work, too.
    """

    name, flag = "Weights & Biases", "wandb"
    shows_texts = True

    def __init__(self, config: Config, run_dir: Path, iteration: int) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", run_dir.resolve().name),
            # A resumed run reads its id from this file; iteration 0 draws a new one.
            id=_service_run_id(run_dir / "wandb_id", iteration, 12),
            resume="allow",
            dir=str(run_dir),
            config=flat_settings(config),
        )
        # The iteration is a separate x-axis: wandb's own step may not decrease, but the iteration may.
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def write(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of one row in one call."""
        self._run.log({**numbers, "iteration": iteration})

    def close(self) -> None:
        """Wait until all metrics are uploaded, and finish the wandb run."""
        self._run.finish()


@contextlib.contextmanager
def _same_handlers() -> Iterator[None]:
    """Restore the handlers of Ctrl-C and of uncaught errors at the end of the `with` block.

    swanlab sets its own handlers. The first Ctrl-C would end its run, although training continues until it has saved.
    """
    on_error = sys.excepthook
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        sys.excepthook = on_error
        if in_main_thread():
            signal.signal(signal.SIGINT, on_interrupt)


class SwanLab:
    """Writer to SwanLab. A resumed training run resumes its SwanLab run.

    SwanLab keeps the first value of a metric at an iteration. It drops those that a resumed run computes again.
    SWANLAB_MODE=offline keeps the data in the run directory. The other environment variables of swanlab work, too.
    """

    name, flag = "SwanLab", "swanlab"
    shows_texts = True

    def __init__(self, config: Config, run_dir: Path, iteration: int) -> None:
        import swanlab

        self._text = swanlab.Text
        with _same_handlers():
            self._run = swanlab.init(
                project=os.environ.get("SWANLAB_PROJ_NAME", PROJECT),
                experiment_name=os.environ.get("SWANLAB_EXP_NAME", run_dir.resolve().name),
                # A resumed run reads its id from this file; iteration 0 draws a new one.
                id=_service_run_id(run_dir / "swanlab_id", iteration, 21),
                resume="allow",
                logdir=str(run_dir / "swanlab"),
                config=flat_settings(config),
            )

    def write(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers or texts of one row in one call."""
        row = {}
        for name, value in numbers.items():
            # Only the row of samples has texts, which `shows_texts` asks for.
            row[name] = self._text(value) if isinstance(value, str) else value
        self._run.log(row, step=iteration)

    def close(self) -> None:
        """Wait until all metrics are uploaded, and finish the SwanLab run."""
        with _same_handlers():
            self._run.finish()


class MLflow:
    """Writer to MLflow. A resumed training run resumes its MLflow run.

    The MLflow run is stored in the run directory unless MLFLOW_TRACKING_URI is set.
    """

    name, flag = "MLflow", "mlflow"

    def __init__(self, config: Config, run_dir: Path, iteration: int) -> None:
        import mlflow

        if not os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer MLflow requires it for file stores
            mlflow.set_tracking_uri((run_dir.resolve() / "mlflow").as_uri())
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        self._mlflow = mlflow
        path = run_dir / "mlflow_run"
        run_id = None
        # A run that begins again is another MLflow run, even in the same folder.
        if iteration and path.is_file():
            run_id = path.read_text(encoding="utf-8").strip()
        run_name = None if run_id else run_dir.resolve().name  # None keeps the name of a resumed MLflow run
        run = mlflow.start_run(run_id=run_id, run_name=run_name)
        if run_id is None:
            write_text(path, run.info.run_id + "\n")
            # MLflow refuses longer values.
            settings = [(name, str(value)[:500]) for name, value in flat_settings(config).items()]
            try:
                for start in range(0, len(settings), 100):  # MLflow accepts at most 100 parameters per call
                    mlflow.log_params(dict(settings[start : start + 100]))
            except Exception:
                mlflow.end_run("FAILED")  # while it is open, this process can start no other one
                raise

    def write(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of one row in one call."""
        # MLflow refuses other characters, such as those of the corpus c++, and paths with //, ./ or ../.
        named = {re.sub(r"[^/\w.\- :]|(?<=/)/|\.+/", "_", name): value for name, value in numbers.items()}
        self._mlflow.log_metrics(named, step=iteration)

    def close(self) -> None:
        """End the MLflow run."""
        self._mlflow.end_run()
