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
from megatron._torch import version
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
        return cached_on(self.queries, ("mask", self.causal), self.keys, lambda: _mask(*self))

    def refuse_others(self, query: Tensor, key: Tensor) -> None:
        """Raise ValueError unless every token of query [b, n, q, d] and key [b, n, k, d] has a document id.

        Without this check, kernels that work document by document would leave out a token without an id.
        """
        of_key = self.queries if self.keys is None else self.keys
        for name, ids, tokens in (("queries", self.queries, query), ("keys", of_key, key)):
            b, _, length, _ = tokens.shape
            if tuple(ids.shape) != (b, length):
                raise ValueError(
                    f"document ids {list(ids.shape)} do not fit {name} [{b} samples, "
                    f"{length} tokens]: give an id for each token, or an empty tensor for one document "
                    "without padding"
                )


class DocumentRole(NamedTuple):
    """Roles of the document ids in a decoder-only model.

    attention: tokens attend only within their document. positions: rotary positions are counted from 0 in each
    document.
    """

    attention: bool = True
    positions: bool = False


def role_of(config: Config) -> DocumentRole:
    """Return whether document ids restrict attention and whether they restart positions.

    In a rotary model with --reset-position-ids but without --reset-attention-mask, document ids restart positions and
    do not restrict attention.
    """
    data = config.data
    if data.reset_attention_mask or config.objective != "lm":
        attention = True
    else:
        rotary = config.model.position_embedding == "rope"
        attention = not (rotary and data.reset_position_ids)
    return DocumentRole(attention, positions=data.reset_position_ids)


def document_scope(queries: Tensor, keys: Tensor | None = None, causal: bool = False) -> Documents | None:
    """Return ids [b, q] and [b, k] as Documents, or None if every query sees all keys.

    Raises ValueError if the caller passed an attention mask instead of ids.
    """
    if not queries.numel():
        return None
    if queries.dim() != 2 or queries.dtype == torch.bool:
        raise ValueError(
            f"document ids must be the document number of each token, int [b, s], but got {queries.dtype} "
            f"{list(queries.shape)}, as if it were an attention mask: for GPT-2 compute document ids by "
            f"megatron.utils.get_ltor_documents_and_position_ids"
        )
    return Documents(queries, keys, causal)


def no_documents(device: torch.device) -> Tensor:
    """Return document ids for attention without documents: an empty int16 tensor [0], which costs nothing to send."""
    return torch.empty(0, dtype=torch.int16, device=device)


def begun_by_prefix(tokens: Tensor, length: int) -> Tensor:
    """Return ids int32 [b, s] that make each row of tokens [b, s] one document with a prefix of `length` tokens."""
    ids = torch.ones_like(tokens, dtype=torch.int32)
    ids[:, : max(length, 0)] = -1
    return ids


def document_mask(queries: Tensor, keys: Tensor | None = None, causal: bool = False) -> Tensor | None:
    """Return the mask of document ids [b, q] and [b, k]: bool [b, 1, q, k], True where a query may attend, or None.

    None means that every query sees all keys.
    keys: None in self-attention, where keys and queries have the same ids. causal: later tokens are hidden, too.
    A query whose document has no keys sees all keys that are not padding. So padding changes no number.
    Raises ValueError if the caller passed an attention mask instead of ids.
    """
    documents = document_scope(queries, keys, causal)
    return None if documents is None else documents.mask()


def added_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what to add to scores for a bool mask [b, 1, q, k]: the same shape, 0 if visible, else minus infinity.

    The result is cached on `mask`, so that all layers share it. Otherwise each layer would save a copy for the
    backward pass.
    """

    def make() -> Tensor:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)

    return cached_on(mask, ("added", dtype), None, make)


def cached_on(owner: Tensor, key: tuple[Any, ...], other: Tensor | None, make: Callable[[], Found]) -> Found:
    """Return `make()`, cached under `key` on the tensor `owner` [...] until `owner` or `other` is changed in place."""
    if torch.compiler.is_compiling():  # torch.compile fuses `make` into one kernel, so a cache is not needed.
        return make()
    found: dict[Any, tuple[Tensor | None, Found]] = owner.__dict__.setdefault("_cached", {})
    # The key contains the Python id of `other`. The cache keeps a reference to `other`, because a new tensor could
    # otherwise get the same id. A reference to `owner` would be a cycle, because the cache is an attribute of `owner`.
    kept = None if other is owner else other
    key = (*key, version(owner), id(kept), 0 if kept is None else version(kept))
    if key not in found:
        found[key] = kept, make()
    return found[key][1]


def _mask(queries: Tensor, keys: Tensor | None, causal: bool) -> Tensor:
    others = queries if keys is None else keys
    own = queries.unsqueeze(2)  # [b, q, 1]
    other = others.unsqueeze(1)  # [b, 1, k]
    same = own == other
    if causal:
        in_prefix = (own < 0) & same
        same = (own.abs() == other.abs()).tril() | in_prefix
    if keys is not None:
        text = other != 0
        text = text | ~text.any(-1, keepdim=True)  # a row of padding only
        same = same | (text & ~same.any(-1, keepdim=True))
    return same.unsqueeze(1)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return a mask [1, 1, q, k]: the last `queries` of `keys` tokens attend to themselves and to earlier tokens."""
    return torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def build_mask(window: int | None, role: DocumentRole, context: mpu.Axis) -> Callable[[Tensor, int, int], Any]:
    """Return the function that makes the mask of a decoder-only model's layer, see `attention_kernels.AttentionArgs`.

    Its arguments are document ids [b, s] or empty, the length s of the whole sequence, and the number of cached tokens.
    window: number of last tokens that a query sees, None for all. context: ranks that shard a sequence.
    """

    def documents(ids: Tensor, length: int, seen: int) -> Any:
        return document_scope(ids, causal=True) if role.attention else None

    if context.size > 1:
        from .context_attention import views_of

        return lambda ids, length, seen: views_of(ids, length, window, documents(ids, length, seen), context)
    if window is not None:
        from .window_masks import window_mask

        return lambda ids, length, seen: window_mask(ids, length, seen, window, documents(ids, length, seen))
    return documents


def positions_in_documents(document_ids: Tensor) -> Tensor:
    """Return the position of each token in its document, from 0, for document ids [b, s] -> [b, s].

    A document with a prefix has two ids, -n for the prefix and n for the tokens after the prefix. Its positions are
    counted across both.
    """
    document_ids = document_ids.abs()
    place = torch.arange(document_ids.shape[1], device=document_ids.device).expand(document_ids.shape)
    return place - place.masked_fill(~begins(document_ids), 0).cummax(dim=1).values


def begins(ids: Tensor) -> Tensor:
    """Return whether each token's id differs from that of the token before it: [b, s] -> bool [b, s]."""
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return first
