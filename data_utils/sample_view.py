"""Views of one training sample: its tokens as a table, its attention masks as a figure."""

from typing import Any

import torch
from torch import Tensor

from megatron.model.masks import Documents, positions_in_documents
from megatron.tasks.prefix import mark_prefixes
from megatron.tokenizer import Tokenizer
from megatron.utils import get_ltor_documents_and_position_ids

from .cli import new_figure, save_figure
from .tables import align_columns

Sample = dict[str, Tensor]  # tensors of a sample, or attention masks, by name
Columns = dict[str, list[Any]]
View = tuple[dict[str, Columns], Sample]  # token tables and attention masks, by name


def _token_texts(ids: Tensor, tokenizer: Tokenizer) -> list[str]:
    """Return the quoted text of each token, or its name for a special token."""
    names = {i: name for name, i in tokenizer.specials.items()}
    return [names.get(i) or repr(tokenizer.decode([i])) for i in ids.tolist()]


def gpt2_view(sample: Sample, tokenizer: Tokenizer, config: Any) -> View:
    """Return (token tables by name, attention masks by name) of a GPT-2 sample.

    A mask is True where a query (row) may attend to a key (column).
    """
    text = sample["text"]  # [s + 1]
    tokens = text[None, :-1]  # [1, s]
    labels = text[1:]
    data = config.data
    _, loss_mask, positions = get_ltor_documents_and_position_ids(
        tokens, tokenizer.eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss
    )
    # The table shows the documents even if the run does not separate them.
    documents, _, _ = get_ltor_documents_and_position_ids(
        tokens, tokenizer.eod, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=False
    )
    # The same id everywhere makes the sample one document.
    mask_ids = documents if data.reset_attention_mask else torch.ones_like(documents)
    if "prefixes" in sample:
        mask_ids, loss_mask = mark_prefixes(sample["prefixes"][None], mask_ids, loss_mask)
    table = _table(tokens[0], labels, tokenizer, loss_mask[0], positions[0], documents[0])
    return {"tokens": table}, {"attention": _causal_mask(mask_ids)}


def _columns(tokens: Tensor, tokenizer: Tokenizer) -> Columns:
    """Return the first columns of the table of `tokens` [s]."""
    return {
        "index": list(range(len(tokens))),
        "id": tokens.tolist(),
        "token": _token_texts(tokens, tokenizer),
    }


def _table(
    tokens: Tensor, labels: Tensor, tokenizer: Tokenizer, loss_mask: Tensor, positions: Tensor, documents: Tensor
) -> Columns:
    """Return the token table of a decoder-only model's sample from its tensors [s]."""
    return {
        **_columns(tokens, tokenizer),
        "next": _token_texts(labels, tokenizer),
        "loss": list(map(int, loss_mask)),
        "position": positions.tolist(),
        "document": documents.tolist(),
    }


def _causal_mask(documents: Tensor) -> Tensor:
    """Return the causal attention mask [s, s] of document ids [1, s]."""
    return Documents(documents, causal=True).mask()[0, 0]


def sft_view(sample: Sample, tokenizer: Tokenizer, config: Any) -> View:
    """Return (token tables, attention masks) of a sample that packs several fine-tuning records."""
    documents = sample["document_ids"][None]
    positions = positions_in_documents(documents)[0]
    table = _table(sample["tokens"], sample["labels"], tokenizer, sample["loss_mask"], positions, documents[0])
    return {"tokens": table}, {"attention": _causal_mask(documents)}


def t5_view(sample: Sample, tokenizer: Tokenizer, config: Any) -> View:
    """Return (token tables, attention masks) of a T5 sample.

    There are two tables, for the encoder and the decoder, and three masks, for the encoder, the decoder and the
    cross-attention.
    """
    encoder_ids = sample["encoder_document_ids"]
    decoder_ids = sample["decoder_document_ids"]
    tables: dict[str, Columns] = {
        "encoder": {
            **_columns(sample["encoder"], tokenizer),
            "document": encoder_ids.tolist(),
        },
        "decoder": {
            **_columns(sample["decoder"], tokenizer),
            "label": _token_texts(sample["labels"], tokenizer),
            "loss": sample["loss_mask"].tolist(),
            "document": decoder_ids.tolist(),
        },
    }
    # Unless the run separates documents, all tokens are of document 1; padding keeps the id 0.
    if not config.data.reset_attention_mask:
        encoder_ids = encoder_ids.clamp(max=1)
        decoder_ids = decoder_ids.clamp(max=1)
    masks = {
        "encoder": Documents(encoder_ids[None]).mask()[0, 0],
        "decoder": _causal_mask(decoder_ids[None]),
        "decoder to encoder": Documents(decoder_ids[None], encoder_ids[None]).mask()[0, 0],
    }
    return tables, masks


def as_text(tables: dict[str, Columns]) -> str:
    """Return the tables as text, one below the other."""
    texts = []
    for name, table in tables.items():
        rows = zip(*table.values(), strict=True)
        texts.append(f"{name}:")
        texts.append(align_columns([list(table), *rows]))
    return "\n".join(texts)


def draw(tables: dict[str, Columns], masks: Sample, title: str, path: str) -> None:
    """Plot each attention mask; strips below it show the document and the loss mask of each key.

    Raises ValueError if matplotlib is not installed.
    """
    figure = new_figure("--png", figsize=(1.5 + 4.8 * len(masks), 6.4), layout="constrained")
    axes = figure.subplots(3, len(masks), squeeze=False, height_ratios=[16, 1, 1])
    table_of_mask = {
        "attention": "tokens",
        "encoder": "encoder",
        "decoder": "decoder",
        "decoder to encoder": "encoder",
    }
    image_style = {"interpolation": "nearest", "aspect": "auto"}
    label_style = {"rotation": 0, "ha": "right", "va": "center", "fontsize": 8}
    for i, (name, mask) in enumerate(masks.items()):
        top, strip, loss = axes[:, i]
        # A maximum above 1 makes the color of the mask lighter.
        top.imshow(mask.int(), cmap="Blues", vmin=0, vmax=1.4, **image_style)
        top.set_title(f"{name}: query (row) attends to key (column)", fontsize=10)
        top.set_ylabel("query index")
        top.set_xticks([])
        table = tables[table_of_mask[name]]
        lowest = strip
        strip.imshow([table["document"]], cmap="tab20", **image_style)
        strip.set_ylabel("document", **label_style)
        if "loss" in table:
            lowest = loss
            loss.imshow([table["loss"]], cmap="Greens", vmin=0, vmax=1.4, **image_style)
            loss.set_ylabel("loss", **label_style)
            strip.set_xticks([])
        else:
            loss.set_visible(False)
        strip.set_yticks([])
        loss.set_yticks([])
        lowest.set_xlabel("key index")
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path, dpi=110)
