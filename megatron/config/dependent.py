"""Flags of other projects whose meaning here follows from other settings: how each is worked out.

Each function takes the settings so far, the value that is given and the number of ranks.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .outcomes import Means, NoEffect, Refused
from .sections import Config


def _replicas(config: Config, ranks: int) -> int:
    return config.parallel.data_parallel_size(ranks)


def accumulation(config: Config, total: Any, ranks: int) -> Means | Refused:
    """`total` samples of a global batch, in micro-batches of this --batch-size."""
    each, replicas = config.train.batch_size, _replicas(config, ranks)
    if total < 1 or total % (each * replicas):
        return Refused(f"it must be a multiple of {each * replicas} = --batch-size {each} x {replicas} replicas")
    return Means({"gas": total // (each * replicas)}, f"{total} = --batch-size {each} x {replicas} replicas x --gas")


def iterations(setting: str) -> Callable[[Config, Any, int], Means | Refused]:
    """How many iterations a number of samples is, for `setting`."""

    def on(config: Config, samples: Any, ranks: int) -> Means | Refused:
        batch = config.train_batch_size(ranks)
        if samples < batch:
            return Refused(f"it is less than one global batch of {batch} samples")
        return Means({setting: samples // batch}, f"global batches of {batch} samples")

    return on


def _share_of_decay(config: Config, rising: Any, of: int, unit: str) -> Means | Refused:
    if not 0 <= rising <= of:
        return Refused(f"it must lie between 0 and the {of} {unit} of the decay")
    return Means({"warmup": rising / of}, f"{rising} of the {of} {unit} of the decay")


def warmup_iterations(config: Config, rising: Any, ranks: int) -> Means | Refused:
    """The share of the decay that so many iterations are."""
    return _share_of_decay(config, rising, config.lr_decay_iters, "iterations")


def warmup_samples(config: Config, rising: Any, ranks: int) -> Means | Refused:
    """The share of the decay that so many samples are."""
    return _share_of_decay(config, rising, config.lr_decay_iters * config.train_batch_size(ranks), "samples")


def stretches(config: Config, layers: Any, ranks: int) -> Means | Refused:
    """Interleaved stretches of `layers` layers each."""
    stages, total = config.parallel.stages, config.model.num_layers
    if layers < 1 or total % (stages * layers) or total == stages * layers:
        return Refused(f"--num-layers {total} must be 2 or more times --pipe-parallel-size {stages} x {layers}")
    return Means({"pipeline_schedule": "interleaved", "virtual_pipeline_size": total // (stages * layers)})


def merges(config: Config, path: Any, ranks: int) -> NoEffect | Refused:
    """A file of merges that stands where we look for it, or one that does not."""
    vocab = config.data.vocab_file
    if vocab is not None and Path(path) in _merges_beside(Path(vocab)):
        return NoEffect("it is read where it is, next to --vocab-file")
    return Refused("merges are read from merges.txt next to --vocab-file; copy the file there")


def _merges_beside(vocab: Path) -> list[Path]:
    """Where merges are read from: by the name of the vocabulary, or in the folder that --vocab-file is."""
    own = vocab.name.replace("vocab.json", "merges.txt")
    return [vocab.with_name("merges.txt"), vocab.with_name(own), vocab / "merges.txt", vocab / "gpt2-merges.txt"]


def fp32_sums(config: Config, _: Any, ranks: int) -> NoEffect | Refused:
    """Gradients added up in fp32, where they are."""
    if config.train.precision in ("fp32", "fp64") or (
        config.train.precision == "bf16" and (config.parallel.zero_stage or 0) <= 1
    ):
        return NoEffect(f"{config.train.precision} adds gradients up in fp32 or better already")
    return Refused('write "communication_data_type": "fp32" in --deepspeed-config, or take --precision bf16')


def momentum(config: Config, value: Any, ranks: int) -> NoEffect | Refused:
    """That of SGD, which is fixed."""
    return NoEffect("it is 0.9 here") if value == 0.9 else Refused("the momentum of --optimizer sgd is 0.9")


def gated_width(values: Mapping[str, Any]) -> int | None:
    """Inside a gated MLP, as Megatron-LM has it where nothing says it: int(8/3 h / 64) 64. None for a hidden size that is refused anyway."""
    h = values["hidden_size"]
    return h // 24 * 64 if type(h) is int else None


def groups(config: Config, _: Any, ranks: int) -> Means | NoEffect:
    """Groups of queries, unless their number is given."""
    if config.model.num_key_value_heads is not None:
        return NoEffect("--num-key-value-heads says how many there are")
    return Means({"num_key_value_heads": 1}, "one group, as there, where nothing says how many")


def norms_of_heads(config: Config, _: Any, ranks: int) -> Means | Refused:
    """Norms of queries and keys, of the kind that we have."""
    if config.model.normalization == "rmsnorm":
        return Means({"qk_norm": True})
    return Refused("norms of queries and keys are RMS norms here, take --normalization rmsnorm for all")


def no_learned_positions(config: Config, _: Any, ranks: int) -> NoEffect | Refused:
    """Nothing, where positions are not learned."""
    kind = config.model.position_embedding
    if kind != "learned":
        return NoEffect(f"--position-embedding {kind} has no learned ones")
    return Refused("a model without positions is not here: see --position-embedding")


def window(config: Config, sides: Any, ranks: int) -> Means | Refused:
    """`N,0` as tokens that a token sees, itself counted."""
    before, _, after = sides.strip("()").replace(" ", "").partition(",")
    if not before.isdigit() or after != "0":
        return Refused("N,0 can be taken: a token sees N others before it and none behind; leave it out for all")
    return Means({"sliding_window": int(before) + 1}, "the token itself is counted here")
