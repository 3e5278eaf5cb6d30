"""Coordinate check of muP: train a model in several widths for a few steps, and compare the sizes of its activations.

With muP (Yang et al. 2022), activations of trained models have the same size in every width. Without it, they grow with
the width, so wider models need smaller learning rates. Training flags describe the model of the smallest width
(--family llama --num-layers 4 ...).
"""

from data_utils.cli import output_file, positive_int, run

from ..plan.plan_flags import TrainingFlagsParser

EXAMPLES = """\
  python tools/coordinate_check.py --output coordinates.png
  python tools/coordinate_check.py --widths 128 256 512 --grow head-size --family llama --activation swiglu \\
      --position-embedding rope --normalization rmsnorm --no-hidden-bias"""


def build_parser() -> TrainingFlagsParser:
    parser = TrainingFlagsParser(__doc__, EXAMPLES)
    add = parser.add_argument
    add(
        "--widths",
        type=positive_int,
        nargs="+",
        default=[64, 128, 256, 512],
        help="hidden sizes (default: 64 128 256 512)",
    )
    add(
        "--grow",
        choices=("heads", "head-size"),
        default="heads",
        help="what grows with the width: the number of attention heads (default) or the width of each",
    )
    add("--steps", type=positive_int, default=5, help="optimizer steps (default: 5)")
    add("--seeds", type=positive_int, default=2, help="seeds over which sizes are averaged (default: 2)")
    add("--output", type=output_file, help="figure to draw, a PNG (needs matplotlib)")
    return parser


def cli() -> None:
    run("megatron_tools.report.coordinate_check:main", build_parser())
