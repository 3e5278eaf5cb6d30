"""What is cheap to compute is computed again in the backward pass instead of being kept (Korthikanti et al. 2022).

torch's fused attention keeps no scores, so what a layer keeps most of are the outputs of its norms, its queries, keys
and values, and what its activation function puts out. Each of these is a result whose own inputs are kept anyway: a
`Recipe` stands in its place among what autograd saves, and cooks it when the backward pass asks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Recipe:
    """How to compute a tensor again, and the result for as long as somebody is still to ask for it.

    source: what `function` is given, or the recipe for that where it is not kept either.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], source: "Tensor | Recipe") -> None:
        self._function, self._source = function, source if isinstance(source, Recipe) else source.detach()
        self._uses = self._left = 0
        self._found: Tensor | None = None

    def cook(self) -> Tensor:
        """[...], computed again from what the result was made of."""
        source = self._source.cook() if isinstance(self._source, Recipe) else self._source
        with torch.no_grad():
            return self._function(source)

    def view(self, tensor: Tensor) -> "_View":
        """What is saved of `tensor` [...], a view of the result."""
        self._uses += 1
        return _View(self, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def ask(self) -> Tensor:
        """The result, [...]; computed once for all views."""
        if self._found is None:
            self._found, self._left = self.cook(), self._uses
        found, self._left = self._found, self._left - 1
        if not self._left:
            self._found = None
        return found


class _View(NamedTuple):
    recipe: Recipe
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextmanager
def instead_of(*results: tuple[Recipe | None, Tensor | None]) -> Iterator[None]:
    """Whatever saves one of these results, or a view of it, within this block saves its recipe, if there is one."""
    recipes = {r.untyped_storage().data_ptr(): recipe for recipe, r in results if recipe and r is not None}
    if not recipes:
        yield
        return

    def pack(tensor: Tensor) -> Any:
        recipe = recipes.get(tensor.untyped_storage().data_ptr())
        return recipe.view(tensor) if recipe else tensor

    with saved_tensors_hooks(pack, _unpack):
        yield


def _unpack(kept: Any) -> Tensor:
    if not isinstance(kept, _View):
        return kept  # type: ignore[no-any-return]
    return kept.recipe.ask().as_strided(kept.size, kept.stride, kept.offset)
