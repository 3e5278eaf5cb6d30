"""Selective recomputation of cheap results in the backward pass (Korthikanti et al. 2022).

torch's fused attention saves no scores. Most of what a layer saves are therefore the outputs of its norms, its queries,
keys and values, and the output of its activation function. The inputs of these operations are saved anyway. In place of
such an output, autograd can save a `Recipe`, with which the backward pass recomputes the output from the input.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.autocast import present_autocast


class Recipe:
    """Function and input from which a tensor is recomputed; the recomputed tensor is cached until its last use.

    source: the input of `function`, or the input's own recipe if the input is not saved either.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], source: "Tensor | Recipe") -> None:
        self._function = function
        if isinstance(source, Recipe):
            self._source: Tensor | Recipe = source
            self._autocast: AbstractContextManager[object] = source._autocast
        else:
            self._source = source.detach()
            # The backward pass recomputes under the torch.autocast of this forward pass.
            self._autocast = present_autocast(source.device)
        # Number of registered views, and how many of them are still to take the result after it was recomputed.
        self._uses = self._uses_left = 0
        self._result: Tensor | None = None

    def recompute(self) -> Tensor:
        """Recompute the result [...] from its source."""
        source = self._source.recompute() if isinstance(self._source, Recipe) else self._source
        with torch.no_grad(), self._autocast:
            return self._function(source)

    def register_view(self, tensor: Tensor) -> "_RecomputedView":
        """Register `tensor` [...], a view of the result, and return what autograd saves in place of this tensor."""
        self._uses += 1
        return _RecomputedView(self, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def take_result(self) -> Tensor:
        """Return the result [...], recomputed once for all registered views."""
        if self._result is None:
            self._result = self.recompute()
            self._uses_left = self._uses
        result = self._result
        self._uses_left -= 1
        if not self._uses_left:  # the last view has it now, so free it
            self._result = None
        return result


class _RecomputedView(NamedTuple):
    """Object that autograd saves in place of a tensor: the recipe of the memory that it views, and its place in it."""

    recipe: Recipe
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextmanager
def save_recipe_for(*results: tuple[Recipe | None, Tensor | None]) -> Iterator[None]:
    """Make autograd save recipes in place of tensors and their views inside the block.

    results: pairs (recipe, tensor). If the recipe is None, autograd saves the tensor itself.
    """
    recipe_by_address = {}  # views of a tensor have the same address of memory, and so the same recipe
    for recipe, tensor in results:
        if recipe and tensor is not None:
            recipe_by_address[tensor.untyped_storage().data_ptr()] = recipe
    if not recipe_by_address:  # autograd saves tensors as usual
        yield
        return

    def pack(tensor: Tensor) -> Any:
        recipe = recipe_by_address.get(tensor.untyped_storage().data_ptr())
        if recipe:
            return recipe.register_view(tensor)
        # An operation's own output would refer to the operation, and such a cycle is not always freed.
        return tensor.detach()

    with saved_tensors_hooks(pack, _unpack):
        yield


def _unpack(saved: Any) -> Tensor:
    """Return the tensor that `save_recipe_for` saved, recomputed if a recipe was saved in its place."""
    if not isinstance(saved, _RecomputedView):
        return saved  # type: ignore[no-any-return]
    return saved.recipe.take_result().as_strided(saved.size, saved.stride, saved.offset)


def run_on_recomputed(function: Callable[[Tensor], Tensor], consumer: Callable[..., Any], x: Tensor) -> Any:
    """Return `consumer(function(x), recipe=...)` for x [...], where the backward pass recomputes `function(x)`."""
    result = function(x)
    recipe = Recipe(function, x)
    with save_recipe_for((recipe, result)):
        return consumer(result, recipe=recipe)
