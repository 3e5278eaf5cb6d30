"""Run an entry script in several layouts on CPU ranks, and name the first layer that differs from a run in one process.

Each layout trains for a few steps. Everything after -- is passed to the script. Use a tiny model. Dropout is
off unless --keep-dropout is given, because replicas and tensor-parallel ranks draw different masks. Exit code 0
if all layouts agree, else 1.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import megatron
from data_utils.cli import Parser, local_path, positive_float, positive_int, run
from megatron.ranks.source import package_versions, source_hash

from .layouts import DEFAULT_LAYOUTS, Layout, common_micros, read_layout

EXAMPLES = """\
  python tools/verify_layout.py pretrain_gpt2.py -- --data-path runs/steps/data_text_document \\
      --vocab-file runs/steps/tokenizer.model --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64
  python tools/verify_layout.py examples/pretrain_decoder.py --layouts "pp 2" "tp 2, sp" --precision fp64 -- \\
      --data-path ...
  python tools/verify_layout.py --fuzz 100 --seed 1"""
FIXED_FLAGS = (
    "--batch-size-schedule none --train-samples none --eval-iters 0 --eval-interval 0 --save-interval 0 "
    "--no-save-at-end --log-interval 1 --no-compile --no-tensorboard --num-workers 0"
)
TIMEOUT = 600.0  # seconds of a layout
NO_DEVICES = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"), "")


def train_in_layout(args: argparse.Namespace, layout: Layout, micros: int, folder: Path) -> str | None:
    """Train in `layout`; the ranks write records into `folder`. Return an error message, or None on success."""
    folder.mkdir()
    dropout = [] if args.keep_dropout else ["--hidden-dropout", "0", "--attention-dropout", "0"]
    own_flags = ["--train-iters", str(args.steps), "--precision", args.precision, "--run-dir", f"{folder}/run"]
    # The user's flags, then this tool's flags, which override them.
    flags = [*args.flags, *dropout, *layout.flags(micros), *FIXED_FLAGS.split(), *own_flags]
    command = [sys.executable, "-m"]
    if layout.ranks > 1:
        command += ["megatron_tools.launch", "--standalone", "--nproc-per-node", str(layout.ranks), "-m"]
    command += ["megatron_tools.verify.verify_rank", str(folder), str(args.steps), args.script, *flags]
    # The ranks import the package from where this process has it, whatever their working directory is.
    python_path = [str(Path(megatron.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    timeout = args.timeout or TIMEOUT
    env = {**os.environ, **NO_DEVICES, "PYTHONPATH": os.pathsep.join(filter(None, python_path))}
    try:
        process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return f"did not finish within {timeout:g} s (--timeout)"
    # Each rank writes its file after the last step. If all files are there, an error at exit does not matter.
    if len(list(folder.glob("rank*.pt"))) == layout.ranks:
        return None
    return describe_failure(folder, process.returncode, process.stderr)


def describe_failure(folder: Path, code: int, stderr: str) -> str:
    """Return why a run wrote no records and, if known, in which module it stopped."""
    lines = list(filter(str.strip, stderr.splitlines()))
    # Show two lines, or one if they are equal: the first one that belongs to no traceback or warning, which often names
    # the cause, and the last one, which is the error itself.
    messages = []
    for line in lines:
        # torch logs warnings as "W0131 ...", W and the date, here January 31.
        if not line.startswith(("Traceback", " ", "warning", "W0", "W1")):
            messages.append(line)
            break
    if lines and lines[-1] not in "".join(messages):
        messages.append(lines[-1])
    reason = "; ".join(map(str.strip, messages)) or f"exited with code {code} without a record"
    stopped_modules = sorted({path.read_text(encoding="utf-8") for path in folder.glob("stopped*")})
    if stopped_modules:
        return f"stopped in layer {', '.join(stopped_modules)}: {reason}"
    return reason


def compare_layouts(args: argparse.Namespace) -> bool:
    """Run the script in all layouts, print the comparison, and return whether all layouts agree.

    Raises ValueError if the run in one process fails.
    """
    if not Path(args.script).is_file():
        raise ValueError(f"there is no script {args.script}")
    if args.tolerance is not None and not 0 < args.tolerance < 1:
        raise ValueError(f"--tolerance {args.tolerance} must be between 0 and 1, such as 1e-4")
    refuse_layout_flags(args.flags)
    reference = read_layout(args.reference)
    layouts = list(map(read_layout, args.layouts))
    if reference.ranks > 1:
        raise ValueError(
            f"--reference {args.reference!r} needs {reference.ranks} ranks, but must need only one; use pp 0 or pp 1"
        )
    micros = args.micros or common_micros(layouts)
    # These import torch, which takes seconds. Errors in the flags are reported before.
    from .compare import TOLERANCE, Comparison, Verdict, as_table
    from .records import Records

    tolerance = args.tolerance or TOLERANCE[args.precision]
    source = source_hash(args.script)
    with tempfile.TemporaryDirectory() as folder:
        reference_folder = Path(folder, "one")
        error = train_in_layout(args, reference, micros, reference_folder)
        if error:
            raise ValueError(f"the reference run in one process failed: {error}")
        expected = Records.read(reference_folder, micros)
        verdicts = list[Verdict]()
        for index, layout in enumerate(layouts):
            layout_folder = Path(folder, str(index))
            error = train_in_layout(args, layout, micros, layout_folder)
            if error:
                verdicts.append(Verdict(str(layout), run_error=error))
            else:
                records = Records.read(layout_folder, micros)
                comparison = Comparison(expected, records, tolerance)
                verdicts.append(comparison.compare(str(layout)))
    comparison_text = f"{args.script}, {args.steps} steps of {micros} micro-batches in {args.precision}"
    if not args.keep_dropout:
        comparison_text += ", without dropout"
    print(comparison_text)
    print(as_table(verdicts, tolerance))
    print_identity(args.script, source)
    return all(each.agrees for each in verdicts)


def print_identity(script: str, source: str) -> None:
    """Print what was compared: the hash of the source and the versions. Raises ValueError if the source has changed.

    source: hash of the source before the first run.
    """
    if source != source_hash(script):
        raise ValueError(f"tds, megatron or {script} changed while the layouts ran; run the comparison again")
    used_versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    print(f"source {source[:12]} (SHA-256 of tds, megatron and {script}); {used_versions}")


def refuse_layout_flags(flags: Sequence[str]) -> None:
    """Raise ValueError if the script's flags contain a flag that each layout sets."""
    # cp is 2, so that its flag is among those of the layout.
    layout_flags = {"--global-batch-size", "--sequence-parallel", *Layout(cp=2).flags(micros=1)}
    for flag in flags:
        if flag.startswith("--") and flag.partition("=")[0] in layout_flags:
            raise ValueError(f"{flag}: each layout sets this flag; before --, use --layouts or --micros instead")


def refuse_ignored_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for an argument that has no effect with --fuzz."""
    default_of = build_parser().get_default
    names = ["script", "reference", "steps", "precision", "tolerance", "keep_dropout"]
    # With flags after --, nothing is drawn: these flags run in each of --layouts. Otherwise layouts are drawn, too.
    names += ["draw"] if args.flags else ["layouts", "micros"]
    ignored = []
    for name in names:
        if getattr(args, name) != default_of(name):
            ignored.append(f"--{name.replace('_', '-')}")
    if ignored:
        given = ", ".join(ignored).replace("--script", f"the script {args.script}")
        raise ValueError(f"--fuzz ignores {given}: leave these arguments out")
    if args.flags and args.fuzz > 1:
        raise ValueError(f"--fuzz {args.fuzz}: the flags after -- are compared once in each layout; give --fuzz 1")


def main(args: argparse.Namespace) -> None:
    if args.fuzz is not None:
        refuse_ignored_arguments(args)
        from .fuzz_campaign import fuzz as compare
    elif args.script is None:
        raise ValueError("give the entry script to run, or --fuzz")
    else:
        compare = compare_layouts
    if not compare(args):
        sys.exit(1)


def build_parser() -> Parser:
    parser = Parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("script", nargs="?", type=local_path, help="entry script to run; not with --fuzz")
    add(
        "--layouts",
        nargs="+",
        default=list(DEFAULT_LAYOUTS),
        metavar="LAYOUT",
        help='layouts such as "pp 2, tp 2", "dp 2, zero 1", "tp 2, sp", "pp 2, vpp 2", "pp 2, schedule zb-h1" '
        "(default: %(default)s)",
    )
    add(
        "--reference",
        default="pp 0",
        help="layout of the run in one process: pp 0 (default), or pp 1 for a model that is always a pipeline",
    )
    add("--steps", type=positive_int, default=3, help="optimizer steps (default: 3)")
    add(
        "--micros",
        type=positive_int,
        help="micro-batches per step over all replicas (default: as few as fit all layouts)",
    )
    add(
        "--precision",
        choices=("fp32", "fp64"),
        default="fp32",
        help="fp32, or fp64 to rule out rounding errors; fp64 cannot be used with ZeRO (default: fp32)",
    )
    add(
        "--tolerance",
        type=float,
        help="largest relative difference that counts as agreement (default: 1e-4 in fp32, 1e-9 in fp64)",
    )
    add("--keep-dropout", action="store_true", help="do not turn off the dropout that the script's flags set")
    add(
        "--fuzz",
        type=positive_int,
        metavar="N",
        help="instead of a script: compare N random settings and layouts of GPT-2, Llama and T5 with one process",
    )
    add("--seed", type=int, default=0, help="with --fuzz: seed of the draws and of the corpora (default: 0)")
    add("--draw", type=int, default=0, help="with --fuzz: number of the first draw (default: 0)")
    add("--verbose", action="store_true", help="with --fuzz: print a line for each draw")
    add("--timeout", type=positive_float, help="maximum seconds per layout (default: 600, with --fuzz 60)")
    return parser


def cli() -> None:
    argv = sys.argv[1:]
    # The arguments of this tool come before `--`, those of the script after it.
    separator = argv.index("--") if "--" in argv else len(argv)
    own_arguments = argv[:separator]
    flags = argv[separator + 1 :]
    parser = build_parser()
    parser.set_defaults(flags=flags)
    # Flags that this tool does not know are probably the script's, and -- is missing. `run` reports all other errors.
    _, unknown = parser.parse_known_args(own_arguments)
    unknown_flags = [word for word in unknown if word.startswith("--")]
    if unknown_flags and not flags:
        parser.error(
            f"{unknown_flags[0]} is not a flag of this tool; put the script's flags after --, as in: "
            f"verify_layout.py SCRIPT -- {unknown_flags[0]} ..."
        )
    run(main, parser, own_arguments)
