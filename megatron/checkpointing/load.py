"""Loading of checkpoints into an engine: the parallel layout may differ, the model and the data must match."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron import mpu
from megatron.config import Config
from megatron.model.layers import global_parameters
from megatron.ranks.accelerators import ranks_on_machine
from megatron.ranks.agreement import raise_on_all_ranks, require_equal_values
from megatron.ranks.rank_0 import print_notes
from tds import optimizer_state as zero_state
from tds.average import AVERAGE

from .changes import moments_to_load, print_freezing_changes, restore_buffers
from .checksums import SHA256
from .contradictions import refuse_contradictions, refuse_unread_weights, unread_weights
from .files import WEIGHT, sums_file
from .reader import CheckpointReader
from .share import local_parts
from .state import TrainState
from .stream import stored_dtype
from .wanted import LOAD_ALL, Wanted

TensorKey = tuple[str, str, nn.Parameter]  # kind ("weight" or a moment's name), global name of the parameter, parameter
LoadedTensor = tuple[str, nn.Parameter, Tensor]  # kind, parameter, value of this rank's shard


def load_checkpoint(path: Path, engine: Any, config: Config, fingerprint: str, wanted: Wanted = LOAD_ALL) -> TrainState:
    """Load the checkpoint `path`: weights, buffers, optimizer state, dropout seed and the position in training.

    `wanted` selects the parts. All ranks must call this. The parallel layout may differ from the layout of the run
    that saved the checkpoint. If any rank fails, every rank raises RunError.
    """
    with raise_on_all_ranks():
        reader = CheckpointReader(path)
        refuse_contradictions(reader, config, fingerprint, wanted)
        sums = SHA256.hash_file(sums_file(path))
    require_equal_values({f"the SHA-256 of {sums_file(path)}": sums})  # each node may have a copy of its own
    unread = unread_weights(reader, engine)
    if wanted.position:
        print_freezing_changes(reader, engine)
    with raise_on_all_ranks():
        refuse_unread_weights(reader, unread, wanted)
    with ThreadPoolExecutor(1) as checker:  # while the tensors are read, check the files that they come from
        verification = checker.submit(reader.verify, dist.get_rank(), dist.get_world_size())
        with raise_on_all_ranks():
            try:
                _load_tensors(reader, engine, wanted)
            finally:
                verification.result()  # if a file is damaged, raise this error rather than its consequences
    restore_buffers(reader, engine.module)
    if wanted.rng and reader.rng_seed is not None:
        mpu.get_rng().seed = reader.rng_seed
    if wanted.position:
        print_notes(_notes_on_flags(reader, wanted))
        state = TrainState.from_dict(reader.state)
        # The axis of DeepSpeed's monitors, which count each sample once for each context-parallel rank.
        engine.global_samples = state.consumed_samples * mpu.get_mesh().context.size
        return state
    return TrainState()


def _notes_on_flags(reader: CheckpointReader, wanted: Wanted) -> Iterator[str]:
    """Yield a note for each of --no-load-optim and --no-load-rng that discards something: each start does so again."""
    advice = f"of {reader.path} is not loaded; leave the flag out once this run has saved a checkpoint"
    if not wanted.optimizer and reader.optimizer["moments"]:
        yield f"--no-load-optim: the optimizer state (step {reader.optimizer['step']}) {advice}"
    if not wanted.rng and reader.rng_seed not in (None, mpu.get_rng().seed):
        yield f"--no-load-rng: the dropout seed {advice}"


def _load_tensors(reader: CheckpointReader, engine: Any, wanted: Wanted) -> None:
    """Load the weights, and the optimizer's state if `wanted.optimizer` is set."""
    moments = moments_to_load(reader, engine) if wanted.optimizer else []
    if AVERAGE in moments:
        # Announce which frozen weights have an average in the checkpoint. The rank that saves a weight keeps it.
        for part in local_parts(engine, moments=[]):  # only the weights matter here
            if not part.parameter.requires_grad and f"{AVERAGE}.{part.name}" in reader.tensors:
                engine.weight_average.announce_frozen(part.parameter, part.is_written_here)
    if moments:
        counts = _step_counts(reader, engine, moments)
        zero_state.make_moments(engine, moments, reader.optimizer["step"], counts)
    # The order of the keys is the same on all data-parallel ranks that hold a parameter.
    keys: list[TensorKey] = []
    for name, parameter in global_parameters(engine.module):
        keys.append((WEIGHT, name, parameter))
        for moment in zero_state.moments_of(engine, parameter, moments):
            # The checkpoint has no moments of a parameter that was frozen or never had a gradient. `_read_shard` takes
            # the weight as its average.
            if moment == AVERAGE or f"{moment}.{name}" in reader.tensors:
                keys.append((moment, name, parameter))
    for kind, parameter, value in _read_and_broadcast(reader, keys, engine.device):
        if kind == WEIGHT:
            zero_state.set_weight(parameter, value)
        else:  # `kind` is the name of a moment
            zero_state.set_moment(engine, parameter, kind, value)
    if wanted.optimizer:
        zero_state.set_loss_scaler(engine, reader.optimizer["loss_scaler"])


def _step_counts(reader: CheckpointReader, engine: Any, moments: Sequence[str]) -> dict[nn.Parameter, int | None]:
    """Return each parameter's step count; None for a parameter without moments (frozen, or never had a gradient).

    A parameter that was frozen and has only an average begins at 0.
    """
    common_step = reader.optimizer["step"]
    differing_steps = reader.optimizer.get("steps", {})
    counts = dict[nn.Parameter, int | None]()
    for name, parameter in global_parameters(engine.module):
        stored_moments = {moment for moment in moments if f"{moment}.{name}" in reader.tensors}
        if not stored_moments:
            counts[parameter] = None
        elif stored_moments == {AVERAGE}:  # only the average of --ema-decay, as the parameter was frozen
            counts[parameter] = 0
        else:
            counts[parameter] = differing_steps.get(name, common_step)
    return counts


def _read_and_broadcast(
    reader: CheckpointReader, keys: Sequence[TensorKey], device: torch.device
) -> Iterator[LoadedTensor]:
    """Yield (kind, parameter, value) for each key; a value is this rank's shard, in the dtype of checkpoints.

    The data-parallel ranks that hold a parameter divide the keys: each value is read by one rank, which broadcasts the
    value to the other ranks. A rank that cannot read a value still takes part in all broadcasts, so that no other rank
    hangs, and raises its CheckpointError or OSError at the end. If any rank raises, the values on all ranks are
    invalid.
    If all ranks are on the CPUs of one machine, each rank reads all values itself: repeated reads come from the
    kernel's page cache, which is faster than a broadcast.
    device: device of the values, the one on which the model is trained.
    """
    world = dist.get_world_size()
    if device.type == "cpu" and ranks_on_machine(world) == world:
        for key in keys:
            kind, _, parameter = key
            yield kind, parameter, _read_shard(reader, key, device)
        return
    keys_by_axis: dict[mpu.Axis, list[TensorKey]] = {mpu.get_mesh().data: []}
    for key in keys:
        _, _, parameter = key
        keys_by_axis.setdefault(mpu.replicas_of(parameter), []).append(key)
    problem: Exception | None = None  # the first error of this rank, after which the rank reads no more
    for axis, axis_keys in keys_by_axis.items():
        # Of keys 0 to 5 and two ranks, rank 0 reads and sends 0, 2 and 4, rank 1 reads and sends 1, 3 and 5.
        for begin in range(0, len(axis_keys), axis.size):
            turn_keys = axis_keys[begin : begin + axis.size]
            own_value: Tensor | None = None
            if axis.rank < len(turn_keys) and not problem:  # the last turn may have fewer keys than ranks
                try:
                    own_value = _read_shard(reader, turn_keys[axis.rank], device).contiguous()
                except (ValueError, OSError) as error:
                    problem = error
            for reader_rank, (kind, _, parameter) in enumerate(turn_keys):
                if reader_rank == axis.rank and own_value is not None:
                    value = own_value
                else:  # the broadcast replaces these zeros; a rank that could not read its own value sends them
                    shape = mpu.spec_of(parameter).local_shape
                    value = torch.zeros(shape, dtype=stored_dtype(parameter), device=device)
                if axis.group is not None:  # None: no other rank holds these parameters
                    as_bytes = value.view(-1).view(torch.uint8)  # NCCL and gloo lack some dtypes, such as int16
                    dist.broadcast(as_bytes, axis.ranks[reader_rank], group=axis.group)
                yield kind, parameter, value
    if problem:
        raise problem


def _read_shard(reader: CheckpointReader, key: TensorKey, device: torch.device) -> Tensor:
    """Return this rank's shard of the tensor `key`. A weight without an average in the checkpoint is its average."""
    kind, name, parameter = key
    stored_key = f"{kind}.{name}"
    if kind == AVERAGE and stored_key not in reader.tensors:
        stored_key = f"{WEIGHT}.{name}"
    return reader.read_shard(stored_key, parameter).to(device, stored_dtype(parameter))
