"""Models with CPM-Pretrain's signatures: built from `get_args()` and called with attention masks.

They subclass the models of `megatron.model.gpt2` and `t5`, and turn each mask into the equivalent document ids.
"""

from collections.abc import Container
from typing import Any

from torch import Tensor

from megatron.config import Config
from megatron.model import gpt2, t5
from megatron.training.global_vars import get_args

from .masks import T5Masks, check_positions, decoder_documents, t5_documents


def config_or_default(config: Config | None, num_tokentypes: int) -> Config:
    """Return `config`, or the settings of the run if `config` is None.

    Raises ValueError if num_tokentypes is not 0, as no model has token types.
    """
    if num_tokentypes:
        raise ValueError(f"num_tokentypes is {num_tokentypes}: no model has token types; leave it at 0")
    return get_args().config if config is None else config


def decoder_inputs(inputs: Any) -> Any:
    """Replace the mask of (tokens, positions, attention mask) by document ids; return other inputs unchanged."""
    is_triple = isinstance(inputs, (tuple, list)) and len(inputs) == 3
    # A mask has 4 dimensions. Document ids, which this project's own batches have in its place, have 2, or 1 if empty.
    if is_triple and inputs[2].dim() == 4:
        tokens, positions, mask = inputs
        return tokens, positions, decoder_documents(mask, tokens)
    return inputs


def t5_inputs(inputs: Any, reset_positions: bool) -> Any:
    """Replace CPM-Pretrain's seven inputs of a T5 by tokens and document ids; return other inputs unchanged.

    The seven inputs are encoder tokens, positions and mask, decoder tokens, positions and mask, and the cross mask.
    Raises ValueError if document ids cannot express the masks, or if positions do not count from 0.
    """
    if not isinstance(inputs, (tuple, list)) or len(inputs) != 7:
        return inputs
    encoder, encoder_positions, encoder_mask, decoder, decoder_positions, decoder_mask, cross_mask = inputs
    encoder_ids, decoder_ids = t5_documents(T5Masks(encoder_mask, decoder_mask, cross_mask))
    check_positions("encoder", encoder_positions, encoder_ids, reset_positions)
    check_positions("decoder", decoder_positions, decoder_ids, reset_positions)
    return encoder, decoder, encoder_ids, decoder_ids


class GPT2Model(gpt2.GPT2Model):
    """GPT-2 without a pipeline; see `megatron.model.gpt2.GPT2Model`.

    config: by default, the settings of the run (`get_args().config`).
    """

    def __init__(
        self,
        config: Config | None = None,
        parallel_output: bool = True,
        own: Container[int] | None = None,
        *,
        num_tokentypes: int = 0,
    ) -> None:
        super().__init__(config_or_default(config, num_tokentypes), parallel_output, own)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        **others: Tensor,
    ) -> Tensor:
        """Return the logits, or the loss if `labels` are given, as `megatron.model.gpt2.GPT2Model` does.

        document_ids: document ids [b, s], or an attention mask, bool [1 or b, 1, s, s], True where attention is
        forbidden.
        """
        if document_ids is not None and document_ids.dim() == 4:
            document_ids = decoder_documents(document_ids, tokens)
        # CPM-Pretrain's scripts flatten the token losses by view(-1), which requires contiguous memory.
        return super().forward(tokens, position_ids, document_ids, labels, loss_mask, **others).contiguous()


class T5Model(t5.T5Model):
    """T5 without a pipeline; see `megatron.model.t5.T5Model`.

    config: by default, the settings of the run (`get_args().config`).
    """

    def __init__(
        self,
        config: Config | None = None,
        parallel_output: bool = True,
        own: Container[int] | None = None,
        is_text: Any = None,
        *,
        num_tokentypes: int = 0,
    ) -> None:
        config = config_or_default(config, num_tokentypes)
        super().__init__(config, parallel_output, own, is_text)
        self._reset_positions = config.data.reset_position_ids

    def forward(
        self, *inputs: Any, labels: Tensor | None = None, loss_mask: Tensor | None = None, **others: Any
    ) -> Tensor:
        """Return the logits, or the loss if `labels` are given, as `megatron.model.t5.T5Model` does.

        inputs: the inputs of `megatron.model.t5.T5Model`, or CPM-Pretrain's seven (see `t5_inputs`).
        """
        converted: Any = t5_inputs(inputs, self._reset_positions)
        others |= {"labels": labels, "loss_mask": loss_mask}
        # CPM-Pretrain's scripts flatten the token losses by view(-1), which requires contiguous memory.
        return super().forward(*converted, **others).contiguous()
