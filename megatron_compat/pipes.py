"""Pipeline models with CPM-Pretrain's signatures. Importing this module imports DeepSpeed, which takes seconds."""

from collections.abc import Callable
from typing import Any

from megatron import mpu
from megatron.config import Config
from megatron.model import pipe, t5_pipe

from .models import config_or_default, decoder_inputs, t5_inputs

BatchFunction = Callable[[Any], tuple[Any, Any]]


def _check_topology(topology: Any) -> None:
    if topology is not None and topology != mpu.get_topology():
        raise ValueError(f"topology {topology} is not the topology of this run; pass mpu.get_topology()")


class _TakesMasks:
    """Mixin for pipeline models: turns attention masks that `_megatron_batch_fn` returns into document ids."""

    _script_batch_fn: BatchFunction | None = None

    def _without_masks(self, inputs: Any) -> Any:
        raise NotImplementedError

    @property
    def _megatron_batch_fn(self) -> BatchFunction:
        """Function that calls the script's batch function and replaces the masks among the inputs of its batch."""
        script_batch_fn = self._script_batch_fn
        if script_batch_fn is None:  # the training loop asks by `hasattr` whether the script has set a function
            raise AttributeError("_megatron_batch_fn of the model is not set")

        def without_masks(data: Any) -> Any:
            # A batch is (inputs, labels). The engine refuses anything else.
            batch = script_batch_fn(data)
            if not isinstance(batch, (tuple, list)):
                return batch
            return self._without_masks(batch[0]), *batch[1:]

        return without_masks

    @_megatron_batch_fn.setter
    def _megatron_batch_fn(self, function: BatchFunction) -> None:
        self._script_batch_fn = function


class GPT2ModelPipe(_TakesMasks, pipe.GPT2ModelPipe):
    """GPT-2 over pipeline stages; see `megatron.model.pipe.GPT2ModelPipe`.

    config: by default, the settings of the run (`get_args().config`).
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        num_tokentypes: int = 0,
        parallel_output: bool = True,
        add_pooler: bool = False,
        topology: Any = None,
    ) -> None:
        _check_topology(topology)
        if add_pooler or not parallel_output:
            raise ValueError(
                "GPT2ModelPipe has no pooler and leaves logits sharded: pass add_pooler=False and parallel_output=True"
            )
        super().__init__(config_or_default(config, num_tokentypes))

    _without_masks = staticmethod(decoder_inputs)


class T5ModelPipe(_TakesMasks, t5_pipe.T5ModelPipe):
    """T5 over pipeline stages; see `megatron.model.t5_pipe.T5ModelPipe`.

    config: by default, the settings of the run (`get_args().config`).
    """

    def __init__(
        self,
        config: Config | None = None,
        is_text: Any = None,
        *,
        num_tokentypes: int = 0,
        parallel_output: bool = True,
        topology: Any = None,
    ) -> None:
        _check_topology(topology)
        if not parallel_output:
            raise ValueError("T5ModelPipe leaves logits sharded: pass parallel_output=True")
        config = config_or_default(config, num_tokentypes)
        self._reset_positions = config.data.reset_position_ids
        super().__init__(config, is_text)

    def _without_masks(self, inputs: Any) -> Any:
        converted = t5_inputs(inputs, self._reset_positions)
        # Neither CPM-Pretrain's seven inputs nor the four of this project: `t5_inputs` has left them unchanged.
        if len(converted) != 4:
            return converted
        encoder, decoder, encoder_ids, decoder_ids = converted
        # int32, as in the example with which the pipeline is built: decoder tokens cross all stages of the encoder.
        return encoder, decoder.int(), encoder_ids, decoder_ids
