"""Settings that have no effect beside other settings: one table of conditions, and the notes on them.

A setting that can only be a mistake is refused where it is defined. A setting in this table is accepted with a note,
because it takes effect once other settings change.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from .fields import flag
from .messages import format_flag
from .sections import Config, settings

Condition = Callable[[Config], bool]
_DEFAULTS = {f.name: f.default for _, _, f in settings()}


class Row(NamedTuple):
    """Settings that have no effect under a condition.

    names: names of settings, separated by spaces. applies: condition on the settings of the run. reason: template of
    the reason, with names of settings in braces. off_value: value that asks for nothing and needs no note. is_derived:
    whether the run computes the setting, so that a given value needs a note only if it differs. note: whole note, for a
    setting that does not do what its name says.
    """

    names: str
    applies: Condition
    reason: str
    off_value: Any = None
    is_derived: bool = False
    note: str = "{flag} has no effect: {reason}"


def _no_tensor_parallelism(config: Config) -> bool:
    return config.parallel.model_parallel_size == 1


def _no_use_of_interval(config: Config) -> bool:
    train: Any = config.train  # the settings of a feature are not among the declared attributes
    is_for_samples = bool(train.sample_prompt) and train.sample_interval is None
    return config.train.eval_iters == 0 and not is_for_samples


def _separate_corpora(config: Config) -> bool:
    """Return whether no corpus is divided into training, validation and test documents."""
    d = config.data
    if d.train_data_path is not None:
        return True
    names_held_out = d.valid_data_path is not None or d.test_data_path is not None
    return d.data_stages is not None and names_held_out


def _scales_nothing(config: Config) -> bool:
    """Return whether --rope-scaling leaves all positions unscaled."""
    m = config.model
    return m.rope_scaling is not None and m.rope_scaling_factor == 1 and m.rope_attention_factor in (None, 1)


def _ignores_seq_length(config: Config) -> bool:
    """Return whether neither the samples nor the positions of a T5 depend on --seq-length."""
    m = config.model
    d = config.data
    if not config.is_t5 or d.enc_seq_length is None:
        return False
    # --enc-seq-length sets the length of the samples, so only the number of learned positions may need --seq-length.
    if m.position_embedding != "learned" or m.max_position_embeddings is not None:
        return True
    # The number of learned positions is the longest of the three lengths; see `Config.positions`.
    longest = max(d.enc_seq_length, d.dec_seq_length or 0)
    return d.seq_length <= longest


def _computed_operations(config: Config) -> set[str]:
    """Return the operations of --reference-ops that a model of this family computes."""
    m = config.model
    # Fine-tuning separates the conversations of a window, prefix-LM the prefixes.
    separates_documents = config.data.reset_attention_mask or config.objective != "lm"
    is_computed = {
        "cross-entropy": True,
        "rms-norm": m.normalization == "rmsnorm" or m.qk_norm,
        "rope": m.position_embedding == "rope",
        # attention in blocks, which a CPU uses for a bias and in bf16
        "biased-attention": m.position_embedding == "relative" or config.train.dtype == "bf16",
        "relative-positions": m.position_embedding == "relative",
        "document-attention": separates_documents or config.is_t5,
        m.activation: True,  # --reference-ops accepts only gated activations; the names of others match nothing
    }
    return {name for name, computed in is_computed.items() if computed}


ROWS = (
    # batches and evaluation
    Row(
        "gas",
        lambda c: c.train.batch_size_schedule is not None,
        "--batch-size-schedule {batch_size_schedule} is given",
        is_derived=True,
    ),
    Row(
        "train_iters",
        lambda c: c.train.train_samples is not None,
        "--train-samples {train_samples} is given",
        is_derived=True,
    ),
    Row("eval_interval", _no_use_of_interval, "--eval-iters is 0"),
    # Beside --data-stages, these flags also let training use the documents that --split would hold out.
    Row(
        "valid_data_path test_data_path",
        lambda c: c.train.eval_iters == 0 and c.data.data_stages is None,
        "--eval-iters is 0",
    ),
    # data
    Row("split", _separate_corpora, "other flags name the corpora of training and of validation"),
    Row(
        "noise_density mean_span_length",
        lambda c: c.is_t5 and c.objective != "span-corruption",
        "--objective is {objective}, which masks no spans",
    ),
    Row(
        "reset_position_ids reset_attention_mask",
        lambda c: c.model.family is not None and c.objective == "sft",
        "with --objective sft, each conversation is a document of its own",
    ),
    Row("seq_length", _ignores_seq_length, "--enc-seq-length {enc_seq_length} sets the length of this T5's samples"),
    # model
    Row(
        "relative_attention_num_buckets relative_attention_max_distance",
        lambda c: c.model.family is not None and c.model.position_embedding != "relative",
        "--position-embedding is {position_embedding}",
    ),
    Row(
        "rope_scaling rope_scaling_factor rope_original_length rope_low_freq_factor rope_high_freq_factor "
        "rope_beta_fast rope_beta_slow",
        _scales_nothing,
        "--rope-scaling {rope_scaling} with --rope-scaling-factor 1 scales nothing",
    ),
    Row(
        "logits_chunk_size",
        lambda c: "cross-entropy" in c.model.reference_ops,
        "--reference-ops cross-entropy computes all logits at once",
    ),
    Row(
        "reference_ops",  # a custom model may compute any
        lambda c: c.model.family is not None and _computed_operations(c).isdisjoint(c.model.reference_ops),
        "this model computes no such operation",
    ),
    Row(
        "router_aux_loss",
        lambda c: not c.model.has_aux_loss,
        "it is for --router-balance aux-loss or bias-and-aux-loss",
    ),
    Row(
        "router_bias_rate",
        lambda c: not c.model.has_router_bias,
        "it is for --router-balance bias or bias-and-aux-loss",
    ),
    Row(
        "experts_per_token",
        lambda c: c.model.experts_per_token == 1 and c.model.normalize_expert_weights,
        "",
        note="with --experts-per-token 1, normalized weights of experts are always 1, so only the losses of the "
        "router train it; --no-normalize-expert-weights lets the loss of the model train it, too",
    ),
    Row(
        "mup_base_num_key_value_heads",
        lambda c: c.optim.optimizer != "muon",
        "the rules for --optimizer {optimizer} do not depend on the number of key/value heads",
    ),
    # layout
    Row(
        "pipeline_schedule virtual_pipeline_size pipeline_timeout",
        lambda c: c.parallel.pipe_parallel_size == 0,
        "there is no pipeline",
        off_value=1,
    ),
    Row(
        "partition_method pipeline_extra_warmup",
        lambda c: c.parallel.stages == 1,
        "there is one stage",
    ),
    Row("sequence_parallel", _no_tensor_parallelism, "--model-parallel-size is 1", off_value=False),
    Row("async_tensor_model_parallel_allreduce", _no_tensor_parallelism, "--model-parallel-size is 1"),
    Row(
        "checkpoint_num_layers",
        lambda c: not c.parallel.checkpoint_activations,
        "--checkpoint-activations is not given",
        off_value=1,
    ),
    Row(
        "overlap_grad_reduce",
        lambda c: c.parallel.zero_stage in (2, 3) or c.train.precision == "fp16",
        "DeepSpeed reduces the gradients with ZeRO 2, ZeRO 3 and fp16",
    ),
    # optimizer and learning rate
    Row("adam_beta1 adam_beta2 adam_eps", lambda c: c.optim.optimizer == "sgd", "the optimizer is sgd"),
    Row("min_lr", lambda c: c.optim.lr_decay_style == "constant", "the learning rate is constant"),
    Row(
        "lr_decay_iters lr_decay_samples",
        lambda c: c.optim.lr_decay_style == "constant" and c.optim.warmup == 0,
        "the learning rate is constant and has no warm-up",
    ),
    Row(
        "lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style",
        lambda c: c.optim.lr_decay_style != "wsd",
        "--lr-decay-style is {lr_decay_style}",
    ),
    Row(
        "embedding_weight_decay",
        lambda c: c.optim.weight_decay == 0 and c.optim.param_groups is None,
        "--weight-decay is 0",
    ),
    # checkpoints
    Row(
        "save",
        lambda c: str(c.checkpoint.save).lower().startswith("memory://"),
        "",
        note="{flag} keeps checkpoints only in the memory of each process, so they are lost when the run ends; give a "
        "folder or the URL of object storage to keep them",
    ),
    Row("exit_on_missing_checkpoint", lambda c: c.checkpoint.load is None, "--load is not given"),
    Row("load_optim load_rng", lambda c: c.checkpoint.finetune, "--finetune loads only the weights"),
)

# A further row of a run of one rank.
ONE_RANK = Row("check_replicas", lambda c: True, "there is one rank")


def notes(config: Config, ranks: int, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note on each of the settings `given`, by name, that has no effect in a run with these settings.

    A value that equals its default and is None, False, 0 or empty asks for nothing, so it gets no note.
    """
    values = dict[str, Any]()  # all settings by name, for the names in braces
    for section in config.to_dict().values():
        values |= section
    rows = [*ROWS]
    if ranks == 1:
        rows.append(ONE_RANK)
    for row in rows:
        for name in row.names.split():
            if name not in given:
                continue
            value = given[name]
            # Most rows have the off_value None, so a flag given as `none` gets no note either.
            is_default = value == _DEFAULTS[name]
            asks_for_nothing = value == row.off_value or (is_default and not value)
            is_equal = row.is_derived and value == values[name]
            if not asks_for_nothing and not is_equal and row.applies(config):
                reason = row.reason.format(**values)
                yield row.note.format(flag=format_flag(flag(name), value), reason=reason)
