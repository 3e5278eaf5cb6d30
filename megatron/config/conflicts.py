"""Settings of optional parts that exclude each other or need each other."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..storage import is_url
from .data import objectives_of
from .fields import problems_where
from .optim import floor_share

if TYPE_CHECKING:
    from .sections import Config

PARAM_GATHER_NEEDS = (
    "--overlap-param-gather needs --zero-stage 1 in fp32 or bf16, --overlap-grad-reduce, and a --deepspeed-config "
    "without other keys in zero_optimization and bf16"
)
EXPERTS_NEED = (
    "--expert-parallel-size reduces experts over some replicas only, which DeepSpeed's optimizers cannot: use "
    "--zero-stage 0 in fp32, or --zero-stage 1 in fp32 or bf16, with --overlap-grad-reduce and a --deepspeed-config "
    "without other keys in zero_optimization and bf16"
)
MUON_NEEDS = (
    "--optimizer muon steps whole matrices, which DeepSpeed's ZeRO shards: use --zero-stage 0 in fp32, or "
    "--zero-stage 1 in fp32 or bf16 with --overlap-grad-reduce and a --deepspeed-config without other keys in "
    "zero_optimization and bf16"
)


def conflicts(config: "Config") -> Iterator[str]:
    """Yield an error text for each conflict of `config`."""
    yield from _recomputation_conflicts(config)
    if config.train.precision == "fp8" and config.model.num_experts:
        yield "--num-experts cannot be used with --precision fp8, whose matmuls need a fixed shape; use bf16"
    if config.train.compile:
        yield from compile_conflicts(config)
    for find_conflicts in (
        _wsd_conflicts,
        _optimizer_conflicts,
        _objective_conflicts,
        _objective_option_conflicts,
        _sequence_conflicts,
        _expert_conflicts,
        _object_storage_conflicts,
    ):
        yield from find_conflicts(config)


def _recomputation_conflicts(config: "Config") -> Iterator[str]:
    """Yield an error text for each pair of settings that would recompute or move the same activations.

    A schedule that splits the backward pass excludes recomputation, too.
    """
    m = config.model
    p = config.parallel
    recomputes_layers = p.checkpoint_activations
    # Then the gradients of inputs and of weights are computed in two passes, and each of them needs the activations.
    splits_backward = p.splits_backward(config.train.gas)
    schedule = f"--pipeline-schedule {p.pipeline_schedule}"
    yield from problems_where(
        (
            splits_backward and recomputes_layers,
            f"{schedule} would recompute activations for each half of the backward pass; use 1f1b with "
            "--checkpoint-activations",
        ),
        (
            m.checkpoint_attention and recomputes_layers,
            "--checkpoint-activations recomputes attention with its layer; leave --checkpoint-attention out",
        ),
        (
            m.offload_activations and recomputes_layers,
            "--checkpoint-activations leaves nothing for --offload-activations to move; leave one of them out",
        ),
    )
    if m.recompute_modules:
        conflicting_settings = problems_where(
            (recomputes_layers, "--checkpoint-activations, which recomputes whole layers"),
            (m.checkpoint_attention, "--checkpoint-attention, which keeps queries, keys and values"),
            (m.offload_activations, "--offload-activations, which keeps activations elsewhere"),
            (splits_backward, f"{schedule}, which splits the backward pass"),
        )
        for setting in conflicting_settings:
            yield f"--recompute-modules cannot be used with {setting}; leave one of them out"
    if m.checkpoint_attention and splits_backward:
        yield (
            f"{schedule} would recompute attention for each half of the backward pass; use 1f1b with "
            "--checkpoint-attention"
        )


def compile_conflicts(config: "Config", zero_stage: int | None = None) -> Iterator[str]:
    """Yield an error text for each setting that cannot be combined with --compile.

    zero_stage: stage of ZeRO; None if it is not known yet.
    """
    m = config.model
    p = config.parallel
    yield from problems_where(
        (
            m.offload_activations,
            "--offload-activations cannot see activations inside compiled layers; remove one of them",
        ),
        (
            m.recompute_modules,
            "--recompute-modules cannot be used with --compile, which chooses what to recompute itself; leave one of "
            "them out",
        ),
        (
            p.splits_backward(config.train.gas),
            f"--compile cannot be used with --pipeline-schedule {p.pipeline_schedule}, which splits the backward pass; "
            "use 1f1b",
        ),
        (
            config.train.precision == "fp8",
            "--compile cannot be used with --precision fp8, whose matmuls are not compiled; use bf16",
        ),
        (
            m.num_experts,
            "--compile cannot be used with --num-experts, whose shapes depend on the tokens; leave one out",
        ),
        (
            zero_stage == 3,
            "--compile cannot be used with ZeRO stage 3, which frees a layer's weights after use; use --zero-stage 2 "
            "(or stage 2 in the ds_config that sets it)",
        ),
    )


def _wsd_conflicts(config: "Config") -> Iterator[str]:
    """Yield an error text if the decay of the schedule wsd has the wrong unit or does not fit into the run."""
    o = config.optim
    if o.lr_decay_style != "wsd":
        return
    # --lr-wsd-decay-* must have the unit of the schedule. `misplaced` is the value of the flag with the other unit.
    if config.lr_decay_samples is None:
        unit = "iterations"
        ending = "iters"
        total = config.lr_decay_iters
        decay = o.lr_wsd_decay_iters
        other_flag = "--lr-wsd-decay-samples"
        misplaced = o.lr_wsd_decay_samples
    else:
        unit = "samples"
        ending = "samples"
        total = config.lr_decay_samples
        decay = o.lr_wsd_decay_samples
        other_flag = "--lr-wsd-decay-iters"
        misplaced = o.lr_wsd_decay_iters
    warmup = floor_share(o.warmup, total)
    if misplaced is not None:
        yield f"{other_flag} {misplaced}: the learning rate follows {unit} here; give --lr-wsd-decay-{ending} instead"
    if decay is not None and warmup + decay > total:
        yield (
            f"--lr-wsd-decay-{ending} {decay} after {warmup} {unit} of --warmup is more than the {total} of "
            f"--lr-decay-{ending}"
        )


def _optimizer_conflicts(config: "Config") -> Iterator[str]:
    """Yield an error text for each setting of Adam's moments and of muP that contradicts the optimizer."""
    o = config.optim
    if o.rounded_moments and (o.optimizer == "sgd" or config.model.kernels == "apex"):
        yield "--exp-avg-dtype and --exp-avg-sq-dtype need torch's Adam: use --optimizer adam and --kernels torch"
    # A bf16 number has 8 significant bits: adding 0.2 % of it, or less, does not change it. With a beta2 of 0.999, a
    # second moment would never fall.
    if o.exp_avg_sq_dtype == "bf16" and o.adam_beta2 > 0.98:
        yield (
            f"--exp-avg-sq-dtype bf16 rounds the small changes of --adam-beta2 {o.adam_beta2} away; use fp32 or an "
            "--adam-beta2 of at most 0.98"
        )
    if config.model.mup_base_hidden_size is not None and o.optimizer == "sgd":
        yield "--mup-base-hidden-size scales learning rates for Adam, not for --optimizer sgd; use adam"


def _objective_conflicts(config: "Config") -> Iterator[str]:
    """Yield an error text for each setting that contradicts the objective or a T5's samples."""
    d = config.data
    supported = objectives_of(config.model.family)
    if d.objective is not None and d.objective not in supported:
        model = config.model.family or "custom model"
        yield f"--objective {d.objective}: a {model} supports {' or '.join(supported)}"
    if config.objective == "prefix-lm":
        yield from _prefix_lm_conflicts(config)
    if config.is_t5 and d.span_convention == "cpm" and d.num_sentinels < 2:
        yield f"--num-sentinels {d.num_sentinels}: with --span-convention cpm, a sentinel also ends the labels; give 2"
    if config.is_t5 and d.reset_position_ids and not d.reset_attention_mask:
        yield (
            "--reset-position-ids: a T5 distinguishes documents only with --reset-attention-mask; give both, or neither"
        )


def _prefix_lm_conflicts(config: "Config") -> Iterator[str]:
    """Yield an error text for each setting that excludes prefixes with bidirectional attention."""
    m = config.model
    d = config.data
    looks_ahead = "--objective prefix-lm lets a prefix look ahead, which"
    yield from problems_where(
        (
            m.sliding_window is not None,
            f"{looks_ahead} --sliding-window forbids: leave one of them out; --sliding-window none turns off the "
            f"window that a --config file sets",
        ),
        (
            config.parallel.context_parallel_size > 1,
            f"{looks_ahead} --context-parallel-size does not support yet: leave one of them out",
        ),
        (
            m.position_embedding == "rope" and d.reset_position_ids and not d.reset_attention_mask,
            "--objective prefix-lm with rotary positions: --reset-position-ids needs --reset-attention-mask, too",
        ),
    )


def _objective_option_conflicts(config: "Config") -> Iterator[str]:
    """Yield an error text for each option of one objective that is given with another, or that lacks its partner."""
    d = config.data
    objective = config.objective
    has_fim_options = d.fim_tokens is not None or d.fim_spm_rate != 0.5  # 0.5 is the default
    yield from problems_where(
        (
            d.fim_rate and objective != "lm",
            f"--fim-rate rearranges running text, which --objective {objective} does not read: leave it out",
        ),
        (
            # The three names must differ; None, if they are not given, counts as no name.
            d.fim_rate and len(set(d.fim_tokens or ())) != 3,
            "--fim-rate needs --fim-tokens PREFIX MIDDLE SUFFIX, the names of three special tokens",
        ),
        (
            has_fim_options and not d.fim_rate,
            "--fim-tokens and --fim-spm-rate have no effect alone: give --fim-rate, too",
        ),
        (
            objective == "sft" and d.eod_mask_loss,
            "--objective sft takes the targets from the corpus: leave --eod-mask-loss out",
        ),
    )


def _sequence_conflicts(config: "Config") -> Iterator[str]:
    """Yield an error text if the sequence cannot be divided into equal slices for all ranks."""
    c = config.parallel.context_parallel_size
    t = config.parallel.model_parallel_size
    s = config.data.seq_length
    # A rank takes one slice of the first and one of the second half, so that causal attention costs all ranks the same.
    if c > 1 and s % (2 * c):
        yield (
            f"--seq-length {s} is not a multiple of {2 * c}: each of --context-parallel-size {c} ranks takes two "
            f"slices of a sequence, all of one length"
        )
    # A T5 pads its sequences, and the length of a custom model's is unknown.
    is_length_known = c > 1 or config.model.family in ("gpt2", "llama")
    if config.parallel.sequence_parallel and s % (c * t) and is_length_known:
        yield (
            f"--seq-length {s} is not a multiple of {c * t}, over which --context-parallel-size {c} and "
            f"--sequence-parallel with --model-parallel-size {t} shard it"
        )
    has_learned_positions = config.is_t5 and config.model.position_embedding == "learned"
    if config.parallel.sequence_parallel and has_learned_positions:
        longest = max(config.data.enc_seq_length or s, config.data.dec_seq_length or 0)
        padded = -(-longest // t) * t  # rounded up
        if padded > config.positions:
            yield (
                f"--sequence-parallel pads {longest} tokens to {padded} for --model-parallel-size {t}, but there are "
                f"{config.positions} learned positions: give --max-position-embeddings {padded}, or other lengths"
            )


def _expert_conflicts(config: "Config") -> Iterator[str]:
    ranks = config.parallel.expert_parallel_size
    experts = config.model.num_experts
    if ranks > 1 and (experts is None or experts % ranks):
        given = "(none)" if experts is None else experts
        yield f"--num-experts {given} cannot be divided among --expert-parallel-size {ranks} ranks"


def _object_storage_conflicts(config: "Config") -> Iterator[str]:
    """Yield an error text if --run-dir is in object storage, or is missing although --save is there."""
    save = config.checkpoint.save
    run_dir = config.log.run_dir
    if run_dir is not None and is_url(run_dir):
        yield f"--run-dir {run_dir} must be a folder on this machine; --save can name object storage"
    elif save is not None and is_url(save) and run_dir is None:
        yield (
            f"--save {save} needs --run-dir, a folder on this machine for metrics, locks and files on their way to "
            "object storage"
        )


def own_reduction_conflicts(config: "Config", zero_stage: int, own_zero1: bool, own_reduction: bool) -> Iterator[str]:
    """Yield an error text for each flag that needs this project's reduction of gradients instead of DeepSpeed's.

    own_zero1: whether the run uses this project's ZeRO 1. own_reduction: whether it reduces all gradients itself,
    without ZeRO.
    """
    p = config.parallel
    yield from problems_where(
        (p.overlap_param_gather and not own_zero1, PARAM_GATHER_NEEDS),
        (config.optim.optimizer == "muon" and zero_stage and not own_zero1, MUON_NEEDS),
        (p.expert_parallel_size > 1 and not own_zero1 and not own_reduction, EXPERTS_NEED),
    )


def zero_conflicts(config: "Config", precision: str, zero_stage: int) -> Iterator[str]:
    """Yield an error text if the stage of ZeRO cannot be used with the pipeline or the number format `precision`."""
    yield from problems_where(
        (
            config.parallel.pipe_parallel_size > 0 and zero_stage > 1,
            f"ZeRO stage {zero_stage} cannot be used with a pipeline, as each micro-batch would reduce-scatter the "
            "gradients again; use --zero-stage 1 (or stage 1 in the ds_config that sets it) or --pipe-parallel-size 0",
        ),
        (
            precision in ("fp16", "bf16") and zero_stage == 0,
            f"{precision} needs fp32 master weights and gradients; use --zero-stage 1 or higher, which keeps them "
            "(or such a stage in the ds_config that sets it)",
        ),
        (
            precision == "fp64" and zero_stage > 0,
            f"--precision fp64, a mode for numerical checks, needs ZeRO stage 0, not {zero_stage}; use --zero-stage 0 "
            "(or stage 0 in the ds_config that sets it)",
        ),
    )
