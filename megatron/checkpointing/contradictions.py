"""Refusal of a checkpoint whose model, tokenizer, optimizer or samples contradict the settings of the run."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.config.command_line import refuse_removed
from megatron.config.fields import ConfigError, flag
from megatron.config.messages import shorten_list
from megatron.model.layers import global_parameters
from megatron.ranks.objects import gather_objects
from megatron.ranks.rank_0 import print_rank_0

from .files import INDEX, WEIGHT, CheckpointError
from .reader import CheckpointReader, plain_config
from .wanted import LOAD_ALL, Wanted

# Settings that, besides the corpus and the seed, decide how a sample is made.
SAMPLE_SETTINGS = (
    "seq_length", "enc_seq_length", "dec_seq_length", "objective", "span_convention", "noise_density",
    "mean_span_length", "num_sentinels", "fim_rate", "fim_spm_rate", "fim_tokens",
)  # fmt: skip

Values = dict[str, Any]  # setting of the model -> its value


def refuse_contradictions(
    reader: CheckpointReader, config: Config, fingerprint: str | None, wanted: Wanted = LOAD_ALL
) -> None:
    """Raise CheckpointError if the checkpoint's model, tokenizer, optimizer or sample settings differ from this run's.

    The message shows the value in the checkpoint and the value in this run.
    """
    saved = plain_config(reader)
    _refuse_other_model(reader, saved, config, wanted)
    if wanted.same_tokenizer:
        advice = "; pass --override-tokenizer to continue with this run's tokenizer"
        reader.check_tokenizer(fingerprint, advice, vocab_file=config.data.vocab_file)
    saved_optimizer = reader.config["optim"]["optimizer"]
    # A checkpoint without moments, such as one of imported weights, fits any optimizer.
    if wanted.optimizer and reader.optimizer["moments"] and saved_optimizer != config.optim.optimizer:
        raise CheckpointError(
            f"{reader.path} has the state of --optimizer {saved_optimizer}, but this run uses "
            f"{config.optim.optimizer}; pass --no-load-optim to continue with new optimizer state, and leave --load "
            "out if this run has saved the checkpoint itself"
        )
    if wanted.same_data and reader.state["consumed_samples"]:
        _refuse_other_samples(reader, saved, config)


def _refuse_other_model(reader: CheckpointReader, saved: Config, config: Config, wanted: Wanted) -> None:
    """Raise CheckpointError if the checkpoint holds another model; --finetune may change the reach of attention."""
    saved_model = _architecture(saved, reader.positions)
    current_model = _architecture(config, config.positions)
    if saved_model["family"] is None or current_model["family"] is None:
        # A custom model has no known family, so do not compare families.
        saved_model["family"] = current_model["family"]
    differing = [name for name in saved_model if saved_model[name] != current_model[name]]
    # Fine-tuning for longer contexts changes only rotary settings and the window size.
    is_extension = all(name.startswith("rope_") or name == "sliding_window" for name in differing)
    # Only --finetune starts at iteration 0 with the weights of a checkpoint. It has this effect on the checkpoint of
    # --load, but is ignored if the run resumes from its own checkpoint.
    starts_finetuning = not wanted.position
    if not differing or (is_extension and starts_finetuning):
        return
    differences = describe_differences(saved_model, current_model)
    advice = ""
    # --finetune alone would not help: it needs --load, and a run's own checkpoint goes before that of --load.
    if is_extension:
        advice = f"; for this run's values, start a new run (another --run-dir) with --load {reader.path} --finetune"
    settings = Path(reader.path).parent / "settings.json"
    if settings.is_file():
        advice += f"; --config {settings} sets the checkpoint's values"
    raise CheckpointError(f"{reader.path} holds another model: {differences}{advice}")


def _refuse_other_samples(reader: CheckpointReader, saved: Config, config: Config) -> None:
    """Raise CheckpointError if the settings of this run make other samples than those of the checkpoint."""
    advice = "pass --override-data to continue with this run's samples"
    try:
        # An earlier version may have changed the samples by a setting that no longer exists.
        refuse_removed(reader.config, reader.path / INDEX)
    except ConfigError as error:
        raise CheckpointError(f"{error}; {advice}") from None
    differences = describe_differences(sample_settings(saved), sample_settings(config))
    if differences:
        raise CheckpointError(f"{reader.path} was trained on samples made with other settings: {differences}; {advice}")


def sample_settings(config: Config) -> Values:
    """Return the settings that decide how a sample is made from a corpus."""
    values = {name: getattr(config.data, name) for name in SAMPLE_SETTINGS}
    values["objective"] = config.objective
    if config.is_t5 and config.data.enc_seq_length is not None:
        values["seq_length"] = None  # it sets no length of such a T5's samples
    return values


def _architecture(config: Config, positions: int) -> Values:
    """Return the settings that decide which model it is, with defaults that follow from other settings filled in."""
    model = config.model
    # Mutable settings, such as dropout, may change when a run resumes.
    values = {f.name: getattr(model, f.name) for f in fields(model) if not f.metadata["mutable"]}
    if model.position_embedding != "relative":
        values["relative_attention_num_buckets"] = None
        values["relative_attention_max_distance"] = None
    values["max_position_embeddings"] = positions if model.position_embedding == "learned" else 0
    values["num_key_value_heads"] = model.key_value_heads
    values["qkv_bias"] = model.has_qkv_bias
    values["kv_hidden_size"] = model.head_size
    values["ff_hidden_size"] = model.ff_size
    values["num_decoder_layers"] = model.decoder_layers if config.is_t5 else 0
    values["expert_ff_hidden_size"] = model.expert_ff_size if model.num_experts else None
    values["moe_layer_frequency"] = _layers_with_experts(config)
    return values


def _layers_with_experts(config: Config) -> str | None:
    """Return a 1 for each layer with experts and a 0 for each other layer, such as `0 1 0 1`; None without experts."""
    model = config.model
    if not model.num_experts:
        return None
    # Encoder and decoder of T5 follow the same pattern, so the longer of them shows all of it.
    layers = max(model.num_layers, model.decoder_layers) if config.is_t5 else model.num_layers
    flags = [str(int(model.has_experts(i))) for i in range(layers)]
    return " ".join(flags) or None


def describe_differences(saved: Values, current: Values) -> str:
    """Return the settings with other values in this run than in the checkpoint, for messages; "" if there are none."""
    differences = []
    for name, value in saved.items():
        if value != current[name]:
            differences.append(f"{flag(name)} is {value} in the checkpoint and {current[name]} in this run")
    return "; ".join(differences)


def unread_weights(reader: CheckpointReader, engine: Any) -> list[str]:
    """Return the keys of the checkpoint's weights for which no rank has a parameter. All ranks must call this."""
    unread = {key for key in reader.tensors if key.startswith(f"{WEIGHT}.")}
    for names in gather_objects([name for name, _ in global_parameters(engine.module)]):
        unread.difference_update(f"{WEIGHT}.{name}" for name in names)
    return sorted(unread)


def refuse_unread_weights(reader: CheckpointReader, unread: Sequence[str], wanted: Wanted) -> None:
    """Raise CheckpointError if a resumed run would drop the weights `unread`.

    If the run only starts with the weights of the checkpoint, print a note instead.
    """
    if not unread:
        return
    shown_names = shorten_list(unread, 3)
    if wanted.position:
        raise CheckpointError(f"{reader.path / INDEX} lists weights that this model does not have: {shown_names}")
    print_rank_0(f"note: {reader.path} holds weights that this model does not have: {shown_names}")
