"""Contradictions between sections: sizes that do not fit the ranks, the batches, the stages or the positions."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .batches import BatchSchedule, parse_batch_schedule, parse_entries
from .fields import flag, problems_where, raise_first_problem

if TYPE_CHECKING:
    from .sections import Config


def contradictions(config: "Config") -> Iterator[str]:
    """Yield an error text for each contradiction between the sections of `config`."""
    for find_problems in (
        _tensor_parallel_problems,
        _other_family_problems,
        _batch_schedule_problems,
        _empty_stage_problems,
        _position_problems,
    ):
        yield from find_problems(config)


def _tensor_parallel_problems(config: "Config") -> Iterator[str]:
    """Yield an error text for each size that cannot be split over the model-parallel ranks."""
    m = config.model
    ranks = config.parallel.model_parallel_size
    # With 4 ranks, each rank has 2 of 8 key/value heads, and 2 ranks share each of 2 heads. 3 heads cannot be split.
    heads = m.key_value_heads
    split = f"cannot be split over --model-parallel-size {ranks}"
    yield from problems_where(
        (m.num_attention_heads % ranks, f"--num-attention-heads {m.num_attention_heads} {split}"),
        (
            heads % ranks and ranks % heads,
            f"--num-key-value-heads {heads} {split}: one must be a multiple of the other",
        ),
        (
            # Keys and values of a shared head are projected in shards: each rank computes 1/ranks of both.
            ranks > heads and 2 * heads * m.head_size % ranks,
            f"--num-key-value-heads {heads} x 2 x --kv-hidden-size {m.head_size} {split}; it must be a multiple",
        ),
        (m.ff_size % ranks, f"--ff-hidden-size {m.ff_size} {split}"),
        (
            m.num_experts and m.expert_ff_size % ranks,
            f"--expert-ff-hidden-size {m.expert_ff_size} {split}",
        ),
    )


def _other_family_problems(config: "Config") -> Iterator[str]:
    """Yield an error text if the user changed settings that only other model families read."""
    from .sections import settings

    family = config.model.family
    if family is None:
        return
    ignored = []
    for section, _, f in settings():
        families = f.metadata["family"]  # of models that read the setting; None stands for all
        if families is None or family in families:
            continue
        if getattr(getattr(config, section), f.name) != f.default:
            ignored.append(f"{flag(f.name)} (used by {' and '.join(families)} only)")
    if ignored:
        them = "them" if len(ignored) > 1 else "it"
        yield f"{', '.join(ignored)}: this model is a {family}; leave {them} out"


def _batch_schedule_problems(config: "Config") -> Iterator[str]:
    """Yield an error text if the starts of --batch-size-schedule do not ascend, or cannot be known."""
    given = config.train.batch_size_schedule
    if given is None:
        return
    # The starts are checked in samples, to which a T5's numbers of tokens cannot be converted without its data. A start
    # of 0 needs no conversion.
    if config.is_t5 and any(entry.start and not entry.in_samples for entry in parse_entries(given)):
        yield (
            f"--batch-size-schedule {given}: the number of tokens in a sample of a t5 follows from its data; count "
            f"samples instead, such as 5000_samples:64"
        )
        return
    starts = parse_batch_schedule(given, config.data.seq_length).starts
    if any(later <= start for start, later in itertools.pairwise(starts)):
        yield (
            f"--batch-size-schedule {given}: the starts do not ascend; in samples of --seq-length "
            f"{config.data.seq_length} tokens, they are {', '.join(map(str, starts))}"
        )


def _batch_size_problems(train: Any, batches: BatchSchedule, replicas: int) -> Iterator[str]:
    """Yield an error text for each batch that the replicas cannot share, and if --train-samples is below one batch.

    train: a `TrainConfig`.
    """
    micro_samples = train.batch_size * replicas  # samples of one micro-batch on each replica
    for size in batches.sizes:
        if size % micro_samples:
            yield (
                f"--batch-size-schedule {train.batch_size_schedule}: the size {size} is not a multiple of "
                f"{micro_samples} = --batch-size {train.batch_size} x {replicas} replicas; change one of them. A "
                f"resumed run needs only the sizes that lie ahead: begin with 0:SIZE"
            )
    first_size = batches.sizes[0]
    if train.train_samples is not None and train.train_samples < first_size:
        yield f"--train-samples {train.train_samples} is less than one global batch of {first_size} samples"


def scheduled_train_section(config: "Config", world_size: int, iteration: int, consumed: int) -> Any:
    """Return the section `train` with --gas and --train-iters of a schedule; see `Config.with_derived_iters`.

    --gas becomes the number of micro-batches of the largest batch. --train-samples sets --train-iters: the iterations
    done plus those that fit into the remaining samples.
    iteration, consumed: number of iterations and of samples that the run has done.
    """
    train = config.train
    replicas = config.parallel.data_parallel_size(world_size)
    batches = config.batch_schedule(world_size)
    raise_first_problem(_batch_size_problems(train, batches, replicas))
    gas = max(batches.sizes) // (train.batch_size * replicas)
    iterations = train.train_iters
    if train.train_samples is not None:
        iterations = iteration + batches.iterations_between(consumed, train.train_samples)
    return replace(train, gas=gas, train_iters=iterations)


def _empty_stage_problems(config: "Config") -> Iterator[str]:
    """Yield an error text if there are more pipeline stages, or virtual stages, than layers."""
    m = config.model
    p = config.parallel
    if m.family is None:
        return  # a custom model may have more layers than --num-layers says
    layers = m.num_layers
    flags = f"--num-layers {m.num_layers}"
    if config.is_t5:
        layers += m.decoder_layers
        flags += f" + --num-decoder-layers {m.decoder_layers}"
    if p.stages * p.chunks > layers:
        chunks = f" x --virtual-pipeline-size {p.chunks}" if p.chunks > 1 else ""
        stages = f"--pipe-parallel-size {p.pipe_parallel_size}{chunks}"
        yield f"{stages} is more than {flags}: some stages would have no layer"


def _position_problems(config: "Config") -> Iterator[str]:
    """Yield an error text for each length that exceeds the number of learned positions."""
    d = config.data
    positions = config.model.max_position_embeddings
    if positions is None:
        return
    lengths: dict[str, int | None] = {"--seq-length": d.seq_length}
    if config.is_t5 and d.enc_seq_length:
        # Then the samples of a T5 do not depend on --seq-length.
        lengths = {"--enc-seq-length": d.enc_seq_length, "--dec-seq-length": d.dec_seq_length}
    for name, length in lengths.items():
        if length is not None and length > positions:
            yield f"{name} {length} exceeds --max-position-embeddings {positions}; raise the latter"
