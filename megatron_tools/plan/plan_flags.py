"""Find layouts of a model on a cluster that fit in memory, and predict their speed and training time in days.

Give two of --global-batch-size, --micro-batch-size and --gas, or --global-batch-size alone. Training flags
describe the model (--num-layers 24 ...). A layout flag (--model-parallel-size 8, --zero-stage 1,
--checkpoint-activations ...) sets a value that the search keeps. docs/scaling.md describes what is counted and how
accurate the predictions are.
"""

from typing import Any

from data_utils.cli import Parser, local_path, number_type, output_file, positive_int, run
from megatron.config.fields import at_least

EXAMPLES = """\
  python tools/plan.py --model configs/models/llama_8b.json --cluster h100 --devices 64 --global-batch-size 1024 \\
      --tokens 1e12
  python tools/plan.py --model configs/models/gpt2_345M.json --cluster a100 --devices 8 --micro-batch-size 4 --gas 8 \\
      --explain
  python tools/plan.py --model configs/models/llama_70b.json --cluster h100 --devices 256 --global-batch-size 1024 \\
      --model-parallel-size 8 --pipe-parallel-size 4 --explain --chart memory.png
  python tools/plan.py --family gpt2 --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \\
      --vocab-size 5000 --cluster laptop_cpu --devices 2 --global-batch-size 8 --write plan && plan/run.sh"""


class TrainingFlagsParser(Parser):
    """Parser that does not know the training flags; it returns them unparsed in the result's attribute `flags`."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Return the arguments; `flags` holds those that this parser does not know."""
        parsed, unknown = self.parse_known_args(args, namespace)
        parsed.flags = unknown
        return parsed


def build_parser() -> Parser:
    parser = TrainingFlagsParser(__doc__, EXAMPLES)
    add = parser.add_argument
    add(
        "--model",
        "--config",
        type=local_path,
        action="append",
        default=[],
        metavar="FILE",
        help="model settings: a name in configs/models such as llama_8b, or a JSON file",
    )
    add("--cluster", type=local_path, help="hardware: a name in configs/clusters such as h100, or a JSON file")
    add("--devices", type=positive_int, help="number of devices")
    add("--global-batch-size", type=positive_int, help="samples per step")
    add(
        "--micro-batch-size",
        "--batch-size",
        type=positive_int,
        help="samples per micro-batch (default: chosen by the search)",
    )
    add("--gas", type=positive_int, help="micro-batches per step and replica (default: computed from the batch sizes)")
    add(
        "--tokens",
        type=number_type(at_least(1)),
        help="tokens to train on, e.g. 1e12; the table then shows the duration of the run",
    )
    add("--top", type=positive_int, default=10, help="rows to print (default: 10)")
    add(
        "--layout",
        type=int,
        default=1,
        help="number of the table row for --explain, --chart and --write (default: 1, the fastest)",
    )
    add(
        "--explain",
        action="store_true",
        help="print how the memory and time of the layout chosen by --layout are computed",
    )
    add(
        "--chart",
        type=output_file,
        metavar="FILE",
        help="draw the memory of the layout chosen by --layout, by stage and kind (needs matplotlib)",
    )
    add(
        "--write",
        type=local_path,
        metavar="DIR",
        help="write config.json, ds_config.json and run.sh for the layout chosen by --layout",
    )
    return parser


def cli() -> None:
    run("megatron_tools.plan.plan:main", build_parser())
