"""Draw a pipeline schedule with its bubble and memory, as text and as a figure.

Draws the schedule that the engine would run, or with --run the measured schedule of a run with --trace.
"""

import argparse
from pathlib import Path
from string import ascii_letters

from data_utils.cli import Parser, local_path, number_type, output_file, positive_float, positive_int, run
from megatron.config.fields import at_least
from tds import timeline
from tds.schedule import BUILT_IN
from tds.timetable import Span, bubble_fraction, check_plan, max_in_flight, simulate_times

from .drawing import write_figures
from .timetable import instructions_of, timetable_of

EXAMPLES = """\
  python tools/draw_schedule.py --stages 4 --micros 8
  python tools/draw_schedule.py --schedule 1f1b --extra-warmup 1 --stages 4 --micros 8 --message 0.3
  python tools/draw_schedule.py --schedule interleaved --chunks 2 --stages 4 --micros 8 --svg interleaved.svg
  python tools/draw_schedule.py --schedule zb-h1 --stages 4 --micros 8
  python tools/draw_schedule.py --run runs/mine --svg mine.svg"""


def as_text(spans: list[Span], stages: int, unit: float) -> str:
    """Return one row for each stage, with three characters (four with chunks) for each `unit` of time."""
    chunked = any(span.chunk for span in spans)
    cell_width = 4 if chunked else 3
    rows = [""] * stages
    for span in sorted(spans, key=lambda s: s.begin):
        begin_cell = round(span.begin / unit)
        end_cell = round(span.end / unit)
        pass_name = span.kind
        if chunked:
            # Fa is a forward pass of the first chunk. There are 52 letters, from a to Z.
            pass_name += ascii_letters[span.chunk % 52]
        # A pass of 2 units in cells of 3 characters is shown as `B0--- `.
        width = cell_width * (end_cell - begin_cell)
        label = f"{pass_name}{span.micro}".ljust(width - 1, "-")
        # Spaces up to the begin of the pass show the time in which the stage was idle.
        row = rows[span.stage].ljust(cell_width * begin_cell)
        rows[span.stage] = f"{row}{label} "
    return "\n".join(f"stage {stage} | {row.rstrip()}" for stage, row in enumerate(rows))


def draw_run(args: argparse.Namespace) -> None:
    """Draw one iteration of a run that was made with --trace, next to the ideal schedule of the same passes."""
    folder = Path(args.run) / timeline.FOLDER
    ranks = timeline.read(folder)
    merged = timeline.merge(folder, ranks)
    table = timetable_of(ranks, args.iteration)
    rows = table.rows()
    print("\n".join(rows))
    print(
        f"the whole step took {table.chosen.seconds * 1e3:.1f} ms, the median of {table.num_iterations} steps is "
        f"{table.median_seconds * 1e3:.1f} ms"
    )
    print(f"clocks of {merged.ranks} ranks aligned to within {merged.error_us:.0f} us; merged trace: {merged.path}")
    write_figures(args.svg, args.png, rows, table.stages, "ms")


def main(args: argparse.Namespace) -> None:
    if args.run:
        draw_run(args)
        return
    stages = args.stages
    if stages is None or args.micros is None:
        raise ValueError("give --stages and --micros, or --run")
    if (args.chunks > 1) != (args.schedule == "interleaved"):
        raise ValueError(
            f"--chunks {args.chunks} does not fit --schedule {args.schedule}; use 2 or more chunks for interleaved and "
            f"1 for the other schedules"
        )
    plan = instructions_of(args.schedule, stages, args.micros, args.chunks, args.extra_warmup)
    check_plan(plan, args.micros)
    spans = simulate_times(plan, args.forward, args.backward, args.message)
    shortest = min(span.end - span.begin for span in spans)
    print(as_text(spans, stages, shortest))
    in_flight = ", ".join(f"{max_in_flight(stage) / args.chunks:g}" for stage in plan)
    bubble = f"bubble {bubble_fraction(spans):.1%}"
    print(f"{bubble}; micro-batches kept by each stage: {in_flight}")
    extra = f", extra warmup {args.extra_warmup}" if args.extra_warmup else ""
    label = f"{args.schedule}{extra}: {stages} stages, {args.micros} micro-batches, {bubble}"
    write_figures(args.svg, args.png, {label: spans}, stages)


def build_parser() -> Parser:
    parser = Parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--schedule", choices=BUILT_IN, default="1f1b", help="schedule (default: 1f1b)")
    add(
        "--extra-warmup",
        type=int,
        default=0,
        help="for 1f1b: a value of N multiplies the number of warm-up forward passes by 1 + N (default: 0)",
    )
    add("--chunks", type=positive_int, default=1, help="layer chunks per stage, for interleaved schedules (default: 1)")
    add("--stages", type=positive_int, help="pipeline stages")
    add("--micros", type=positive_int, help="micro-batches per step")
    add("--forward", type=positive_float, default=1.0, help="duration of a forward pass (default: 1)")
    add("--backward", type=positive_float, default=2.0, help="duration of a backward pass (default: 2)")
    add("--message", type=number_type(at_least(0)), default=0.0, help="duration of a message (default: 0)")
    add(
        "--run",
        type=local_path,
        metavar="DIR",
        help="draw the measured schedule of this run, made with --trace, next to the ideal schedule",
    )
    add("--iteration", type=int, help="iteration of --run (default: the iteration with median time)")
    add("--svg", type=output_file, help="SVG file to write")
    add("--png", type=output_file, help="PNG file to write (needs matplotlib)")
    return parser


def cli() -> None:
    run(main, build_parser())
