"""Show on a web page how a trained model writes: texts token by token, side by side, and likely next tokens.

Only this machine can open the page, unless --host says otherwise. The page loads nothing from other servers.
"""

from data_utils.cli import Parser, number_type, run
from megatron.config.fields import between

from . import generate_flags

EXAMPLES = """\
  python tools/demo.py --load runs/gpt2
  python tools/demo.py --load exported/ --port 8000 --num-samples 3
  python tools/demo.py --load runs/poet --poem
      a model of scripts/run_poet.sh: title -> poem"""


def build_parser() -> Parser:
    parser = Parser(__doc__, EXAMPLES)
    generate_flags.add_model_flags(parser)
    generate_flags.add_sampling_flags(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 lets other machines in (default: 127.0.0.1)")
    add("--port", type=number_type(between(1, 65535), int), default=7860, help="port of the page (default: 7860)")
    add("--poem", action="store_true", help="add a form that writes a poem under a title, with lines of equal length")
    # Flags of tools/generate.py that the page does not have keep their defaults.
    parser.set_defaults(**vars(generate_flags.build_parser().parse_args(["--load", "."])))
    return parser


def cli() -> None:
    run("megatron_tools.write.demo:main", build_parser())
