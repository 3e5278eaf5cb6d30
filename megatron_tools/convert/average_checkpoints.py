"""Average the weights of several checkpoints into a new checkpoint, as in SWA (Izmailov et al. 2018)."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_utils.cli import Parser, any_path, local_path, run
from megatron.atomic import whole_folder
from megatron.checkpointing import CheckpointReader, find_checkpoint, plain_config
from megatron.checkpointing.files import BUFFER, WEIGHT, latest_checkpoint, numbered_checkpoints
from megatron.checkpointing.forks import forks_of, without_abandoned
from megatron.checkpointing.pruned import read_kept
from megatron.checkpointing.relocation import FOLDER as TOKENIZER
from megatron.checkpointing.relocation import copy_folder
from megatron.checkpointing.stream import Entry
from megatron.checkpointing.write import write_checkpoint
from megatron.config import ModelConfig
from megatron.config.fields import flag

EXAMPLES = """\
  python tools/average_checkpoints.py --load runs/gpt2 --last 5 --output averaged
  python tools/average_checkpoints.py --load runs/gpt2 --last 5 --decay 0.5 --output averaged
  python tools/average_checkpoints.py --load a/checkpoints/iter_0000100 b/checkpoints/iter_0000100 --weights 3 1 \\
      --output averaged
      then: python tools/evaluate.py --load averaged --input held_out.jsonl"""


def newest(load: str, number: int) -> list[Path]:
    """Return the newest `number` checkpoints of a run, damaged or not, oldest first; ValueError if it has fewer.

    Checkpoints that the run has abandoned, by a resume from an earlier one, are left out.
    """
    last = find_checkpoint(load)
    if latest_checkpoint(last.parent) != last:
        raise ValueError(f"--last needs a run directory or a folder of checkpoints, not the checkpoint --load {load}")
    newest_iteration = int(last.name[5:])  # 1000 for the folder iter_0001000
    earlier = []
    for iteration, path in numbered_checkpoints(last.parent).items():
        if iteration <= newest_iteration:
            earlier.append(path)
    found = without_abandoned(earlier, forks_of(last) or ())
    if not 0 < number <= len(found):
        raise ValueError(f"--last {number} must lie between 1 and {len(found)}, the number of checkpoints of {load}")
    return found[-number:]


def shares(number: int, weights: Sequence[float] | None, decay: float | None) -> list[float]:
    """Return the weights of `number` checkpoints, oldest first, with a sum of 1.

    weights: the weights of --weights before division by their sum. decay: weights of an exponential moving average
    that begins with the oldest checkpoint. Without both, all weights are equal. Raises ValueError.
    """
    if decay is not None:
        if not 0 < decay < 1:
            raise ValueError(f"--decay {decay:g} must lie between 0 and 1, without these")
        # Three checkpoints and a decay of 0.9 have the weights 0.81, 0.09 and 0.1.
        parts = [decay ** (number - 1)]
        for at in range(1, number):
            parts.append((1 - decay) * decay ** (number - 1 - at))
        return parts
    given = list(weights or [1.0] * number)
    total = sum(given)
    if len(given) != number:
        raise ValueError(f"--weights gives {len(given)} numbers for {number} checkpoints; give one for each")
    if not all(each >= 0 for each in given) or not 0 < total < math.inf:
        raise ValueError("--weights must be numbers of at least 0 with a finite sum above 0")
    return [each / total for each in given]


def refuse_other_models(readers: Sequence[CheckpointReader]) -> None:
    """Raise ValueError unless all checkpoints hold the same model with the same tokenizer."""
    first = readers[0]
    for reader in readers[1:]:
        differing = _difference(reader, first)
        if differing:
            raise ValueError(f"{reader.path} and {first.path} differ in {differing}; average checkpoints of one model")


def _difference(one: CheckpointReader, other: CheckpointReader) -> str:
    """Return in what the models of two checkpoints differ, "" if in nothing."""
    ours = plain_config(one).model
    theirs = plain_config(other).model
    for field in fields(ModelConfig):
        if not field.metadata["free"] and getattr(ours, field.name) != getattr(theirs, field.name):
            return flag(field.name)
    if _shapes(one) != _shapes(other):
        return "the weights"
    return "the tokenizer" if one.tokenizer != other.tokenizer else ""


def _shapes(reader: CheckpointReader) -> dict[str, list[int]]:
    return {key: entry["shape"] for key, entry in reader.tensors.items() if key.startswith(f"{WEIGHT}.")}


def _mean(readers: Sequence[CheckpointReader], parts: Sequence[float], key: str) -> Tensor:
    """Return the weighted sum of a tensor over checkpoints, in fp64."""
    total = torch.zeros((), dtype=torch.float64)
    for reader, part in zip(readers, parts, strict=True):
        value = reader.whole(key).double()
        if not value.isfinite().all():
            raise ValueError(f"{reader.path}: {key!r} is not finite; average other checkpoints")
        total = total + part * value
    return total


def entries_of(readers: Sequence[CheckpointReader], parts: Sequence[float]) -> list[Entry]:
    """Return the tensors to write: the average of each weight, and the buffers of the last checkpoint."""
    last = readers[-1]
    found = []
    for key, entry in last.tensors.items():
        if key.startswith(f"{WEIGHT}."):
            make = partial(_mean, readers, parts, key)
        elif key.startswith(f"{BUFFER}."):
            make = partial(last.whole, key)
        else:
            continue
        found.append(Entry(key, tuple(entry["shape"]), last.dtype(key), make))
    return found


def _copy_tokenizer(checkpoint: Path, output: Path) -> None:
    """Copy the tokenizer that a run has put beside its checkpoints or into its run directory, if there is one."""
    for home in (checkpoint.parent, checkpoint.parent.parent):
        if (home / TOKENIZER).is_dir():
            copy_folder(home / TOKENIZER, output / TOKENIZER)
            return


def main(args: argparse.Namespace) -> None:
    output = Path(args.output)
    if any(output.glob("*")) or (output.parent / "latest").exists():
        raise ValueError(f"{output} is not empty, or lies in a folder of checkpoints; choose another --output")
    if args.weights is not None and args.decay is not None:
        raise ValueError("--weights and --decay both set the weights; leave one of them out")
    if (args.last is None) == (len(args.load) == 1):
        raise ValueError("give either one run as --load, with --last, or several checkpoints as --load")
    read_kept(lambda: _chosen(args), lambda paths: _average(args, output, paths))


def _chosen(args: argparse.Namespace) -> list[Path]:
    """Return the checkpoints to average, oldest first."""
    if args.last is not None:
        return newest(args.load[0], args.last)
    return [find_checkpoint(load) for load in args.load]


def _average(args: argparse.Namespace, output: Path, paths: Sequence[Path]) -> None:
    """Write the average of the checkpoints `paths` to the folder `output`."""
    parts = shares(len(paths), args.weights, args.decay)
    readers = [CheckpointReader(path, args.ema) for path in paths]
    refuse_other_models(readers)
    origin: list[dict[str, Any]] = []
    for reader, part in zip(readers, parts, strict=True):
        reader.verify()
        iteration = reader.state["iteration"]
        origin.append({"checkpoint": str(reader.path), "iteration": iteration, "weight": part, "ema": args.ema})
    last = readers[-1]
    with whole_folder(output) as folder:
        final = folder / "iter_0000000"
        write_checkpoint(final, entries_of(readers, parts), plain_config(last), last.tokenizer or "", origin)
        _copy_tokenizer(last.path, folder)
    for each in origin:
        print(f"{each['weight']:.4f} x {each['checkpoint']}")
    print(f"-> {output / final.name}: weights only, at iteration 0, without optimizer state")


def build_parser() -> Parser:
    parser = Parser(__doc__ or "", EXAMPLES)
    add = parser.add_argument
    add("--load", type=any_path, nargs="+", required=True, help="a run directory, with --last, or several checkpoints")
    add("--last", type=int, help="number of newest checkpoints of the run to average")
    add("--weights", type=float, nargs="+", help="weight of each checkpoint, oldest first (default: all equal)")
    add("--decay", type=float, help="weight the checkpoints as an exponential moving average with this decay")
    add("--ema", action="store_true", help="use the moving average of the weights that a run with --ema-decay keeps")
    add("--output", type=local_path, required=True, help="new folder for the checkpoint")
    return parser


def cli() -> None:
    run(main, build_parser())


if __name__ == "__main__":
    cli()
