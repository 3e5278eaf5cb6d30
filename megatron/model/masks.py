"""Who may look at whom, built where it is needed from the number of the document that each token is in.

Shapes: b batch, q queries, k keys. A document id of 0 is padding; empty ids mean one document without padding.
"""

import torch
from torch import Tensor


def no_documents(device: torch.device) -> Tensor:
    """The document ids of plain attention: an empty tensor [0], int16, which costs nothing to send."""
    return torch.empty(0, dtype=torch.int16, device=device)


def document_mask(queries: Tensor, keys: Tensor | None = None, causal: bool = False) -> Tensor | None:
    """Document ids [b, q] and [b, k] -> [b, 1, q, k], True where a query may look; None for everywhere.

    keys None: the queries themselves. causal: and at nothing after itself. A query that would see
    nothing, which padding may bring about, sees everything: what it computes is not used.
    Raises ValueError for a mask in the place of the ids.
    """
    if not queries.numel():
        return None
    if queries.dim() != 2 or queries.dtype == torch.bool:
        raise ValueError(
            f"our models take the document number of each token, int [b, s], not a mask, {queries.dtype} "
            f"{list(queries.shape)}: megatron.utils.get_ltor_documents_and_position_ids gives what GPT-2 takes"
        )
    same = queries.unsqueeze(2) == (queries if keys is None else keys).unsqueeze(1)
    if causal:
        same = same.tril()
    if keys is not None:
        same = same | ~same.any(-1, keepdim=True)
    return same.unsqueeze(1)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """[1, 1, q, k]: the last `queries` of `keys` tokens look at themselves and at what precedes them."""
    return torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def positions_in_documents(document_ids: Tensor) -> Tensor:
    """[b, s] document ids -> [b, s] position of each token in its document, from 0."""
    place = torch.arange(document_ids.shape[1], device=document_ids.device).expand(document_ids.shape)
    first = torch.ones_like(document_ids, dtype=torch.bool)
    first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return place - place.masked_fill(~first, 0).cummax(dim=1).values
