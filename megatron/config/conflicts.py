"""Settings of optional parts that exclude each other or need each other."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..storage import is_url
from .data import objectives_of
from .optim import share_of

if TYPE_CHECKING:
    from .sections import Config


def conflicts(config: "Config") -> Iterator[str]:
    """Yield an error text for each conflict of `config`."""
    yield from _of_recomputation(config)
    yield from _of_wsd(config)
    yield from _of_mup(config)
    yield from _of_objectives(config)
    yield from _of_settings_of_objectives(config)
    yield from _of_contexts(config)
    yield from _of_experts(config)
    yield from _of_object_storage(config)


def _of_recomputation(config: "Config") -> Iterator[str]:
    m = config.model
    p = config.parallel
    splits = p.splits_backward(config.train.gas)
    if splits and p.checkpoint_activations:
        yield (
            f"--pipeline-schedule {p.pipeline_schedule} would recompute activations for each half of the backward "
            "pass; use 1f1b with --checkpoint-activations"
        )
    if m.checkpoint_attention and p.checkpoint_activations:
        yield "--checkpoint-activations recomputes attention with its layer; leave --checkpoint-attention out"
    if m.offload_activations and p.checkpoint_activations:
        yield "--checkpoint-activations leaves nothing for --offload-activations to move; leave one of them out"
    for name, given in (
        ("--checkpoint-activations, which recomputes whole layers", p.checkpoint_activations),
        ("--checkpoint-attention, which keeps queries, keys and values", m.checkpoint_attention),
        ("--offload-activations, which keeps activations elsewhere", m.offload_activations),
        (f"--pipeline-schedule {p.pipeline_schedule}, which splits the backward pass", splits),
    ):
        if m.recompute_modules and given:
            yield f"--recompute-modules cannot be used with {name}; leave one of them out"
    if m.checkpoint_attention and splits:
        yield (
            f"--pipeline-schedule {p.pipeline_schedule} would recompute attention for each half of the backward "
            "pass; use 1f1b with --checkpoint-attention"
        )
    if config.train.precision == "fp8" and m.num_experts:
        yield "--num-experts cannot be used with --precision fp8, whose matmuls need a fixed shape; use bf16"
    if config.train.compile:
        yield from conflicts_with_compile(config)


def conflicts_with_compile(config: "Config", zero_stage: int | None = None) -> Iterator[str]:
    """Yield an error text for each setting that cannot be combined with --compile.

    zero_stage: stage of ZeRO; None if it is not known yet.
    """
    if config.model.offload_activations:
        yield "--offload-activations cannot see activations inside compiled layers; remove one of them"
    if config.model.recompute_modules:
        yield (
            "--recompute-modules cannot be used with --compile, which chooses what to recompute itself; leave one "
            "of them out"
        )
    if config.parallel.splits_backward(config.train.gas):
        name = config.parallel.pipeline_schedule
        yield f"--compile cannot be used with --pipeline-schedule {name}, which splits the backward pass; use 1f1b"
    if config.train.precision == "fp8":
        yield "--compile cannot be used with --precision fp8, whose matmuls are not compiled; use bf16"
    if config.model.num_experts:
        yield "--compile cannot be used with --num-experts, whose shapes depend on the tokens; leave one out"
    if zero_stage == 3:
        yield (
            "--compile cannot be used with ZeRO stage 3, which frees a layer's weights after use; use --zero-stage 2"
        )


def _of_wsd(config: "Config") -> Iterator[str]:
    o = config.optim
    samples = config.lr_decay_samples
    if o.lr_decay_style != "wsd":
        return
    unit = "iterations"
    decay = o.lr_wsd_decay_iters
    other = o.lr_wsd_decay_samples
    names = "--lr-wsd-decay-iters", "--lr-wsd-decay-samples", "--lr-decay-iters"
    if samples is not None:
        unit, decay, other = "samples", other, decay
        names = names[1], names[0], "--lr-decay-samples"
    total = config.lr_decay_iters if samples is None else samples
    warmup = share_of(o.warmup, total)
    if other is not None:
        yield f"{names[1]} {other}: the learning rate follows {unit} here; give {names[0]} instead"
    if decay is not None and warmup + decay > total:
        yield f"{names[0]} {decay} after {warmup} {unit} of --warmup is more than the {total} of {names[2]}"


def _of_mup(config: "Config") -> Iterator[str]:
    if config.model.mup_base_hidden_size is not None and config.optim.optimizer == "sgd":
        yield "--mup-base-hidden-size scales learning rates for Adam, not for --optimizer sgd; use adam"


def _of_objectives(config: "Config") -> Iterator[str]:
    m = config.model
    d = config.data
    known = objectives_of(config.model.family)
    if d.objective is not None and d.objective not in known:
        yield f"--objective {d.objective}: a {m.family or 'custom model'} supports {' or '.join(known)}"
    prefixes = config.objective == "prefix-lm"
    looks_ahead = "--objective prefix-lm lets a prefix look ahead, which"
    if prefixes and not config.is_t5 and m.sliding_window is not None:
        yield (
            f"{looks_ahead} --sliding-window forbids: leave one of them out; --sliding-window none turns off the "
            f"window that a --config file sets"
        )
    if prefixes and config.parallel.context_parallel_size > 1:
        yield f"{looks_ahead} --context-parallel-size does not support yet: leave one of them out"
    if d.reset_position_ids and not d.reset_attention_mask:
        if prefixes and not config.is_t5 and m.position_embedding == "rope":
            yield (
                "--objective prefix-lm with rotary positions: --reset-position-ids needs --reset-attention-mask, too"
            )
        if config.is_t5:
            yield (
                "--reset-position-ids: a T5 distinguishes documents only with --reset-attention-mask; give both, "
                "or neither"
            )


def _of_settings_of_objectives(config: "Config") -> Iterator[str]:
    d = config.data
    if d.fim_rate and config.objective != "lm":
        yield f"--fim-rate rearranges running text, which --objective {config.objective} does not read: leave it out"
    if d.fim_rate and len(set(d.fim_tokens or ())) != 3:
        yield "--fim-rate needs --fim-tokens PREFIX MIDDLE SUFFIX, the names of three special tokens"
    if not d.fim_rate and (d.fim_tokens is not None or d.fim_spm_rate != 0.5):
        yield "--fim-tokens and --fim-spm-rate have no effect alone: give --fim-rate, too"
    if config.objective == "sft" and d.eod_mask_loss:
        yield "--objective sft takes the targets from the corpus: leave --eod-mask-loss out"


def _of_contexts(config: "Config") -> Iterator[str]:
    c = config.parallel.context_parallel_size
    t = config.parallel.model_parallel_size
    s = config.data.seq_length
    if c > 1 and s % (2 * c):
        yield (
            f"--seq-length {s} is not a multiple of {2 * c}: each of --context-parallel-size {c} ranks takes two "
            f"slices of a sequence, all of one length"
        )
    if c > 1 and config.parallel.sequence_parallel and s % (c * t):
        yield (
            f"--seq-length {s} is not a multiple of {c * t}, over which --context-parallel-size {c} and "
            f"--sequence-parallel with --model-parallel-size {t} shard it"
        )


def _of_experts(config: "Config") -> Iterator[str]:
    ranks = config.parallel.expert_parallel_size
    experts = config.model.num_experts
    if ranks > 1 and (experts is None or experts % ranks):
        given = "(none)" if experts is None else experts
        yield f"--num-experts {given} cannot be divided among --expert-parallel-size {ranks} ranks"


def _of_object_storage(config: "Config") -> Iterator[str]:
    save = config.checkpoint.save
    run_dir = config.log.run_dir
    if run_dir is not None and is_url(run_dir):
        yield f"--run-dir {run_dir} must be a folder on this machine; --save can name object storage"
    elif save is not None and is_url(save) and run_dir is None:
        yield (
            f"--save {save} needs --run-dir, a folder on this machine for metrics, locks and files on their way to "
            "object storage"
        )
