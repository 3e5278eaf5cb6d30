"""Measure the cost of layers and messages on this machine, predict step times of other layouts, and compare.

Every round measures each layout in turn. The layout trains some steps. Before and after that, as many
single-rank processes as it has ranks run at the same time, to measure their speed and how much their passes vary.
So other load on the machine affects prediction and measurement alike. Layers, messages and the optimizer are
measured independently of layouts.
"""

import argparse
import multiprocessing
import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from data_utils.cli import Parser, run, write_json
from tds.schedule import schedule_of
from tds.timeline import LETTERS
from tds.timetable import Span, bubble

from .profiled_rank import SIZES, work
from .simulator import Costs, Machine, Result, simulate

EXAMPLES = """\
  python tools/profile_run.py
  python tools/profile_run.py --rounds 7 --only "t5 2 1f1b" "gpt2 4 1f1b" --save costs.json"""
COMMON = (
    "--hidden-size 256 --num-attention-heads 4 --vocab-size 8064 --hidden-dropout 0 --attention-dropout 0 --batch-size 4 "
    "--precision fp32 --cpu-matmul torch"
)
MODELS = {
    "gpt2": f"--family gpt2 {COMMON} --seq-length 128",
    "t5": f"--family t5 {COMMON} --enc-seq-length 128 --dec-seq-length 64 --kv-hidden-size 64 --ff-hidden-size 512 --normalization rmsnorm "
    "--position-embedding relative --no-scale-attention --no-hidden-bias --activation gated-gelu --no-tie-embeddings",
}
CALIBRATED = {"gpt2": 3, "t5": 2}  # number of layers in the models that are measured layer by layer


DRAWS = 8  # simulations with different jitter, whose mean is the prediction


class Layout(NamedTuple):
    """A run to predict and measure."""

    family: str
    stages: int
    schedule: str
    micros: int
    layers: int
    replicas: int = 1

    @property
    def chunks(self) -> int:
        """Chunks of layers on each stage."""
        return 2 if self.schedule == "interleaved" else 1

    @property
    def ranks(self) -> int:
        """Number of ranks over all stages and replicas."""
        return self.stages * self.replicas

    @property
    def flags(self) -> str:
        """Flags of `pretrain`."""
        return (
            f"{MODELS[self.family]} --num-layers {self.layers} --pipe-parallel-size {self.stages} --gas {self.micros} "
            f"--pipeline-schedule {self.schedule} --virtual-pipeline-size {self.chunks}"
        )

    def __str__(self) -> str:
        replicas = f" x {self.replicas} replicas" if self.replicas > 1 else ""
        return (
            f"{self.family} {self.stages} {self.schedule}{replicas}, {self.layers} layers, {self.micros} micro-batches"
        )


LAYOUTS = [
    Layout("gpt2", 1, "1f1b", 4, 4), Layout("gpt2", 2, "1f1b", 4, 4), Layout("gpt2", 2, "1f1b", 8, 6), Layout("gpt2", 2, "gpipe", 4, 4),
    Layout("gpt2", 2, "interleaved", 4, 4), Layout("gpt2", 2, "zb-h1", 4, 4), Layout("gpt2", 3, "1f1b", 6, 6),
    Layout("gpt2", 4, "1f1b", 8, 8), Layout("gpt2", 2, "1f1b", 4, 4, replicas=2), Layout("t5", 1, "1f1b", 4, 2),
    Layout("t5", 2, "1f1b", 4, 2), Layout("t5", 2, "1f1b", 8, 4), Layout("t5", 2, "zb-h1", 4, 2), Layout("t5", 4, "1f1b", 8, 4),
]  # fmt: skip


class Group:
    """The processes of one run. They idle until they get a request."""

    def __init__(self, flags: str, ranks: int) -> None:
        context = multiprocessing.get_context("forkserver")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=work, args=(flags, rank, ranks, port, theirs))
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def ready(self) -> list[dict[str, Any]]:
        """Return what each rank holds, once all have made their first steps. Raises RuntimeError if a rank fails."""
        return self.answers()

    def ask(self, what: str, value: Any = None) -> None:
        """Send a request to all ranks; `answers` waits for the results."""
        for pipe in self.pipes:
            pipe.send((what, value))

    def answers(self) -> list[Any]:
        """Return the results of all ranks."""
        try:
            return [pipe.recv() for pipe in self.pipes]
        except EOFError:
            raise RuntimeError("a rank that was to be measured has ended; its error stands above") from None

    def stop(self) -> None:
        """Stop all processes."""
        for pipe, process in reversed(list(zip(self.pipes, self.processes, strict=True))):  # rank 0 holds the store
            if process.is_alive():
                pipe.send(None)
            process.join(20)


@dataclass
class Calibrated:
    """Costs in seconds of a single rank alone on a core.

    layers: (forward, input gradients, weight gradients) by kind. engine: cost of passes relative to that of
    their layers (forward, backward). whole: a step of the measured run. step: (seconds, parameters) of an
    optimizer step.
    """

    layers: dict[str, tuple[float, float, float]]
    engine: tuple[float, float]
    whole: float
    begin: float
    step: tuple[float, int]
    messages: dict[str, float]
    message_bytes: float

    def sum(self, kinds: Sequence[str], part: int) -> float:
        """Return the total over layers."""
        return sum(self.layers[kind][part] for kind in kinds)


def of_step(pieces: Sequence[Sequence[Any]], name: str) -> float:
    """Return the CPU seconds in all spans of this name."""
    return float(sum(p[2] for p in pieces if p[3] == name) / 1e9)


def calibrate(group: Group, held: dict[str, Any], messages: dict[str, float], message_bytes: float) -> Calibrated:
    """Return the costs of layers and whole steps, measured in a run of one rank."""
    group.ask("layers")
    layers = group.answers()[0]
    group.ask("steps", 3)
    steps = group.answers()[0]
    kinds = [kind for chunk in held["kinds"] for kind in chunk]

    def usual(name: str) -> float:
        return statistics.median(of_step(pieces, name) for pieces in steps)

    micros = sum(p[3] == "Forward" for p in steps[0])
    forward = sum(layers[kind][0] for kind in kinds)
    backward = sum(layers[kind][1] + layers[kind][2] for kind in kinds)
    whole = usual("train_batch")
    known = usual("Forward") + usual("Backward") + usual("Step")
    engine = usual("Forward") / micros / forward, usual("Backward") / micros / backward
    return Calibrated(
        layers, engine, whole, max(whole - known, 0.0), (usual("Step"), held["parameters"]), messages, message_bytes
    )


def predict(
    layout: Layout, held: Sequence[dict[str, Any]], known: Calibrated, rates: Sequence[float], uneven: float, seed: int
) -> Result:
    """Return the simulated step of a layout whose stages hold the layers in `held`.

    rates: relative speed of a rank while 1, 2, ... ranks compute at once. uneven, seed: of the jitter.
    """
    of = {each["stage"]: each for each in held}
    ahead, behind = known.engine

    def forward(stage: int, chunk: int) -> float:
        return ahead * known.sum(of[stage]["kinds"][chunk], 0)

    def weight(stage: int, chunk: int) -> float:
        return behind * known.sum(of[stage]["kinds"][chunk], 2)

    def backward(stage: int, chunk: int) -> float:
        return behind * known.sum(of[stage]["kinds"][chunk], 1) + weight(stage, chunk)

    def reduce(stage: int, _: int) -> float:
        shared = of[stage]["tied"] + (of[stage]["parameters"] if layout.replicas > 1 else 0)
        return float(4 * shared * known.messages["reduce"])

    def optimizer(stage: int, _: int) -> float:
        return float(known.step[0] * of[stage]["parameters"] / known.step[1])

    small, large = (known.messages[str(size)] for size in SIZES)
    bandwidth = (SIZES[1] - SIZES[0]) / max(large - small, 1e-9)
    costs = Costs(
        forward, backward, weight, message=known.message_bytes, begin=known.begin, reduce=reduce, optimizer=optimizer
    )
    schedule = schedule_of({"schedule": layout.schedule}, layout.chunks)
    plan = [list(schedule(stage, layout.stages, layout.micros)) for stage in range(layout.stages)]
    machine = Machine(latency=small, bandwidth=bandwidth, rates=rates, jitter=uneven, seed=seed)
    return simulate(plan, costs, machine, layout.replicas)


def rates_of(speeds: Sequence[float], ranks: int) -> list[float]:
    """Return the speed with n ranks at once for each n, interpolated from those of 1, 2 and all ranks."""
    known = dict(zip(sorted({1, min(2, ranks), ranks}), speeds, strict=True))
    found = []
    for n in range(1, ranks + 1):
        low, high = max(k for k in known if k <= n), min(k for k in known if k >= n)
        share = (n - low) / (high - low) if high > low else 0.0
        found.append((low * known[low] * (1 - share) + high * known[high] * share) / n)
    return found


def speeds(ones: Sequence[Group], ranks: int, steps: int, whole: float) -> tuple[list[float], float]:
    """Measure the speed of 1, 2 and all ranks at once, and how much the duration of passes varies.

    Speed is `whole`, the CPU seconds of a step, divided by its wall-clock time. The variation is half the width
    of a uniform distribution with the same variance, measured with all ranks.
    """
    found, uneven = [], 0.0
    for busy in sorted({1, min(2, ranks), ranks}):
        for group in ones[:busy]:
            group.ask("steps", steps)
        answers = [group.answers()[0] for group in ones[:busy]]
        found.append(whole * steps / statistics.mean(map(_took, answers)))
        uneven = statistics.mean(map(_unevenness, answers))
    return found, uneven


def _unevenness(steps: Sequence[Sequence[Any]]) -> float:
    widths = []
    for name in ("Forward", "Backward"):
        took = [p[1] - p[0] for pieces in steps for p in pieces if p[3] == name]
        widths.append(3**0.5 * statistics.pstdev(took) / statistics.mean(took))
    return float(min(statistics.mean(widths), 0.95))


def _took(steps: Sequence[Sequence[Any]]) -> float:
    return float(sum(p[1] - p[0] for pieces in steps for p in pieces if p[3] == "train_batch") / 1e9)


def measured(layout: Layout, answers: Sequence[Any], held: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return (seconds of a step, bubble) from the spans of all ranks."""
    steps = list(zip(*answers, strict=True))
    begins = [min(p[0] for rank in step for p in rank if p[3] == "train_batch") for step in steps]
    end = max(p[1] for rank in steps[-1] for p in rank if p[3] == "train_batch")
    took = [b - a for a, b in pairwise([*begins, end])]
    bubbles = []
    for step in steps:
        spans = [
            Span(held[rank]["stage"], p[5], p[6], LETTERS[p[3]], p[0] / 1e9, p[1] / 1e9)
            for rank, pieces in enumerate(step) for p in pieces if p[4] == "pass" and rank % layout.replicas == 0
        ]  # fmt: skip
        zero = min(span.begin for span in spans)
        bubbles.append(bubble([Span(s.stage, s.micro, s.chunk, s.kind, s.begin - zero, s.end - zero) for s in spans]))
    return statistics.median(took) / 1e9, statistics.median(bubbles)


class Round(NamedTuple):
    """One layout in one round: seconds of a step and bubble, predicted and measured."""

    predicted: float
    took: float
    bubble: float
    was: float


def compare(layouts: Sequence[Layout], rounds: int, steps: int, save: str | None) -> dict[Layout, list[Round]]:
    """Start all processes, calibrate, and measure layouts and calibration in turn."""
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload(["torch", "tds", "megatron_tools.simulate.synthetic", "torch._dynamo"])
    most = max(layout.ranks for layout in layouts)
    ones = {
        f: [Group(Layout(f, 1, "1f1b", 2, CALIBRATED[f]).flags, 1) for _ in range(most)]
        for f in dict.fromkeys(each.family for each in layouts)
    }
    pair = Group(Layout(next(iter(ones)), 2, "1f1b", 2, 2).flags, 2)
    held = {family: [each.ready()[0] for each in groups][0] for family, groups in ones.items()}
    pair.ready()
    found: dict[Layout, list[Round]] = {}
    for layout in layouts:
        group = Group(layout.flags, layout.ranks)
        about, calibrators, found[layout] = group.ready(), ones[layout.family], []
        for _ in range(rounds):
            pair.ask("messages")
            messages = pair.answers()[0]
            size = 4.0 * 4 * 256 * (128 + (64 if layout.family == "t5" else 0))
            known = calibrate(calibrators[0], held[layout.family], messages, size)
            before, uneven = speeds(calibrators, layout.ranks, steps, known.whole)
            group.ask("steps", steps)
            took, was = measured(layout, group.answers(), about)
            after, later = speeds(calibrators, layout.ranks, steps, known.whole)
            rates = rates_of([(a + b) / 2 for a, b in zip(before, after, strict=True)], layout.ranks)
            drawn = [predict(layout, about, known, rates, (uneven + later) / 2, seed) for seed in range(DRAWS)]
            seconds, idle = (statistics.mean(x) for x in zip(*((r.seconds, r.bubble) for r in drawn), strict=True))
            found[layout].append(Round(seconds, took, idle, was))
        if save:
            write_json(
                save,
                {
                    "layers": known.layers,
                    "engine": known.engine,
                    "begin": known.begin,
                    "step": known.step,
                    "messages": messages,
                },
            )
        print(_row(layout, found[layout]), flush=True)
        group.stop()
    for group in [pair, *(each for groups in ones.values() for each in groups)]:
        group.stop()
    return found


def _medians(rounds: Sequence[Round]) -> tuple[Round, float]:
    """Return the median of each column, and of predicted over measured time minus 1."""
    middle = Round(*(statistics.median(column) for column in zip(*rounds, strict=True)))
    return middle, statistics.median(each.predicted / each.took for each in rounds) - 1


def _row(layout: Layout, rounds: Sequence[Round]) -> str:
    middle, off = _medians(rounds)
    return (
        f"| {layout} | {middle.predicted * 1e3:.0f} | {middle.took * 1e3:.0f} | {off:+.1%} | {middle.bubble:.1%} | {middle.was:.1%} | "
        f"{100 * statistics.median(r.bubble - r.was for r in rounds):+.1f} |"
    )


def main(args: argparse.Namespace) -> None:
    chosen = [x for x in LAYOUTS if not args.only or any(str(x).startswith(word) for word in args.only)]
    if not chosen:
        raise ValueError(f"--only {args.only} names none of: {'; '.join(map(str, LAYOUTS))}")
    print("| layout | predicted, ms | measured, ms | off by | bubble predicted | measured | off by, points |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    found = compare(chosen, args.rounds, args.steps, args.save)
    near = [
        abs(_medians(r)[1]) <= 0.15 and abs(statistics.median(x.bubble - x.was for x in r)) <= 0.05
        for r in found.values()
    ]
    print(
        f"{sum(near)} of {len(near)} within 15 % of the step and 5 points of the bubble; medians of {args.rounds} rounds"
    )


def build_parser() -> Parser:
    parser = Parser(__doc__ or "", EXAMPLES)
    parser.add_argument("--rounds", type=int, default=5, help="of each layout (default: 5)")
    parser.add_argument("--steps", type=int, default=3, help="of a layout in a round (default: 3)")
    parser.add_argument("--only", nargs="+", help="layouts whose row begins like this")
    parser.add_argument("--save", help="write what was calibrated to this JSON")
    return parser


def cli() -> None:
    run(main, build_parser())


if __name__ == "__main__":
    cli()
