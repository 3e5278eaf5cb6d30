"""Notes on what a resumed run changes: settings, buffers, frozen weights and the average of the weights."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from megatron.config import Config
from megatron.config.messages import shorten_list
from megatron.model.layers import global_parameters
from megatron.ranks.agreement import raise_on_all_ranks
from megatron.ranks.buffers import record_buffers
from megatron.ranks.objects import gather_objects
from megatron.ranks.rank_0 import print_rank_0
from tds.average import AVERAGE

from .contradictions import describe_differences, sample_settings
from .files import BUFFER
from .reader import CheckpointReader, load_buffers
from .state import TrainState

# Section of the settings -> settings that change what a step computes. The learning rate and the data have messages of
# their own, and other settings of the model cannot change.
SETTINGS_OF_STEPS = {
    "model": "hidden_dropout attention_dropout router_aux_loss router_bias_rate router_z_loss router_jitter",
    "data": "reset_position_ids reset_attention_mask eod_mask_loss",
    "train": "precision z_loss skip_step_sigma skip_step_window",
    "optim": "weight_decay embedding_weight_decay param_groups clip_grad adam_beta1 adam_beta2 adam_eps "
    "exp_avg_dtype exp_avg_sq_dtype muon_momentum muon_nesterov muon_ns_steps muon_ns_dtype muon_adjust_lr_fn "
    "muon_lr_factor",
}


def restore_buffers(reader: CheckpointReader, model: nn.Module) -> None:
    """Load the persistent buffers, and print a warning for buffers that only the model or only the checkpoint has."""
    with raise_on_all_ranks():
        own_names = load_buffers(reader, model)  # (names of loaded buffers, names that the checkpoint lacks)
    record_buffers(model)  # the next save then compares the buffers with the loaded values
    loaded_buffers = set[str]()
    missing_buffers = set[str]()
    for loaded_here, missing_here in gather_objects(own_names):
        loaded_buffers |= loaded_here
        missing_buffers |= missing_here
    prefix = f"{BUFFER}."
    stored_buffers = {key.removeprefix(prefix) for key in reader.tensors if key.startswith(prefix)}
    _warn_about_buffers(reader, missing_buffers, "are not in this checkpoint and keep their initial values")
    _warn_about_buffers(reader, stored_buffers - loaded_buffers, "are in this checkpoint, but not in the model")


def _warn_about_buffers(reader: CheckpointReader, buffers: set[str], problem: str) -> None:
    if buffers:
        print_rank_0(f"warning: {reader.path}: the buffers {shorten_list(sorted(buffers))} {problem}")


def training_notes(saved: Config, config: Config, state: TrainState, world_size: int) -> Iterator[str]:
    """Yield notes on what changes the losses from now on, besides the learning rate and the data.

    saved: settings of the checkpoint. state: position in training.
    """
    differences = describe_differences(_settings_of_steps(saved), _settings_of_steps(config))
    if differences:
        yield f"this run does not train as before: {differences}"
    has_schedule = saved.train.batch_size_schedule or config.train.batch_size_schedule
    if not has_schedule:
        size = config.train_batch_size(world_size)
        # Checkpoints do not have the number of replicas, from which the former size would follow.
        former_size = state.consumed_samples / state.iteration
        if size != former_size:
            yield f"an iteration has {size} samples; until this checkpoint it had {former_size:g} on average"


def _settings_of_steps(config: Config) -> dict[str, Any]:
    """Return the settings that change what a step computes, and may change when a run resumes."""
    values = {}
    for section, names in SETTINGS_OF_STEPS.items():
        for name in names.split():
            values[name] = getattr(getattr(config, section), name)
    return values | sample_settings(config)  # those of samples may change with --override-data


def print_freezing_changes(reader: CheckpointReader, engine: Any) -> None:
    """Print which weights are frozen in the checkpoint but not in this run, and vice versa. All ranks must call this.

    Older checkpoints do not list frozen weights.
    """
    own_parameters = {name: p.requires_grad for name, p in global_parameters(engine.module)}
    is_trained = dict[str, bool]()  # name -> whether the run trains the parameter, of all ranks
    for rank_parameters in gather_objects(own_parameters):
        is_trained |= rank_parameters
    frozen_before = reader.optimizer.get("frozen")
    if frozen_before is None:  # an older checkpoint
        return
    frozen = sorted(name for name, trains in is_trained.items() if not trains and name not in frozen_before)
    unfrozen = sorted(name for name in frozen_before if is_trained.get(name))  # not a weight that the model has lost
    if frozen:
        print_rank_0(f"note: frozen from now on, but trained before this checkpoint: {shorten_list(frozen)}")
    if unfrozen:
        print_rank_0(f"note: trained from now on, but frozen before this checkpoint: {shorten_list(unfrozen)}")


def moments_to_load(reader: CheckpointReader, engine: Any) -> list[str]:
    """Return the names of the moments to load. The average of --ema-decay counts as one, if the run keeps it."""
    moments: list[str] = reader.optimizer["moments"]
    is_stored = AVERAGE in moments
    # A checkpoint without any moments, such as one of imported weights, needs no note.
    if engine.weight_average and moments and not is_stored:
        print_rank_0(f"note: {reader.path} holds no average of the weights; --ema-decay begins one with its weights")
    if is_stored and not engine.weight_average:
        print_rank_0(f"note: without --ema-decay, this run drops the average of the weights in {reader.path}")
        return [name for name in moments if name != AVERAGE]
    return moments
