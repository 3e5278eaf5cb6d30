"""Attention masks of a sliding window (Beltagy et al. 2020).

Shapes: b batch, q queries, k keys.
"""

from functools import lru_cache

import torch
from torch import Tensor

from .masks import Documents, cached_on, causal_mask


def window_mask(
    document_ids: Tensor, queries: int, num_cached: int, window: int, mask: Documents | None
) -> Documents | Tensor | None:
    """Restrict a causal `mask` to the last `window` tokens, the query's own token included.

    mask: None if attention is not restricted to documents. queries: q. num_cached: number of cached tokens before the
    queries, k - q.
    Returns `mask` itself if the window covers all keys, otherwise a bool mask [1 or b, 1, q, k], True where a query
    may attend. Layers that receive the same ids share the result.
    """
    keys = num_cached + queries
    if keys <= window:
        return mask
    # torch.compile warns of cached functions.
    make_window = causal_window.__wrapped__ if torch.compiler.is_compiling() else causal_window
    visible = make_window(queries, keys, window, document_ids.device)
    if mask is None:
        return visible
    key = "window", queries, num_cached, window, mask.causal
    return cached_on(mask.queries, key, lambda: visible & mask.mask(), mask.keys)


@lru_cache(maxsize=2)
def causal_window(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return a causal mask [1, 1, q, k] of the last `window` tokens. The mask is cached because it is large."""
    # Query i is token keys - queries + i, and the first key that it sees is window - 1 tokens earlier.
    with torch.inference_mode(False):  # training after an evaluation in inference mode saves this mask
        return causal_mask(queries, keys, device).triu(keys - queries - window + 1)
