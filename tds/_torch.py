"""Every name inside torch that this package uses without torch's promise (tested with the versions of pyproject.toml).

What has another way goes that way where the name is missing; what has none says so in a sentence.
"""

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_use_count = getattr(torch._C, "_storage_Use_Count", None)


def has_hooks(tensor: Tensor) -> bool:
    """Whether somebody else wants to see or change the gradient of `tensor`, on which this package has one hook."""
    return bool(tensor._backward_hooks) or len(tensor._post_accumulate_grad_hooks or ()) > 1  # type: ignore[attr-defined]


def users(tensor: Tensor) -> int:
    """How many tensors look into the memory of `tensor`, autograd's own and this one included. Raises RuntimeError if torch does not tell.

    Nothing public counts them, and a buffer that is handed out too early is a wrong number somewhere else.
    """
    if _use_count is None:
        raise RuntimeError(
            f"torch {torch.__version__} does not tell who uses a tensor's memory: use a version that tds is tested with"
        )
    return int(_use_count(tensor.untyped_storage()._cdata)) - 1


def default_store() -> Any:
    """The store that the ranks met at. Raises RuntimeError if torch does not give it.

    A store of our own would need a port of its own, which no launcher hands out.
    """
    found = getattr(dist.distributed_c10d, "_get_default_store", None)
    if found is None:
        raise RuntimeError(
            f"torch {torch.__version__} does not give the store of its ranks: use a version that tds is tested with"
        )
    return found()


def can_split(group: Any, device: torch.device) -> bool:
    """Return whether groups may be split off the communicator that `group` has on `device`."""
    return bool(group._get_backend(device).supports_splitting)


def recorded_collectives() -> list[dict[str, Any]]:
    """What torch's flight recorder holds, the oldest first; nothing where it is off or torch does not tell.

    The public way is a file that a process writes as it dies.
    """
    module = getattr(torch._C, "_distributed_c10d", None)
    found: list[dict[str, Any]] = []
    for name in (
        "_dump_nccl_trace_json",
        "_dump_fr_trace_json",
    ):  # NCCL has a recorder of its own, the others share one
        dump = getattr(module, name, None)
        if dump is not None:
            with contextlib.suppress(RuntimeError, TypeError, ValueError):
                found += json.loads(dump(includeCollectives=True)).get("entries", [])
    return found


ROW = 4096  # elements; torch's norm on a CPU is a plain fp32 sum, wrong by 5e-4 for 10 million elements


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each tensor, scalars: in one kernel on accelerators, and accurate to fp32 on CPUs, too."""
    if all(t.device.type == "cpu" for t in tensors):
        return [_norm_by_rows(t) for t in tensors]
    at_once = getattr(torch, "_foreach_norm", None)
    return list(at_once(tensors)) if at_once else [torch.linalg.vector_norm(t) for t in tensors]


def _norm_by_rows(tensor: Tensor) -> Tensor:
    """Return the 2-norm in fp64 from the norms of rows of `ROW` elements."""
    flat = tensor.reshape(-1)
    whole = flat.numel() // ROW * ROW
    squares: Tensor = torch.linalg.vector_norm(flat[whole:]).double().square()
    if whole:
        squares = squares + torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1).double().square().sum()
    return squares.sqrt()


def scale_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each by a scalar, in place; in one kernel for all where torch has it."""
    at_once = getattr(torch, "_foreach_mul_", None)
    if at_once:
        at_once(tensors, factor)
        return
    for t in tensors:
        t.mul_(factor)


_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def scatter_sum(share: Tensor, whole: Tensor, group: Any) -> Any:
    """Begin to add `whole` up over the group; `share`, this rank's part of its memory, then holds the sums, the rest anything.

    gloo's reduce-scatter takes four times as long as its all-reduce over four ranks.
    """
    if dist.get_backend(group) == "gloo":
        return dist.all_reduce(whole, group=group, async_op=True)
    return _reduce_scatter(share, whole, group=group, async_op=True)


def gather_shares(whole: Tensor, share: Tensor, group: Any) -> Any:
    """Begin to fill `whole` with the shares of all ranks of the group; `share` lies in it."""
    return _all_gather(whole, share, group=group, async_op=True)


def raw_bytes(tensor: Tensor) -> bytes:
    """The numbers of `tensor` as they lie in memory."""
    return tensor.detach().resolve_conj().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def keep_saved_tensors() -> None:
    """Let compiled backward passes keep what their forward pass saved, as a backward pass in two halves reads it twice.

    What was compiled before would not: it is compiled again at its next call.
    """
    from torch._functorch import config

    if getattr(config, "donated_buffer", False):
        config.donated_buffer = False
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # type: ignore[no-untyped-call]
