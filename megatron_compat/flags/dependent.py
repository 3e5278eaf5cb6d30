"""Translation of other frameworks' flags whose meaning depends on other settings.

Each function takes the settings of the run, as they are without the flag, the flag's value and the number of ranks. It
returns the flag's outcome: settings of this project, no effect, or a refusal. The table binds the first parameter of
`in_samples`, `setting`.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.config.fields import flag
from megatron.config.sections import Config

from .outcomes import Decision, NoEffect, Refused, Translated


def accumulation(config: Config, global_batch: Any, ranks: int) -> Decision:
    """Translate a global batch size of `global_batch` samples to --gas, given --batch-size."""
    batch_size = config.train.batch_size
    replicas = config.parallel.data_parallel_size(ranks)
    step_size = batch_size * replicas
    if global_batch < 1 or global_batch % step_size:
        return Refused(f"the value must be a multiple of {step_size} = --batch-size {batch_size} x {replicas} replicas")
    return Translated(
        {"gas": global_batch // step_size}, f"{global_batch} = --batch-size {batch_size} x {replicas} replicas x --gas"
    )


def rampup(config: Config, words: Any, ranks: int) -> Decision:
    """Translate START INCREMENT SAMPLES to --batch-size-schedule; the last size is --global-batch-size.

    The size grows by INCREMENT whenever another equal share of SAMPLES is consumed, as in Megatron-LM.
    """
    numbers = [str(word).replace("_", "") for word in words]  # int() accepts 9_765_625, too
    if len(numbers) != 3 or not all(map(str.isdecimal, numbers)):
        return Refused("give three whole numbers: the first size, the increment and the number of samples")
    start, increment, samples = map(int, numbers)
    last_size = config.train_batch_size(ranks)
    if start < 1 or increment < 1 or last_size < start or (last_size - start) % increment:
        return Refused(
            f"the global batch of {last_size} samples minus the first size must be a multiple of the increment; "
            "--global-batch-size sets the former"
        )
    # From 16 to 32 in steps of 8 over 1000 samples: 16 from sample 0 on, 24 from 500 on, 32 from 1000 on.
    steps = (last_size - start) // increment
    sizes = {}
    for step in range(steps + 1):
        begin = -(-step * samples // max(steps, 1))  # rounded up; without an increment, there is only step 0
        sizes[begin] = start + step * increment
    return Translated({"batch_size_schedule": " ".join(f"{begin}_samples:{size}" for begin, size in sizes.items())})


def in_samples(setting: str, config: Config, tokens: Any, ranks: int) -> Decision:
    """Translate a number of tokens to a number of samples, the value of `setting`."""
    length = config.data.seq_length
    if config.is_t5:
        return Refused(f"a t5's tokens per sample follow from its data; give {flag(setting)}")
    if tokens < length:
        return Refused(f"the value is less than one sample of --seq-length {length} tokens")
    return Translated({setting: tokens // length}, f"a sample has {length} tokens")


def _share_of_decay(warmup: Any, total: int, unit: str) -> Decision:
    if not 0 <= warmup <= total:
        return Refused(f"the value must lie between 0 and the {total} {unit} of the learning-rate decay")
    return Translated({"warmup": warmup / total}, f"{warmup} of the {total} {unit} of the learning-rate decay")


def warmup_iterations(config: Config, warmup: Any, ranks: int) -> Decision:
    """Translate warmup iterations to --warmup, a fraction of the learning-rate decay."""
    config = config.with_derived_iters(ranks)
    if config.lr_decay_samples is None:
        return _share_of_decay(warmup, config.lr_decay_iters, "iterations")
    # The decay is counted in samples, so count those of the first `warmup` iterations.
    return _share_of_decay(config.batch_schedule(ranks).advance(0, warmup), config.lr_decay_samples, "samples")


def deepspeed_warmup(config: Config, warmup: Any, ranks: int) -> Decision:
    """Translate DeepSpeed's number of warmup steps as `warmup_iterations` does, with a note on the other shape."""
    decision = warmup_iterations(config, warmup, ranks)
    if isinstance(decision, Translated):
        shapes = "this warm-up is linear, DeepSpeed's by default logarithmic"
        return replace(decision, note=f"{decision.note}; {shapes}")
    return decision


def warmup_samples(config: Config, warmup: Any, ranks: int) -> Decision:
    """Translate warmup samples to --warmup, a fraction of the learning-rate decay."""
    config = config.with_derived_iters(ranks)
    if config.lr_decay_samples is not None:
        return _share_of_decay(warmup, config.lr_decay_samples, "samples")
    batches = config.batch_schedule(ranks)
    decay_iters = config.lr_decay_iters
    # With one batch size, the decay has a known number of samples. Otherwise, count iterations.
    if len(batches.sizes) == 1:
        return _share_of_decay(warmup, decay_iters * batches.sizes[0], "samples")
    return _share_of_decay(batches.iterations_between(0, warmup), decay_iters, "iterations")


def warmup_tokens(config: Config, warmup: Any, ranks: int) -> Decision:
    """Translate warmup tokens to --warmup, a fraction of the learning-rate decay."""
    if config.is_t5:
        return Refused("a t5's tokens per sample follow from its data; give --warmup")
    return warmup_samples(config, warmup // config.data.seq_length, ranks)


def virtual_pipeline(config: Config, layers: Any, ranks: int) -> Decision:
    """Translate the number of layers of a virtual stage to --pipeline-schedule interleaved --virtual-pipeline-size."""
    stages = config.parallel.stages
    total = config.model.num_layers
    layers_per_round = stages * layers  # those of one virtual stage on each rank
    # An interleaved schedule needs at least two virtual stages on each rank.
    if layers < 1 or total % layers_per_round or total == layers_per_round:
        return Refused(
            f"--num-layers {total} must be a multiple of --pipe-parallel-size {stages} x {layers} layers, and larger "
            "than this product"
        )
    return Translated({"pipeline_schedule": "interleaved", "virtual_pipeline_size": total // layers_per_round})


def merge_file(config: Config, path: Any, ranks: int) -> Decision:
    """Accept the merges file that the tokenizer of --vocab-file reads anyway; refuse others."""
    from megatron.tokenizer.hf import find_merges

    vocab = Path(config.data.vocab_file or "vocab.json").absolute()
    # In a folder, the tokenizer finds the vocabulary by these names.
    files = [vocab / "vocab.json", vocab / "gpt2-vocab.json"]
    vocab_file = next(filter(Path.is_file, files), vocab)  # the first that exists, else `vocab`, a file itself
    merges = find_merges(vocab_file)
    if Path(path).resolve() == merges.resolve():
        return NoEffect("merges are always read from this file next to --vocab-file")
    return Refused(f"merges are read from {merges}; copy the file there")


def fp32_sums(config: Config, _: Any, ranks: int) -> Decision:
    """Accept fp32 gradient accumulation and reduction if the flags and the ds_config imply them, else refuse."""
    from megatron.config.ds_config import read_file  # imports torch

    precision = config.train.precision
    # The second argument accepts every section, as `resolve` in that module checks the sections later.
    ds_config = read_file(config, lambda section, content: None)
    file_stage = ds_config.get("zero_optimization", {}).get("stage")
    # None: not set there. If neither the flag nor the file sets the stage, the default is 0 or 1.
    is_low_stage = all(stage in (None, 0, 1) for stage in (config.parallel.zero_stage, file_stage))
    # DeepSpeed reduces in the dtype of the weights; with bf16 and ZeRO 0 or 1, `resolve` chooses fp32 instead.
    default_type = "fp32" if precision in ("fp32", "fp64") or is_low_stage else config.train.dtype
    reduces_in_fp32 = str(ds_config.get("communication_data_type", default_type)).lower() == "fp32"
    # In fp16, DeepSpeed accumulates gradients in fp16.
    if reduces_in_fp32 and precision in ("fp32", "fp64", "bf16", "fp8"):
        return NoEffect(f"--precision {precision} reduces gradients in fp32 or fp64")
    return Refused(
        'write "communication_data_type": "fp32" in --deepspeed-config, and use --precision bf16 or leave this flag out'
    )


def gated_width(values: Mapping[str, Any]) -> int | None:
    """Return Megatron-LM's default inner size of a gated MLP, int(8/3 hidden_size / 64) * 64.

    Returns None if hidden_size is not an int; the validation of settings refuses such a value later.
    """
    hidden_size = values["hidden_size"]
    # 8/3 of hidden_size, divided by 64, is hidden_size / 24.
    return hidden_size // 24 * 64 if type(hidden_size) is int else None


def query_key_norms(config: Config, _: Any, ranks: int) -> Decision:
    """Translate a flag for query and key norms to --qk-norm; refuse the flag if --normalization is not rmsnorm."""
    if config.model.normalization == "rmsnorm":
        return Translated({"qk_norm": True})
    return Refused("query and key norms are always RMSNorm; use --normalization rmsnorm for all norms")


def no_learned_positions(config: Config, _: Any, ranks: int) -> Decision:
    """Accept --no-position-embedding if positions are not learned, else refuse."""
    kind = config.model.position_embedding
    if kind != "learned":
        return NoEffect(f"--position-embedding {kind} has no learned positions")
    return Refused("every model uses position embeddings; see --position-embedding")


def window_size(config: Config, sides: Any, ranks: int) -> Decision:
    """Translate Megatron's --window-size N,0 to --sliding-window N + 1, which also counts the token itself."""
    # The value may be typed as (N,0) or as N, 0.
    before, _, after = sides.strip("()").replace(" ", "").partition(",")
    if not before.isdigit() or after != "0":
        return Refused(
            "only N,0 is supported: N earlier tokens and no later ones; leave the flag out for full attention"
        )
    return Translated({"sliding_window": int(before) + 1}, "--sliding-window also counts the token itself")


def constant_weight_decay(config: Config, value: Any, ranks: int) -> Decision:
    """Accept a first or last weight decay that is --weight-decay, else refuse."""
    reason = f"--weight-decay {config.optim.weight_decay} is constant"
    return NoEffect(reason) if value == config.optim.weight_decay else Refused(reason)
