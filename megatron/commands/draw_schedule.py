"""Draw a pipeline schedule as the engine would run it, with its bubble and its memory, or as a run with --trace really did: as text, and as SVG."""

import argparse
from pathlib import Path

from megatron.atomic import write_text
from megatron.reporting.timetable import plan_of, timetable_of
from tds import timeline
from tds.schedule import NAMES
from tds.timetable import Span, bubble, check, most_in_flight, times

from .cli import Parser, run

EXAMPLES = """\
  python tools/draw_schedule.py --stages 4 --micros 8
  python tools/draw_schedule.py --schedule 1f1b --extra-warmup 1 --stages 4 --micros 8 --message 0.3
  python tools/draw_schedule.py --schedule interleaved --chunks 2 --stages 4 --micros 8 --svg interleaved.svg
  python tools/draw_schedule.py --schedule zb-h1 --stages 4 --micros 8
  python tools/draw_schedule.py --run runs/mine --svg mine.svg"""
COLOURS = {"F": ("#7aa6d9", "#b4cdea"), "B": ("#e0a458", "#eec999"), "W": ("#7fb685", "#b5d6b9")}  # even, odd chunk


def as_text(spans: list[Span], stages: int, unit: float) -> str:
    """One row a stage, one column of three characters (four with chunks) for each `unit` of time."""
    chunked = any(span.chunk for span in spans)
    wide = 4 if chunked else 3
    rows = [""] * stages
    for span in sorted(spans, key=lambda s: s.begin):
        at, until = round(span.begin / unit), round(span.end / unit)
        kind = f"{span.kind}{'abcdefgh'[span.chunk]}" if chunked else span.kind
        label = f"{kind}{span.micro}".ljust(wide * (until - at) - 1, "-") + " "
        rows[span.stage] = rows[span.stage].ljust(wide * at) + label
    return "\n".join(f"stage {stage} | {row.rstrip()}" for stage, row in enumerate(rows))


def as_svg(spans: list[Span], stages: int) -> str:
    """One bar a pass, blue forward, orange backward, green weight gradients; odd chunks are paler."""
    width, height, left = 860.0, 34, 70
    scale = (width - left - 10) / max(span.end for span in spans)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{stages * height + 10}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{width:.0f}" height="{stages * height + 10}" fill="white"/>',
    ]
    parts += [f'<text x="4" y="{s * height + 26}">stage {s}</text>' for s in range(stages)]
    parts += [_bar(span, left, scale, span.stage * height + 8) for span in spans]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(span: Span, left: float, scale: float, y: int) -> str:
    x, w = left + span.begin * scale, (span.end - span.begin) * scale
    number = f'<text x="{x + w / 2:.1f}" y="{y + 17}" text-anchor="middle">{span.micro}</text>' if w > 9 else ""
    colour = COLOURS[span.kind][span.chunk % 2]
    return f'<rect x="{x:.1f}" y="{y}" width="{max(w - 1, 0.5):.1f}" height="26" rx="3" fill="{colour}"/>{number}'


def beside(rows: dict[str, list[Span]], stages: int) -> str:
    """Several timetables on one scale of time, one above the other, each below its words."""
    width, height, left = 860, 34, 70
    scale = (width - left - 10) / max(span.end for spans in rows.values() for span in spans)
    tall = stages * height + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{tall * len(rows)}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{tall * len(rows)}" fill="white"/>',
    ]
    for row, (words, spans) in enumerate(rows.items()):
        top = row * tall + 24
        parts.append(f'<text x="4" y="{top - 6}" font-weight="bold">{words}</text>')
        parts += [f'<text x="4" y="{top + s * height + 22}">stage {s}</text>' for s in range(stages)]
        parts += [_bar(span, left, scale, top + span.stage * height + 4) for span in spans]
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw_run(args: argparse.Namespace) -> None:
    """What a traced iteration became, beside the same passes in an ideal schedule."""
    folder = Path(args.run) / timeline.FOLDER
    ranks = timeline.read(folder)
    merged = timeline.merge(folder, ranks)
    table = timetable_of(ranks, args.iteration)
    lines = table.rows()
    print("\n".join(lines))
    print(
        f"the whole step took {table.chosen.seconds * 1e3:.1f} ms, the median of {table.kept} is {table.usual * 1e3:.1f} ms"
    )
    print(f"clocks of {merged.ranks} ranks aligned to {merged.error_us:.0f} us; all of them in {merged.path}")
    if args.svg:
        write_text(args.svg, beside(lines, table.stages))


def main(args: argparse.Namespace) -> None:
    if args.run:
        draw_run(args)
        return
    if args.stages is None or args.micros is None:
        raise ValueError("give --stages and --micros, or --run")
    if min(args.stages, args.micros) < 1:
        raise ValueError("--stages and --micros must be at least 1")
    if (args.chunks > 1) != (args.schedule == "interleaved"):
        raise ValueError(f"--chunks {args.chunks} does not fit {args.schedule}: interleaved takes 2 to 8, the others 1")
    plan = plan_of(args.schedule, args.stages, args.micros, args.chunks, args.extra_warmup)
    check(plan, args.micros)
    spans = times(plan, args.forward, args.backward, args.message)
    print(as_text(spans, args.stages, min(span.end - span.begin for span in spans)))
    kept = ", ".join(f"{most_in_flight(stage) / args.chunks:g}" for stage in plan)
    print(f"bubble {bubble(spans):.1%}; micro-batches kept by each stage: {kept}")
    if args.svg:
        Path(args.svg).write_text(as_svg(spans, args.stages), encoding="utf-8")


def build_parser() -> Parser:
    parser = Parser(__doc__ or "", EXAMPLES)
    parser.add_argument("--schedule", choices=NAMES, default="1f1b", help="default: 1f1b")
    parser.add_argument("--extra-warmup", type=int, default=0, help="how much farther ahead 1f1b runs (default: 0)")
    parser.add_argument(
        "--chunks", type=int, default=1, help="stretches of layers a stage, for interleaved (default: 1)"
    )
    parser.add_argument("--stages", type=int, help="pipeline stages")
    parser.add_argument("--micros", type=int, help="micro-batches of one step")
    parser.add_argument("--forward", type=float, default=1.0, help="time of a forward pass (default: 1)")
    parser.add_argument("--backward", type=float, default=2.0, help="time of a backward pass (default: 2)")
    parser.add_argument("--message", type=float, default=0.0, help="time of a message (default: 0)")
    parser.add_argument("--run", metavar="DIR", help="draw what a run with --trace really did, beside the ideal")
    parser.add_argument("--iteration", type=int, help="with --run: which; if not given, the one of median time")
    parser.add_argument("--svg", help="write the picture to this file, too")
    return parser


def cli() -> None:
    run(main, build_parser())


if __name__ == "__main__":
    cli()
