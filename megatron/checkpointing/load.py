"""Loading of checkpoints into an engine: the parallel layout may differ, the model and the data must match."""

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron import mpu
from megatron.config import Config
from megatron.config.command_line import refuse_removed
from megatron.config.fields import ConfigError, first_of, flag
from megatron.model.layers import global_parameters
from megatron.ranks.agreement import all_ranks, same_everywhere
from megatron.ranks.buffers import remember
from megatron.ranks.initialize import ranks_here
from megatron.ranks.objects import gather_objects
from megatron.ranks.rank_0 import print_rank_0
from tds import optimizer_state as zero_state
from tds.average import AVERAGE

from .checksums import SHA256
from .files import BUFFER, INDEX, WEIGHT, CheckpointError, sums_file
from .reader import CheckpointReader, load_buffers, plain_config
from .share import parts_of
from .state import TrainState

# Settings that, besides the corpus and the seed, decide how a sample is made.
SAMPLE_SETTINGS = (
    "seq_length", "enc_seq_length", "dec_seq_length", "objective", "span_convention", "noise_density",
    "mean_span_length", "num_sentinels", "fim_rate", "fim_spm_rate", "fim_tokens",
)  # fmt: skip


LARGE_BATCH = 1 << 22  # global batch size (samples per iteration) that no run exceeds


@dataclass(frozen=True)
class Wanted:
    """Which parts of a checkpoint to load, and which mismatches between checkpoint and run to refuse."""

    position: bool = True  # load the iteration and the consumed samples
    optimizer: bool = True  # load moments, step counts and the loss scale
    rng: bool = True  # load the seed of the dropout streams
    same_data: bool = True  # refuse a checkpoint trained on samples that this run's data does not produce
    same_tokenizer: bool = True  # refuse the checkpoint if its tokenizer differs from that of this run

    @classmethod
    def by(cls, config: Config, beside_load: bool = False) -> "Wanted":
        """Return the parts to load and the mismatches to refuse, as the flags in `config` ask.

        beside_load: whether --load is given but ignored, because the run resumes from its own checkpoint.
        """
        c = config.checkpoint
        # --finetune and --no-load-* were meant for the checkpoint of --load, when the run started. Applying them to
        # the run's own checkpoint would discard the progress of the run.
        if beside_load:
            return cls(same_data=not c.override_data, same_tokenizer=not c.override_tokenizer)
        return cls(
            position=not c.finetune,
            optimizer=c.load_optim and not c.finetune,
            rng=c.load_rng and not c.finetune,
            same_data=not (c.finetune or c.override_data),
            same_tokenizer=not c.override_tokenizer,
        )


def load_checkpoint(path: Path, engine: Any, config: Config, fingerprint: str, wanted: Wanted = Wanted()) -> TrainState:
    """Load the checkpoint `path`: weights, buffers, optimizer state, dropout seed and the position in training.

    `wanted` selects the parts. All ranks must call this. The parallel layout may differ from the layout of the run
    that saved the checkpoint. If any rank fails, every rank raises RunError.
    """
    with all_ranks():
        reader = CheckpointReader(path)
        refuse_contradictions(reader, config, fingerprint, wanted)
        sums = SHA256.of(sums_file(path))
    same_everywhere({f"the SHA-256 of {sums_file(path)}": sums})  # each node may have a copy of its own
    unread = _unread_weights(reader, engine)
    if wanted.position:
        _name_changes(reader, engine)
    with all_ranks():
        _refuse_unread(reader, unread, wanted)
    with ThreadPoolExecutor(1) as checker:  # while the tensors are read, check the files that they come from
        checked = checker.submit(reader.verify, dist.get_rank(), dist.get_world_size())
        with all_ranks():
            try:
                _load_tensors(reader, engine, wanted)
            finally:
                checked.result()  # if a file is damaged, raise this error rather than its consequences
    _restore_buffers(reader, engine.module)
    if wanted.rng and reader.rng_seed is not None:
        mpu.get_rng().seed = reader.rng_seed
    state = TrainState.from_dict(reader.state) if wanted.position else TrainState()
    return state if wanted.optimizer else replace(state, features={})


def _restore_buffers(reader: CheckpointReader, model: nn.Module) -> None:
    """Load the persistent buffers, and print a warning for buffers that only the model or only the checkpoint has."""
    with all_ranks():
        loaded = load_buffers(reader, model)
    remember(model)
    every = gather_objects(loaded)
    everywhere = {name for names, _ in every for name in names}
    lacking = sorted({name for _, names in every for name in names})
    held = {key.removeprefix(f"{BUFFER}.") for key in reader.tensors if key.startswith(f"{BUFFER}.")}
    for names, problem in (
        (lacking, "are not in this checkpoint and keep their initial values"),
        (sorted(held - everywhere), "are in this checkpoint, but not in the model"),
    ):
        if names:
            print_rank_0(f"warning: {reader.path}: the buffers {first_of(names)} {problem}")


def _unread_weights(reader: CheckpointReader, engine: Any) -> list[str]:
    """Return the keys of the checkpoint's weights for which no rank has a parameter. All ranks must call this."""
    every = gather_objects([name for name, _ in global_parameters(engine.module)])
    known = {f"{WEIGHT}.{name}" for names in every for name in names}
    return sorted(key for key in reader.tensors if key.startswith(f"{WEIGHT}.") and key not in known)


def _refuse_unread(reader: CheckpointReader, unread: Sequence[str], wanted: Wanted) -> None:
    """Raise CheckpointError if a resumed run would drop the weights `unread`.

    If the run only starts with the weights of the checkpoint, print a note instead.
    """
    if not unread:
        return
    shown = first_of(unread, 3)
    if wanted.position:
        raise CheckpointError(f"{reader.path / INDEX} lists weights that this model does not have: {shown}")
    print_rank_0(f"note: {reader.path} holds weights that this model does not have: {shown}")


def step_lags(path: Path | None, wanted: Wanted) -> dict[str, int]:
    """Return, by name, by how many steps the step counts of weights in a checkpoint are lower than the optimizer's.

    Weights that were frozen or never had a gradient lag by all steps; weights that are not in the result do not lag.
    """
    optimizer = CheckpointReader(path).optimizer if path is not None and wanted.optimizer else {"moments": []}
    if not optimizer["moments"]:
        return {}
    counts = dict.fromkeys(optimizer.get("without_moments", ()), 0) | optimizer.get("steps", {})
    return {name: optimizer["step"] - count for name, count in counts.items()}


def _name_changes(reader: CheckpointReader, engine: Any) -> None:
    """Print which weights are frozen in the checkpoint but not in this run, and vice versa. All ranks must call this.

    Older checkpoints do not list frozen weights.
    """
    every = gather_objects({name: p.requires_grad for name, p in global_parameters(engine.module)})
    trained = {name: learns for each in every for name, learns in each.items()}
    before = reader.optimizer.get("frozen")
    if before is None:
        return
    frozen = sorted(name for name, learns in trained.items() if not learns and name not in before)
    thawed = sorted(name for name in before if trained.get(name))
    for names, now, then in ((frozen, "frozen", "trained"), (thawed, "trained", "frozen")):
        if names:
            print_rank_0(f"note: {now} from now on, but {then} before this checkpoint: {first_of(names)}")


def refuse_contradictions(
    reader: CheckpointReader, config: Config, fingerprint: str | None, wanted: Wanted = Wanted()
) -> None:
    """Raise CheckpointError if the checkpoint's model, tokenizer, optimizer or sample settings differ from this run's.

    The message shows the value in the checkpoint and the value in this run.
    """
    saved = plain_config(reader)
    there = _architecture(saved, reader.positions)
    here = _architecture(config, config.positions)
    if there["family"] is None or here["family"] is None:
        there["family"] = here["family"]  # a custom model has no known family, so do not compare families
    differing = _differences(there, here)
    if differing and not (config.checkpoint.finetune and _only_reach(there, here)):
        more = "; pass --finetune to continue with this run's values" if _only_reach(there, here) else ""
        settings = Path(reader.path).parent / "settings.json"
        if settings.is_file():
            more += f"; --config {settings} sets the checkpoint's values"
        raise CheckpointError(f"{reader.path} holds another model: {differing}{more}")
    if wanted.same_tokenizer:
        reader.check_tokenizer(fingerprint, "; pass --override-tokenizer to continue with this run's tokenizer")
    before = reader.config["optim"]["optimizer"]
    if wanted.optimizer and reader.optimizer["moments"] and before != config.optim.optimizer:
        raise CheckpointError(
            f"{reader.path} has the state of --optimizer {before}, but this run uses "
            f"{config.optim.optimizer}; pass --no-load-optim to continue with new optimizer state"
        )
    _refuse_impossible_counts(reader, saved)
    if wanted.same_data and reader.state["consumed_samples"]:
        _refuse_removed_settings(reader)
        differing = _differences(settings_of_samples(saved), settings_of_samples(config))
        if differing:
            raise CheckpointError(
                f"{reader.path} was trained on samples made with other settings: {differing}; pass --override-data to "
                f"continue with this run's samples"
            )


def _refuse_removed_settings(reader: CheckpointReader) -> None:
    """Raise CheckpointError if a removed setting changed the samples on which the checkpoint was trained."""
    try:
        refuse_removed(reader.config, reader.path / INDEX)
    except ConfigError as error:
        raise CheckpointError(f"{error}; pass --override-data to continue with this run's samples") from None


def settings_of_samples(config: Config) -> dict[str, Any]:
    """Return the settings that decide how a sample is made from a corpus."""
    return {name: getattr(config.data, name) for name in SAMPLE_SETTINGS} | {"objective": config.objective}


def _refuse_impossible_counts(reader: CheckpointReader, saved: Config) -> None:
    """Raise CheckpointError if the checkpoint counts more samples than its iterations can have consumed."""
    iteration = reader.state["iteration"]
    samples = reader.state["consumed_samples"]
    most = iteration * max(saved.train.batch_size * saved.train.gas, LARGE_BATCH)
    if samples > most:
        raise CheckpointError(
            f"{reader.path / INDEX}: consumed_samples is {samples}, more than {iteration} iterations can have read "
            f"({most})"
        )


def _architecture(config: Config, positions: int) -> dict[str, Any]:
    m = config.model
    values = {f.name: getattr(m, f.name) for f in fields(m) if not f.metadata["free"]}
    if m.position_embedding != "relative":
        values |= {"relative_attention_num_buckets": None, "relative_attention_max_distance": None}
    if m.position_embedding != "learned":
        positions = 0
    decoder = m.decoder_layers if config.is_t5 else 0
    layers = range(max(m.num_layers, decoder)) if m.num_experts else ()
    follows = {
        "num_key_value_heads": m.key_value_heads,
        "qkv_bias": m.has_qkv_bias,
        "kv_hidden_size": m.head_size,
        "ff_hidden_size": m.ff_size,
        "num_decoder_layers": decoder,
        "expert_ff_hidden_size": m.expert_ff_size if m.num_experts else None,
        "moe_layer_frequency": " ".join(str(int(m.has_experts(i))) for i in layers) or None,
    }
    return values | follows | {"max_position_embeddings": positions}


def _only_reach(there: dict[str, Any], here: dict[str, Any]) -> bool:
    """Return whether the models differ only in rotary settings and window size, as after long-context extension.

    there, here: settings of the checkpoint's model and of this run's model, by name.
    """
    return all(name.startswith("rope_") or name == "sliding_window" for name in there if there[name] != here[name])


def _differences(there: dict[str, Any], here: dict[str, Any]) -> str:
    differing = [name for name in there if there[name] != here[name]]
    return "; ".join(
        f"{flag(name)} is {there[name]} in the checkpoint and {here[name]} in this run" for name in differing
    )


def _load_tensors(reader: CheckpointReader, engine: Any, wanted: Wanted) -> None:
    """Load the weights, and the optimizer's state if `wanted.optimizer` is set."""
    moments = _moments(reader, engine) if wanted.optimizer else []
    if AVERAGE in moments:
        _hold_averages(reader, engine)
    if moments:
        zero_state.make_moments(engine, moments, reader.optimizer["step"], _steps(reader, engine, moments))
    keys = list(_wanted_keys(reader, engine, moments))
    for kind, parameter, value in _read_once(reader, keys, engine.device):
        if kind == WEIGHT:
            zero_state.set_weight(parameter, value)
        else:
            zero_state.set_moment(engine, parameter, kind, value)
    if wanted.optimizer:
        zero_state.set_loss_scaler(engine, reader.optimizer["loss_scaler"])


def _hold_averages(reader: CheckpointReader, engine: Any) -> None:
    """Announce which frozen weights have an average in the checkpoint. The rank that saves a weight keeps it."""
    for part in parts_of(engine, []):
        if not part.parameter.requires_grad and f"{AVERAGE}.{part.name}" in reader.tensors:
            engine.weight_average.hold(part.parameter, part.mine)


def _moments(reader: CheckpointReader, engine: Any) -> list[str]:
    """Return the names of the moments to load. The average of --ema-decay counts as one, if the run keeps it."""
    moments: list[str] = reader.optimizer["moments"]
    if engine.weight_average and moments and AVERAGE not in moments:
        print_rank_0(f"note: {reader.path} holds no average of the weights; --ema-decay begins one with its weights")
    if engine.weight_average or AVERAGE not in moments:
        return moments
    print_rank_0(f"note: without --ema-decay, this run drops the average of the weights in {reader.path}")
    return [name for name in moments if name != AVERAGE]


def _steps(reader: CheckpointReader, engine: Any, moments: Sequence[str]) -> dict[nn.Parameter, int | None]:
    """Return each parameter's step count; None for a parameter without moments (frozen, or never had a gradient).

    A parameter that was frozen and has only an average begins at 0.
    """
    common = reader.optimizer["step"]
    others = reader.optimizer.get("steps", {})
    found = dict[nn.Parameter, int | None]()
    for name, parameter in global_parameters(engine.module):
        own = {each for each in moments if f"{each}.{name}" in reader.tensors}
        if own == {AVERAGE}:
            found[parameter] = 0
        else:
            found[parameter] = others.get(name, common) if own else None
    return found


Key = tuple[str, str, nn.Parameter]  # kind ("weight" or a moment's name), global name of the parameter, parameter


def _wanted_keys(reader: CheckpointReader, engine: Any, moments: Sequence[str]) -> Iterator[Key]:
    """Yield the key of each weight and moment that this rank needs.

    The order is the same on all data-parallel ranks that hold a parameter.
    """
    for name, parameter in global_parameters(engine.module):
        yield WEIGHT, name, parameter
        for moment in zero_state.moments_of(engine, parameter, moments):
            # The checkpoint has no moments of a parameter that was frozen or never had a gradient. Its average is the
            # weight.
            if moment == AVERAGE or f"{moment}.{name}" in reader.tensors:
                yield moment, name, parameter


def _read_once(
    reader: CheckpointReader, keys: Sequence[Key], device: torch.device
) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Yield (kind, parameter, value) for each key; a value is this rank's shard, in fp32 or fp64.

    The data-parallel ranks that hold a parameter divide the keys: each value is read by one rank, which broadcasts the
    value to the other ranks. A rank that cannot read a value still takes part in all broadcasts, so that no other rank
    hangs, and raises its CheckpointError or OSError at the end. If any rank raises, the values on all ranks are
    invalid.
    If all ranks are on the CPUs of one machine, each rank reads all values itself: repeated reads come from the
    kernel's page cache, which is faster than a broadcast.
    device: device of the values, the one on which the model is trained.
    """
    if device.type == "cpu" and ranks_here(dist.get_world_size()) == dist.get_world_size():
        for kind, name, parameter in keys:
            yield kind, parameter, reader.local(_key(reader, kind, name), parameter).to(_dtype(parameter))
        return
    by_axis: dict[mpu.Axis, list[Key]] = {mpu.get_mesh().data: []}
    for key in keys:
        by_axis.setdefault(mpu.replicas_of(key[2]), []).append(key)
    problem: ValueError | OSError | None = None
    for axis, own in by_axis.items():
        problem = yield from _read_in_turn(reader, own, device, axis, problem)
    if problem is not None:
        raise problem


def _read_in_turn(
    reader: CheckpointReader,
    keys: Sequence[Key],
    device: torch.device,
    axis: mpu.Axis,
    problem: ValueError | OSError | None,
) -> Generator[tuple[str, nn.Parameter, Tensor], None, ValueError | OSError | None]:
    """Read the keys as `_read_once` does, all of parameters that the ranks of `axis` hold.

    problem: error of an earlier call, after which this rank reads no more. Returns it, or the error of this call.
    """
    for at in range(0, len(keys), axis.size):
        mine: Tensor | None = None
        if at + axis.rank < len(keys) and problem is None:
            kind, name, parameter = keys[at + axis.rank]
            try:
                mine = reader.local(_key(reader, kind, name), parameter).to(device, _dtype(parameter)).contiguous()
            except (ValueError, OSError) as error:
                problem = error
        for turn, (kind, _, parameter) in enumerate(keys[at : at + axis.size]):
            value = mine if turn == axis.rank else None
            if value is None:
                value = torch.zeros(mpu.spec_of(parameter).local_shape, dtype=_dtype(parameter), device=device)
            if axis.group is not None:
                dist.broadcast(value, axis.ranks[turn], group=axis.group)
            yield kind, parameter, value
    return problem


def _key(reader: CheckpointReader, kind: str, name: str) -> str:
    key = f"{kind}.{name}"
    return key if kind != AVERAGE or key in reader.tensors else f"{WEIGHT}.{name}"


def _dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype in which the optimizer keeps a parameter's values and moments."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32
