"""Comparison of each target's logit with the others of a vocabulary that is sharded over the model-parallel ranks."""

import torch
from torch import Tensor

from .cross_entropy import localize_targets
from .current import current_mesh
from .mappings import reduce_from_model_parallel_region
from .mesh import Axis
from .vocab_shards import check_same_tokens, max_over_ranks, wide_dtype


@torch.no_grad()
def vocab_parallel_right(
    logits: Tensor, target: Tensor, vocab_size: int | None = None, axis: Axis | None = None
) -> Tensor:
    """Return whether each target has the largest logit, bool [...]; a tie counts as correct.

    logits: [..., v/t]. target: [...] ids < vocab_size. vocab_size: number of rows without padding; by default no
    row is padding.
    """
    check_same_tokens(logits, target)
    axis = axis or current_mesh().model
    shard_size = logits.shape[-1]
    flat_logits = logits.reshape(-1, shard_size)
    flat_target = target.reshape(-1)
    vocab_size = vocab_size or shard_size * axis.size
    local_ids, is_local, real_rows = localize_targets(flat_logits, flat_target, vocab_size, axis)
    # own_best[0]: this rank's largest logit. own_best[1]: the target's logit, minus infinity if another rank holds it.
    own_best = logits.new_full((2, len(flat_target)), -torch.inf, dtype=wide_dtype(logits))
    if real_rows:
        real_logits = flat_logits[:, :real_rows]
        target_logit = real_logits.gather(-1, local_ids.unsqueeze(-1)).squeeze(-1)
        # The MAX of a backend may lose another rank's NaN, so a NaN counts as the largest logit, and as a wrong target.
        own_max = real_logits.amax(-1)
        own_best[0] = torch.where(own_max.isnan(), torch.inf, own_max)
        own_best[1] = torch.where(is_local & ~target_logit.isnan(), target_logit, -torch.inf)
    # One all-reduce gives both rows. Only one rank has more than minus infinity in row 1, so the MAX is the target's
    # logit. `flat_logits` is passed to check that the ranks hold shards.
    max_logit, target_logits = max_over_ranks(own_best, flat_logits, axis)
    return torch.eq(target_logits, max_logit).view(target.shape)


def excess_over_mean(logits: Tensor, target: Tensor, vocab_size: int, axis: Axis) -> Tensor:
    """Return by how much each target's logit exceeds the mean logit, [n] in fp32 (fp64 for fp64 logits).

    Label smoothing adds it to the cross entropy (Szegedy et al. 2016). logits: [n, v/t]. target: [n] ids < vocab_size.
    """
    local_ids, is_local, real_rows = localize_targets(logits, target, vocab_size, axis)
    wide_logits = logits.to(wide_dtype(logits))
    # Only one rank has the target's logit; on the others it is 0 here. Each rank subtracts its share of the mean.
    target_logit = wide_logits.gather(-1, local_ids.unsqueeze(-1)).squeeze(-1)
    target_logit = target_logit.masked_fill(~is_local, 0.0)
    share_of_mean = wide_logits[:, :real_rows].sum(-1) / vocab_size
    return reduce_from_model_parallel_region(target_logit - share_of_mean, axis)
