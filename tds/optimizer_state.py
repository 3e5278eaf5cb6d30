"""The fp32 weight and the optimizer moments of a parameter, independent of DeepSpeed's wrapper.

ZeRO flattens these tensors and shards them over the replicas. This module reads and sets each tensor in the shape of
its parameter, which is this rank's tensor-parallel shard. With ZeRO, reading is a collective: all data-parallel ranks
must read the same parameters in the same order.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._deepspeed import BF16_Optimizer, Zero3Optimizer, Zero12Optimizer, utils, zero
from ._torch import norms
from .average import AVERAGE
from .clip import weights_of
from .distributed_optimizer import DistributedOptimizer
from .optimizers import adam_of, torch_optimizer_of

LINKS_MOMENTS = BF16_Optimizer, Zero12Optimizer, DistributedOptimizer


def _is_wrapped(parameter: nn.Parameter) -> bool:
    """Return whether DeepSpeed keeps the optimizer state of `parameter` in flat shards."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def stepped_tensors(engine: Any) -> list[Tensor]:
    """Return the tensors that the torch optimizer steps: the parameters, or ZeRO's flat shards of them."""
    if isinstance(engine.optimizer, Zero3Optimizer):
        # ZeRO-3 puts these shards into param_groups only while it steps them.
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    return weights_of(torch_optimizer_of(engine))


def _stepped_by_weight(engine: Any) -> dict[nn.Parameter, Tensor]:
    """Map each parameter to the tensor that the torch optimizer steps for it: the parameter, or ZeRO's flat shard."""
    optimizer = engine.optimizer
    stepped: dict[Any, Tensor] = {}
    if isinstance(optimizer, DistributedOptimizer):
        for bucket in optimizer.buckets:
            stepped.update(dict.fromkeys(bucket.parameters, bucket.share))
        return stepped
    # Two lists with an item for each parameter group: its parameters, and this rank's flat fp32 shard of them.
    if isinstance(optimizer, BF16_Optimizer):
        shards = optimizer.bf16_groups, optimizer.fp32_groups_flat_partition
    elif isinstance(optimizer, Zero3Optimizer):
        shards = optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat
    elif isinstance(optimizer, Zero12Optimizer):
        shards = optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups
    else:
        return {p: p for p in stepped_tensors(engine)}  # type: ignore[misc]
    for parameters, shard in zip(*shards, strict=True):
        stepped.update(dict.fromkeys(parameters, shard))
    return stepped


def wait_for_weights(engine: Any) -> None:
    """Wait for weights that an optimizer with `overlap_gather` still gathers. Call this before reading weights."""
    if isinstance(engine.optimizer, DistributedOptimizer):
        engine.optimizer.wait()


def returns_copies(engine: Any) -> bool:
    """Return whether `get_weight` and `get_moment` return copies, because an optimizer wraps the torch optimizer."""
    return engine.optimizer is not torch_optimizer_of(engine)


def before_step(engine: Any, hook: Callable[[], None]) -> None:
    """Call `hook` before each change of weights and moments by the optimizer."""
    torch_optimizer_of(engine).register_step_pre_hook(lambda *_: hook())


def side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context whose work runs after all work queued so far, but beside later work; a no-op on a CPU."""
    if device.type == "cpu":
        return nullcontext()
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    return stream


def local_shard(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of `parameter` in the dtype of the forward pass.

    Under ZeRO-3 this is a flat shard `[n]`, else the whole parameter.
    """
    return getattr(parameter, "ds_tensor", parameter)


def get_weight(parameter: nn.Parameter) -> Tensor:
    """Return the fp32 master copy of a parameter, in its shape; without a master copy, return the parameter.

    If a user has changed elements of the weight since the last step, the result has the changed values.
    """
    if hasattr(parameter, "ds_id") and not parameter.requires_grad:  # a frozen weight is sharded but has no fp32 copy
        with zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    if not _is_wrapped(parameter):
        return parameter.detach()
    exact: Tensor = utils.safe_get_full_fp32_param(parameter)
    if hasattr(parameter, "ds_id"):  # under ZeRO-3, `parameter` is empty, so there is nothing to compare with
        return exact
    # Where the fp32 copy does not round to the weight, a user has changed the weight.
    seen = parameter.detach()
    return torch.where(exact.to(seen.dtype) == seen, exact, seen.to(exact.dtype))


@torch.no_grad()
def set_weight(parameter: nn.Parameter, value: Tensor) -> None:
    """Set the master copy, and the weight that the forward pass reads, to `value`."""
    if _is_wrapped(parameter) and parameter.requires_grad:  # a frozen weight has no fp32 copy
        utils.safe_set_full_fp32_param(parameter, value)
    if not hasattr(parameter, "ds_id"):  # not sharded by ZeRO-3
        parameter.copy_(value)
        return
    # ZeRO-3's forward pass gathers flat shards of the weight, so set this rank's shard, but not the padding at its end.
    # For example, 10 elements on 4 replicas: shards have 3 elements, and rank 3 sets only the first of them.
    shard: Any = parameter.ds_tensor  # type: ignore[attr-defined]
    rank = dist.get_rank(parameter.ds_process_group)  # type: ignore[attr-defined]
    values = value.flatten()[rank * shard.numel() : (rank + 1) * shard.numel()]
    shard.view(-1)[: values.numel()].copy_(values)


def moment_names(engine: Any) -> list[str]:
    """Return the names of this rank's per-parameter optimizer tensors, e.g. exp_avg and exp_avg_sq.

    The list is empty as long as no weight of this rank has had a gradient in a step.
    """
    _link_moments(engine)  # so that `get_moment` finds the moments of the returned names
    names = set[str]()
    for owner in stepped_tensors(engine):
        for name, value in torch_optimizer_of(engine).state.get(owner, {}).items():
            # Moments are the tensors in the shape of the weight or shard. Adam's step count, a scalar tensor, also has
            # the shape of a scalar weight.
            if name != "step" and isinstance(value, Tensor) and value.shape == owner.shape:
                names.add(name)
    return sorted(names)


def moments_of(engine: Any, parameter: nn.Parameter, names: Sequence[str]) -> list[str]:
    """Return which moments in `names` the optimizer has for `parameter`; [] if it never had a gradient.

    A frozen parameter has only an average, if it was trained before this run.
    """
    if not parameter.requires_grad:
        average = engine.weight_average
        has_average = average is not None and parameter in average.of_frozen
        return [AVERAGE] if has_average and AVERAGE in names else []
    # A parameter in ZeRO's flat shard has the moments of the shard, even if it never had a gradient.
    if not (_is_wrapped(parameter) or parameter in torch_optimizer_of(engine).state):
        return []
    return _moment_names_of(engine, parameter, names)


def _moment_names_of(engine: Any, tensor: Tensor, names: Sequence[str]) -> list[str]:
    """Return which moments in `names` belong to `tensor`, a weight or an owner, if the optimizer distinguishes them."""
    moments_of_tensor = getattr(torch_optimizer_of(engine), "moments_of", None)
    if moments_of_tensor is None:
        return list(names)
    owned_names = {AVERAGE, *moments_of_tensor(tensor)}
    return [name for name in names if name in owned_names]


def get_moment(engine: Any, parameter: nn.Parameter, name: str) -> Tensor:
    """Return the optimizer moment `name` of a parameter, in the parameter's shape."""
    if not parameter.requires_grad:
        return engine.weight_average.frozen_average(parameter, get_weight(parameter))  # type: ignore[no-any-return]
    if _is_wrapped(parameter):
        return utils.safe_get_full_optimizer_state(parameter, name)  # type: ignore[no-any-return]
    return torch_optimizer_of(engine).state[parameter][name].to(parameter.dtype)  # type: ignore[no-any-return]


@torch.no_grad()
def set_moment(engine: Any, parameter: nn.Parameter, name: str, value: Tensor) -> None:
    """Set the optimizer moment `name` of a parameter to `value`, in the parameter's shape."""
    if not parameter.requires_grad:
        engine.weight_average.set_frozen_average(parameter, value)
    elif _is_wrapped(parameter):
        utils.safe_set_full_optimizer_state(parameter, value, name)
    else:
        torch_optimizer_of(engine).state[parameter][name].copy_(value)


def get_step(engine: Any) -> int:
    """Return the optimizer's step count (Adam's t), the highest one on this rank."""
    inner = torch_optimizer_of(engine)
    highest = 0
    for group in inner.param_groups:  # apex's Adam counts by group
        highest = max(highest, int(group.get("step", 0)))
    for owner in stepped_tensors(engine):  # torch's Adam counts by weight
        highest = max(highest, int(inner.state.get(owner, {}).get("step") or 0))
    return highest


def step_counts(engine: Any) -> dict[nn.Parameter, int]:
    """Return the step count of each parameter, if the optimizer counts per parameter or per flat shard.

    A parameter that was frozen or had no gradient in some steps has a lower count than the other parameters.
    """
    inner = torch_optimizer_of(engine)
    group_steps: dict[Tensor, Any] = {}  # stepped tensor -> step count of its group, None except with apex's Adam
    for group in inner.param_groups:
        group_steps.update(dict.fromkeys(group["params"], group.get("step")))
    counts = {}
    # The owner of a parameter is the tensor that the optimizer steps: the parameter itself, or the shard with it.
    for parameter, owner in _stepped_by_weight(engine).items():
        state = inner.state.get(owner, {})
        step = state.get("step", group_steps.get(owner))
        if step is not None:
            counts[parameter] = int(step)
    return counts


def make_moments(engine: Any, names: Sequence[str], step: int, exceptions: Mapping[nn.Parameter, int | None]) -> None:
    """Create optimizer state for every parameter: zero moments, and the step count `step`.

    exceptions: step counts of the parameters whose count differs from `step`. None stands for a parameter that never
    had a gradient; it gets no state. If ZeRO flattens parameters into a shard, the shard gets their highest count.
    """
    inner = torch_optimizer_of(engine)
    adam = adam_of(inner)
    # Moment -> its dtype, if an optimizer keeps it in lower precision; others have the dtype of what is stepped.
    moment_dtypes = getattr(adam, "moment_dtypes", {})
    counts = _counts_to_set(engine, step, exceptions)
    # Fused and capturable kernels read the step count on the device of the weights; torch's `load_state_dict` moves it
    # there, too.
    on_device = any(group.get("fused") or group.get("capturable") for group in inner.param_groups)
    for owner in stepped_tensors(engine):
        count = counts.get(owner, step)
        if count is None and not returns_copies(engine):  # never had a gradient; a shard of weights gets state anyway
            continue
        state = dict[str, Any]()
        for name in _moment_names_of(engine, owner, names):
            state[name] = torch.zeros_like(owner, dtype=moment_dtypes.get(name))
        if isinstance(adam, torch.optim.AdamW) and "exp_avg" in state:
            device = owner.device if on_device else None  # None: the CPU
            state["step"] = torch.tensor(float(count or 0), dtype=torch.float32, device=device)
        inner.state[owner] = state

    if not isinstance(adam, (torch.optim.AdamW, torch.optim.SGD)):  # apex's Adam counts steps by group
        for group in inner.param_groups:
            steps = [counts.get(owner, step) or 0 for owner in group["params"]]
            group["step"] = max(steps, default=step)
    _link_moments(engine)


def _counts_to_set(engine: Any, step: int, exceptions: Mapping[nn.Parameter, int | None]) -> dict[Tensor, int | None]:
    """Return the step count of each tensor that the torch optimizer steps; None if it never had a gradient.

    step, exceptions: see `make_moments`. A parameter without an exception has the count `step`.
    """
    counts = dict[Tensor, int | None]()
    for parameter, owner in _stepped_by_weight(engine).items():
        count = exceptions.get(parameter, step)
        other_count = counts.get(owner)  # of another weight in the same shard, which gets the highest count
        if other_count is not None:
            count = max(other_count, count or 0)
        counts[owner] = count
    return counts


def _link_moments(engine: Any) -> None:
    """Link ZeRO's parameters to their moments. DeepSpeed does this only after the first group's first step."""
    if isinstance(engine.optimizer, LINKS_MOMENTS):
        optimizer: Any = engine.optimizer
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def disable_reduction(engine: Any) -> None:
    """Stop DeepSpeed's `backward` from reducing gradients (ZeRO-0); the caller reduces them from now on."""
    engine.enable_backward_allreduce = False


def was_skipped(engine: Any) -> bool:
    """Return whether the last step was skipped because a gradient had a NaN or Inf."""
    return bool(getattr(engine.optimizer, "overflow", False))  # of torch's optimizers, tds's engines set it


def drop_skipped_gradients(engine: Any) -> None:
    """Drop the gradients of a skipped step. With offload_optimizer, DeepSpeed 0.19 adds the next step's to them."""
    optimizer = engine.optimizer
    if isinstance(optimizer, Zero12Optimizer) and optimizer.overflow:
        gradients = optimizer.averaged_gradients
        gradients.update(dict.fromkeys(gradients))  # sets the gradients of each parameter group to None


def loss_scale(engine: Any) -> float | None:
    """Return the current fp16 loss scale, or None in another precision."""
    return float(engine.optimizer.cur_scale) if engine.fp16_enabled() else None


def _scaler_keys(scaler: Any) -> tuple[str, ...]:
    """Return the names of the attributes that training changes in a loss scaler."""
    dynamic_keys = "cur_iter", "last_overflow_iter", "cur_hysteresis"
    return ("cur_scale", *dynamic_keys) if scaler.dynamic else ("cur_scale",)


def _scaler_of(engine: Any) -> Any:
    """Return fp16's loss scaler, or None in another precision."""
    return engine.optimizer.loss_scaler if engine.fp16_enabled() else None


def get_loss_scaler(engine: Any) -> dict[str, float]:
    """Return the state of fp16's loss scaler; only its `cur_scale` if the scaler is static, {} in another precision."""
    scaler = _scaler_of(engine)
    return {key: getattr(scaler, key) for key in _scaler_keys(scaler)} if scaler else {}


def set_loss_scaler(engine: Any, state: dict[str, float]) -> None:
    """Restore a result of `get_loss_scaler` if both loss scales, saved and current, are dynamic.

    A static loss scale is a setting of the run, so it is not restored.
    """
    scaler = _scaler_of(engine)
    if scaler and scaler.dynamic and "cur_iter" in state:  # only a dynamic scaler saves `cur_iter`
        for key in _scaler_keys(scaler):
            if key in state:
                setattr(scaler, key, state[key])


def least_loss_scale(engine: Any) -> float | None:
    """Return the minimum of fp16's dynamic loss scale, or None without one.

    After this call, the engine keeps skipping steps at this minimum instead of raising an error.
    """
    scaler = _scaler_of(engine)
    if not scaler or not scaler.dynamic:
        return None
    scaler.raise_error_at_min_scale = False  # else DeepSpeed raises a bare Exception
    return float(scaler.min_scale)


def check_all_copies(engine: Any) -> None:
    """Make DeepSpeed's optimizers skip a step if a replicated or tied weight's gradient is non-finite on one rank only.

    DeepSpeed's norms count such a weight on one rank only, so a NaN on another rank would not skip the step.
    With ZeRO-1 and ZeRO-2 in fp32, and with ZeRO-3, checking all gradients costs one more pass over them and one more
    synchronization.
    """
    optimizer = engine.optimizer
    # In the first two, extend the result from which DeepSpeed computes the norm. The last has a setting for this.
    if isinstance(optimizer, BF16_Optimizer):
        optimizer.get_grads_for_norm = partial(_norm_grads_with_copies, optimizer, optimizer.get_grads_for_norm)
    elif isinstance(optimizer, Zero3Optimizer):
        optimizer._get_norm_groups = partial(_norms_inf_if_invalid, optimizer, optimizer._get_norm_groups)
    elif isinstance(optimizer, Zero12Optimizer):
        optimizer.check_grad_overflow = True


def _norm_grads_with_copies(optimizer: Any, original: Any, for_clipping: bool = False) -> Any:
    """Return the gradients that the bf16 optimizer's norm counts, plus a scalar that checks all other gradients.

    The scalar is 0 times the norms of the other gradients. It is NaN if any of them contains NaN or Inf, and NaN makes
    the optimizer skip the step.
    """
    result = original(for_clipping)
    if for_clipping:  # after the norm, DeepSpeed asks once more for all gradients, to scale them
        return result
    counted, experts = result  # DeepSpeed keeps the gradients of experts apart
    counted_grads = set(counted)
    uncounted: list[Tensor] = []
    for grads in optimizer.fp32_groups_gradients:
        uncounted += [grad for grad in grads if grad not in counted_grads]
    if uncounted:
        counted = [*counted, 0 * torch.stack(norms(uncounted)).sum().float()]
    return counted, experts


def _norms_inf_if_invalid(optimizer: Any, original: Any) -> list[Any]:
    """Return ZeRO 3's norms, plus infinity if any gradient contains NaN or Inf, which skips the step."""
    optimizer.check_overflow()
    group_norms = list(original())
    if optimizer.overflow:
        group_norms.append(float("inf"))
    return group_norms


def use_fp64(engine: Any) -> None:
    """Switch a new engine to fp64, for numerical checks; a ds_config has no fp64, but DeepSpeed steps any dtype."""
    engine.module.double()
    engine._config.communication_data_type = torch.float64  # without this, gradients would be summed in fp32
