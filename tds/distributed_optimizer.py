"""An optimizer with states sharded over the replicas and communication overlapped with computation.

This is ZeRO stage 1 (Rajbhandari et al. 2020) in the manner of Megatron-LM's distributed optimizer. Gradients are
reduced during a step's last backward pass. DeepSpeed's reduction only starts after the last gradient.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._deepspeed import link_shares, utils
from ._torch import has_hooks
from .bucket_launch import BucketLauncher, ChunkOf, pack_buckets, sort_buckets
from .buckets import Bucket
from .clip import counted_squared_norm, is_unique_param, trainable_weights, weights_of
from .flat_matrices import Work, has_little_padding
from .gathers import DeferredGathers, layers_that_wait
from .messages import setting_advice
from .module_changes import ADVICE, ReplacedWeightError
from .optimizers import clip_in_step, steps_separately
from .param_replicas import group_by_holders

# Largest number of groups. The weights of a group are gathered while the next one is stepped. Each call of the wrapped
# optimizer costs host time for all of its parameters, so more groups would cost more than they hide.
MAX_GROUPS = 8


class DistributedOptimizer(torch.optim.Optimizer):
    """An optimizer sharded over the replicas, for fp32 and bf16 with ZeRO stage 1 in the ds_config.

    Weights and gradients lie in flat buckets, and this replica steps one share of each bucket. A BucketLauncher
    reduces each bucket during a step's last backward pass, and `step` all-gathers the weights of a group of buckets
    while the next group is stepped.

    Use it as `tds.initialize(model=..., optimizer=tds.DistributedOptimizer(torch.optim.AdamW(...)), config=...)`,
    with or without a pipeline. In bf16, gradients are accumulated and weights are stepped in fp32. The learning
    rate is in `param_groups`, as in the wrapped optimizer. A weight without a gradient gets a gradient of zeros, as in
    DeepSpeed's ZeRO, so weight decay applies to it.

    The wrapped optimizer's update must be element-wise, like Adam's, except for weights whose `whole_work(weight)`, a
    method of the optimizer, returns the work of stepping the weight, not None. Each of these weights is stepped by one
    replica. The share of a replica then has the attribute `pieces`, a list of (weight, begin of its elements in the
    share). A parameter group has weights of one kind. If all states belong to single weights, set the attribute
    `steps_separately` of the optimizer to True.

    A pipeline engine calls the methods below. Without a pipeline, call `arm()` before the last `backward()` of a
    step, then `finish()`, `clip()` and the engine's `step()`. Gradients are summed, not averaged, so divide losses by
    the number of replicas.

    bucket_bytes: minimum bytes of gradients in a bucket; None: depends on the number of replicas.
    overlap_gather: wait for the gathered weights in the next forward pass, layer by layer, not at the end of `step`.
        This needs a PipelineModule or a SequentialModule. Code that reads or replaces weights or layers between two
        steps must then call `wait()` first; checkpoints and evaluation need no such call.

    If a weight's storage was replaced between two steps (`p.data = new`), the new values are copied into the
    bucket. In-place changes of half-precision weights are copied too. Raises RuntimeError in a backward pass if a
    gradient arrives after its bucket was reduced. This may happen if a weight is used by a varying number of
    re-entrant checkpoints; then use the optimizer without this wrapper.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, bucket_bytes: int | None = None, overlap_gather: bool = False
    ) -> None:
        self._launcher: BucketLauncher | None = None  # set by attach()
        # torch's class needs parameter groups for its own attributes; then the wrapped optimizer's groups replace them.
        super().__init__([{"params": list(group["params"])} for group in optimizer.param_groups], {})
        self.optimizer = optimizer
        self._expose_wrapped()
        self.bucket_bytes = bucket_bytes
        self._overlap_gather = overlap_gather
        # attach() sets these: the model's weights, and the buckets that hold them.
        self.buckets: list[Bucket] = []
        self.dp_process_group: Any = None
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._name_of: dict[nn.Parameter, str] = {}
        self._frozen: list[nn.Parameter] = []
        self.bf16_groups: list[list[nn.Parameter]] = []  # DeepSpeed saves the shapes of these weights
        self.fp16_groups = self.bf16_groups  # the name that DeepSpeed reads in runs without bf16
        self._gathers = DeferredGathers((), ())
        self._norm_slices: list[tuple[Tensor, bool]] | None = None  # of Bucket.norm_slices, computed once
        # State of a step: finish() reduces the gradients, clip() stores their norm and its limit.
        self._is_reduced = False
        self.norm: Tensor | None = None
        self._limit = 0.0
        # Given to clip(): reads the norm on the host, from which step() sets `overflow`, whether the step was skipped.
        self.read_norm: Callable[[], float] | None = None
        self.overflow = False
        self._global_grad_norm: Tensor | None = None  # DeepSpeed's engine reads this attribute
        self._are_states_linked = False  # whether DeepSpeed's utilities can read the states, after the first step

    def attach(
        self, module: nn.Module, group: Any, chunk_of: ChunkOf | None = None, apart: Iterable[nn.Parameter] = ()
    ) -> None:
        """Move the weights of `module`, already on their device and in their dtype, into flat memory.

        group: process group of the replicas. chunk_of: for a stage with several chunks, the chunk of a weight; 0 by
        default. apart: weights that other stages also hold; each gets a separate bucket, so that all stages shard
        and reduce it in the same way.
        """
        self._refuse_unsteppable(module)
        self.dp_process_group = group
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._name_of = {p: name for name, p in module.named_parameters()}
        chunk_of = chunk_of or {}
        self._make_buckets(module, chunk_of, set(apart))
        self._launcher = BucketLauncher(self.buckets, chunk_of)
        self._gathers = DeferredGathers(self.buckets, layers_that_wait(module) if self._overlap_gather else ())
        for bucket in self.buckets:
            bucket.count_views()  # to notice later whether a user still views the memory
            if bucket.accumulates_matmuls:
                # megatron.mpu's layers, whose weights have a `spec`, may add a weight gradient in one kernel.
                for p in bucket.parameters:
                    if hasattr(p, "spec"):
                        p.spec.accumulate_wgrad = partial(self._accumulate_wgrad, p)

    def _make_buckets(self, module: nn.Module, chunk_of: ChunkOf, separate: Iterable[nn.Parameter]) -> None:
        """Put the trainable weights of `module` into buckets, and let the wrapped optimizer step their shares."""
        trainable = set(trainable_weights(module))
        for param_group in self.param_groups:
            group_weights = [p for p in param_group["params"] if p in trainable]
            work = self._whole_work(group_weights)
            # Experts may be held by some of the replicas only, so they get buckets of their own.
            for group, weights in group_by_holders(group_weights, self.dp_process_group):
                replicas = dist.get_world_size(group)
                # Weights that are stepped as wholes may not divide evenly over the replicas. A bucket takes more and
                # more of them until it needs little padding.
                is_enough = partial(has_little_padding, replicas=replicas, work=work) if work else None
                for parameters in pack_buckets(weights, group, self.bucket_bytes, chunk_of, separate, is_enough):
                    bucket = Bucket(parameters, group, work)
                    self.buckets.append(bucket)
                    link_shares(bucket)
            self.bf16_groups.append(group_weights)
        sort_buckets(self.buckets, module.parameters(), chunk_of)
        for bucket in self.buckets:
            self._bucket_of.update(dict.fromkeys(bucket.parameters, bucket))
        for param_group in self.param_groups:
            # The wrapped optimizer now gets shares in place of weights. All weights of a bucket are in one parameter
            # group, so its first weight shows the group.
            stepped = set(param_group["params"])
            param_group["params"] = [bucket.share for bucket in self.buckets if bucket.parameters[0] in stepped]
        if isinstance(self.optimizer, torch.optim.Adagrad):  # its constructor creates the states, here of the shares
            sharded = torch.optim.Adagrad(self.param_groups, **self.defaults)
            self.state.clear()
            self.state.update(sharded.state)

    def _whole_work(self, weights: Sequence[nn.Parameter]) -> Work | None:
        """Return the function `whole_work` of the optimizer, if it steps these weights as wholes, else None."""
        work: Work | None = getattr(self.optimizer, "whole_work", None)
        return work if work and weights and work(weights[0]) is not None else None  # all are of one kind

    def _require_launcher(self) -> BucketLauncher:
        assert self._launcher, "tds.initialize() comes first"
        return self._launcher

    def _accumulate_wgrad(self, parameter: nn.Parameter, left: Tensor, right: Tensor) -> bool:
        """Accumulate `left` `[o, n]` @ `right` `[n, i]` into the gradient of `parameter` `[o, i]`, without autograd.

        A layer calls this in its backward pass. Returns False if the layer must give the gradient to autograd
        instead, because a hook has to see it.
        """
        if has_hooks(parameter):
            return False
        self._require_launcher().add_gradient(parameter, partial(self._bucket_of[parameter].add_matmul, left, right))
        return True

    def _refuse_unsteppable(self, module: nn.Module) -> None:
        """Raise ValueError for weights that would silently not be trained."""
        stepped = set(weights_of(self))
        outside = stepped.difference(module.parameters())
        problem = None
        # A state shows that the optimizer has taken a step, also a state without a step count, such as SGD's momentum;
        # hence the 1. Only Adagrad's constructor creates states, of step 0.
        if any(state.get("step", 1) for state in self.state.values()):
            problem = "already has states of unsharded weights: wrap it before its first step"
        elif any(hasattr(p, "_hp_mapping") for p in stepped):  # DeepSpeed's link from a weight to its shard
            problem = "is given weights that are already sharded over replicas: build the model again"
        # If all weights are outside the model, the stage has no weights, and they are the placeholder that torch's
        # optimizers need.
        elif len(outside) < len(stepped) and any(p.requires_grad for p in outside):
            problem = "has weights that are not in the model: register them in it"
        addresses = [p.data_ptr() for p in stepped if p.requires_grad and p.numel()]
        if len(set(addresses)) < len(addresses):
            problem = "has two weights in one memory: assign the Parameter itself, as in head.weight = embedding.weight"
        if problem:
            raise ValueError(f"the optimizer in tds.DistributedOptimizer {problem}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. Raises RuntimeError after tds.initialize(), which shards all weights."""
        if self._launcher:
            raise RuntimeError("tds.initialize() has sharded all weights: call add_param_group before it")
        super().add_param_group(param_group)

    def _refuse_changes(self) -> None:
        """Raise RuntimeError if weights were frozen or unfrozen since `attach`, which fixed the sharding."""
        verb = "frozen"
        changed = [p for p in self._bucket_of if not p.requires_grad]
        if not changed:
            verb = "unfrozen"
            changed = [p for p in self._frozen if p.requires_grad]
        if changed:
            raise RuntimeError(
                f"{len(changed)} weights, the first of shape {tuple(changed[0].shape)}, were {verb} after "
                f"tds.initialize(), in which a DistributedOptimizer shards the trainable weights: call "
                f"tds.initialize() again, or train without this optimizer ({setting_advice['no ZeRO']})"
            )

    def _adopt_replaced(self) -> None:
        """Copy weights whose storage was replaced into the buckets. Raises ReplacedWeightError if that is not safe."""
        bucket_storages = {bucket.weights.untyped_storage().data_ptr() for bucket in self.buckets}
        for bucket in self.buckets:
            replaced = bucket.replaced_weights()
            for p in replaced:
                view = bucket.view_of[p]
                problem = None
                if p.untyped_storage().data_ptr() in bucket_storages:
                    problem = "shares memory with another weight"
                elif (p.dtype, p.device, p.shape) != (view.dtype, view.device, view.shape):
                    problem = "has another dtype, device or shape"
                if problem:
                    raise ReplacedWeightError(
                        f"the weight {self._name_of[p]} {problem} since tds.initialize(): {ADVICE}"
                    )
            if replaced and not bucket.adopt_weights(replaced):
                raise ReplacedWeightError(
                    f"the storage of the weight {self._name_of[replaced[0]]} was replaced after tds.initialize(), "
                    f"while another tensor still views the old storage, e.g. to restore it later: {ADVICE}"
                )

    def arm(self, chunk: int = 0) -> None:
        """Overlap the reduction with the next backward pass of `chunk`, which must be the chunk's last of this step."""
        self._require_launcher().arm(chunk)

    def finish(self) -> None:
        """Reduce the remaining buckets and wait, so that each replica has the summed gradients of its shares."""
        self._require_launcher().finish()
        self._is_reduced = True

    def gradient_share(self, parameter: nn.Parameter) -> Tensor | None:
        """Return this replica's share `[n]` of the summed gradient of a tied weight, after `finish()`.

        parameter: a weight that was passed to `attach` in `apart`. Returns None if the weight is not trained.
        """
        bucket = self._bucket_of.get(parameter)
        return None if bucket is None else bucket.share_grad

    def squared_norm(self, model_rank: int, device: torch.device) -> Tensor:
        """Return this rank's part of the squared global gradient norm, a scalar in fp64, to be summed over replicas.

        The result is NaN or Inf if any gradient in this rank's shares contains NaN or Inf. This includes gradients
        that only another rank counts in the norm. model_rank: tensor-parallel rank.
        """
        if self._norm_slices is None:
            self._norm_slices = []
            counts = {p: is_unique_param(p, model_rank) for p in self._bucket_of}
            for bucket in self.buckets:
                self._norm_slices += bucket.norm_slices(counts)
        return counted_squared_norm(self._norm_slices, device)

    def clip(self, norm: Tensor, limit: float, read_norm: Callable[[], float] | None = None) -> None:
        """Store the global gradient norm, a scalar, and its limit (0: no clipping) for the next `step()`.

        read_norm: function that returns the norm on the host. If it is given, `step()` calls it after it has given the
        device all its work, and sets `overflow`, from which DeepSpeed learns whether the step was skipped.
        """
        self.norm = norm
        self._limit = limit
        self.read_norm = read_norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step the shares and all-gather the weights; skip the step if the norm is not finite.

        A skipped step leaves step counts unchanged. Raises RuntimeError if weights were frozen or unfrozen since
        the engine was made, or unless `finish` and `clip` ended the gradients.
        """
        self.wait()
        self._refuse_changes()
        self._adopt_replaced()
        for p in self._bucket_of:
            if p.grad is not None:
                raise RuntimeError(
                    f"the gradient of the weight {self._name_of[p]} was set after finish(), which reduces gradients: "
                    f"set it before finish()"
                )
        norm = self.norm
        if closure is not None or norm is None or not self._is_reduced:
            raise RuntimeError(
                "step() of a DistributedOptimizer was called too early or with a closure: after the last backward "
                "pass, call finish(), clip() and then step() without a closure"
            )
        # Clip now, or let a fused optimizer clip in its kernel. If the norm is not finite, also make the step a no-op.
        clip_in_step(self.optimizer, [bucket.share_grad for bucket in self.buckets], norm, self._limit)
        self._global_grad_norm = norm
        self.norm = None
        # Step a group of buckets at a time. The wrapped optimizer steps only the shares that have a gradient.
        for bucket in self.buckets:
            bucket.share.grad = None
        # For example, 20 buckets are stepped in groups of 3, in the order in which the next forward pass uses them.
        forward_order = self.buckets[::-1]
        group_size = len(forward_order)
        if steps_separately(self.optimizer):  # any other optimizer counts one step in each call
            group_size = -(-len(forward_order) // MAX_GROUPS)  # rounded up
        # Read once for all groups: where `clip_in_step` has replaced this method, it did so for the next call only.
        step = self.optimizer.step
        for start in range(0, len(forward_order), max(group_size, 1)):
            group = forward_order[start : start + group_size]
            for bucket in group:
                bucket.pull_changes()  # only now, so that the share is in the CPU's cache when it is stepped
                bucket.share.grad = bucket.share_grad
            step()
            for bucket in group:
                bucket.gather()  # runs while the next group is stepped
                bucket.share.grad = None
        self._gathers.defer()
        if not self._are_states_linked:  # the first step has created the states
            self._lazy_init_hp_params_optimizer_state()
        if self.read_norm is not None:
            self.overflow = not math.isfinite(self.read_norm())

    def wait(self) -> None:
        """Wait until this replica has all weights of the last step; needed only with `overlap_gather`."""
        self._gathers.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients at the start of a step."""
        self._is_reduced = False
        if self._launcher:
            self._launcher.reset()
        for bucket in self.buckets:
            bucket.drop_grads()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Do nothing, because `arm` marks the last backward pass of a step."""

    def _lazy_init_hp_params_optimizer_state(self) -> None:
        """Link parameters to their optimizer moments, so that DeepSpeed's utilities can read the moments."""
        for bucket in self.buckets:
            if bucket.share in self.state:
                utils.lazy_init_hp_params_optimizer_state(bucket.parameters, bucket.share, self.state)
                self._are_states_linked = True

    def refresh_fp32_params(self) -> None:
        """Copy the model's weights, which have just been loaded, into the fp32 copies that this optimizer steps."""
        self.wait()
        for bucket in self.buckets:
            bucket.pull_weights()

    _restore_from_bit16_weights = refresh_fp32_params  # DeepSpeed calls it after loading only weights

    def state_dict(self) -> dict[str, Any]:
        """Return this replica's shares and optimizer states.

        This state can be loaded only with the same number of replicas and the same layers on each stage.
        """
        shares = [bucket.share.detach().clone() for bucket in self.buckets]
        return {"optimizer": self.optimizer.state_dict(), "shares": shares}

    def load_state_dict(  # type: ignore[override]
        self, state_dict_list: Any, load_optimizer_states: bool = True, **_: Any
    ) -> None:
        """Load this replica's state from `state_dict_list`, the states of all replicas in rank order.

        The items of other replicas may be None.
        Raises ValueError if the shares differ in number or size from this run's.
        """
        # None if another number of replicas saved the states.
        own_state: Any = None
        if len(state_dict_list) == dist.get_world_size(self.dp_process_group):
            own_state = state_dict_list[dist.get_rank(self.dp_process_group)]
        # With load_optimizer_states=False, as the error advises, DeepSpeed's engine calls `_restore_from_bit16_weights`
        # instead of this method.
        saved_shapes = None
        if own_state:
            saved_shapes = [share.shape for share in own_state.get("shares", ())]
        if saved_shapes != [bucket.share.shape for bucket in self.buckets]:
            raise ValueError(
                f"the checkpoint holds optimizer states sharded over {len(state_dict_list)} replicas, which do not fit "
                f"this run with {dist.get_world_size(self.dp_process_group)} replicas: use the same number of replicas "
                f"and the same partition of the layers, or load_optimizer_states=False"
            )
        if load_optimizer_states:
            self.optimizer.load_state_dict(own_state["optimizer"])
            self._expose_wrapped()  # torch has given the wrapped optimizer new param_groups and a new state
        for bucket, share in zip(self.buckets, own_state["shares"], strict=True):
            bucket.share.data.copy_(share)
        self._lazy_init_hp_params_optimizer_state()  # links weights to the loaded moments

    def _expose_wrapped(self) -> None:
        """Expose the wrapped optimizer's param_groups, state and defaults as this optimizer's own."""
        wrapped = self.optimizer
        self.param_groups = wrapped.param_groups
        self.state = wrapped.state
        self.defaults = wrapped.defaults
