"""An optimizer whose states are cut over the replicas, and whose messages leave while passes still run.

ZeRO's first stage (Rajbhandari et al. 2020) as Megatron-LM's distributed optimizer does it: gradients are added up
bucket by bucket during the last backward pass of a step, each replica steps its share of every bucket, and new
weights are on their way while the next share is stepped. DeepSpeed's begin when the last gradient of all is there.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._deepspeed import link_shares, link_states
from ._torch import norms
from .buckets import Bucket
from .clip import counts_here, leave_out_unless_finite
from .departures import Departures, pack

ONE_BY_ONE = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)  # keep a step count for each tensor, or none


class DistributedOptimizer(torch.optim.Optimizer):
    """`tds.initialize(model=..., optimizer=tds.DistributedOptimizer(torch.optim.AdamW(...)), config=...)`.

    For fp32 and bf16, with a pipeline and without, ZeRO stage 0 or 1 in the ds_config (it is stage 1 either way). In bf16
    gradients are added up and weights are stepped in fp32. Losses must be divided by the number of replicas by whoever makes
    them: gradients are added up, not averaged. The learning rate is in `param_groups`, as with the optimizer inside.
    bucket_bytes: see `tds.departures.pack`.
    After `attach`, `arm()` and `finish()` are those of `Departures`: before and after the last backward pass of a step; the engine of a
    pipeline calls them.
    Raises RuntimeError in a backward pass if a gradient arrives after its bucket has left, as may happen where a weight is used by a
    changing number of re-entrant checkpoints: take the optimizer without this wrapper.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, bucket_bytes: int | None = None) -> None:
        super().__init__([{"params": list(group["params"])} for group in optimizer.param_groups], {})
        self.optimizer, self.bucket_bytes = optimizer, bucket_bytes
        self._show_inside()
        self.buckets: list[Bucket] = []
        self.dp_process_group: Any = None
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        # DeepSpeed writes the shapes of these into its checkpoints.
        self.bf16_groups = self.fp16_groups = [list(group["params"]) for group in optimizer.param_groups]
        self._counted: list[tuple[Tensor, bool]] | None = None
        self._norm: Tensor | None = None
        self._limit = 0.0
        self._global_grad_norm: Tensor | None = None  # as DeepSpeed's engine asks for it

    # ------------------------------------------------------------- beginning

    def attach(
        self,
        module: nn.Module,
        group: Any,
        chunk_of: Mapping[nn.Parameter, int] | None = None,
        apart: Iterable[nn.Parameter] = (),
    ) -> None:
        """Move the weights of `module`, which are on their device and in their dtype, into flat memory. group: of the replicas.

        chunk_of: for a pipeline stage with several, 0 where nothing is said. apart: weights that other stages
        hold, too: each gets a bucket of its own, so that it is cut and added up in the same way everywhere.
        """
        known = {p for p in module.parameters() if p.requires_grad}
        self.dp_process_group, chunk_of, apart = group, chunk_of or {}, set(apart)
        for at, settings in enumerate(self.param_groups):
            mine = [p for p in settings["params"] if p in known]
            for parameters in pack(mine, group, self.bucket_bytes, chunk_of, apart):
                self.buckets.append(Bucket(parameters, group))
                link_shares(self.buckets[-1], at)
        # They leave in the order in which their last gradients come: the last chunk's first, and in it the last layer's.
        place = {p: at for at, p in enumerate(module.parameters())}
        self.buckets.sort(key=lambda b: (-chunk_of.get(b.parameters[0], 0), -min(place[p] for p in b.parameters)))
        for settings in self.param_groups:
            group_of = set(settings["params"])
            settings["params"] = [bucket.share for bucket in self.buckets if bucket.parameters[0] in group_of]
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        departures = Departures(self.buckets, chunk_of)
        self.arm, self.finish = departures.arm, departures.finish

    # -------------------------------------------------------------- gradients

    def gradient_share(self, parameter: nn.Parameter) -> Tensor | None:
        """After `finish()`: this replica's share of the summed gradient of a weight that is `apart`, 1-D; None of one that does not learn."""
        bucket = self._bucket_of.get(parameter)
        return None if bucket is None else bucket.share_grad

    def squared_norm(self, model_rank: int, device: torch.device) -> Tensor:
        """What this rank's shares give to the square of the gradients' norm over the model and the replicas, a scalar in fp64.

        Not finite if any gradient in them is not, that of a copy included. model_rank: among the tensor-parallel ranks.
        """
        if self._counted is None:
            counts = {p: counts_here(p, model_rank) for p in self._bucket_of}
            self._counted = [piece for bucket in self.buckets for piece in bucket.stretches(counts)]
        total = torch.zeros((), dtype=torch.float64, device=device)
        for counted in (True, False):
            pieces = [piece for piece, counts_too in self._counted if counts_too is counted]
            if pieces:
                squares = torch.stack(norms(pieces)).double().square().sum()
                total += squares if counted else 0 * squares
        return total

    # ------------------------------------------------------------------ step

    def clip(self, norm: Tensor, limit: float) -> None:
        """Before `step()`: the norm of all gradients of the model, a scalar, and what it is to be at most (0: anything)."""
        self._norm, self._limit = norm, limit

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step the shares and bring the weights together. Nothing changes, step counts included, if the norm is not finite."""
        assert closure is None and self._norm is not None, "call clip() first; there are no closures"
        for bucket in self.buckets:
            bucket.share.grad = bucket.share_grad
        self._scale_and_guard(self._norm)
        self._global_grad_norm, self._norm = self._norm, None
        first_first = self.buckets[::-1]  # whose weights the next forward pass uses first
        if not isinstance(self.optimizer, ONE_BY_ONE):
            self.optimizer.step()
            for bucket in first_first:
                bucket.gather()
        else:
            grads = {bucket: bucket.share.grad for bucket in self.buckets}
            for bucket in self.buckets:
                bucket.share.grad = None
            for bucket in first_first:
                bucket.share.grad = grads[bucket]
                self.optimizer.step()
                bucket.gather()
                bucket.share.grad = None
        for bucket in first_first:
            bucket.wait()

    def _scale_and_guard(self, norm: Tensor) -> None:
        """Within the optimizer's own pass over memory where it can."""
        leave_out_unless_finite(self.optimizer, norm)
        if not self._limit:
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            return
        too_long = ((norm + 1e-6) / self._limit).clamp(min=1.0)
        if all(group.get("fused") for group in self.param_groups):
            self.optimizer.grad_scale = too_long.float()  # type: ignore[attr-defined]
            return
        for bucket in self.buckets:
            bucket.share_grad.div_(too_long.to(bucket.share_grad.dtype))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """A new step begins."""
        for bucket in self.buckets:
            bucket.forget_grads()

    # --------------------------------------------------- as DeepSpeed asks it

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Nothing: `arm` says it."""

    def _lazy_init_hp_params_optimizer_state(self) -> None:
        """Let parameters find their moments."""
        for bucket in self.buckets:
            if bucket.share in self.state:
                link_states(bucket, self.state)

    def refresh_fp32_params(self) -> None:
        """Take the fp32 weights from those of the model, into which others were loaded."""
        for bucket in self.buckets:
            bucket.take_weights()

    def state_dict(self) -> dict[str, Any]:
        """Of this replica's shares: what `load_state_dict` takes with as many replicas and the same layers on each stage."""
        shares = [bucket.share.detach().clone() for bucket in self.buckets]
        return {"optimizer": self.optimizer.state_dict(), "shares": shares}

    def load_state_dict(  # type: ignore[override]
        self, state_dict_list: Any, load_optimizer_states: bool = True, **_: Any
    ) -> None:
        """state_dict_list: those of all replicas, in order. Raises ValueError if they were other ones."""
        mine = self._mine(state_dict_list)
        if mine is None:
            raise ValueError(
                f"the checkpoint holds the optimizer's states of {len(state_dict_list)} replicas with other shares than those of the "
                f"{dist.get_world_size(self.dp_process_group)} here: load it on as many, cut in the same way, or with "
                f"load_optimizer_states=False"
            )
        if load_optimizer_states:
            self.optimizer.load_state_dict(mine["optimizer"])
            self._show_inside()
        for bucket, share in zip(self.buckets, mine["shares"], strict=True):
            bucket.share.data.copy_(share)

    def _show_inside(self) -> None:
        """One learning rate and one state, whoever looks."""
        inside = self.optimizer
        self.param_groups, self.state, self.defaults = inside.param_groups, inside.state, inside.defaults

    def _mine(self, states: Any) -> Any:
        """This replica's; None if they do not fit. DeepSpeed may give only these, and None for the others."""
        rank = dist.get_rank(self.dp_process_group)
        mine = states[rank] if len(states) == dist.get_world_size(self.dp_process_group) else None
        shapes = [tuple(share.shape) for share in (mine or {}).get("shares", ())]
        return mine if shapes == [tuple(bucket.share.shape) for bucket in self.buckets] else None
