"""Checkpoints that know no layout: every tensor is stored whole or in stretches of rows under its global name.

    checkpoints/latest                 name of the newest whole checkpoint
    checkpoints/iter_0000200/
        checkpoint.json                training state, settings, where each tensor lies, a SHA-256 per file
        pipe00-model00.safetensors     what that stage and model-parallel rank hold

No pickle anywhere. A checkpoint is written into a folder with a temporary name, which is
renamed when all of it is on disk; `latest` moves last. So whatever happens, `latest` names a
whole checkpoint. Vocabulary padding, copies and tied weights are stored once or not at all.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from . import mpu, zero_state
from .arguments import HOME, with_values
from .config import Config
from .model.init import full_shape, local_shape, own_rows
from .model.layers import global_parameters
from .runtime import RunError, together

FORMAT = 1
WEIGHT = "weight"


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or of another model; the message says which and where."""


@dataclass
class TrainState:
    """What changes while a run goes on."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    sample_hash: int = 0  # of the samples consumed, in their order; see data/position.py


# What must agree between a checkpoint and the run that loads it, as dotted names of settings.
SHAPES = (
    "model.num_layers", "model.hidden_size", "model.num_attention_heads", "model.kv_hidden_size",
    "model.ff_hidden_size", "model.hidden_bias", "model.vocab_size",
)  # fmt: skip


# ------------------------------------------------------------------------------------- saving


def save_checkpoint(folder: str, engine: Any, state: TrainState, config: Config, fingerprint: str) -> Path:
    """Write a checkpoint of `state.iteration`; all ranks must call this. Returns its folder.

    Raises RunError on every rank if any rank cannot write; earlier checkpoints stay as they are.
    """
    final = Path(folder) / f"iter_{state.iteration:07d}"
    temporary = final.with_name(final.name + ".tmp")
    first = not dist.is_initialized() or dist.get_rank() == 0

    def prepare() -> None:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

    together(prepare)
    tensors, places = _own_tensors(engine)  # a collective under ZeRO, so outside of what may fail
    try:
        report = together(lambda: _write_tensors(temporary, tensors, places))
        reports = _gather(report)
        together(lambda: _publish(final, temporary, engine, state, config, fingerprint, reports) if first else None)
    except RunError as error:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(f"could not save a checkpoint in {folder}: {error}") from None
    return final


def _own_tensors(engine: Any) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """What this rank writes: tensors by key, and where each stands in the whole."""
    mesh = mpu.get_mesh()
    names = zero_state.moment_names(engine)
    tensors, places = {}, {}
    for name, parameter in global_parameters(engine.module):
        values = {WEIGHT: zero_state.get_weight(parameter)}
        values |= {moment: zero_state.get_moment(engine, parameter, moment) for moment in names}
        if mesh.data.rank != 0 or not mpu.counts_here(parameter, mesh.model.rank):
            continue
        dim, begin, end = own_rows(parameter)
        for kind, value in values.items():
            key = f"{kind}.{name}"
            tensors[key] = value.view(local_shape(parameter)).narrow(dim, 0, end - begin).contiguous().cpu()
            places[key] = {"dim": dim, "begin": begin, "end": end, "shape": list(full_shape(parameter))}
    return tensors, places


def _write_tensors(
    folder: Path, tensors: dict[str, Tensor], places: dict[str, dict[str, Any]]
) -> dict[str, Any] | None:
    if not tensors:
        return None
    mesh = mpu.get_mesh()
    path = folder / f"pipe{mesh.pipe.rank:02d}-model{mesh.model.rank:02d}.safetensors"
    try:
        save_file(tensors, str(path))
    except SafetensorError as error:
        raise OSError(str(error)) from None
    _sync(path)
    return {"file": path.name, "sha256": sha256_of(path), "bytes": path.stat().st_size, "tensors": places}


def _publish(
    final: Path,
    temporary: Path,
    engine: Any,
    state: TrainState,
    config: Config,
    fingerprint: str,
    reports: list[dict[str, Any] | None],
) -> None:
    written = [report for report in reports if report]
    content = {
        "format": FORMAT,
        "state": asdict(state),
        "optimizer": {
            "step": zero_state.get_step(engine),
            "moments": zero_state.moment_names(engine),
            "loss_scaler": zero_state.get_loss_scaler(engine),
        },
        "tokenizer": fingerprint,
        "positions": config.positions,
        "config": config.to_dict(),
        "files": {r["file"]: {"sha256": r["sha256"], "bytes": r["bytes"]} for r in written},
        "tensors": _merge(written),
    }
    index = temporary / "checkpoint.json"
    index.write_text(json.dumps(content, indent=1), encoding="utf-8")
    _sync(index)
    old = final.with_name(final.name + ".old.tmp")
    if final.exists():  # the same iteration again: swap, so that there is a whole one at any moment but one
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    temporary.rename(final)
    _sync(final.parent)
    point_latest_to(final)
    shutil.rmtree(old, ignore_errors=True)


def point_latest_to(checkpoint: Path) -> None:
    """Let `latest` beside it name a checkpoint that is whole."""
    folder = checkpoint.parent
    temporary = folder / "latest.tmp"
    temporary.write_text(checkpoint.name + "\n", encoding="utf-8")
    _sync(temporary)
    os.replace(temporary, folder / "latest")
    _sync(folder)


def _merge(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """key -> its whole shape and the pieces that make it up."""
    merged: dict[str, Any] = {}
    for report in reports:
        for key, place in report["tensors"].items():
            entry = merged.setdefault(key, {"shape": place["shape"], "dim": place["dim"], "pieces": []})
            entry["pieces"].append({"file": report["file"], "begin": place["begin"], "end": place["end"]})
    return merged


def _gather(report: Any) -> list[Any]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [report]
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    return reports


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


# ------------------------------------------------------------------------------------ loading


def latest_checkpoint(folder: str) -> Path | None:
    """The checkpoint that `latest` names, None where there is none yet. Raises CheckpointError if it is gone."""
    pointer = Path(folder) / "latest"
    if not pointer.exists():
        return None
    path = Path(folder) / pointer.read_text(encoding="utf-8").strip()
    if not (path / "checkpoint.json").is_file():
        raise CheckpointError(f"{pointer} names {path.name}, but there is no whole checkpoint of that name beside it")
    return path


def find_checkpoint(load: str) -> Path:
    """The newest checkpoint of a run directory, of a folder of checkpoints, or `load` itself."""
    for folder in (Path(load) / "checkpoints", Path(load)):
        if (folder / "checkpoint.json").is_file():
            return folder
        path = latest_checkpoint(str(folder))
        if path:
            return path
    raise CheckpointError(f"{load} holds no checkpoint")


class CheckpointReader:
    """Reads any stretch of any tensor of a checkpoint, whatever the layout that wrote it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
            self.state, self.optimizer, self.files = content["state"], content["optimizer"], content["files"]
            self.tensors, self.config, self.positions = content["tensors"], content["config"], content["positions"]
            self.tokenizer, version = content["tokenizer"], content["format"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}/checkpoint.json cannot be read: {type(error).__name__} {error}") from None
        if version != FORMAT:
            raise CheckpointError(f"{path} has format {version}; this version reads format {FORMAT}")
        self._open: dict[str, Any] = {}

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        """Check the files against their checksums, every `ranks`-th of them. Raises CheckpointError naming the file."""
        for name in sorted(self.files)[rank::ranks]:
            path, known = self.path / name, self.files[name]
            if not path.is_file():
                raise CheckpointError(f"{path} is missing")
            if path.stat().st_size != known["bytes"]:
                raise CheckpointError(f"{path} has {path.stat().st_size} bytes, {known['bytes']} were written")
            if sha256_of(path) != known["sha256"]:
                raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one it was saved with")

    def read(self, key: str, dim: int, begin: int, end: int) -> Tensor:
        """Rows `begin` to `end` along `dim` of tensor `key`, put together from the pieces that hold them."""
        if key not in self.tensors:
            raise CheckpointError(f"{self.path} holds no tensor {key!r}")
        entry = self.tensors[key]
        if dim != entry["dim"]:  # stored along another dimension: the whole of it is needed
            return self.read(key, entry["dim"], 0, entry["shape"][entry["dim"]]).narrow(dim, begin, end - begin)
        found = []
        for piece in sorted(entry["pieces"], key=lambda p: int(p["begin"])):
            low, high = max(begin, piece["begin"]), min(end, piece["end"])
            if low < high:
                part = self._file(piece["file"]).get_slice(key)
                at = (slice(None),) * dim + (slice(low - piece["begin"], high - piece["begin"]),)
                found.append(part[at])
        if sum(part.shape[dim] for part in found) != end - begin:
            raise CheckpointError(f"{self.path}: rows {begin} to {end} of {key!r} are not all there")
        return torch.cat(found, dim) if len(found) > 1 else found[0]

    def local(self, key: str, parameter: nn.Parameter) -> Tensor:
        """This rank's part of `key`, laid out as `parameter`, padding as zeros, fp32 or fp64."""
        dim, begin, end = own_rows(parameter)
        shape = full_shape(parameter)
        if key in self.tensors and tuple(self.tensors[key]["shape"]) != shape:
            raise CheckpointError(
                f"{self.path}: {key!r} has shape {self.tensors[key]['shape']}, the model needs {list(shape)}"
            )
        rows = self.read(key, dim, begin, end)
        value = torch.zeros(local_shape(parameter), dtype=rows.dtype)
        value.narrow(dim, 0, end - begin).copy_(rows)
        return value

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(str(self.path / name), framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self.path / name} cannot be read: {error}") from None
        return self._open[name]

    def check_same_model(self, config: Config, fingerprint: str | None) -> None:
        """Raise CheckpointError with both values if this checkpoint is of another model or tokenizer."""
        now = config.to_dict()
        differing = []
        for dotted in SHAPES:
            section, name = dotted.split(".")
            saved = self.config.get(section, {}).get(name)
            if saved != now[section][name]:
                differing.append(f"{name} is {saved} there and {now[section][name]} here")
        if self.positions != config.positions:
            differing.append(f"max_position_embeddings is {self.positions} there and {config.positions} here")
        if differing:
            raise CheckpointError(f"{self.path} is of another model: {'; '.join(differing)}")
        if fingerprint is not None and self.tokenizer and fingerprint != self.tokenizer:
            raise CheckpointError(
                f"{self.path} was trained with another tokenizer (SHA-256 {self.tokenizer[:12]}, --vocab-file has "
                f"{fingerprint[:12]})"
            )


def plain_config(reader: CheckpointReader, model_parallel_size: int = 1) -> Config:
    """The settings that a checkpoint was saved with, without its layout."""
    saved = {name: value for section in reader.config.values() for name, value in section.items() if name in HOME}
    plain = {
        "pipe_parallel_size": 0,
        "pipeline_schedule": "1f1b",
        "virtual_pipeline_size": 1,
        "pipeline_extra_warmup": 0,
    }
    return with_values(Config(), {**saved, **plain, "model_parallel_size": model_parallel_size})


def each_weight(reader: CheckpointReader, model: Any) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """(global name, parameter, its value in the checkpoint) of every parameter that this process holds."""
    for name, parameter in global_parameters(model):
        yield name, parameter, reader.local(f"{WEIGHT}.{name}", parameter)


@torch.no_grad()
def load_weights(path: Path, model: Any) -> CheckpointReader:
    """Load the weights alone, into a model that no engine holds yet (to generate, evaluate or export)."""
    reader = CheckpointReader(path)
    reader.verify()
    for _, parameter, value in each_weight(reader, model):
        parameter.copy_(value)
    return reader


def load_checkpoint(folder: str, engine: Any, config: Config, fingerprint: str) -> TrainState | None:
    """Continue from the newest checkpoint of `folder`: weights, moments, loss scale, position.

    All ranks must call this; the layout may be another than the one that saved. None where
    there is no checkpoint. Raises RunError alike on every rank.
    """
    path = together(lambda: latest_checkpoint(folder))
    if path is None:
        return None
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def check() -> CheckpointReader:
        reader = CheckpointReader(path)
        reader.verify(rank, ranks)
        reader.check_same_model(config, fingerprint)
        return reader

    reader = together(check)
    together(_loader(reader, engine, config))
    return TrainState(**reader.state)


def _loader(reader: CheckpointReader, engine: Any, config: Config) -> Callable[[], None]:
    def load() -> None:
        moments = reader.optimizer["moments"]
        if moments and reader.config["optim"]["optimizer"] != config.optim.optimizer:
            raise CheckpointError(
                f"{reader.path} has the state of --optimizer {reader.config['optim']['optimizer']}, "
                f"this run uses {config.optim.optimizer}"
            )
        if moments:
            zero_state.make_moments(engine, moments, reader.optimizer["step"])
        for name, parameter, value in each_weight(reader, engine.module):
            zero_state.set_weight(parameter, value.to(engine.device))
            for moment in moments:
                zero_state.set_moment(
                    engine, parameter, moment, reader.local(f"{moment}.{name}", parameter).to(engine.device)
                )
        zero_state.set_loss_scaler(engine, reader.optimizer["loss_scaler"])

    return load
