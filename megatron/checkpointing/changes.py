"""Notes on what a resumed run changes: buffers, frozen weights and the average of the weights."""

from typing import Any

from torch import nn

from megatron.config.fields import first_of
from megatron.model.layers import global_parameters
from megatron.ranks.agreement import all_ranks
from megatron.ranks.buffers import remember
from megatron.ranks.objects import gather_objects
from megatron.ranks.rank_0 import print_rank_0
from tds.average import AVERAGE

from .files import BUFFER
from .reader import CheckpointReader, load_buffers
from .share import parts_of


def restore_buffers(reader: CheckpointReader, model: nn.Module) -> None:
    """Load the persistent buffers, and print a warning for buffers that only the model or only the checkpoint has."""
    with all_ranks():
        loaded = load_buffers(reader, model)
    remember(model)
    everywhere: set[str] = set()
    lacking: set[str] = set()
    for names, missing in gather_objects(loaded):
        everywhere |= names
        lacking |= missing
    prefix = f"{BUFFER}."
    held = {key.removeprefix(prefix) for key in reader.tensors if key.startswith(prefix)}
    _warn(reader, lacking, "are not in this checkpoint and keep their initial values")
    _warn(reader, held - everywhere, "are in this checkpoint, but not in the model")


def _warn(reader: CheckpointReader, buffers: set[str], problem: str) -> None:
    if buffers:
        print_rank_0(f"warning: {reader.path}: the buffers {first_of(sorted(buffers))} {problem}")


def name_changes(reader: CheckpointReader, engine: Any) -> None:
    """Print which weights are frozen in the checkpoint but not in this run, and vice versa. All ranks must call this.

    Older checkpoints do not list frozen weights.
    """
    trained: dict[str, bool] = {}
    for each in gather_objects({name: p.requires_grad for name, p in global_parameters(engine.module)}):
        trained |= each
    before = reader.optimizer.get("frozen")
    if before is None:
        return
    frozen = sorted(name for name, learns in trained.items() if not learns and name not in before)
    thawed = sorted(name for name in before if trained.get(name))
    if frozen:
        print_rank_0(f"note: frozen from now on, but trained before this checkpoint: {first_of(frozen)}")
    if thawed:
        print_rank_0(f"note: trained from now on, but frozen before this checkpoint: {first_of(thawed)}")


def hold_averages(reader: CheckpointReader, engine: Any) -> None:
    """Announce which frozen weights have an average in the checkpoint. The rank that saves a weight keeps it."""
    for part in parts_of(engine, []):
        if not part.parameter.requires_grad and f"{AVERAGE}.{part.name}" in reader.tensors:
            engine.weight_average.hold(part.parameter, part.mine)


def moments_to_load(reader: CheckpointReader, engine: Any) -> list[str]:
    """Return the names of the moments to load. The average of --ema-decay counts as one, if the run keeps it."""
    moments: list[str] = reader.optimizer["moments"]
    is_stored = AVERAGE in moments
    if engine.weight_average and moments and not is_stored:
        print_rank_0(f"note: {reader.path} holds no average of the weights; --ema-decay begins one with its weights")
    if is_stored and not engine.weight_average:
        print_rank_0(f"note: without --ema-decay, this run drops the average of the weights in {reader.path}")
        return [name for name in moments if name != AVERAGE]
    return moments
