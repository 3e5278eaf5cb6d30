"""Record of a parameter: which part of the whole parameter this rank holds, and how its initial values are drawn.

Initial values do not depend on the number of model-parallel ranks. A large parameter is drawn in blocks of rows, each
from its own seed, and a rank draws only the blocks in which it holds rows. If an initialiser needs the whole parameter,
every rank draws all of it and keeps its part.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..seeds import derive_seed
from .current import parallel_context
from .fused_rows import FusedRows
from .mappings import all_reduce
from .mesh import TRIVIAL_AXIS, Axis
from .random import seeded

InitMethod = Callable[[Tensor], object]  # fills a whole weight in place, like the functions of torch.nn.init

zeros: InitMethod = nn.init.zeros_
ones: InitMethod = nn.init.ones_

# Initialisers that draw each element independently of the others and of the shape.
_ELEMENTWISE_INITS = (
    nn.init.zeros_, nn.init.ones_, nn.init.constant_, nn.init.normal_, nn.init.uniform_, nn.init.trunc_normal_,
)  # fmt: skip
BLOCK_ELEMENTS = 1 << 20  # elements of a block of rows that one seed draws; a longer row is a block by itself


def normal(std: float) -> InitMethod:
    """Return an initialiser that draws from a normal distribution of mean 0 and standard deviation `std`."""
    return partial(nn.init.normal_, mean=0.0, std=std)


NORMAL = normal(0.02)  # initialisation of the weights of GPT-2 and BERT


def draw_rows(
    part: Tensor, begin: int, dim: int, full_shape: Sequence[int], init_method: InitMethod, seed: int
) -> None:
    """Draw initial values of `part`, rows of a parameter [*full_shape] from row `begin` on along dimension `dim`.

    Each block of rows has its own seed, so a row has the same values in any part. With blocks of 4 rows, a part of
    rows 2 to 7 draws the blocks of rows 0 to 3 and 4 to 7, and drops rows 0 and 1.
    """
    end = begin + part.shape[dim]
    elements_per_row = math.prod(full_shape) // max(full_shape[dim], 1)
    block_rows = max(BLOCK_ELEMENTS // max(elements_per_row, 1), 1)  # at least one, however long a row is
    block_shape = list(full_shape)
    for block_begin in range(begin - begin % block_rows, end, block_rows):  # the first block contains row `begin`
        block_shape[dim] = min(block_rows, full_shape[dim] - block_begin)  # the last block may have fewer rows
        block = torch.empty(block_shape, dtype=part.dtype, device="cpu")
        # The first block uses `seed` itself, so a parameter of one block has the values of a draw of the whole.
        block_seed = derive_seed(seed, "rows", block_begin) if block_begin else seed
        with seeded(block_seed):
            init_method(block)
        # Copy the rows that the block and the part have in common.
        copy_begin = max(block_begin, begin)
        num_rows = min(block_begin + block_rows, end) - copy_begin
        drawn = block.narrow(dim, copy_begin - block_begin, num_rows)
        part.narrow(dim, copy_begin - begin, num_rows).copy_(drawn)


class Rows(NamedTuple):
    """Rows `begin` to `end` (exclusive) along dimension `dim` of a whole parameter."""

    dim: int
    begin: int
    end: int


@dataclass
class ParamSpec:
    """Record of this rank's part of a parameter, attached to it as `parameter.spec`.

    Shapes: [local] of this rank's part, padding included; [full] of the whole parameter, without padding.
    init_method: draws the initial values; None keeps those that the module has set.
    dim: the sharded dimension, None if every rank holds a copy.
    full_size: size of the sharded dimension over all ranks, without padding.
    rank, size: index of this rank's part, and number of parts.
    fused: order of the rows of several matrices that this parameter holds; None if it is one matrix.
    used_as_embedding: this rank looks up rows of the parameter, so autograd adds a gradient of the look-up.
    accumulate_wgrad: function that an optimizer sets. It gets the two factors of the gradient of a linear layer's
    weight, [o, n] and [n, i], and adds their product to the gradient, or returns False to leave this to autograd.
    """

    local_shape: tuple[int, ...]
    init_method: InitMethod | None = None
    dim: int | None = None
    full_size: int = 0
    rank: int = 0
    size: int = 1
    fused: FusedRows | None = None
    used_as_embedding: bool = False
    accumulate_wgrad: Callable[[Tensor, Tensor], bool] | None = None

    @property
    def split(self) -> bool:
        """True if other ranks hold other parts of the parameter."""
        return self.dim is not None and self.size > 1

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part, padding included; a parameter without dimensions is stored as [1]."""
        return self.local_shape or (1,)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, as on one rank and without padding; [1] for one without dimensions."""
        shape = list(self.stored_shape)
        if self.dim is not None:
            shape[self.dim] = self.full_size
        return tuple(shape)

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Shapes of the whole matrices that this weight [o, i] fuses, or its own shape if it is one matrix."""
        rows, columns = self.full_shape
        # For example, 96 rows in parts (2, 1, 1) fuse matrices of 48, 24 and 24 rows.
        blocks_per_matrix = self.fused.parts if self.fused else (1,)
        rows_per_block = rows // sum(blocks_per_matrix)
        return [(rows_per_block * blocks, columns) for blocks in blocks_per_matrix]

    @property
    def rows(self) -> Rows:
        """Rows of the whole parameter that this rank holds, without padding: all rows if it holds a copy."""
        if self.dim is None:  # a copy, with rows along dimension 0
            return Rows(0, 0, self.stored_shape[0])
        length = self.local_shape[self.dim]
        begin = min(self.rank * length, self.full_size)
        end = min((self.rank + 1) * length, self.full_size)  # of 10 rows, rank 3 with length 3 has row 9 and padding
        return Rows(self.dim, begin, end)

    def without_padding(self, part: Tensor) -> Tensor:
        """Return a view [rows, ...], without padding rows, of `part`, this rank's part (perhaps flattened)."""
        dim, begin, end = self.rows
        return part.view(self.stored_shape).narrow(dim, 0, end - begin)

    def with_padding(self, rows: Tensor) -> Tensor:
        """Pad this rank's `rows` [rows, ...] with zeros to `local_shape`; return `rows` itself if it has this shape."""
        if rows.shape == self.local_shape:
            return rows
        part = torch.zeros(self.local_shape, dtype=rows.dtype)
        self.without_padding(part).copy_(rows)
        return part

    @torch.no_grad()
    def put(self, whole: Tensor, parameter: Tensor) -> None:
        """Copy this rank's rows of a `whole` parameter [full] into `parameter` [local]; padding becomes zero."""
        dim, begin, end = self.rows
        parameter.zero_()
        self.without_padding(parameter).copy_(whole.narrow(dim, begin, end - begin))

    @torch.no_grad()
    def fill(self, parameter: nn.Parameter, seed: int | None = None) -> None:
        """Draw the initial values of `parameter`, this rank's part.

        seed: seed of the values; None draws them from torch's generator. A draw from a seed leaves torch's generator
        unchanged, so only such draws are skipped inside `skip_init`; skipping others would change the later ones. Does
        nothing if no initialiser was declared or the parameter is on the meta device.
        """
        init_method = self.init_method
        if init_method is None or parameter.is_meta:
            return
        if seed is None:
            self._fill_from_whole(parameter, init_method)
            return
        if parallel_context().skip_init:  # all weights are loaded from a file afterwards
            return
        function = getattr(init_method, "func", init_method)  # `normal` returns a partial; `func` is its function
        # If the initialiser draws each element independently, this rank can draw its rows [n, ...] alone.
        if function in _ELEMENTWISE_INITS:
            dim, begin, _ = self.rows
            parameter.zero_()  # also the padding, which no draw covers
            draw_rows(self.without_padding(parameter), begin, dim, self.full_shape, init_method, seed)
            return
        with seeded(seed):  # other initialisers, such as orthogonal_, need the whole parameter
            self._fill_from_whole(parameter, init_method)

    def _fill_from_whole(self, parameter: nn.Parameter, init_method: InitMethod) -> None:
        """Draw the whole parameter from torch's generator, and copy this rank's part."""
        whole = torch.empty(self.full_shape, dtype=parameter.dtype, device="cpu")
        init_method(whole)
        self.put(whole, parameter)


def spec_of(parameter: Tensor) -> ParamSpec:
    """Return the record of `parameter` [any shape]; an undeclared parameter counts as replicated on every rank.

    The record of a parameter that ZeRO-3 has partitioned has the shape before partitioning.
    """
    spec = getattr(parameter, "spec", None)
    if isinstance(spec, ParamSpec):
        return spec
    return ParamSpec(tuple(getattr(parameter, "ds_shape", parameter.shape)))


def sharded_by_zero(parameter: Tensor) -> bool:
    """Return whether ZeRO stage 3 shards `parameter` [any shape].

    A sharded weight can have its whole shape, because ZeRO 3 may gather it before the module that uses it runs.
    """
    return hasattr(parameter, "ds_shape")


def replicas_of(parameter: Tensor) -> Axis:
    """Return the ranks of the data axis that hold `parameter` [any shape]: all, or only some if it is of an expert."""
    mesh = parallel_context().mesh
    return mesh.expert_replicas if hasattr(parameter, "replica_group") else mesh.data


def declare(
    parameter: nn.Parameter,
    init_method: InitMethod = zeros,
    *,
    dim: int | None = None,
    full_size: int | None = None,
    axis: Axis | None = None,
    sequence: Axis | None = None,
) -> nn.Parameter:
    """Initialise `parameter`, this rank's part, and attach its record `parameter.spec`.

    init_method: fills the whole parameter, on the CPU, from torch's default generator, which must have the same seed
    on all ranks that hold parts of the parameter.
    dim: the dimension that is sharded over `axis`, counted from the end if negative; None for a copy on every rank.
    full_size: size of the sharded dimension over all ranks, without padding; by default there is no padding.
    axis: by default the model axis of the current context, as in the layers of this package.
    sequence: the ranks over which each declaration sums the gradients of a copy, because each rank sees only its
    shard of the sequence or of the heads, as for weights of norms, biases added after a reduce-scatter, and positions.
    """
    if dim is None:
        axis = TRIVIAL_AXIS  # one part, the whole parameter, of which each rank holds a copy
    else:
        axis = axis or parallel_context().mesh.model
        num_dims = parameter.dim()
        if not -num_dims <= dim < num_dims:
            raise ValueError(
                f"mpu.declare: dim {dim} is no dimension of a parameter of shape {list(parameter.shape)}; give one "
                "that it has, or None for a copy on every rank"
            )
        dim %= num_dims  # -1 becomes the last dimension
        if full_size is None:  # no padding
            full_size = parameter.shape[dim] * axis.size
    spec = ParamSpec(tuple(parameter.shape), init_method, dim, full_size or 0, axis.rank, axis.size)
    parameter.spec = spec  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = spec.split  # type: ignore[attr-defined]  # the name DeepSpeed and Megatron read
    if sequence is not None and sequence.size > 1 and parameter.requires_grad:
        parameter.register_hook(partial(all_reduce, axis=sequence))  # type: ignore[no-untyped-call]
    if not parallel_context().defer_init:  # else the caller fills the parameter later
        spec.fill(parameter)
    return parameter
