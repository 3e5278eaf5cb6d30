"""Reading of any slice of any tensor in a checkpoint, independent of the layout that wrote it."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.config import Config, with_family
from megatron.config.command_line import HOME, RENAMED, with_values
from megatron.config.fields import ConfigError
from megatron.config.messages import describe_error
from megatron.json_text import JsonError, parse_json
from megatron.model.layers import global_buffers, global_parameters
from megatron.storage import RemotePath
from tds.average import AVERAGE

from . import schema
from .bounds import refuse_absurd_sizes
from .checksums import checksum_algorithm
from .files import BUFFER, FORMAT, INDEX, WEIGHT, CheckpointError
from .stream import DTYPE_CODES, DTYPES, FLOAT_CODES, as_stored, open_tensors
from .sums import check_file, read_sums, unreadable_error


class CheckpointReader:
    """Reader of a checkpoint: any slice of any tensor, whatever parallel layout wrote the checkpoint.

    average: read the average of --ema-decay in place of the weights. Raises CheckpointError if there is none.
    """

    def __init__(self, path: Path, average: bool = False) -> None:
        self.path = path
        self.sums = read_sums(path)
        self._checksum = checksum_algorithm(path)
        check_file(path / INDEX, self._checksum, self.sums[INDEX])
        content = _read_index(path, self.sums)
        self.state = content["state"]
        self.optimizer = content["optimizer"]
        self.rng_seed = content["rng_seed"]
        self.tensors = content["tensors"]
        self.config = content["config"]
        self.positions = content["positions"]
        self.tokenizer = content["tokenizer"]
        self._open_files: dict[str, Any] = {}
        self._stored_keys: dict[str, str] = {}  # key -> key under which the files hold this tensor, if another one
        if not average:
            return
        for key in self.tensors:  # the average of weight.a.bias is stored under AVERAGE.a.bias
            average_key = f"{AVERAGE}.{key.removeprefix(f'{WEIGHT}.')}"
            if average_key in self.tensors:
                self._stored_keys[key] = average_key
        if not self._stored_keys:
            raise CheckpointError(f"{self.path} holds no average of the weights (--ema-decay); leave out --ema")
        # The key of a weight then leads to the shape and the pieces of its average.
        self.tensors |= {key: self.tensors[stored] for key, stored in self._stored_keys.items()}

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        """Check the checksums of this rank's share of the files: every `ranks`-th file, beginning with number `rank`.

        Together, the ranks check all files. Raises CheckpointError, which names the file.
        In object storage, of files with tensors only the header and the size are checked, so that no rank reads
        tensors that it does not need.
        """
        used = set[str]()
        for entry in self.tensors.values():
            used.update(piece["file"] for piece in entry["pieces"])
        missing = sorted(used - self.sums.keys())
        if missing:
            raise unreadable_error(self.path / self._checksum.sums_name, f"is damaged: it does not list {missing[0]}")
        for name in sorted(self.sums)[rank::ranks]:
            path = self.path / name
            if isinstance(path, RemotePath) and name.endswith(".safetensors"):
                open_tensors(path)
            else:
                check_file(path, self._checksum, self.sums[name])

    def read(self, key: str, dim: int, begin: int, end: int) -> Tensor:
        """Return rows `begin` to `end` along `dim` of tensor `key`, concatenated from the stored pieces."""
        if key not in self.tensors:
            raise CheckpointError(f"{self.path} holds no tensor {key!r}")
        entry = self.tensors[key]
        if dim != entry["dim"]:  # each piece has a part of every row, so read all pieces
            return self.read_whole(key).narrow(dim, begin, end - begin)
        if begin == end:  # this rank holds only padding
            shape = list(entry["shape"])
            shape[dim] = 0
            return torch.empty(shape, dtype=self.dtype(key))
        parts = []
        for piece in sorted(entry["pieces"], key=lambda piece: int(piece["begin"])):
            piece_begin = piece["begin"]
            first = max(begin, piece_begin)
            last = min(end, piece["end"])
            # Of rows 6 to 10, a piece with rows 4 to 8 has rows 6 to 8, which are its rows 2 to 4.
            if first < last:
                rows = slice(first - piece_begin, last - piece_begin)
                # For dimension 2, the index is [:, :, rows].
                index = (slice(None),) * dim + (rows,)
                parts.append(self._open_piece(key, piece)[index])
        if sum(part.shape[dim] for part in parts) != end - begin:
            raise CheckpointError(f"{self.path}: rows {begin} to {end} of {key!r} are incomplete")
        # torch.cat would copy a single part.
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0]

    def read_whole(self, key: str) -> Tensor:
        """Return the whole tensor `key`."""
        entry = self.tensors[key]
        return self.read(key, entry["dim"], 0, entry["shape"][entry["dim"]])

    def _open_piece(self, key: str, piece: dict[str, Any]) -> Any:
        """Return one piece of a tensor as a safetensors slice.

        Raises CheckpointError if the file's header contradicts checkpoint.json.
        """
        name = piece["file"]
        if name not in self._open_files:
            self._open_files[name] = open_tensors(self.path / name)
        file = self._open_files[name]
        entry = self.tensors[key]
        stored_key = self._stored_keys.get(key, key)  # the key of the average, if it is read in place of the weight
        shape = list(entry["shape"])
        shape[entry["dim"]] = piece["end"] - piece["begin"]
        if stored_key not in file.keys():  # noqa: SIM118  # it is no dict
            raise CheckpointError(f"{self.path / name} does not hold {stored_key!r}")
        part = file.get_slice(stored_key)
        is_moment = not stored_key.startswith((f"{WEIGHT}.", f"{BUFFER}."))
        allowed_codes = FLOAT_CODES if is_moment else DTYPE_CODES
        if part.get_shape() != shape or part.get_dtype() not in allowed_codes.values():
            raise CheckpointError(
                f"{self.path / name} holds {stored_key!r} as {part.get_dtype()} {part.get_shape()}, but {INDEX} "
                f"requires a supported dtype and the shape {shape}"
            )
        return part

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of tensor `key`."""
        nonempty_piece = next(piece for piece in self.tensors[key]["pieces"] if piece["begin"] < piece["end"])
        stored_code = self._open_piece(key, nonempty_piece).get_dtype()
        return DTYPES[stored_code]

    def read_shard(self, key: str, parameter: nn.Parameter) -> Tensor:
        """Return this rank's shard of tensor `key` in the shape of `parameter`; padding rows are zeros."""
        spec = mpu.spec_of(parameter)
        if key in self.tensors and tuple(self.tensors[key]["shape"]) != spec.full_shape:
            raise CheckpointError(
                f"{self.path}: {key!r} has shape {self.tensors[key]['shape']}, the model needs {list(spec.full_shape)}"
            )
        return spec.with_padding(self.read(key, *spec.rows))  # spec.rows: dimension, first row, last row + 1

    def check_tokenizer(self, fingerprint: str | None, advice: str = "", *, vocab_file: str | None = None) -> None:
        """Raise CheckpointError if the checkpoint was trained with a tokenizer other than this run's.

        fingerprint: SHA-256 of this run's tokenizer; None skips the check. vocab_file: path of this tokenizer.
        advice: text to append to the error message.
        """
        current_file = vocab_file or "the given one"
        # A checkpoint of imported or averaged weights may name no tokenizer.
        if fingerprint is not None and self.tokenizer and fingerprint != self.tokenizer:
            raise CheckpointError(
                f"{self.path} was trained with another tokenizer (its SHA-256 is {self.tokenizer[:12]}, that of "
                f"{current_file} is {fingerprint[:12]}){advice}"
            )


def _read_index(path: Path, files: Collection[str]) -> dict[str, Any]:
    """Return the content of checkpoint.json. files: names in the list of checksums. Raises CheckpointError."""
    try:
        text = (path / INDEX).read_text(encoding="utf-8")
        content: dict[str, Any] = parse_json(text, "the file", dict, constants=False)
        version = content.get("format")
        if version not in (2, FORMAT):
            raise CheckpointError(f"{path} has format {version}; this version reads formats 2 and {FORMAT}")
        schema.check_index(content, files)
    except (OSError, UnicodeDecodeError, JsonError, schema.SchemaError) as error:
        raise CheckpointError(f"{path / INDEX} cannot be read: {describe_error(error)}") from None
    model = content["config"]["model"]
    if version == 2 and model.get("activation") == "gelu":
        model["activation"] = "gelu-tanh"  # in format 2, "gelu" meant the tanh approximation
    return content


def plain_config(reader: CheckpointReader, model_parallel_size: int = 1, pipe_parallel_size: int = 0) -> Config:
    """Return the settings of a checkpoint with its parallel layout replaced, by default for a single process."""
    saved = {}  # present name of each setting of all sections -> its value
    for section in reader.config.values():
        for name, value in section.items():
            saved[RENAMED.get(name, name)] = value
    index_path = reader.path / INDEX
    refuse_absurd_sizes(reader.config["model"], (entry["shape"] for entry in reader.tensors.values()), index_path)
    layout = {
        "pipe_parallel_size": pipe_parallel_size,
        "pipeline_schedule": "1f1b",
        "virtual_pipeline_size": 1,
        "pipeline_extra_warmup": 0,
        "sequence_parallel": False,  # needs sequence lengths divisible by the number of ranks
        "model_parallel_size": model_parallel_size,
        "context_parallel_size": 1,
        "expert_parallel_size": 1,
        # These kernels need a package and a CUDA device, which a tool may not have.
        "flash_attention_impl": None,
        "kernels": "auto",
    }
    try:
        # HOME has all present settings; those that have been removed are ignored.
        known_settings = {name: value for name, value in with_family(saved).items() if name in HOME}
        config = with_values(Config(), {**known_settings, **layout})
    except ConfigError as error:
        raise CheckpointError(f"{index_path} has invalid settings: {error}") from None
    from .relocation import with_kept_tokenizer

    return with_kept_tokenizer(config, reader.path)


def each_weight(reader: CheckpointReader, model: Any) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Yield (global name, parameter, checkpoint value) for every parameter that this process holds."""
    for name, parameter in global_parameters(model):
        yield name, parameter, reader.read_shard(f"{WEIGHT}.{name}", parameter)


@torch.no_grad()
def load_weights(path: Path, model: Any, average: bool = False) -> CheckpointReader:
    """Load only weights and buffers, into a model that has no engine (to generate, evaluate or export).

    average: load the average of --ema-decay in place of the weights.
    """
    reader = CheckpointReader(path, average)
    reader.verify()
    for _, parameter, value in each_weight(reader, model):
        parameter.copy_(value)
    load_buffers(reader, model)
    return reader


@torch.no_grad()
def load_buffers(reader: CheckpointReader, model: Any) -> tuple[set[str], set[str]]:
    """Load the persistent buffers of `model`; return (names of the loaded buffers, names that the checkpoint lacks).

    Raises CheckpointError if a buffer's shape in the checkpoint differs from its shape in the model.
    """
    loaded = set[str]()
    missing = set[str]()
    for name, buffer in global_buffers(model):
        key = f"{BUFFER}.{name}"
        file_view = as_stored(buffer)
        if not buffer.numel():  # it has no value to load
            continue
        if key not in reader.tensors:
            missing.add(name)
            continue
        shape = reader.tensors[key]["shape"]
        if shape != list(file_view.shape):
            raise CheckpointError(
                f"{reader.path}: the buffer {name} has shape {shape} in the checkpoint, but {list(file_view.shape)} in "
                f"the model; give the buffer its final shape when the model is built"
            )
        file_view.copy_(reader.read_whole(key))  # this changes `buffer`, of which it is a view
        loaded.add(name)
    return loaded, missing
