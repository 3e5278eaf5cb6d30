"""Comparison of each target's logit with the others of a vocabulary that is sharded over the model-parallel ranks."""

import torch
from torch import Tensor

from .cross_entropy import on_this_rank
from .current import current
from .mappings import reduce_from_model_parallel_region
from .mesh import Axis
from .vocab_shards import largest, refuse_other_tokens


@torch.no_grad()
def vocab_parallel_right(
    logits: Tensor, target: Tensor, vocab_size: int | None = None, axis: Axis | None = None
) -> Tensor:
    """Return whether each target has the largest logit, bool [...]; a tie counts as correct.

    logits: [..., v/t]. target: [...] ids < vocab_size. vocab_size: number of rows without padding; by default no
    row is padding.
    """
    refuse_other_tokens(logits, target)
    axis = axis or current().model
    local, mine, real = on_this_rank(logits, target, vocab_size or logits.shape[-1] * axis.size, axis)
    # best[0]: this rank's largest logit. best[1]: the target's logit, minus infinity if another rank holds it.
    best = logits.new_full((2, *target.shape), -torch.inf, dtype=torch.promote_types(logits.dtype, torch.float32))
    if real:
        x = logits[..., :real]
        found = x.gather(-1, local.unsqueeze(-1)).squeeze(-1)
        # The MAX of a backend may lose another rank's NaN, so a NaN counts as the largest logit, and as a wrong target.
        here = x.amax(-1)
        best[0] = torch.where(here.isnan(), torch.inf, here)
        best[1] = torch.where(mine & ~found.isnan(), found, -torch.inf)
    top, own = largest(best, logits.reshape(-1, logits.shape[-1]), axis)
    right: Tensor = own == top
    return right


def excess_over_mean(logits: Tensor, target: Tensor, vocab_size: int, axis: Axis) -> Tensor:
    """Return by how much each target's logit exceeds the mean logit, [n] in fp32 (fp64 for fp64 logits).

    Label smoothing adds it to the cross entropy (Szegedy et al. 2016). logits: [n, v/t]. target: [n] ids < vocab_size.
    """
    local, mine, real = on_this_rank(logits, target, vocab_size, axis)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    of_target = wide.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0.0)
    return reduce_from_model_parallel_region(of_target - wide[:, :real].sum(-1) / vocab_size, axis)
