"""Squared norms of the weights, gradients and updates of a step by layer, for any optimizer and ZeRO stage."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._deepspeed import Zero3Optimizer
from ._torch import norms
from .clip import counted_squared_norm, weights_of
from .optimizer_state import local_shard, stepped_tensors
from .optimizers import torch_optimizer_of
from .param_replicas import is_first_holder


class _Slice(NamedTuple):
    """Elements `start` to `start + numel` of the flattened `owner`, a tensor that the optimizer steps.

    layer: index of the layer to which these elements belong.
    """

    owner: Tensor
    start: int
    numel: int
    layer: int

    def narrow(self, tensor: Tensor) -> Tensor:
        """Return the slice of a tensor of the owner's shape."""
        return tensor.detach().reshape(-1).narrow(0, self.start, self.numel)


class StepNorms:
    """Squared norms by layer of this rank's shards, to be summed over all ranks.

    `begin` starts the measurement of a step; `take` returns it after the step. Meanwhile, a copy of this rank's shards
    of the weights is in memory.

    layers: parameter -> index of its layer, for the parameters that this rank counts. count: number of layers.
    first_replica: whether this rank is the first of its replicas; without ZeRO, only that one counts.
    """

    def __init__(self, engine: Any, layers: Mapping[nn.Parameter, int], count: int, first_replica: bool) -> None:
        self._engine = engine
        self._layers = layers
        self._count = count
        self._is_first_replica = first_replica
        self._slices: list[_Slice] | None = None  # None: do not measure
        self._weights_before: dict[Tensor, Tensor] = {}
        inner = torch_optimizer_of(engine)
        inner.register_step_pre_hook(self._before_step)
        inner.register_step_post_hook(self._after_step)

    def begin(self) -> None:
        """Measure the next step."""
        self._slices = list(self._find_slices())
        self._gradients = self._zeros()
        self._updates = self._zeros()

    def take(self) -> Tensor:
        """Return the squared norms of weights, gradients and updates, [3, layers] in fp64, after the step.

        The gradients may be scaled, each by the same factor: they are what the optimizer got, clipped or not.
        """
        assert self._slices is not None, "begin() comes first"
        stepped = [(each.layer, each.narrow(each.owner)) for each in self._slices]
        weights = self._sums(stepped)
        # The optimizer does not step frozen weights. Of copies on the replicas, one counts; ZeRO-3 has no copies.
        frozen = []
        for p, layer in self._layers.items():
            if p.requires_grad:
                continue
            if hasattr(p, "ds_id") or is_first_holder(p, self._is_first_replica):
                elements = local_shard(p).detach().reshape(-1)
                frozen.append((layer, elements[: _unpadded_numel(p)]))
        weights += self._sums(frozen)
        self._slices = None
        return torch.stack([weights, self._gradients, self._updates])

    def _zeros(self) -> Tensor:
        return torch.zeros(self._count, dtype=torch.float64, device=self._engine.device)

    def _sums(self, pieces: Iterable[tuple[int, Tensor]]) -> Tensor:
        """Return the sums of squares by layer of (layer, tensor) pairs."""
        total = self._zeros()
        layers = []
        tensors = []
        for layer, piece in pieces:
            if piece.numel():
                layers.append(layer)
                if piece.dtype.itemsize < 4:  # 16 bits would round the norm, so take it now, from a copy in fp32
                    (piece,) = norms([piece.float()])  # the norm of a scalar is the scalar itself
                tensors.append(piece)
        if tensors:
            tensor_norms = torch.stack([norm.to(total.device) for norm in norms(tensors)])
            total.index_add_(0, torch.tensor(layers, device=total.device), tensor_norms.double().square())
        return total

    def _find_slices(self) -> Iterator[_Slice]:
        """Yield this rank's slices of the tensors that the optimizer steps."""
        optimizer = self._engine.optimizer
        stepped = stepped_tensors(self._engine)
        by_storage = {each.untyped_storage().data_ptr(): each for each in stepped}
        for parameter, index in self._layers.items():
            if not parameter.requires_grad:
                continue
            if isinstance(optimizer, Zero3Optimizer):
                # (index of the parameter group, first element in the group's shard, number of elements with padding)
                group, start, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
                yield _Slice(stepped[group], start, _unpadded_numel(parameter), index)
            elif hasattr(parameter, "_hp_mapping"):
                mapping: Any = parameter._hp_mapping
                if mapping is not None:  # else no element of it is in this rank's shards
                    # `hp_fragment`, the weight's elements in fp32, views the memory of one of the stepped shards.
                    owner = by_storage[mapping.hp_fragment.untyped_storage().data_ptr()]
                    address = mapping.hp_fragment_address
                    yield _Slice(owner, address.start, address.numel, index)
            elif is_first_holder(parameter, self._is_first_replica):  # unsharded; of its copies, one counts
                yield _Slice(parameter, 0, parameter.numel(), index)

    def _before_step(self, inner: torch.optim.Optimizer, *_: Any) -> None:
        """Measure the gradients and copy the weights of this call; DeepSpeed may step groups in separate calls."""
        if self._slices is None:
            return
        grads = {p: p.grad for p in weights_of(inner) if p.grad is not None}
        gradients = []
        self._weights_before = {}
        for each in self._slices:
            owner = each.owner
            if owner in grads:
                gradients.append((each.layer, each.narrow(grads[owner].to_dense())))
                self._weights_before[owner] = owner.detach().clone()
        self._gradients += self._sums(gradients)

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        """Measure the updates of the weights that `_before_step` has copied."""
        for owner, change in self._weights_before.items():
            change.sub_(owner.detach())  # minus the update, which has the same norm
        updates = []
        for each in self._slices or ():
            if each.owner in self._weights_before:
                updates.append((each.layer, each.narrow(self._weights_before[each.owner])))
        if updates:
            self._updates += self._sums(updates)
        self._weights_before = {}


def _unpadded_numel(parameter: Any) -> int:
    """Return the number of elements of this rank's part; ZeRO 3 pads shards with uninitialised memory at the end."""
    if not hasattr(parameter, "ds_id"):
        return int(parameter.numel())
    # For example, 10 elements on 4 replicas: shards have 3 elements, and the last rank's shard has 1 and padding.
    size = parameter.ds_tensor.numel()
    return int(max(0, min(size, parameter.ds_numel - size * dist.get_rank(parameter.ds_process_group))))


def squared_norm(tensor: Tensor) -> Tensor:
    """Return the squared norm of a tensor of any size, a scalar in fp64.

    torch's own norm of a large fp32 tensor on a CPU has an error of 1e-3.
    """
    return counted_squared_norm([(tensor, True)], tensor.device)
