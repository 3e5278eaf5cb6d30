"""Runs of the parity fuzzer: a case in its layout and in one process, and the comparison of all their numbers.

The run in one process computes each step as one micro-batch, without recomputation and other settings that may not
change any number, and with the reference formulas of --reference-ops.
"""

import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.lookup import latest_checkpoint
from megatron.checkpointing.reader import CheckpointReader
from megatron.config import Config
from megatron.config.command_line import parse
from megatron.config.ds_config import resolve
from megatron.config.fields import ConfigError
from megatron.config.messages import describe_error
from megatron.tasks import TASKS

from .compare import GRADIENT_FLOOR, TOLERANCE, relative_error
from .fuzz_ranks import OK, Outcome, Ranks
from .fuzz_table import GROUPS_FILE, OPERATIONS, Case, neutral_flags
from .layouts import ONE_PROCESS

STEPS = 3
# Constant learning rate, so that the last step changes the weights, too. Adam divides rounding errors of gradients that
# are mathematically zero, such as those of biases of keys, by its epsilon: the default 1e-8 would enlarge them to 1e-9.
RUN_FLAGS = (
    "--vocab-file tokenizer.model --split 8,2,0 --lr-decay-style constant --warmup 0 --hidden-dropout 0 "
    f"--attention-dropout 0 --train-iters {STEPS} --eval-iters 1 --eval-interval 0 --save-interval 0 --log-interval 1 "
    "--no-compile --no-tensorboard --num-workers 0"
)
ADAM_EPSILON = {"fp64": "1e-5", "fp32": "1e-3"}
# Values of metrics.jsonl that measure speed or memory. `deviation` of a skipped step divides by the standard deviation
# of two or three similar numbers, which enlarges rounding errors of fp32; these numbers themselves are compared.
IGNORED_METRICS = {
    "tokens_per_second",
    "tflops",
    "mfu",
    "memory_mb",
    "memory_before_model_mb",
    "straggler",
    "timers_ms",
    "seconds",
    "loss_scale",
    "deviation",
}
MIN_SCALE = 1e-6  # errors of smaller numbers of the log are relative to this number
Values = dict[str, Tensor]


@dataclass
class CaseResult:
    """Result of a case: its outcome, whose kind may also be `differs`, and the largest relative difference."""

    outcome: Outcome
    largest_error: float = 0.0

    @property
    def failed(self) -> bool:
        """True if the case differs from one process, crashes or hangs."""
        return self.outcome.kind not in ("ok", "refused")


@dataclass
class Fuzzer:
    """Runs cases on warm ranks, with data in `folder`. timeout: seconds of a run. prepare: see `Ranks`."""

    folder: Path
    timeout: float = 60.0
    prepare: Callable[[], object] | None = None
    _ranks: dict[str, Ranks] = field(default_factory=dict)
    _reference_runs: dict[tuple[str, ...], tuple[Outcome, Values]] = field(default_factory=dict)
    _run_count: int = 0

    def run(self, case: Case) -> CaseResult:
        """Run a case and compare it with the run in one process."""
        try:
            config = self.settings_of(case)
        except ConfigError as error:
            return CaseResult(Outcome("refused", describe_error(error)))
        precision = case.precision
        common_flags = [*RUN_FLAGS.split(), "--precision", precision, "--adam-eps", ADAM_EPSILON[precision]]
        reference = (*reference_flags(case, config.train.batch_size), *common_flags)
        layout_flags = [*case.flags, *case.layout.flags(case.micros), *common_flags]
        # Both runs work at the same time, on ranks of their own. The last run in one process is kept, because shrinking
        # a failure often repeats it.
        layout_run = self._start("layout", case.layout.ranks, layout_flags)
        if reference not in self._reference_runs:
            reference_run = self._start("one", 1, reference)
            self._reference_runs = {reference: self._finish(*reference_run)}
        outcome, values = self._finish(*layout_run)
        expected_outcome, expected_values = self._reference_runs[reference]
        if expected_outcome.kind != "ok":
            return CaseResult(Outcome(expected_outcome.kind, f"in one process: {expected_outcome.message}"))
        if outcome.kind != "ok":
            return CaseResult(outcome)
        return compare_values(expected_values, values, TOLERANCE[precision])

    def settings_of(self, case: Case) -> Config:
        """Return the settings of a case's layout. Raises ConfigError if the project refuses them."""
        family = case.flags[case.flags.index("--family") + 1]
        world = case.layout.ranks
        words = [*case.flags, *case.layout.flags(case.micros), *RUN_FLAGS.split(), "--precision", case.precision]
        arguments = []
        for word in words:
            # Ranks work in `folder`, this process does not.
            arguments.append(str(self.folder / word) if word == GROUPS_FILE else word)
        config = parse(arguments, TASKS[family].defaults, world).with_derived_iters(world)
        # Called only for the errors that it raises. Without fast bf16, as on a CPU.
        resolve(config, world, fast_bf16=False)
        return config

    def close(self) -> None:
        """End all ranks, and forget the run in one process."""
        self._reference_runs = {}
        for ranks in self._ranks.values():
            ranks.close()

    def _start(self, name: str, world: int, argv: Sequence[str]) -> tuple[Ranks, Path]:
        """Start a run of `world` ranks, and return these ranks and its run directory."""
        self._run_count += 1
        work_dir = self.folder / f"run{self._run_count}"
        work_dir.mkdir()
        new_ranks = Ranks(world, self.folder, self.prepare)  # without processes; `start` opens them
        ranks = self._ranks.setdefault(f"{name}{world}", new_ranks)
        arguments = [*argv, "--run-dir", str(work_dir / "run")]
        ranks.start(arguments, work_dir / "meeting")
        return ranks, work_dir

    def _finish(self, ranks: Ranks, work_dir: Path) -> tuple[Outcome, Values]:
        """Wait for a run; return its outcome and values, and delete its run directory."""
        outcome = ranks.finish(time.monotonic() + self.timeout)
        values: Values = {}
        if outcome == OK:
            try:
                values = read_run(work_dir / "run")
            except (OSError, ValueError) as error:
                outcome = Outcome("crash", f"the run left no complete results: {describe_error(error)}")
        shutil.rmtree(work_dir, ignore_errors=True)
        return outcome, values


def reference_flags(case: Case, batch_size: int) -> list[str]:
    """Return the flags of the run in one process, whose steps have one micro-batch each.

    batch_size: samples of a micro-batch in the layout.
    """
    neutral = neutral_flags()
    flags: list[str] = []
    is_kept = True
    for word in case.flags:
        if word.startswith("--"):
            # The words after a flag are its values and are kept or dropped with it.
            is_kept = word.replace("--no-", "--") not in neutral
        if is_kept:
            flags.append(word)
    return [
        *flags, *ONE_PROCESS.flags(micros=1), "--batch-size", str(batch_size * case.micros),
        "--reference-ops", *OPERATIONS.split(),
    ]  # fmt: skip


def read_run(run_dir: Path) -> Values:
    """Return all numbers of metrics.jsonl and all tensors of the last checkpoint of a run, by name."""
    values: Values = {}
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for name, number in _numbers(f"{row['split']} {row['iteration']}", row):
            values[name] = torch.tensor(number, dtype=torch.float64)
    checkpoint = latest_checkpoint(run_dir / "checkpoints")
    if checkpoint is None:  # all steps were skipped
        return values
    reader = CheckpointReader(checkpoint)
    values["checkpoint iteration"] = torch.tensor(float(reader.state["iteration"]))
    for key, entry in reader.tensors.items():
        # All rows, along the dimension in which the tensor is stored in pieces.
        dim = entry["dim"]
        values[key] = reader.read(key, dim, 0, entry["shape"][dim])
    return values


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield (name, number) of each number in a row of metrics.jsonl that the layout may not change.

    Keys of dicts and indices of lists are appended to `name`, as in `train 3 expert_tokens layers.0 1`.
    """
    if isinstance(value, dict):
        for key, child in value.items():
            if key not in IGNORED_METRICS:
                yield from _numbers(f"{name} {key}", child)
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _numbers(f"{name} {index}", child)
    elif isinstance(value, (int, float)):
        yield name, value


def compare_values(expected: Values, values: Values, tolerance: float) -> CaseResult:
    """Compare the values of two runs; a value that only one of them has is an infinite difference.

    The words of the result name the first differences: those of the log in the order of the iterations, then tensors.
    """
    floors = _error_floors(expected)
    errors: dict[str, float] = {}
    # The names of both; a name that one of them lacks stays infinite.
    for name in expected | values:
        errors[name] = math.inf
        if name in expected and name in values:
            floor = floors.get(_tensor_kind(name), MIN_SCALE)
            errors[name] = relative_error(values[name], expected[name], floor)
    differences = [f"{name} differs by {error:.1e}" for name, error in errors.items() if error > tolerance]
    outcome = OK
    if differences:
        outcome = Outcome("differs", f"{len(differences)} of {len(errors)} values: {'; '.join(differences[:4])}")
    return CaseResult(outcome, max(errors.values(), default=0.0))


def _tensor_kind(name: str) -> str:
    """Return the kind of a tensor of a checkpoint, such as weight or exp_avg; a number of the log has no kind."""
    return "" if " " in name else name.partition(".")[0]


def _error_floors(values: Values) -> dict[str, float]:
    """Return kind of tensor -> the size below which an error is not relative to the tensor's own size.

    Some tensors, such as the moments of biases of keys, consist of rounding errors only.
    """
    squares: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, value in values.items():
        kind = _tensor_kind(name)
        if kind:
            squares[kind] += value.double().square().sum().item()  # type: ignore[assignment]
            counts[kind] += value.numel()
    floors = {}
    for kind, total in squares.items():
        floors[kind] = GRADIENT_FLOOR * math.sqrt(total / max(counts[kind], 1))
    return floors
