"""GPT-2 and models like it without a pipeline. Their layers are in gpt2_layers.py.

Shapes: s sequence, b batch, v vocabulary, t model-parallel ranks.
"""

from collections.abc import Callable, Container

import torch
from torch import Tensor

from megatron import mpu
from megatron.config import Config

from .gpt2_layers import gpt2_layers, vocab_size_of
from .layer_stack import LayerStack
from .layers import Layer
from .loss import IsText, TokenLoss, split_router_loss
from .masks import no_documents


class LanguageModel(LayerStack):
    """Language model without a pipeline: this rank's shard of every layer, and the loss.

    list_layers: function (settings, vocabulary size) -> layers, which a subclass sets.
    parallel_output: leave logits sharded over the model-parallel ranks, [b, s, v/t] with padding, as the loss
    expects them. Otherwise gather them and remove the padding, [b, s, v].
    own: indices of the layers to build, None for all (see LayerStack). is_text: maps labels to a mask of those that
    are text (see TokenLoss).
    """

    list_layers: Callable[[Config, int], list[Layer]]

    def __init__(
        self,
        config: Config,
        parallel_output: bool = True,
        own: Container[int] | None = None,
        is_text: IsText | None = None,
    ) -> None:
        vocab_size = vocab_size_of(config)
        super().__init__(self.list_layers(config, vocab_size), config.train.seed, config.recomputed_layers, own)
        self.vocab_size = vocab_size
        self.parallel_output = parallel_output
        self.axis = mpu.get_mesh().model
        self.context = mpu.context_axis()
        self.loss_fn: TokenLoss = TokenLoss.from_config(config, vocab_size, is_text)

    def compute(
        self, inputs: tuple[Tensor, ...], labels: Tensor | None, loss_mask: Tensor | None, extra: dict[str, Tensor]
    ) -> Tensor:
        """Run the layers and return logits, [b, s, v/t] or [b, s, v].

        With labels [b, s], return the loss of every token, [b, s], or with a loss_mask [b, s] as well, the masked sum.
        extra: see `Targets` in loss.py.
        """
        # Logits [s, b, v/t], perhaps deferred (--logits-chunk-size); with experts, in training (logits, routers' loss).
        outputs = self.run(inputs)
        logits, _ = split_router_loss(outputs)  # the routers' loss only matters as a part of a training loss
        if labels is not None:
            if loss_mask is None:
                from .extra_losses import loss_per_token

                return loss_per_token(self.loss_fn, logits, labels)
            return self.loss_fn(outputs, (labels, loss_mask, extra))
        logits = mpu.whole_logits(logits).transpose(0, 1)  # [b, s, v/t]
        if self.parallel_output:
            return logits
        return mpu.gather_from_model_parallel_region(logits, self.axis)[..., : self.vocab_size]


class GPT2Model(LanguageModel):
    """GPT-2 without a pipeline. parallel_output, own: see LanguageModel."""

    list_layers = staticmethod(gpt2_layers)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        **extra: Tensor,
    ) -> Tensor:
        """Return the logits of tokens [b, s], or the loss if labels are given.

        With labels [b, s] the result is the loss of every token, [b, s] in fp32; with a loss_mask [b, s] as well, the
        sum of the losses weighted by it. A loss can be differentiated only once, because its backward pass overwrites
        the logits.
        position_ids: [b, s], by default counted from 0. A rotary model computes its positions itself and uses the
        position ids only to find where they restart at 0, see `DecoderStart`.
        document_ids: [b, s], the number of the document to which each token's attention is restricted, 0 for padding;
        by default one document without padding.
        extra: the further tensors `corpora` and `text` of `Targets`.
        On each of c context-parallel ranks, tokens, labels and loss mask are the rank's own, [b, s/c]; position and
        document ids are those of the whole sequence.
        """
        if position_ids is None:
            b, local_length = tokens.shape
            position_ids = torch.arange(local_length * self.context.size, device=tokens.device).expand(b, -1)
        if document_ids is None:
            document_ids = no_documents(tokens.device)
        return self.compute((tokens, position_ids, document_ids), labels, loss_mask, extra)
