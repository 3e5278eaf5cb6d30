"""The pipeline version of a T5."""

import torch

from megatron.config import Config

from .gpt2_layers import vocab_size_of
from .loss import IsText, TokenLoss
from .masks import no_documents
from .pipe import TIED_WEIGHTS, LayerStackPipe
from .t5 import t5_layers
from .work import sample_lengths


class T5ModelPipe(LayerStackPipe):
    """T5 over pipeline stages.

    Inputs: (encoder tokens [b, k], decoder tokens int32 [b, q], encoder and decoder document ids or empty).
    Encoder stages exchange the encoder's hidden states, the decoder's tokens and the document ids (int16).
    Decoder stages exchange the hidden states of encoder and decoder, and the document ids.
    is_text: maps labels to a mask of those that are text, see TokenLoss.
    """

    def __init__(self, config: Config, is_text: IsText | None = None) -> None:
        vocab_size = vocab_size_of(config)
        b = config.train.batch_size
        # tds measures the layers on this example with --partition-method measured. Values do not matter. Decoder tokens
        # are int32, because they cross all stages of the encoder.
        encoder_length, decoder_length = sample_lengths(config)
        if config.model.position_embedding == "learned":
            decoder_length = min(decoder_length, config.positions)
        # Sequence parallelism needs lengths that are multiples of the number of ranks.
        ranks = config.parallel.model_parallel_size
        encoder = torch.zeros(b, max(encoder_length // ranks, 1) * ranks).long()
        decoder = torch.zeros(b, max(decoder_length // ranks, 1) * ranks).int()
        ids = no_documents(encoder.device)
        example = (encoder, decoder, ids, ids)
        loss = TokenLoss.from_config(config, vocab_size, is_text)
        tied = {**TIED_WEIGHTS, "encoder_positions": "weight", "decoder_positions": "weight"}
        super().__init__(t5_layers(config, vocab_size), config, tied, loss, example)
