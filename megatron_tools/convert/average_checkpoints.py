"""The work of tools/average_checkpoints.py, whose flags are in average_flags.py."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.atomic import atomic_folder
from megatron.checkpointing import CheckpointReader, find_checkpoint, plain_config
from megatron.checkpointing.files import WEIGHT
from megatron.checkpointing.forks import forks_of, without_abandoned
from megatron.checkpointing.lookup import latest_checkpoint, numbered_checkpoints
from megatron.checkpointing.pruned import read_with_retry
from megatron.checkpointing.relocation import TOKENIZER_FOLDER, copy_folder, tokenizer_homes
from megatron.checkpointing.stream import LazyTensor
from megatron.checkpointing.write import write_checkpoint
from megatron.config import ModelConfig
from megatron.config.fields import flag

from .upcycle import MODEL_KEYS


def newest_checkpoints(load: str, number: int) -> list[Path]:
    """Return the newest `number` checkpoints of a run, damaged or not, oldest first; ValueError if it has fewer.

    Checkpoints that the run has abandoned, by a resume from an earlier one, are left out.
    """
    newest = find_checkpoint(load)
    # find_checkpoint also accepts one checkpoint. An older one than the newest of its folder cannot stand for its run.
    if latest_checkpoint(newest.parent) != newest:
        raise ValueError(f"--last needs a run directory or a folder of checkpoints, not the checkpoint --load {load}")
    last_iteration = int(newest.name.removeprefix("iter_"))
    # After a resume from an earlier checkpoint, those with higher numbers may still be there.
    up_to_newest = []
    for iteration, path in numbered_checkpoints(newest.parent).items():
        if iteration <= last_iteration:
            up_to_newest.append(path)
    # A fork is a resume from an earlier checkpoint. If the newest one is damaged, its forks are unknown (None), and
    # nothing counts as abandoned.
    forks = forks_of(newest) or ()
    known = list(without_abandoned(up_to_newest, forks))
    if not 0 < number <= len(known):
        raise ValueError(f"--last {number} must lie between 1 and {len(known)}, the number of checkpoints of {load}")
    return known[-number:]


def normalized_weights(number: int, weights: Sequence[float] | None, decay: float | None) -> list[float]:
    """Return the weights of `number` checkpoints, oldest first, with a sum of 1.

    weights: the weights of --weights before division by their sum. decay: weights of an exponential moving average
    that begins with the oldest checkpoint. Without both, all weights are equal. Raises ValueError.
    """
    if decay is not None:
        if not 0 < decay < 1:
            raise ValueError(f"--decay {decay:g} must lie between 0 and 1, without these")
        # The average starts as the oldest checkpoint; each later one changes it to decay x average + (1 - decay) x
        # checkpoint. Three checkpoints and a decay of 0.9 thus have the weights 0.81, 0.09 and 0.1.
        ema_weights = [decay ** (number - 1)]
        for position in range(1, number):
            ema_weights.append((1 - decay) * decay ** (number - 1 - position))
        return ema_weights
    raw_weights = list(weights or [1.0] * number)
    if len(raw_weights) != number:
        raise ValueError(f"--weights gives {len(raw_weights)} numbers for {number} checkpoints; give one for each")
    total = sum(raw_weights)
    # `all(... >= 0)` is also false for NaN, which a test for negative weights would let pass.
    are_valid = all(weight >= 0 for weight in raw_weights) and 0 < total < math.inf
    if not are_valid:
        raise ValueError("--weights must be numbers of at least 0 with a finite sum above 0")
    return [weight / total for weight in raw_weights]


def _first_difference(first: CheckpointReader, second: CheckpointReader) -> str:
    """Return in what the models of two checkpoints differ, "" if in nothing."""
    first_model = plain_config(first).model
    second_model = plain_config(second).model
    for field in fields(ModelConfig):
        differs = getattr(first_model, field.name) != getattr(second_model, field.name)
        # Mutable settings, such as dropout, may change while a run trains, and do not make another model.
        if differs and not field.metadata["mutable"]:
            return flag(field.name)
    if _weight_shapes(first) != _weight_shapes(second):
        return "the weights"
    return "the tokenizer" if first.tokenizer != second.tokenizer else ""


def _weight_shapes(reader: CheckpointReader) -> dict[str, list[int]]:
    return {key: entry["shape"] for key, entry in reader.tensors.items() if key.startswith(f"{WEIGHT}.")}


def _weighted_mean(readers: Sequence[CheckpointReader], weights: Sequence[float], key: str) -> Tensor:
    """Return the weighted sum of a tensor over checkpoints, in fp64."""
    # A scalar: the first sum broadcasts it to the shape of the tensor.
    total = torch.zeros((), dtype=torch.float64)
    for reader, weight in zip(readers, weights, strict=True):
        value = reader.read_whole(key).double()
        if not value.isfinite().all():
            raise ValueError(f"{reader.path}: {key!r} is not finite; average other checkpoints")
        total = total + weight * value
    return total


def averaged_entries(readers: Sequence[CheckpointReader], weights: Sequence[float]) -> list[LazyTensor]:
    """Return the tensors to write: the average of each weight, and the integers and buffers of the last checkpoint."""
    newest = readers[-1]
    entries = []
    for key, entry in newest.tensors.items():
        # Leave out the state of the optimizer.
        if not key.startswith(MODEL_KEYS):
            continue
        dtype = newest.dtype(key)
        # `compute` is called when the tensor is written, so that only one is in memory at a time.
        if key.startswith(f"{WEIGHT}.") and dtype.is_floating_point:
            compute = partial(_weighted_mean, readers, weights, key)
        else:
            compute = partial(newest.read_whole, key)
        entries.append(LazyTensor(key, tuple(entry["shape"]), dtype, compute))
    return entries


def _copy_tokenizer(checkpoint: Path, output: Path) -> None:
    """Copy the tokenizer that a run has put beside its checkpoints or into its run directory, if there is one."""
    for home in tokenizer_homes(checkpoint):
        if (home / TOKENIZER_FOLDER).is_dir():
            copy_folder(home / TOKENIZER_FOLDER, output / TOKENIZER_FOLDER)
            return


def main(args: argparse.Namespace) -> None:
    # A folder whose parent has a file `latest` would become one more checkpoint of that run.
    output = Path(args.output)
    if any(output.glob("*")) or (output.parent / "latest").exists():
        raise ValueError(f"{output} is not empty, or lies in a folder of checkpoints; choose another --output")
    if args.weights is not None and args.decay is not None:
        raise ValueError("--weights and --decay both set the weights; leave one of them out")
    # --last selects checkpoints of one run. Several --load are checkpoints, and exclude it.
    names_one_run = len(args.load) == 1
    has_last = args.last is not None
    if names_one_run != has_last:
        raise ValueError("give either one run as --load, with --last, or several checkpoints as --load")
    # A run may delete a checkpoint meanwhile; then both functions are called once more.
    read_with_retry(partial(_checkpoints_to_average, args), partial(_write_average, args, output))


def _checkpoints_to_average(args: argparse.Namespace) -> list[Path]:
    """Return the checkpoints to average, oldest first."""
    if args.last is not None:
        return newest_checkpoints(args.load[0], args.last)
    return list(map(find_checkpoint, args.load))


def _write_average(args: argparse.Namespace, output: Path, paths: Sequence[Path]) -> None:
    """Write the average of the checkpoints `paths` to the folder `output`."""
    weights = normalized_weights(len(paths), args.weights, args.decay)
    readers = [CheckpointReader(path, args.ema) for path in paths]
    for reader in readers[1:]:
        differing = _first_difference(reader, readers[0])
        if differing:
            raise ValueError(
                f"{reader.path} and {readers[0].path} differ in {differing}; average checkpoints of one model"
            )
    sources: list[dict[str, Any]] = []
    for reader, weight in zip(readers, weights, strict=True):
        reader.verify()
        source = {
            "checkpoint": str(reader.path),
            "iteration": reader.state["iteration"],
            "weight": weight,
            "ema": args.ema,
        }
        sources.append(source)
    # The average takes its settings and its tokenizer from the newest checkpoint, and no optimizer state.
    newest = readers[-1]
    with atomic_folder(output) as folder:
        target = folder / "iter_0000000"
        entries = averaged_entries(readers, weights)
        write_checkpoint(target, entries, plain_config(newest), newest.tokenizer or "", sources)
        _copy_tokenizer(newest.path, folder)
    for source in sources:
        print(f"{source['weight']:.4f} x {source['checkpoint']}")
    print(f"-> {output / target.name}: weights only, at iteration 0, without optimizer state")
