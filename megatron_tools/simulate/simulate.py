"""Simulate one step of a pipeline schedule and print a table of what-if variants beside it."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from data_utils.cli import Parser, run, write_json
from tds.queues import Rules
from tds.schedule import NAMES

from ..report.drawing import write_pictures
from ..report.timetable import plan_of
from .simulator import Costs, Machine, Result, simulate

EXAMPLES = """\
  python tools/simulate.py --stages 4 --micros 8
  python tools/simulate.py --stages 8 --micros 32 --forward 0.011 --backward 0.022 --megabytes 16 --gigabytes-per-second 20
  python tools/simulate.py --stages 4 --micros 8 --cores 2 --schedule zb-h1 --svg zb.svg --chrome zb.json"""


def costs_of(args: argparse.Namespace, chunks: int) -> Costs:
    """Return the costs of a pass, for stages that are split into `chunks`."""
    return Costs(args.forward / chunks, args.backward / chunks, message=args.megabytes * 1e6, optimizer=args.optimizer)


def machine_of(args: argparse.Namespace) -> Machine:
    """Return the simulated machine: links, cores, stragglers and queues."""
    slow = {}
    for word in args.slow:
        stage, _, factor = word.partition(":")
        if not stage.isdigit() or int(stage) >= args.stages or not factor:
            raise ValueError(f"--slow {word}: give a stage from 0 to {args.stages - 1} and a factor, as 2:1.5")
        slow[int(stage)] = float(factor)
    rates = [min(1.0, args.cores / n) for n in range(1, args.stages * args.replicas + 1)] if args.cores else []
    return Machine(
        latency=args.latency,
        bandwidth=args.gigabytes_per_second * 1e9,
        rates=rates,
        rules=Rules(ahead=0) if args.queues == "nccl" else None,
        slow=slow,
        jitter=args.jitter,
        seed=args.seed,
    )


def answers(args: argparse.Namespace) -> Iterator[tuple[str, Result, float]]:
    """Yield (variant, simulation result, micro-batches of a step)."""
    p, m, machine = args.stages, args.micros, machine_of(args)

    def ask(name: str, what: str, micros: int, chunks: int, on: Machine) -> tuple[str, Result, float]:
        extra = args.extra_warmup if what == "1f1b" else 0
        plan = plan_of(what, p, micros, chunks, extra)
        return name, simulate(plan, costs_of(args, chunks), on, args.replicas), micros

    base, chunks = args.schedule, args.chunks
    yield ask(f"as given: {base}", base, m, chunks, machine)
    middle = p // 2
    yield ask(
        f"stage {middle} 1.2 times as slow", base, m, chunks, replace(machine, slow={**machine.slow, middle: 1.2})
    )
    slower = replace(machine, bandwidth=machine.bandwidth / 4, latency=machine.latency * 4)
    yield ask("links 4 times as slow", base, m, chunks, slower)
    yield ask("passes of 0.8 to 1.2 times their time", base, m, chunks, replace(machine, jitter=0.2))
    yield ask(f"{2 * m} micro-batches", base, 2 * m, chunks, machine)
    for name in NAMES:
        if name != base:
            yield ask(name, name, m, 2 if name == "interleaved" else 1, machine)


def table(rows: list[tuple[str, Result, float]]) -> str:
    """Return a Markdown table: step time, time per micro-batch relative to the first row, bubble, and idle reasons."""
    lines = [
        "| what | step | for each micro-batch | bubble | stages wait most for |",
        "| --- | --- | --- | --- | --- |",
    ]
    each = rows[0][1].seconds / rows[0][2]
    for name, found, micros in rows:
        reasons: dict[str, float] = {}
        for stage in found.idle:
            for word, seconds in stage.items():
                reasons[word] = reasons.get(word, 0.0) + seconds / len(found.idle) / found.seconds
        most = ", ".join(f"{word} {share:.1%}" for word, share in sorted(reasons.items(), key=lambda r: -r[1])[:3])
        lines.append(
            f"| {name} | {found.seconds:.4g} | {found.seconds / micros / each - 1:+.1%} | {found.bubble:.1%} | {most} |"
        )
    return "\n".join(lines)


def chrome_of(result: Result) -> dict[str, Any]:
    """Return a simulated step as a Chrome trace."""
    stages = range(len(result.idle))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": s, "args": {"name": f"stage {s}, simulated"}} for s in stages
    ]
    for s in result.spans:
        args = {"micro": s.micro, "chunk": s.chunk}
        events.append({"ph": "X", "name": s.kind, "cat": "pass", "pid": s.stage, "tid": 0, "ts": s.begin * 1e6,
                       "dur": (s.end - s.begin) * 1e6, "args": args})  # fmt: skip
    for m in result.messages:
        name = "activation" if m.forward else "gradient"
        events.append({"ph": "X", "name": name, "cat": "message", "pid": m.to, "tid": 1 + m.forward, "ts": m.begin * 1e6,
                       "dur": (m.end - m.begin) * 1e6, "args": {"micro": m.micro, "from": m.stage}})  # fmt: skip
    return {"traceEvents": events}


def main(args: argparse.Namespace) -> None:
    if min(args.stages, args.micros, args.replicas) < 1:
        raise ValueError("--stages, --micros and --replicas must be at least 1")
    if (args.chunks > 1) != (args.schedule == "interleaved"):
        raise ValueError(f"--chunks {args.chunks} does not fit {args.schedule}: interleaved takes 2 to 8, the others 1")
    rows = list(answers(args))
    print(table(rows))
    found = rows[0][1]
    for stage, reasons in enumerate(found.idle):
        print(f"stage {stage} waits: " + (", ".join(f"{word} {s:.4g}" for word, s in reasons.items()) or "never"))
    begun = min(span.begin for span in found.spans)
    spans = [replace(span, begin=span.begin - begun, end=span.end - begun) for span in found.spans]
    words = f"{rows[0][0]}: {found.seconds:.4g} a step, bubble {found.bubble:.1%}"
    write_pictures(args.svg, args.png, {words: spans}, args.stages)
    if args.chrome:
        write_json(args.chrome, chrome_of(found))


def build_parser() -> Parser:
    parser = Parser(__doc__ or "", EXAMPLES)
    add: Any = parser.add_argument
    add("--schedule", choices=NAMES, default="1f1b", help="default: 1f1b")
    add("--extra-warmup", type=int, default=0, help="how much farther ahead 1f1b runs (default: 0)")
    add("--chunks", type=int, default=1, help="stretches of layers a stage, for interleaved (default: 1)")
    add("--stages", type=int, required=True, help="pipeline stages")
    add("--micros", type=int, required=True, help="micro-batches of one step")
    add("--replicas", type=int, default=1, help="of the whole pipeline (default: 1)")
    add("--forward", type=float, default=1.0, help="seconds of a forward pass over a stage (default: 1)")
    add("--backward", type=float, default=2.0, help="seconds of its backward pass (default: 2)")
    add("--optimizer", type=float, default=0.0, help="seconds of the optimizer's step (default: 0)")
    add("--latency", type=float, default=0.0, help="seconds that a message is on its way at least (default: 0)")
    add("--megabytes", type=float, default=0.0, help="of a message (default: 0)")
    add("--gigabytes-per-second", type=float, default=float("inf"), help="of a link (default: no limit)")
    add(
        "--queues",
        choices=("free", "nccl"),
        default="free",
        help="nccl: a message waits for those before it in its group",
    )
    add("--cores", type=float, default=0.0, help="that all ranks share; 0: each has its own (default: 0)")
    add(
        "--slow",
        nargs="+",
        default=[],
        metavar="STAGE:FACTOR",
        help="stages that take so many times as long, e.g. 2:1.5",
    )
    add("--jitter", type=float, default=0.0, help="0.1 lets each pass take 0.9 to 1.1 times as long (default: 0)")
    add("--seed", type=int, default=0, help="of the jitter (default: 0)")
    add("--svg", help="draw the schedule as given to this file")
    add("--png", help="draw it to this file (needs matplotlib)")
    add("--chrome", help="write it as a Chrome trace to this file")
    return parser


def cli() -> None:
    run(main, build_parser())


if __name__ == "__main__":
    cli()
