"""Sparse gradients, as `nn.Embedding(sparse=True)` gives them.

They are reduced without a dense copy, or made dense if DeepSpeed flattens gradients.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

ABSENT, DENSE = -1, -2  # special row counts: the rank has no gradient, or a dense one


def sparse_weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights of embeddings with sparse gradients, in the same order on all replicas."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    weights = [layer.weight for layer in module.modules() if isinstance(layer, kinds) and layer.sparse]
    # Several embeddings may share a weight; `fromkeys` keeps it once, at its first place.
    return list(dict.fromkeys(p for p in weights if isinstance(p, nn.Parameter) and p.requires_grad))


def refuse_sparse(module: nn.Module, optimizer: object) -> None:
    """Raise ValueError if a weight has sparse gradients, which `optimizer`, a torch optimizer, does not support."""
    weights = sparse_weights(module)
    kind = type(optimizer)
    is_supported = kind in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)
    if weights and not is_supported and kind.__module__.startswith("torch.optim."):
        name = next(name for name, p in module.named_parameters() if p is weights[0])
        raise ValueError(
            f"the weight {name} has sparse gradients, which torch's {kind.__name__} does not support: build "
            "the embedding with sparse=False, or use SGD, Adagrad, SparseAdam, or ZeRO stage 1"
        )


def grad_values(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of `parameter`, or the values `[rows, ...]` of a sparse gradient.

    In-place changes of the result change the gradient.
    """
    assert parameter.grad is not None
    grad = parameter.grad.detach()
    if not grad.is_sparse:
        return grad
    parameter.grad = grad.coalesce()  # sums the gradients of a row that was looked up more than once
    return parameter.grad.values()


def make_dense(weights: Iterable[nn.Parameter]) -> None:
    """Make gradients of these weights dense as soon as autograd has accumulated them.

    ZeRO and half-precision optimizers flatten gradients, so they need dense ones.
    """

    def make_grad_dense(parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to_dense()

    for weight in weights:
        weight.register_post_accumulate_grad_hook(make_grad_dense)  # type: ignore[no-untyped-call]


def empty_gradient(weight: Tensor) -> Tensor:
    """Return a sparse gradient for `weight` `[rows, ...]` that contains no rows, i.e. is zero everywhere."""
    return torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.long, device=weight.device), weight.new_empty(0, *weight.shape[1:]), weight.shape
    )


def dense_gradient(p: nn.Parameter) -> Tensor:
    """Return the gradient of `p`, zeros if it has none. `F.embedding(..., sparse=True)` gives sparse gradients."""
    grad = p.grad
    if grad is None:
        return torch.zeros_like(p)
    return grad.to_dense()


def sum_sparse(weights: Iterable[nn.Parameter], group: object) -> None:
    """Sum the gradients of weights over the group; a rank's gradient may be sparse, dense or absent. Collective.

    The sum is dense if any rank's gradient is dense, and absent if no rank has a gradient. Otherwise it is sparse, with
    the rows of all ranks.
    """
    for weight in weights:
        grad = weight.grad
        # Each rank sends the number of its rows, or a negative code: its gradient is absent, or dense. A gradient that
        # is sparse in several dimensions counts as dense.
        rows = DENSE
        if grad is None:
            rows = ABSENT
        elif grad.is_sparse and grad.sparse_dim() == 1:
            rows = grad.coalesce().indices().shape[1]
        counts = torch.cat(gather_tensors(torch.tensor([rows], device=weight.device), group)).tolist()
        if DENSE in counts:
            grad = dense_gradient(weight)
            dist.all_reduce(grad, group=group)  # type: ignore[arg-type]
            weight.grad = grad
        elif max(counts) > ABSENT:  # some ranks have a sparse gradient, and none has a dense one
            if grad is None:
                grad = empty_gradient(weight)
            # A rank without a gradient has no rows, so its count of -1 becomes 0.
            weight.grad = _sum_of_rows(grad, [max(count, 0) for count in counts], group)


def _sum_of_rows(grad: Tensor, counts: Sequence[int], group: object) -> Tensor:
    """Return the sparse sum over the group. counts: number of rows on each rank."""
    # For example, counts = [2, 1]: both ranks send 2 rows; the second row of rank 1 is padding, which is cut off.
    grad = grad.coalesce()
    indices = grad.indices()[0]
    values = grad.values()
    num_padding = max(counts) - len(indices)
    padded_indices = torch.cat([indices, indices.new_zeros(num_padding)])
    padded_values = torch.cat([values, values.new_zeros(num_padding, *grad.shape[1:])])
    all_indices = _first_rows(gather_tensors(padded_indices, group), counts)
    all_values = _first_rows(gather_tensors(padded_values, group), counts)
    return torch.sparse_coo_tensor(all_indices[None], all_values, grad.shape).coalesce()


def _first_rows(parts: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Return the first rows of each tensor `[rows, ...]`, concatenated."""
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def gather_tensors(x: Tensor, group: object) -> list[Tensor]:
    """Return x [...] of each rank of `group`; all have one shape."""
    gathered = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]  # type: ignore[arg-type]
    dist.all_gather(gathered, x.contiguous(), group=group)  # type: ignore[arg-type]
    return gathered
