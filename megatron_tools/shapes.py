"""Weight shapes that a model's settings imply, and the check that a checkpoint's weights have these shapes."""

from pathlib import Path
from typing import Any

import torch

from megatron import mpu
from megatron.checkpointing.files import INDEX, WEIGHT, CheckpointError
from megatron.checkpointing.reader import CheckpointReader, plain_config
from megatron.config import Config
from megatron.config.command_line import with_values
from megatron.config.data_stages import parse_stages
from megatron.config.messages import shorten_list
from megatron.model import GPT2Model, T5Model
from megatron.model.layers import global_parameters

UNSHARDED = {"model_parallel_size": 1, "pipe_parallel_size": 0}


def whole_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return global name -> unsharded shape for every parameter of the model. No weights are allocated."""
    model_class: Any = T5Model if config.is_t5 else GPT2Model
    # On the device `meta`, tensors have shapes but no content.
    with torch.device("meta"), mpu.defer_init():
        model = model_class(with_values(config, UNSHARDED))
    return {name: mpu.spec_of(parameter).full_shape for name, parameter in global_parameters(model)}


def config_of_checkpoint(path: Path, model_parallel_size: int = 1, pipe_parallel_size: int = 0) -> Config:
    """Return the settings of a GPT-2, Llama or T5 checkpoint, with these parallel sizes instead of the saved ones.

    --data-path replaces the data stages by the one from which the last consumed sample came.
    Raises CheckpointError if the stored weights do not match the settings.
    """
    reader = CheckpointReader(path)
    config = plain_config(reader, model_parallel_size, pipe_parallel_size)
    check_model(reader, config)
    stage_words = config.data.data_stages
    if stage_words:
        values: dict[str, Any] = {"data_stages": None, "valid_data_path": None, "test_data_path": None}
        # The last stage that has begun remains. The first stage begins at 0, so it counts even before any sample.
        for stage in parse_stages(stage_words):
            if stage.begin == 0 or stage.begin < reader.state[f"consumed_{stage.unit}"]:
                values["data_path"] = stage.words
        config = with_values(config, values)
    return config


def check_model(reader: CheckpointReader, config: Config) -> None:
    """Raise CheckpointError unless the stored weights match the model that the settings describe."""
    where = reader.path / INDEX
    stored = {}
    for key, entry in reader.tensors.items():
        if key.startswith(f"{WEIGHT}."):
            stored[key.removeprefix(f"{WEIGHT}.")] = tuple(entry["shape"])
    shapes = whole_shapes(config)
    for name, shape in shapes.items():
        if name not in stored:
            raise CheckpointError(
                f"{reader.path} holds no weight {name}: it belongs to a custom model (this tool supports GPT-2, "
                f"Llama and T5), or {INDEX} describes another model"
            )
        if stored[name] != shape:
            raise CheckpointError(
                f"{where}: the weight {name} has shape {list(stored[name])}, but the saved settings imply {list(shape)}"
            )
    extra = sorted(stored.keys() - shapes.keys())
    if extra:
        raise CheckpointError(
            f"{where} lists weights that do not belong to the model in the saved settings: {shorten_list(extra, 3)}"
        )
    if config.model.position_embedding == "learned" and config.positions != reader.positions:
        raise CheckpointError(
            f"{where}: the number of positions is {reader.positions}, but the saved settings imply {config.positions}"
        )
