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

from megatron.checkpointing.files import latest_checkpoint
from megatron.checkpointing.reader import CheckpointReader
from megatron.config import Config
from megatron.config.command_line import parse
from megatron.config.ds_config import resolve
from megatron.config.fields import ConfigError, describe
from megatron.tasks import TASKS

from .compare import FLOOR, TOLERANCE, error_of
from .fuzz_ranks import OK, Outcome, Ranks
from .fuzz_table import GROUPS_FILE, OPERATIONS, Case, neutral_flags
from .layouts import ONE

STEPS = 3
# Constant learning rate, so that the last step changes the weights, too. Adam divides rounding errors of gradients that
# are mathematically zero, such as those of biases of keys, by its epsilon: the default 1e-8 would enlarge them to 1e-9.
FLAGS = (
    "--vocab-file tokenizer.model --split 8,2,0 --lr-decay-style constant --warmup 0 --hidden-dropout 0 "
    f"--attention-dropout 0 --train-iters {STEPS} --eval-iters 1 --eval-interval 0 --save-interval 0 --log-interval 1 "
    "--no-compile --no-tensorboard --num-workers 0"
)
EPSILON = {"fp64": "1e-5", "fp32": "1e-3"}
# Values of metrics.jsonl that measure speed or memory. `deviation` of a skipped step divides by the standard deviation
# of two or three similar numbers, which enlarges rounding errors of fp32; these numbers themselves are compared.
MEASURED = {
    *("tokens_per_second", "tflops", "mfu", "memory_mb", "memory_before_model_mb", "straggler", "timers_ms"),
    *("seconds", "loss_scale", "deviation"),
}
LEAST = 1e-6  # errors of smaller numbers of the log are relative to this number
Values = dict[str, Tensor]


@dataclass
class Found:
    """Result of a case: its outcome, whose kind may also be `differs`, and the largest relative difference."""

    outcome: Outcome
    error: float = 0.0

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
    _expected: dict[tuple[str, ...], tuple[Outcome, Values]] = field(default_factory=dict)
    _runs: int = 0

    def run(self, case: Case) -> Found:
        """Run a case and compare it with the run in one process."""
        try:
            config = self.settings_of(case)
        except ConfigError as error:
            return Found(Outcome("refused", describe(error)))
        precision = "fp32" if case.layout.zero else "fp64"
        more = [*FLAGS.split(), "--precision", precision, "--adam-eps", EPSILON[precision]]
        one = reference_flags(case, config.train.batch_size) + more
        here = [*case.flags, *case.layout.flags(case.micros), *more]
        place = self._start("layout", case.layout.ranks, here)
        if tuple(one) not in self._expected:
            alone = self._start("one", 1, one)
            self._expected = {tuple(one): self._finish("one", 1, alone)}
        outcome, found = self._finish("layout", case.layout.ranks, place)
        expected_outcome, expected = self._expected[tuple(one)]
        if expected_outcome.kind != "ok":
            return Found(Outcome(expected_outcome.kind, f"in one process: {expected_outcome.words}"))
        if outcome.kind != "ok":
            return Found(outcome)
        return compared(expected, found, TOLERANCE[precision])

    def settings_of(self, case: Case) -> Config:
        """Return the settings of a case's layout. Raises ConfigError if the project refuses them."""
        family = case.flags[case.flags.index("--family") + 1]
        world = case.layout.ranks
        precision = "fp32" if case.layout.zero else "fp64"
        words = [*case.flags, *case.layout.flags(case.micros), *FLAGS.split(), "--precision", precision]
        # Ranks work in `folder`, this process does not.
        words = [str(self.folder / GROUPS_FILE) if word == GROUPS_FILE else word for word in words]
        config = parse(words, TASKS[family].defaults, world).with_batches(world)
        resolve(config, world, False)
        return config

    def close(self) -> None:
        """End all ranks, and forget the run in one process."""
        self._expected = {}
        for ranks in self._ranks.values():
            ranks.close()

    def _start(self, name: str, world: int, argv: Sequence[str]) -> Path:
        """Start a run of `world` ranks, and return its run directory."""
        self._runs += 1
        place = self.folder / f"run{self._runs}"
        place.mkdir()
        ranks = self._ranks.setdefault(f"{name}{world}", Ranks(world, self.folder, self.prepare))
        family = argv[argv.index("--family") + 1]
        ranks.start(family, [*argv, "--run-dir", str(place / "run")], place / "meeting")
        return place

    def _finish(self, name: str, world: int, place: Path) -> tuple[Outcome, Values]:
        """Wait for a run; return its outcome and values, and delete its run directory."""
        outcome = self._ranks[f"{name}{world}"].finish(time.monotonic() + self.timeout)
        values: Values = {}
        if outcome == OK:
            try:
                values = read_run(place / "run")
            except (OSError, ValueError) as error:
                outcome = Outcome("crash", f"the run left no complete results: {describe(error)}")
        shutil.rmtree(place, ignore_errors=True)
        return outcome, values


def reference_flags(case: Case, batch_size: int) -> list[str]:
    """Return the flags of the run in one process, whose steps have one micro-batch each.

    batch_size: samples of a micro-batch in the layout.
    """
    neutral = neutral_flags()
    kept: list[str] = []
    keeps = True
    for word in case.flags:
        if word.startswith("--"):
            keeps = word.replace("--no-", "--") not in neutral
        if keeps:
            kept.append(word)
    return [
        *kept, *ONE.flags(1), "--batch-size", str(batch_size * case.micros), "--reference-ops", *OPERATIONS.split(),
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
        values[key] = reader.read(key, entry["dim"], 0, entry["shape"][entry["dim"]])
    return values


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield (name, number) of each number in a row of metrics.jsonl that the layout may not change.

    Keys of dicts and indices of lists are appended to `name`, as in `train 3 expert_tokens layers.0 1`.
    """
    if isinstance(value, dict):
        for key, each in value.items():
            if key not in MEASURED:
                yield from _numbers(f"{name} {key}", each)
    elif isinstance(value, list):
        for at, each in enumerate(value):
            yield from _numbers(f"{name} {at}", each)
    elif isinstance(value, (int, float)):
        yield name, value


def compared(expected: Values, found: Values, tolerance: float) -> Found:
    """Compare the values of two runs; a value that only one of them has is an infinite difference.

    The words of the result name the first differences: those of the log in the order of the iterations, then tensors.
    """
    floors = _floors(expected)
    errors: dict[str, float] = {}
    for name in expected | found:
        errors[name] = math.inf
        if name in expected and name in found:
            errors[name] = error_of(found[name], expected[name], floors.get(_kind(name), LEAST))
    words = [f"{name} differs by {error:.1e}" for name, error in errors.items() if error > tolerance]
    outcome = OK
    if words:
        outcome = Outcome("differs", f"{len(words)} of {len(errors)} values: {'; '.join(words[:4])}")
    return Found(outcome, max(errors.values(), default=0.0))


def _kind(name: str) -> str:
    """Return the kind of a tensor of a checkpoint, such as weight or exp_avg; a number of the log has no kind."""
    return "" if " " in name else name.partition(".")[0]


def _floors(values: Values) -> dict[str, float]:
    """Return kind of tensor -> the size below which an error is not relative to the tensor's own size.

    Some tensors, such as the moments of biases of keys, consist of rounding errors only.
    """
    squares: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, value in values.items():
        if kind := _kind(name):
            squares[kind] += value.double().square().sum().item()  # type: ignore[assignment]
            counts[kind] += value.numel()
    return {kind: FLOOR * math.sqrt(squares[kind] / max(counts[kind], 1)) for kind in squares}
