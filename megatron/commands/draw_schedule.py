"""Draw a pipeline schedule as the engine would run it, with its bubble and its memory: as text, and as SVG."""

import argparse
from pathlib import Path

from tds.schedule import NAMES, Plan, schedule_of
from tds.timetable import Span, bubble, check, most_in_flight, times

from .cli import Parser, run

EXAMPLES = """\
  python tools/draw_schedule.py --stages 4 --micros 8
  python tools/draw_schedule.py --schedule 1f1b --extra-warmup 1 --stages 4 --micros 8 --message 0.3
  python tools/draw_schedule.py --schedule interleaved --chunks 2 --stages 4 --micros 8 --svg interleaved.svg
  python tools/draw_schedule.py --schedule zb-h1 --stages 4 --micros 8"""
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
    for span in spans:
        x, y = left + span.begin * scale, span.stage * height + 8
        w = (span.end - span.begin) * scale
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{w - 1:.1f}" height="26" rx="3" '
            f'fill="{COLOURS[span.kind][span.chunk % 2]}"/>'
            f'<text x="{x + w / 2:.1f}" y="{y + 17}" text-anchor="middle">{span.micro}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(args: argparse.Namespace) -> None:
    if min(args.stages, args.micros) < 1:
        raise ValueError("--stages and --micros must be at least 1")
    if (args.chunks > 1) != (args.schedule == "interleaved"):
        raise ValueError(f"--chunks {args.chunks} does not fit {args.schedule}: interleaved takes 2 to 8, the others 1")
    schedule = schedule_of({"schedule": args.schedule, "extra_warmup": args.extra_warmup}, args.chunks)
    plan: Plan = [list(schedule(stage, args.stages, args.micros)) for stage in range(args.stages)]
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
    parser.add_argument("--stages", type=int, required=True, help="pipeline stages")
    parser.add_argument("--micros", type=int, required=True, help="micro-batches of one step")
    parser.add_argument("--forward", type=float, default=1.0, help="time of a forward pass (default: 1)")
    parser.add_argument("--backward", type=float, default=2.0, help="time of a backward pass (default: 2)")
    parser.add_argument("--message", type=float, default=0.0, help="time of a message (default: 0)")
    parser.add_argument("--svg", help="write the picture to this file, too")
    return parser


def cli() -> None:
    run(main, build_parser())


if __name__ == "__main__":
    cli()
