"""Training task of T5: predict masked spans of a text or the continuation of a text, depending on --objective."""

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from megatron import mpu

from ..config import Config
from ..config.defaults import DEFAULTS
from ..data import cpm_triples
from ..data.corpus_paths import is_triple, prefixes_of
from ..data.t5_dataset import Objective, Specials, build_train_valid_test_datasets
from ..model.loss import Targets, targets_of
from ..model.masks import no_documents
from ..model.t5 import T5Model
from ..model.text_tokens import count_text_tokens
from ..tokenizer import SentinelTokenizer, Tokenizer
from ..training.task import Batch, Datasets
from .gpt2 import LanguageTask, broadcast_batch

KEYS = ["encoder", "decoder", "labels", "encoder_document_ids", "decoder_document_ids", "loss_mask"]


def is_text(tokenizer: SentinelTokenizer, labels: Tensor) -> Tensor:
    """Return a bool tensor [b, q]: True where a label is text, False for sentinels, end tokens and padding."""
    special_ids = torch.tensor([tokenizer.pad, tokenizer.eod, *tokenizer.sentinels], device=labels.device)
    return ~torch.isin(labels, special_ids)


def _drop_needless_ids(data: Batch) -> Batch:
    """Return `data` with the document id 1 for every token and 0 for padding; if there is no padding, with empty ids.

    Padding is rare, and empty ids need not be sent to other ranks. The rank that reads the data looks for padding while
    the tensors are on the CPU, because the same check on an accelerator would synchronise it in every micro-batch.
    """
    encoder = data["encoder_document_ids"].clamp(max=1)
    decoder = data["decoder_document_ids"].clamp(max=1)
    if encoder.all() and decoder.all():
        encoder = encoder[:, :0]
        decoder = decoder[:, :0]
    return {**data, "encoder_document_ids": encoder, "decoder_document_ids": decoder}


def _needs_document_ids(batch: Batch, config: Config) -> bool:
    """Return whether document ids must mark padding that sequence parallelism appends to the tokens.

    Encoder tokens would attend to padding; routers and --log-layers would count it. Padding of the decoder changes no
    other number, because no decoder token attends to later tokens.
    """
    sides = ["encoder"]  # those on which padding would change a number
    if config.model.num_experts is not None or config.log.log_layers:
        sides.append("decoder")
    ranks = mpu.sequence_axis().size
    # A length that is no multiple of the ranks is padded to one, by `mpu.pad_sequence`.
    return any(batch[side].shape[1] % ranks for side in sides)


def _compact_ids(ids: Tensor) -> Tensor:
    """Return document ids [b, s] as int16; empty ids as `no_documents` makes them."""
    return ids.short() if ids.numel() else no_documents(ids.device)


class T5(LanguageTask):
    """Training task of an encoder that reads --enc-seq-length tokens and a decoder that predicts the targets."""

    name = "t5"
    defaults = DEFAULTS["t5"]
    reads_alone = True

    def extended(self, config: Config, tokenizer: Tokenizer) -> SentinelTokenizer:
        """Return the tokenizer with added padding and sentinel tokens."""
        return SentinelTokenizer(tokenizer, config.data.num_sentinels, config.data.span_convention)

    def datasets(self, config: Config, tokenizer: Tokenizer) -> tuple[Datasets, list[str]]:
        """Return ((training, validation, test) datasets, notes to print).

        A sample is a dict with the keys `KEYS`; its tensors are [k] for k encoder tokens or [q] for q decoder tokens.
        """
        data = config.data
        seed = config.train.seed
        t5_tokenizer = cast(SentinelTokenizer, tokenizer)
        encoder_length = data.enc_seq_length or data.seq_length
        decoder_length = data.dec_seq_length  # None: the objective chooses the length
        specials = Specials(t5_tokenizer.eod, t5_tokenizer.pad, t5_tokenizer.sentinels, data.eod_mask_loss)
        text_vocab_size = t5_tokenizer.base.vocab_size
        prefixes = prefixes_of(data.paths)
        if all(map(is_triple, prefixes)):  # corpora whose spans were masked when they were written
            cpm_triples.check_settings(prefixes[0], config)
            return cpm_triples.build_train_valid_test_datasets(
                data.paths, data.split, encoder_length, decoder_length or 0, specials, seed, text_vocab_size
            )
        has_spans = config.objective == "span-corruption"
        if decoder_length is None and has_spans and config.model.position_embedding == "learned":
            # Much noise in short spans would give the decoder more tokens than it has positions.
            decoder_length = config.positions
        objective = Objective(config.objective, data.span_convention, data.noise_density, data.mean_span_length)
        return build_train_valid_test_datasets(
            data.paths,
            data.split,
            objective,
            encoder_length,
            decoder_length,
            specials,
            seed,
            text_vocab_size,
        )

    def model(self, config: Config, tokenizer: Tokenizer | None) -> nn.Module:
        """Return the whole model, or with pipeline parallelism this rank's stage of the model."""
        is_text_label = partial(is_text, cast(SentinelTokenizer, tokenizer))
        if config.parallel.pipe_parallel_size == 0:
            return T5Model(config, is_text=is_text_label)
        from ..model.t5_pipe import T5ModelPipe  # imported here: it imports DeepSpeed, which data tools do not need

        return T5ModelPipe(config, is_text_label)  # type: ignore[no-any-return]

    def batch(
        self, data: Batch | None, config: Config, tokenizer: Tokenizer | None
    ) -> tuple[tuple[Tensor, ...], Targets]:
        """Return ((encoder, decoder, encoder document ids, decoder document ids), (labels, loss mask)).

        Shapes: encoder and its document ids [b, k], all other tensors [b, q].
        The second tuple may have a dict of further tensors, see `Targets` in megatron/model/loss.py.
        The layers build attention masks from the document ids; padding has id 0, also padding that this method appends.
        Labels that do not count in the loss become padding.
        """
        t5_tokenizer = cast(SentinelTokenizer, tokenizer)
        if data is not None and not config.data.reset_attention_mask:
            data = _drop_needless_ids(data)
        batch, extra = broadcast_batch(data, KEYS, config)
        # `_drop_needless_ids` empties the ids of a batch without padding; restore them if this method appends some.
        if not batch["encoder_document_ids"].numel() and _needs_document_ids(batch, config):
            for side in ("encoder", "decoder"):
                batch[f"{side}_document_ids"] = torch.ones_like(batch[side])
        # Sequence parallelism needs lengths that its ranks can share. Document ids and loss mask are padded with 0.
        pad_values = dict.fromkeys(("encoder", "decoder", "labels"), t5_tokenizer.pad)
        batch = {key: mpu.pad_sequence(tensor, pad_values.get(key, 0)) for key, tensor in batch.items()}
        labels = batch["labels"]
        loss_mask = batch["loss_mask"].float()
        labels = labels.masked_fill(loss_mask == 0, t5_tokenizer.pad)
        encoder = batch["encoder"]
        decoder = batch["decoder"]
        encoder_ids = _compact_ids(batch["encoder_document_ids"])
        decoder_ids = _compact_ids(batch["decoder_document_ids"])
        # With a pipeline, decoder tokens cross all stages of the encoder, so they are sent as int32.
        inputs = (encoder, decoder.int(), encoder_ids, decoder_ids)
        if config.model.num_experts is not None:
            context_axis = mpu.context_axis()
            in_encoder = count_text_tokens(encoder, encoder_ids, context_axis)
            in_decoder = count_text_tokens(decoder, decoder_ids, context_axis)
            extra["text"] = torch.cat([in_encoder, in_decoder])
        return inputs, targets_of(labels, loss_mask, extra)
