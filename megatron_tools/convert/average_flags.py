"""Average the weights of several checkpoints into a new checkpoint, as in SWA (Izmailov et al. 2018)."""

from data_utils.cli import Parser, any_path, local_path, run

EXAMPLES = """\
  python tools/average_checkpoints.py --load runs/gpt2 --last 5 --output averaged
  python tools/average_checkpoints.py --load runs/gpt2 --last 5 --decay 0.5 --output averaged
  python tools/average_checkpoints.py --load a/checkpoints/iter_0000100 b/checkpoints/iter_0000100 --weights 3 1 \\
      --output averaged
      then: python tools/evaluate.py --load averaged --input held_out.jsonl"""


def build_parser() -> Parser:
    parser = Parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--load", type=any_path, nargs="+", required=True, help="a run directory, with --last, or several checkpoints")
    add("--last", type=int, help="number of newest checkpoints of the run to average")
    add("--weights", type=float, nargs="+", help="weight of each checkpoint, oldest first (default: all equal)")
    add("--decay", type=float, help="weight the checkpoints as an exponential moving average with this decay")
    add("--ema", action="store_true", help="use the moving average of the weights that a run with --ema-decay keeps")
    add("--output", type=local_path, required=True, help="new folder for the checkpoint")
    return parser


def cli() -> None:
    run("megatron_tools.convert.average_checkpoints:main", build_parser())
