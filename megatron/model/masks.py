"""Attention masks, built where they are needed from the document id of each token.

Shapes: b batch, q queries, k keys. A document id of 0 means padding. Empty ids mean one document without
padding. In causal attention, tokens of id -n are a prefix of document n and attend to each other in both
directions (Raffel et al. 2020).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron import mpu
from megatron._torch import version_counter
from megatron.config import Config

Found = TypeVar("Found")


class Documents(NamedTuple):
    """Restriction of attention to documents: document ids of the queries, int [b, q], and of the keys, [b, k].

    keys: None in self-attention, where keys and queries have the same ids. causal: a token attends to no later token.
    """

    queries: Tensor
    keys: Tensor | None = None
    causal: bool = False

    def mask(self) -> Tensor:
        """Return the bool mask [b, 1, q, k], True where a query may attend. All layers share it for the same ids."""
        return cached_on(self.queries, ("mask", self.causal), lambda: _build_document_mask(*self), self.keys)

    def check_token_counts(self, query: Tensor, key: Tensor) -> None:
        """Raise ValueError unless every token of query [b, n, q, d] and key [b, n, k, d] has a document id.

        Without this check, kernels that work document by document would leave out a token without an id.
        """
        key_ids = self.queries if self.keys is None else self.keys
        for name, ids, tokens in (("queries", self.queries, query), ("keys", key_ids, key)):
            b, _, length, _ = tokens.shape
            if ids.shape != (b, length):
                raise ValueError(
                    f"document ids {list(ids.shape)} do not fit {name} [{b} samples, "
                    f"{length} tokens]: give an id for each token, or an empty tensor for one document "
                    "without padding"
                )


class DocumentRole(NamedTuple):
    """Roles of the document ids in a decoder-only model.

    restricts_attention: tokens attend only within their document. restarts_positions: rotary positions are counted from
    0 in each document.
    """

    restricts_attention: bool = True
    restarts_positions: bool = False


def document_role_of(config: Config) -> DocumentRole:
    """Return whether document ids restrict attention and whether they restart positions.

    In a rotary model with --reset-position-ids but without --reset-attention-mask, document ids restart positions and
    do not restrict attention.
    """
    data = config.data
    is_rotary_lm = config.objective == "lm" and config.model.position_embedding == "rope"
    only_positions = is_rotary_lm and data.reset_position_ids and not data.reset_attention_mask
    return DocumentRole(restricts_attention=not only_positions, restarts_positions=data.reset_position_ids)


def document_scope(query_ids: Tensor, key_ids: Tensor | None = None, causal: bool = False) -> Documents | None:
    """Return ids [b, q] and [b, k] as Documents. Without ids (empty), return None: every query sees all keys.

    Raises ValueError if the caller passed an attention mask instead of ids.
    """
    if not query_ids.numel():  # ids of `no_documents`: one document without padding
        return None
    if query_ids.dim() != 2 or query_ids.dtype == torch.bool:
        raise ValueError(
            f"document ids must be the document number of each token, int [b, s], but got {query_ids.dtype} "
            f"{list(query_ids.shape)}, as if it were an attention mask: for GPT-2 compute document ids by "
            f"megatron.utils.get_ltor_documents_and_position_ids"
        )
    return Documents(query_ids, key_ids, causal)


def no_documents(device: torch.device) -> Tensor:
    """Return document ids for attention without documents: an empty int16 tensor [0], which costs nothing to send."""
    return torch.empty(0, dtype=torch.int16, device=device)


def prefix_document_ids(tokens: Tensor, length: int) -> Tensor:
    """Return ids int32 [b, s] that make each row of tokens [b, s] one document with a prefix of `length` tokens."""
    ids = torch.ones_like(tokens, dtype=torch.int32)
    ids[:, : max(length, 0)] = -1
    return ids


def document_mask(query_ids: Tensor, key_ids: Tensor | None = None, causal: bool = False) -> Tensor | None:
    """Return the mask of document ids [b, q] and [b, k]: bool [b, 1, q, k], True where a query may attend, or None.

    None means that every query sees all keys.
    key_ids: None in self-attention, where keys and queries have the same ids. causal: later tokens are hidden, too.
    A query whose document has no keys sees all keys that are not padding. So padding changes no number.
    Raises ValueError if the caller passed an attention mask instead of ids.
    """
    documents = document_scope(query_ids, key_ids, causal)
    return None if documents is None else documents.mask()


def to_additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what to add to scores for a bool mask [b, 1, q, k]: the same shape, 0 if visible, else minus infinity.

    The result is cached on `mask`, so that all layers share it. Otherwise each layer would save a copy for the
    backward pass.
    """

    def make() -> Tensor:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)

    return cached_on(mask, ("added", dtype), make)


def cached_on(owner: Tensor, key: tuple[Any, ...], make: Callable[[], Found], other: Tensor | None = None) -> Found:
    """Return `make()`, cached under `key` on the tensor `owner` [...] until `owner` or `other` is changed in place.

    Nothing is cached for tensors of `torch.inference_mode()`, whose changes in place cannot be noticed.
    """
    if torch.compiler.is_compiling():
        return make()  # torch.compile fuses `make` into one kernel, so a cache is not needed
    if owner.is_inference() or (other is not None and other.is_inference()):
        return make()  # such tensors have no version counter
    cache: dict[Any, tuple[Tensor | None, Found]] = owner.__dict__.setdefault("_cached", {})
    # The key contains the Python id of `other`, and both version counters, which grow with each change in place. An
    # entry refers to `other`, because a new tensor could otherwise get the same id. It must not refer to `owner`: the
    # cache is an attribute of `owner`, so that would be a cycle.
    kept_other = None if other is owner else other
    other_version = 0 if kept_other is None else version_counter(kept_other)
    key = (*key, version_counter(owner), id(kept_other), other_version)
    if key not in cache:
        with torch.inference_mode(False):  # training after an evaluation in inference mode uses the result
            cache[key] = kept_other, make()
    return cache[key][1]


def _build_document_mask(query_ids: Tensor, key_ids: Tensor | None, causal: bool) -> Tensor:
    """Build the mask [b, 1, q, k] of `document_mask` from ids [b, q] and [b, k]."""
    query = query_ids.unsqueeze(2)  # [b, q, 1]
    key = (query_ids if key_ids is None else key_ids).unsqueeze(1)  # [b, 1, k]
    visible = query == key
    if causal:
        # Tokens see the earlier tokens of document n, whose ids are n, or -n in its prefix. Two tokens with the same
        # negative id are in the same prefix, where they see each other in both directions.
        # For example, of ids [-1, -1, 1, 2], token 0 sees tokens 0 and 1, token 2 sees 0 to 2, and token 3 only itself.
        in_prefix = (query < 0) & visible
        visible = (query.abs() == key.abs()).tril() | in_prefix
    if key_ids is not None:  # cross-attention; in self-attention, each query sees at least itself
        is_text = key != 0
        # In a row of padding only, all keys count as text, because a query that sees no key would give NaN.
        is_text = is_text | ~is_text.any(-1, keepdim=True)
        # A query whose document has no keys sees all text.
        visible = visible | (is_text & ~visible.any(-1, keepdim=True))
    return visible.unsqueeze(1)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return a mask [1, 1, q, k]: the last `queries` of `keys` tokens attend to themselves and to earlier tokens."""
    # Query i is token keys - queries + i, the last one that it sees.
    return torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def mask_function(window: int | None, role: DocumentRole, context: mpu.Axis) -> Callable[[Tensor, int, int], Any]:
    """Return the function that makes the mask of a decoder-only model's layer, see `attention_kernels.AttentionArgs`.

    Its arguments are document ids [b, s] or empty, the length s of the whole sequence, and the number of cached tokens.
    window: number of last tokens that a query sees, None for all. context: ranks that shard a sequence.
    """

    # None: no restriction, because the ids are empty or serve only to restart positions.
    def documents(ids: Tensor) -> Documents | None:
        return document_scope(ids, causal=True) if role.restricts_attention else None

    if context.size > 1:
        from .context_attention import build_context_views

        # Caches do not work with context parallelism, so the number of cached tokens is 0.
        return lambda ids, length, _: build_context_views(ids, length, window, documents(ids), context)
    if window is not None:
        from .window_masks import window_mask

        return lambda ids, length, num_cached: window_mask(ids, length, num_cached, window, documents(ids))
    # Without documents the mask is None, and the attention kernel itself hides later tokens.
    return lambda ids, *_: documents(ids)


def positions_in_documents(document_ids: Tensor) -> Tensor:
    """Return the position of each token in its document, from 0, for document ids [b, s] -> [b, s].

    A document with a prefix has two ids, -n for the prefix and n for the tokens after the prefix. Its positions are
    counted across both.
    """
    document_ids = document_ids.abs()
    position = torch.arange(document_ids.shape[1], device=document_ids.device).expand(document_ids.shape)
    # Ids [1, 1, 2, 2] give the starts [0, 0, 2, 2] and the positions [0, 1, 0, 1].
    is_start = document_starts(document_ids)
    starts = position.masked_fill(~is_start, 0).cummax(dim=1).values
    return position - starts


def document_starts(ids: Tensor) -> Tensor:
    """Return whether each token's id differs from that of the token before it: [b, s] -> bool [b, s]."""
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return first
