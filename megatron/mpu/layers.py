"""Linear layers and an embedding sharded over the model-parallel ranks (Shoeybi et al. 2019).

Shapes: s sequence, b batch, i features in, o features out, h hidden, v vocabulary, t model-parallel ranks.
A layer that is built alone draws the initial values of its whole weight from torch's default generator, so that the
values do not depend on t; in a model, the model draws them (`mpu.defer_init`).
axis, options: the ranks over which a layer is sharded, and its options, by default those of the current context.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..autocast import in_autocast_dtype
from . import mappings
from .current import parallel_context
from .linear import linear
from .megatron_compat import check_strides
from .mesh import TRIVIAL_AXIS, Axis, Options
from .parameters import NORMAL, InitMethod, declare, ones, spec_of, zeros
from .sequence import reduce_scatter_to_sequence_parallel_region
from .vocab_shards import check_token_ids, padded_vocab_size
from .wide_sums import embedding, layer_norm

if TYPE_CHECKING:
    from .linear_cross_entropy import DeferredLogits


def size_per_rank(total: int, axis: Axis, label: str) -> int:
    """Return `total` / number of ranks. Raises ValueError with `label` if there is a remainder."""
    if total % axis.size:
        raise ValueError(f"{label} {total} cannot be split over {axis.size} model-parallel ranks")
    return total // axis.size


class Sharded(nn.Module):
    """Layer sharded over the ranks of `axis`, with the communication and kernel options `options`."""

    def __init__(self, axis: Axis | None, options: Options | None) -> None:
        super().__init__()
        context = parallel_context()
        self.axis = axis or context.mesh.model
        self.options = options or context.options

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Sum the ranks' partial results [s, ...] in place; with sequence parallelism reduce-scatter to [s/t, ...]."""
        if self.axis.size == 1:
            return x
        if torch.compiler.is_compiling():  # torch.compile can trace only functional collectives
            from .traced import traced_reduce

            return traced_reduce(x, self.axis, self.options.sequence_parallel)
        if self.options.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(x, self.axis)
        return mappings.sum_in_place(x, self.axis)


class VocabParallelEmbedding(Sharded):
    """Embedding with its rows sharded over the model-parallel ranks.

    The table has vocab_size rows, padded with zero rows to a multiple of `multiple` times the number of ranks. The
    softmax ignores padding rows, and checkpoints do not contain them. Attributes have Megatron-LM's names, too.
    Raises IndexError for an id outside the vocabulary.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        init_method: InitMethod = NORMAL,
        *,
        multiple: int = 1,
        axis: Axis | None = None,
        options: Options | None = None,
    ) -> None:
        super().__init__(axis, options)
        self.vocab_size = vocab_size
        self.rows = padded_vocab_size(vocab_size, multiple, self.axis.size) // self.axis.size
        self.first_row = self.axis.rank * self.rows
        self.num_embeddings = vocab_size  # this and the next attributes have Megatron-LM's names
        self.embedding_dim = hidden_size
        self.num_embeddings_per_partition = self.rows
        self.vocab_start_index = self.first_row
        self.vocab_end_index = self.first_row + self.rows
        weight = nn.Parameter(torch.zeros(self.rows, hidden_size))
        self.weight = declare(weight, init_method, dim=0, full_size=vocab_size, axis=self.axis)  # [v/t, h]

    def forward(self, ids: Tensor) -> Tensor:
        """Look up integer ids [...] -> [..., h]; with sequence parallelism [s, b] -> [s/t, b, h]."""
        # `wgrad_accumulator` reads this. An untied output layer has this class, too, but only calls `logits`.
        spec_of(self.weight).used_as_embedding = True
        check_token_ids(ids, self.vocab_size)
        if self.axis.size == 1:
            return embedding(ids, self.weight)
        # If this rank has rows 4 to 7, ids 3 and 5 become -1 and 1. Id 3 looks up row 0 instead, then becomes zeros.
        local_ids = ids - self.first_row
        is_elsewhere = (local_ids < 0) | (local_ids >= self.rows)
        vectors = embedding(local_ids.masked_fill(is_elsewhere, 0), self.weight)
        return self.sum_over_ranks(vectors.masked_fill(is_elsewhere.unsqueeze(-1), 0.0))

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute this rank's logits [..., v/t], including padding, from hidden [..., h] or its shard [s/t, b, h]."""
        return linear(hidden, self.weight, None, self.axis, self.options)

    def deferred_logits(self, hidden: Tensor, chunk: int) -> "DeferredLogits":
        """Return logits of hidden [s, b, h] or its shard that the loss will compute for `chunk` tokens at a time."""
        from .linear_cross_entropy import DeferredLogits

        # The factors are cast to autocast's dtype now, because autocast may end before the loss is computed.
        hidden, weight = in_autocast_dtype(hidden, self.weight)
        return DeferredLogits(hidden, weight, self.axis, self.options, chunk)


class ColumnParallelLinear(Sharded):
    """Linear layer y = x W^T + b with W sharded by output feature: each rank computes its own columns of y.

    gather_output: return all o output features, [..., o], on every rank. If False, each of the t ranks returns its own
    features, [..., o/t].
    skip_bias_add: leave the bias to the caller, who may fuse it with the next operation.
    Returns `(output, bias)`; bias is None without skip_bias_add.
    Raises ValueError unless the number of ranks divides the number of output features.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: InitMethod = NORMAL,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        axis: Axis | None = None,
        options: Options | None = None,
    ) -> None:
        super().__init__(axis, options)
        check_strides(stride, keep_master_weight_for_test)  # Megatron-LM's arguments, of which only defaults work
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add
        columns = size_per_rank(output_size, self.axis, "an output size of")
        self.input_size = input_size
        self.output_size = output_size
        self.output_size_per_partition = columns
        weight = nn.Parameter(torch.empty(columns, input_size))
        self.weight = declare(weight, init_method, dim=0, full_size=output_size, axis=self.axis)  # [o/t, i]
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = declare(nn.Parameter(torch.zeros(columns)), dim=0, full_size=output_size, axis=self.axis)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Apply the layer: x [..., i] (or its shard [s/t, b, i]) -> [..., o/t], or with gather_output [..., o]."""
        bias = None if self.skip_bias_add else self.bias  # with skip_bias_add, the caller adds it
        y = linear(x, self.weight, bias, self.axis, self.options)
        if self.gather_output:
            y = mappings.gather_from_model_parallel_region(y, self.axis)
        if self.skip_bias_add:
            return y, self.bias
        return y, None


class RowParallelLinear(Sharded):
    """Linear layer y = x W^T + b with W sharded by input feature: the ranks' partial results are summed.

    input_is_parallel: x is already sharded, as the output of a ColumnParallelLinear.
    skip_bias_add: leave the bias (on every rank, added once) to the caller, who may fuse it with the next operation.
    Returns `(output, bias)`; bias is None without skip_bias_add.
    Raises ValueError unless the number of ranks divides the number of input features.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: InitMethod = NORMAL,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        axis: Axis | None = None,
        options: Options | None = None,
    ) -> None:
        super().__init__(axis, options)
        check_strides(stride, keep_master_weight_for_test)  # Megatron-LM's arguments, of which only defaults work
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        rows = size_per_rank(input_size, self.axis, "an input size of")
        self.input_size = input_size
        self.output_size = output_size
        self.input_size_per_partition = rows
        weight = nn.Parameter(torch.empty(output_size, rows))
        self.weight = declare(weight, init_method, dim=1, full_size=input_size, axis=self.axis)  # [o, i/t]
        self.bias: nn.Parameter | None = None
        if bias:
            sequence = self.options.sequence_axis(self.axis)  # these ranks add the bias to different tokens
            self.bias = declare(nn.Parameter(torch.zeros(output_size)), sequence=sequence)  # [o]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Apply the layer: x [..., i/t] (without input_is_parallel [..., i]) -> [..., o], or its shard [s/t, b, o]."""
        if not self.input_is_parallel:
            x = mappings.scatter_to_model_parallel_region(x, self.axis)
        partial_sums = linear(x, self.weight, None, TRIVIAL_AXIS, self.options)  # TRIVIAL_AXIS: no communication
        y = self.sum_over_ranks(partial_sums)  # before the bias, which is added once
        if self.skip_bias_add:
            return y, self.bias
        if self.bias is not None:
            y = y + self.bias
        return y, None


class LayerNorm(nn.LayerNorm):
    """LayerNorm (Ba et al. 2016) with weights declared as replicated on the model-parallel ranks.

    In bf16 on a CPU, it sums the gradients of its weights in fp32, unlike torch's; see `wide_sums.py`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for weight, init_method in ((self.weight, ones), (self.bias, zeros)):
            if weight is not None:
                declare(weight, init_method, sequence=parallel_context().sequence)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., h] -> [..., h]."""
        return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
