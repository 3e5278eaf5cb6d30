"""Who may look at whom, built where it is needed from the number of the document that each token is in.

Shapes: b batch, q queries, k keys. A document id of 0 is padding; empty ids mean one document without padding. Where nothing looks at what
is after itself, tokens of id -n are a prefix of document n: they look at each other both ways (Raffel et al. 2020).
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron._torch import version

Found = TypeVar("Found")


class Documents(NamedTuple):
    """Who may look at whom: document ids int [b, q] of the queries, [b, k] of the keys (None: the same), and whether at nothing after itself."""

    queries: Tensor
    keys: Tensor | None = None
    causal: bool = False

    def mask(self) -> Tensor:
        """[b, 1, q, k], see `document_mask`."""
        found = document_mask(*self)
        assert found is not None
        return found

    def refuse_others(self, query: Tensor, key: Tensor) -> None:
        """Raises ValueError unless every token of query [b, n, q, d] and key [b, n, k, d] has an id: what has none would never be computed."""
        of_key = self.queries if self.keys is None else self.keys
        for name, ids, tokens in (("queries", self.queries, query), ("keys", of_key, key)):
            if tuple(ids.shape) != (tokens.shape[0], tokens.shape[2]):
                raise ValueError(
                    f"document ids {list(ids.shape)} do not fit {name} of {tokens.shape[0]} samples of {tokens.shape[2]} tokens: "
                    "give an id for each token, or an empty tensor for one document without padding"
                )


def within(queries: Tensor, keys: Tensor | None = None, causal: bool = False) -> Documents | None:
    """Document ids [b, q] and [b, k] as `document_mask` takes them; None where every query looks everywhere. Raises its errors."""
    if not queries.numel():
        return None
    _check(queries)
    return Documents(queries, keys, causal)


def no_documents(device: torch.device) -> Tensor:
    """The document ids of plain attention: an empty tensor [0], int16, which costs nothing to send."""
    return torch.empty(0, dtype=torch.int16, device=device)


def begun_by_prefix(tokens: Tensor, length: int) -> Tensor:
    """tokens [b, s] -> the ids of one document each, int32 [b, s], of which the first `length` tokens are a prefix."""
    ids = torch.ones_like(tokens, dtype=torch.int32)
    ids[:, : max(length, 0)] = -1
    return ids


def document_mask(queries: Tensor, keys: Tensor | None = None, causal: bool = False) -> Tensor | None:
    """Document ids [b, q] and [b, k] -> [b, 1, q, k], True where a query may look; None for everywhere.

    keys None: the queries themselves. causal: and at nothing after itself. A query that would see
    nothing, which padding may bring about, sees everything: what it computes is not used.
    The layers that are given the same ids share one mask.
    Raises ValueError for a mask in the place of the ids.
    """
    if not queries.numel():
        return None
    _check(queries)
    return follows(queries, ("mask", causal), keys, lambda: _mask(queries, keys, causal))


def _check(queries: Tensor) -> None:
    if queries.dim() != 2 or queries.dtype == torch.bool:
        raise ValueError(
            f"our models take the document number of each token, int [b, s], not a mask, {queries.dtype} "
            f"{list(queries.shape)}: megatron.utils.get_ltor_documents_and_position_ids gives what GPT-2 takes"
        )


def added_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """bool [b, 1, q, k] -> what is added to scores, of the same shape: 0 where a query may look, else minus infinity.

    Layers share this one, too; torch would make one of its own for each of them, and keep it for the backward pass.
    """
    return follows(
        mask, ("added", dtype), None, lambda: torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    )


def follows(owner: Tensor, key: tuple[Any, ...], other: Tensor | None, make: Callable[[], Found]) -> Found:
    """What `make` makes of `owner` and `other` [...] as they are now, once, and kept as long as `owner` lives."""
    if torch.compiler.is_compiling():  # which makes one kernel of it
        return make()
    found: dict[Any, tuple[Tensor | None, Found]] = owner.__dict__.setdefault("_follows", {})
    kept = None if other is owner else other  # no circle; kept, so that its id stays its own
    key = (*key, version(owner), id(kept), 0 if kept is None else version(kept))
    if key not in found:
        found[key] = kept, make()
    return found[key][1]


def _mask(queries: Tensor, keys: Tensor | None, causal: bool) -> Tensor:
    others = queries if keys is None else keys
    if causal:
        same = queries.abs().unsqueeze(2) == others.abs().unsqueeze(1)
        same = same.tril() | ((queries < 0).unsqueeze(2) & (queries.unsqueeze(2) == others.unsqueeze(1)))
    else:
        same = queries.unsqueeze(2) == others.unsqueeze(1)
    if keys is not None:
        same = same | ~same.any(-1, keepdim=True)
    return same.unsqueeze(1)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """[1, 1, q, k]: the last `queries` of `keys` tokens look at themselves and at what precedes them."""
    return torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def window_mask(
    document_ids: Tensor, queries: int, seen: int, window: int, mask: Documents | None
) -> Documents | Tensor | None:
    """`mask`, causal, or None -> the same for tokens that see no more than the last `window`, themselves included: bool [1 or b, 1, q, k].

    queries: q; seen: tokens before these, all of which are keys. `mask` itself where that makes no difference. Shared by the layers
    that are given the same ids.
    """
    keys = seen + queries
    if keys <= window:
        return mask
    near = _window(queries, keys, window, document_ids.device)
    if mask is None:
        return near
    key = "window", queries, seen, window, mask.causal
    return follows(mask.queries, key, mask.keys, lambda: near & mask.mask())


@lru_cache(maxsize=2)
def _window(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """[1, 1, q, k], of all micro-batches: it is as large as a sequence is long, squared."""
    return causal_mask(queries, keys, device).triu(keys - queries - window + 1)


def positions_in_documents(document_ids: Tensor) -> Tensor:
    """[b, s] document ids -> [b, s] position of each token in its document, its prefix included, from 0."""
    document_ids = document_ids.abs()
    place = torch.arange(document_ids.shape[1], device=document_ids.device).expand(document_ids.shape)
    return place - place.masked_fill(~begins(document_ids), 0).cummax(dim=1).values


def begins(ids: Tensor) -> Tensor:
    """[b, s] -> bool [b, s]: whether a token's id is another than that of the token before it."""
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return first
