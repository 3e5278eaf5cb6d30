"""Muon: momentum that is orthogonalised matrix by matrix, for hidden layers; AdamW for all other weights.

Muon is from Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/). The updates are those of
torch.optim.Muon. A weight that fuses several matrices, such as query, key and value, is orthogonalised as these
matrices. A matrix that is sharded over the tensor-parallel ranks is orthogonalised as a whole, see `whole_matrices.py`.
"""

import math
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.config import OptimConfig
from megatron.config.mup import muon_divisor, muon_ratio
from megatron.mpu import Options, ParamSpec, get_mesh, get_options, spec_of
from megatron.mpu.linear import choose_kernels, matmul

from .whole_matrices import apply_to_whole_matrices, matrix_work

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # coefficients of torch.optim.Muon's quintic iteration
EPS = 1e-7
MOMENTUM, ADAM = ("momentum_buffer",), ("exp_avg", "exp_avg_sq")  # names of the moments of the two kinds of weights
BATCH_ELEMENTS = 1 << 24  # elements on this rank that are orthogonalised together; this bounds the memory of a step
DEFAULT_OPTIONS = Options()

Groups = list[dict[str, Any]]


def orthogonalise(matrix: Tensor, steps: int, options: Options = DEFAULT_OPTIONS) -> Tensor:
    """Return U V^T approximately, where U S V^T is the singular value decomposition of `matrix` [o, i], in its dtype.

    This is a Newton-Schulz iteration. It moves all singular values to about 1, roughly between 0.7 and 1.2.
    options: decide whether oneDNN multiplies fp32 matrices on a CPU.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=EPS)  # now all singular values are at most 1
    second_kernel = choose_kernels(x, x, options).output
    # Each step computes a x + (b G + c G G) x for G = x x^T. `matmul` transposes its second factor; G is symmetric.
    for _ in range(steps):
        gram = matmul(x, x, None, second_kernel)
        if second_kernel:
            polynomial = matmul(gram, gram, None, second_kernel).mul_(c).add_(gram, alpha=b)
            x = matmul(polynomial, x.T, None, second_kernel).add_(x, alpha=a)
        else:
            polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


class _Piece(NamedTuple):
    """A weight that this rank steps: its record, and its tensors, [local shape] each."""

    spec: ParamSpec
    weight: Tensor
    grad: Tensor
    momentum: Tensor


class Muon(torch.optim.Optimizer):
    """Muon for the weights in `matrices`, AdamW for all others.

    groups: parameter groups of both kinds of weights; groups without weight_decay have none. dtype: dtype of the
    Newton-Schulz iteration; None: that of the weights. adamw: builds the AdamW optimizer of some groups.
    Raises ValueError if a weight in `matrices` has not two dimensions.

    `tds.DistributedOptimizer` reads `whole_work`, and passes flat shares of several matrices, whose attribute `pieces`
    lists (weight, begin of its elements in the share).
    """

    def __init__(
        self,
        groups: Groups,
        matrices: Collection[nn.Parameter],
        config: OptimConfig,
        adamw: Callable[[Groups], torch.optim.Optimizer],
        dtype: torch.dtype | None = None,
    ) -> None:
        self._matrices = set(matrices)
        self._config = config
        self._dtype = dtype
        self._options = get_options()
        for p in self._matrices:
            if len(spec_of(p).local_shape) != 2:
                raise ValueError(
                    f"--optimizer muon steps matrices, but a weight with use_muon has the shape {tuple(p.shape)}: "
                    "remove its attribute use_muon"
                )
        muon_groups = Groups()
        adamw_groups = Groups()
        for group in groups:
            muon_params = [p for p in group["params"] if p in self._matrices]
            adamw_params = [p for p in group["params"] if p not in self._matrices]
            factor = group.get("lr_factor", 1.0) * config.muon_lr_factor
            if muon_params:
                muon_settings = {"use_muon": True, "lr": config.lr, "lr_factor": factor}
                # A later entry replaces an earlier one of the same name.
                muon_groups.append({"weight_decay": 0.0, **group, **muon_settings, "params": muon_params})
            if adamw_params:
                adamw_groups.append({**group, "params": adamw_params, "use_muon": False})
        self.adamw = adamw(adamw_groups) if adamw_groups else None
        super().__init__([*muon_groups, *adamw_groups], {})

    def moments_of(self, tensor: Tensor) -> tuple[str, ...]:
        """Return the names of the moments of `tensor`, a weight or a flat share of weights [any shape]."""
        return MOMENTUM if tensor in self._matrices or hasattr(tensor, "pieces") else ADAM

    def whole_work(self, parameter: nn.Parameter) -> int | None:
        """Return the work of a matrix that one replica must step as a whole; None for weights of AdamW."""
        return matrix_work(spec_of(parameter)) if parameter in self._matrices else None

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step all weights that have a gradient. An engine computes the gradients before, so there is no closure."""
        adamw = self.adamw
        if adamw is not None:
            # `load_state_dict` replaces both of these attributes.
            adamw.param_groups = [group for group in self.param_groups if not group["use_muon"]]
            adamw.state = self.state
            adamw.step()
        model_ranks = get_mesh().model.size
        for group in self.param_groups:
            if not group["use_muon"]:
                continue
            pieces_of_group = chain.from_iterable(map(self._pieces_of, group["params"]))
            for pieces in _in_batches(pieces_of_group, model_ranks):
                self._step_together(pieces, group["lr"], group["weight_decay"])

    def _pieces_of(self, p: nn.Parameter) -> Iterator[_Piece]:
        """Yield the weights of `p`, a weight [o, i] or a flat share of several weights [n], if it has a gradient."""
        if p.grad is None:
            return
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        tensors = p.detach(), p.grad, state["momentum_buffer"]  # the last three fields of `_Piece`
        if not hasattr(p, "pieces"):  # a single weight
            yield _Piece(spec_of(p), *tensors)
            return
        # A share, its gradient and its momentum are flat, [n], and hold each weight in the same range of elements.
        for weight, begin in p.pieces:
            spec = spec_of(weight)
            end = begin + math.prod(spec.local_shape)
            yield _Piece(spec, *(tensor[begin:end].view(spec.local_shape) for tensor in tensors))

    def _step_together(self, pieces: list[_Piece], lr: float, weight_decay: float) -> None:
        """Update the momentum of all pieces, orthogonalise their updates, and step their weights.

        All tensor-parallel ranks must call this with shards of the same weights.
        """
        config = self._config
        updates = list[Tensor]()  # the momentum of each piece, or Nesterov's momentum
        for _, _, grad, momentum in pieces:
            momentum.lerp_(grad, 1 - config.muon_momentum)
            update = grad.lerp(momentum, config.muon_momentum) if config.muon_nesterov else momentum
            if self._dtype is not None:
                update = update.to(self._dtype)
            updates.append(update)
        specs = [piece.spec for piece in pieces]
        orthogonalise_matrix = partial(orthogonalise, steps=config.muon_ns_steps, options=self._options)
        orthogonal_updates = apply_to_whole_matrices(orthogonalise_matrix, updates, specs, get_mesh().model)
        for (spec, weight, *_), update in zip(pieces, orthogonal_updates, strict=True):
            weight.mul_(1 - lr * weight_decay)
            ratios = _lr_ratios(spec, config.muon_adjust_lr_fn)
            if isinstance(ratios, float):
                weight.add_(update, alpha=-lr * ratios)
            else:  # fused matrices with different factors: one factor for each row
                weight.sub_(ratios.to(weight).mul_(lr) * update)


def _in_batches(pieces: Iterator[_Piece], model_ranks: int) -> Iterator[list[_Piece]]:
    """Yield lists of pieces of about BATCH_ELEMENTS elements, and of at least two for each tensor-parallel rank."""
    batch = list[_Piece]()
    num_elements = 0
    for piece in pieces:
        batch.append(piece)
        num_elements += piece.weight.numel()
        if num_elements >= BATCH_ELEMENTS and (model_ranks == 1 or len(batch) >= 2 * model_ranks):
            yield batch
            batch = []
            num_elements = 0
    if batch:
        yield batch


def _lr_ratios(spec: ParamSpec, adjust_lr_fn: str) -> float | Tensor:
    """Return the factor on the learning rate, as a tensor [rows, 1] if the fused matrices have different factors.

    muP's factor of the first of the fused matrices is in the learning rate of the weight already.
    """
    shapes = spec.matrices
    ratios = [muon_ratio(shape, adjust_lr_fn) for shape in shapes]
    if spec.fused is None:
        return ratios[0]
    block_counts, block_rows, growth = spec.fused
    if len(set(growth)) > 1:  # muP scales the fused matrices differently
        # The learning rate of the whole weight is already divided by divisors[0], that of matrix 0. The factor
        # divisors[0] / divisor replaces it by the divisor of each matrix.
        divisors = [muon_divisor(factors, shape, adjust_lr_fn) for factors, shape in zip(growth, shapes, strict=True)]
        ratios = [ratio * divisors[0] / divisor for ratio, divisor in zip(ratios, divisors, strict=True)]
    if len(set(ratios)) == 1:
        return ratios[0]
    # For example, ratios (1, 2, 2) of query, key and value with blocks (2, 1, 1) of 1 row give the pattern 1, 1, 2, 2,
    # which repeats along the rows of the whole weight.
    row_counts = torch.tensor(block_counts) * block_rows
    pattern = torch.tensor(ratios, dtype=torch.float64).repeat_interleave(row_counts)
    row_ratios = pattern.repeat(spec.full_shape[0] // len(pattern))
    if spec.dim == 0:  # else this rank has all rows
        _, begin, end = spec.rows
        row_ratios = row_ratios[begin:end]
    return row_ratios.unsqueeze(1)
