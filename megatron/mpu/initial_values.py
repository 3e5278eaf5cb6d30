"""Initial values of parameters, which do not depend on the number of model-parallel ranks.

A large parameter is drawn in blocks of rows, each from its own seed, and a rank draws only the blocks in which it
holds rows. If an initialiser needs the whole parameter, every rank draws all of it and keeps its part.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

InitMethod = Callable[[Tensor], object]  # fills a whole weight in place, like the functions of torch.nn.init

zeros: InitMethod = nn.init.zeros_
ones: InitMethod = nn.init.ones_

# Initialisers that draw each element independently of the others and of the shape.
_ELEMENTWISE_INITS = (
    nn.init.zeros_,
    nn.init.ones_,
    nn.init.constant_,
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.trunc_normal_,
)
BLOCK_ELEMENTS = 1 << 20  # elements of a block of rows that one seed draws; a longer row is a block by itself


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed derived from `parts`, the same on every machine and Python version."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's generator of `device`, by default the CPU, inside the block; restore its state afterwards."""
    if device is None or device.type == "cpu":
        saved_state = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)
        restore = torch.set_rng_state
    else:
        module = torch.get_device_module(device)
        saved_state = module.get_rng_state(device)
        restore = partial(module.set_rng_state, device=device)
        module.manual_seed(seed)
    try:
        yield
    finally:
        restore(saved_state)


def normal(std: float) -> InitMethod:
    """Return an initialiser that draws from a normal distribution of mean 0 and standard deviation `std`."""
    return partial(nn.init.normal_, mean=0.0, std=std)


NORMAL = normal(0.02)  # initialisation of the weights of GPT-2 and BERT


def draws_each_element(init_method: InitMethod) -> bool:
    """Return whether the initialiser draws each element independently, so that it can draw rows [n, ...] alone."""
    return getattr(init_method, "func", init_method) in _ELEMENTWISE_INITS


def draw_rows(
    part: Tensor, begin: int, dim: int, full_shape: Sequence[int], init_method: InitMethod, seed: int
) -> None:
    """Draw the rows of a parameter [*full_shape] from row `begin` along `dim` on into `part`, which has some of them.

    For example, with blocks of 4 rows, a part of rows 2 to 7 draws the blocks of rows 0 to 3 and 4 to 7, and leaves
    out rows 0 and 1.
    """
    end = begin + part.shape[dim]
    shape = list(full_shape)
    # As many rows as fit into BLOCK_ELEMENTS, but at least one. A row has prod(shape) / shape[dim] elements.
    block_rows = max(BLOCK_ELEMENTS * shape[dim] // max(math.prod(shape), 1), 1)
    for block_begin in range(begin - begin % block_rows, end, block_rows):
        shape[dim] = min(block_rows, full_shape[dim] - block_begin)
        block = torch.empty(shape, dtype=part.dtype, device="cpu")
        # The first block uses `seed` itself, so a parameter of one block has the values of a draw of the whole.
        with seeded(derive_seed(seed, "rows", block_begin) if block_begin else seed):
            init_method(block)
        copy_begin = max(block_begin, begin)
        rows = min(block_begin + shape[dim], end) - copy_begin
        part.narrow(dim, copy_begin - begin, rows).copy_(block.narrow(dim, copy_begin - block_begin, rows))
