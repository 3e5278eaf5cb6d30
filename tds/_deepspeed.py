"""DeepSpeed's internal classes, the supported range of its releases, and patches of its internals.

DeepSpeed may rename its internals in any release. `_contract.py` lists the names that tds uses. The first use of a name
of tds.api fails if the installed release lacks a listed name. `tds.__getattr__` forwards DeepSpeed's public names.
"""

import contextlib
import functools
import importlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch

from ._contract import CONTRACT
from .messages import setting_advice

SUPPORTED = (0, 19), (0, 20)  # first supported release, first unsupported one; pyproject.toml has the same range
# The first release whose ZeRO 3 waits for all messages on CPUs. Earlier ones wait for the last message only, so with
# gloo, a weight may be read before it has arrived.
ZERO_3_ON_CPU = 0, 19, 8
OVERRIDE = "TDS_ANY_DEEPSPEED"


class UnsupportedDeepSpeed(ValueError, ImportError):
    """A release of DeepSpeed that is outside the supported range or lacks a name that tds uses."""


def refuse_other_releases(version: str) -> str | None:
    """Raise UnsupportedDeepSpeed for a release that is outside `SUPPORTED` or lacks a name that tds uses.

    If the environment variable TDS_ANY_DEEPSPEED is set to anything but 0, return a warning instead. Return None for a
    supported release.
    """
    release = tuple(map(int, re.findall(r"\d+", version)))
    wanted = "deepspeed>={}.{},<{}.{}".format(*SUPPORTED[0], *SUPPORTED[1])
    lacks = "".join(f"; it lacks {each}" for each in missing_names())
    if SUPPORTED[0] <= release < SUPPORTED[1] and not lacks:
        return None
    if _is_override_set():
        return f"{OVERRIDE} is set: training with DeepSpeed {version}, which tds was not tested with ({wanted}){lacks}"
    raise UnsupportedDeepSpeed(
        f"DeepSpeed {version} may silently train on wrong gradients{lacks}: pip install '{wanted}', "
        f"or set {OVERRIDE}=1 to use this release nevertheless"
    )


def _is_override_set() -> bool:
    """Return whether the user allows any release of DeepSpeed."""
    return os.environ.get(OVERRIDE, "") not in ("", "0")


def refuse_wrong_settings(engine: Any) -> str | None:
    """Raise UnsupportedDeepSpeed if the installed release trains wrongly with the settings of `engine`.

    tests/releases finds such settings. This function refuses those that tds.measure cannot detect. If TDS_ANY_DEEPSPEED
    is set, return a warning instead. Return None if nothing is known to be wrong.
    """
    version = deepspeed.__version__
    release = tuple(map(int, re.findall(r"\d+", version)))
    if release >= ZERO_3_ON_CPU or engine.zero_optimization_stage() != 3 or not on_cpu():
        return None  # the bug needs an earlier release, ZeRO 3 and CPUs
    problem = f"DeepSpeed {version} with ZeRO 3 on CPUs may read weights before they have arrived"
    if _is_override_set():
        return problem
    raise UnsupportedDeepSpeed(
        f"{problem}: pip install 'deepspeed>={'.'.join(map(str, ZERO_3_ON_CPU))},<{'.'.join(map(str, SUPPORTED[1]))}', "
        "or use ZeRO 1 or 2"
    )


def missing_names() -> list[str]:
    """Describe each name of CONTRACT that the installed release lacks, and what tds needs the name for.

    Names that only instances have are not checked here but in tests/unit/test_contract.py.
    """
    missing = []
    for names in CONTRACT:
        module, _, path = names.place.partition(":")
        place: Any = None
        with contextlib.suppress(ImportError, AttributeError):
            # An empty path gives the module, and `SynchronizedWallClockTimer.Timer` a class inside a class of it.
            place = resolve_name(f"{module}:{path}")
        for name in f"{names.uses} {names.overrides} {names.patches}".split():
            if not hasattr(place, name):
                missing.append(f"{path or module}.{name}, needed for {names.purpose}")
    return missing


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress what DeepSpeed's modules print in this block. Layers and optimizers that they call still print."""
    # sys.stdout is not replaced, because a logger that a layer sets up in this block would keep the replacement.
    modules = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("deepspeed.")]
    for names in modules:
        names["print"] = lambda *_, **__: None  # hides the built-in function
    try:
        yield
    finally:
        for names in modules:
            names.pop("print", None)


def _import() -> Any:
    # Hide what torch warns of in DeepSpeed, such as deprecated names, since a user cannot change these calls.
    # The log level must be set before the import, because DeepSpeed searches for an accelerator and logs during it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    warnings.filterwarnings("ignore", module=r"deepspeed\.")
    logger = logging.getLogger("DeepSpeed")
    level = os.environ.get("TDS_LOG_LEVEL", "ERROR").upper()
    os.environ.setdefault("DS_LOG_LEVEL", level.lower())
    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # without this variable, DeepSpeed probes for devices and warns
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
    logger.setLevel(getattr(logging, level, logging.ERROR))
    return deepspeed


deepspeed = _import()

try:  # other modules take these names from here, so that the import above comes first
    from deepspeed import checkpointing, utils, zero
    from deepspeed.pipe import LayerSpec, TiedLayerSpec
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER
    from deepspeed.runtime.pipe.engine import PipelineEngine as StockPipelineEngine
    from deepspeed.runtime.pipe.module import PipelineModule as StockPipelineModule
    from deepspeed.runtime.utils import partition_balanced, partition_uniform, set_random_seed
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Zero3Optimizer
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Zero12Optimizer
except ImportError:
    refuse_other_releases(deepspeed.__version__)
    raise

__all__ = [
    "BF16_Optimizer", "TRAIN_BATCH_TIMER", "DeepSpeedEngine", "DeepSpeedOptimizer", "FP16_Optimizer",
    "FP16_UnfusedOptimizer", "LayerSpec", "StockPipelineEngine", "StockPipelineModule", "TiedLayerSpec",
    "Zero3Optimizer", "Zero12Optimizer", "checkpointing", "deepspeed", "partition_balanced",
    "partition_uniform", "set_random_seed", "utils", "zero",
]  # fmt: skip


def on_cpu() -> bool:
    """Return whether DeepSpeed's accelerator is a CPU."""
    return bool(deepspeed.accelerator.get_accelerator().device_name() == "cpu")


def patch_deepspeed() -> None:
    """Patch DeepSpeed's view of what this device can do, before `init_distributed` and `initialize`.

    Unpatched, DeepSpeed compiles a shared-memory op in every rank on a CPU (25-73 s, needs a compiler). It refuses
    fp16 on CPUs without native fp16 instructions, although torch supports fp16 there. It refuses to reduce fp64
    gradients on every device. In half precision without ZeRO, it takes an optimizer step with zero gradients at the
    start. Adam counts this step, so its first real step would be 0.75 times as large as it should be.
    """
    accelerator = deepspeed.accelerator.get_accelerator()
    if on_cpu():
        # Import the submodule by name, because the attribute `deepspeed.comm.torch` is the package torch.
        comm: Any = importlib.import_module("deepspeed.comm.torch")
        comm.build_shm_op = lambda: None
        accelerator.is_fp16_supported = lambda: True
    dtypes = accelerator.supported_dtypes()
    if torch.float64 not in dtypes:
        accelerator.supported_dtypes = lambda: [*dtypes, torch.float64]

    # DeepSpeed broadcasts tied weights into leaves. Without no_grad, they would get a grad_fn. A patched method has the
    # attribute __wrapped__.
    synchronize_ties = StockPipelineModule._synchronize_tied_weights
    if not hasattr(synchronize_ties, "__wrapped__"):
        StockPipelineModule._synchronize_tied_weights = torch.no_grad()(synchronize_ties)

    for optimizer in (FP16_Optimizer, FP16_UnfusedOptimizer):
        optimizer.initialize_optimizer_states = lambda _: None  # it would take the step with zero gradients
    for optimizer in (FP16_Optimizer, FP16_UnfusedOptimizer, Zero12Optimizer, Zero3Optimizer):
        _grow_scale_after_step(optimizer)


@functools.cache  # patches a class once
def _grow_scale_after_step(optimizer_class: Any) -> None:
    """Patch a class of optimizers to unscale the gradients before the loss scale of fp16 grows.

    Unpatched, the scale grows first, so in this step the gradients, and with ZeRO 3 their norm, are half as large.
    """
    step = optimizer_class.step

    @functools.wraps(step)
    def step_then_grow(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        # `step` calls `_update_scale` before it unscales the gradients. If there is no overflow, postpone this call.
        update_scale = optimizer._update_scale
        is_postponed = False

        def update_or_postpone(overflow: Any) -> None:
            nonlocal is_postponed
            if overflow:
                update_scale(True)
            else:
                is_postponed = True

        optimizer._update_scale = update_or_postpone
        try:
            result = step(optimizer, *args, **kwargs)
        finally:
            del optimizer._update_scale  # the method of the class is used again
        if is_postponed:
            update_scale(False)
        return result

    optimizer_class.step = step_then_grow


def set_local_rank() -> None:
    """Set LOCAL_RANK to 0, before the process group is created, if this rank sees only its own device.

    DeepSpeed picks its device by LOCAL_RANK, but `srun --gpus-per-task=1` and container schedulers show each rank
    only one device, number 0. Raises ValueError if several devices are visible but none has the number LOCAL_RANK.
    """
    count = 0 if on_cpu() else torch.accelerator.device_count()  # devices that this rank sees
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not count or local_rank < count:
        return  # there is nothing to choose, or LOCAL_RANK is a valid number
    if count > 1:
        raise ValueError(
            f"rank {os.environ.get('RANK', '0')} has LOCAL_RANK {local_rank}, but sees only {count} accelerators: "
            f"start {count} ranks per machine ({setting_advice['ranks']}), or let each rank see one accelerator only"
        )
    os.environ["LOCAL_RANK"] = "0"


def this_device() -> torch.device:
    """Return the device on which DeepSpeed places this rank's layers."""
    name = deepspeed.accelerator.get_accelerator().device_name(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device(name)


@contextlib.contextmanager
def around_each_layer(context: Callable[[int], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Make every PipelineModule, DeepSpeed's included, build layer i within `context(i)`."""
    build_all = StockPipelineModule._build

    def build_each(module: Any) -> None:
        bounds = module._local_start, module._local_stop
        for index in range(*bounds):
            module._set_bounds(index, index + 1)  # `build_all` builds the layers within these bounds: only this one
            with context(index):
                build_all(module)
        module._set_bounds(*bounds)

    StockPipelineModule._build = build_each
    try:
        yield
    finally:
        StockPipelineModule._build = build_all


def configure_compression(engine: Any) -> None:
    """Set the attributes that DeepSpeed 0.19.0 to 0.19.6 sets in `_configure_optimizer` and reads in each step."""
    for name, method in (
        ("compression_scheduler", "_configure_compression_scheduler"),
        ("quantizer", "_configure_quantization"),
    ):
        if hasattr(engine, method):
            setattr(engine, name, getattr(engine, method)())


def disable_timer_sync(engine: Any) -> None:
    """Stop DeepSpeed's throughput timer from synchronizing in every micro-batch, unless the ds_config has `timers`."""
    if "timers" not in engine._config._param_dict:
        engine.tput_timer.config.synchronized = False


def autocast(engine: Any) -> contextlib.AbstractContextManager[None]:
    """Return the autocast context that `"torch_autocast"` in the ds_config requests for a forward pass."""
    if not engine._config.torch_autocast_enabled:
        return contextlib.nullcontext()
    from deepspeed.runtime.torch_autocast import autocast_if_enabled

    return autocast_if_enabled(engine)  # type: ignore[no-any-return]


class Bf16Sum(NamedTuple):
    """The fp32 tensor in which DeepSpeed's bf16 optimizer accumulates the gradient of one weight.

    flags[position] is True if the weight has a gradient in this step. All weights of a parameter group share `flags`.
    """

    gradient: torch.Tensor
    flags: list[bool]
    position: int


def bf16_sums(optimizer: Any) -> dict[torch.Tensor, Bf16Sum]:
    """Map each weight that DeepSpeed's bf16 optimizer trains to its fp32 gradient sum."""
    sums = {}
    groups = zip(
        optimizer.bf16_groups, optimizer.fp32_groups_gradients, optimizer.fp32_groups_has_gradients, strict=True
    )
    for weights, gradients, flags in groups:
        for index, weight in enumerate(weights):
            sums[weight] = Bf16Sum(gradients[index], flags, index)
    return sums


def flat_groups(optimizer: Any) -> list[tuple[Sequence[torch.Tensor], torch.Tensor]]:
    """Return, for each parameter group of a DeepSpeed optimizer, its weights and the flat tensor that they view.

    The list is empty for an optimizer without such views: a user-defined one, ZeRO-3, DistributedOptimizer.
    """
    for name in ("bit16_groups_flat", "bf16_groups_flat", "fp16_groups_flat"):  # the first is that of ZeRO-1 and ZeRO-2
        flat = getattr(optimizer, name, None)
        if flat is not None:
            weights = getattr(optimizer, name.removesuffix("_flat"))
            return list(zip(weights, flat, strict=True))
    return []


def link_shares(bucket: Any) -> None:
    """Make fp32 weights and gradients of a `Bucket` visible to `deepspeed.utils.safe_get_full_fp32_param` etc."""
    utils.link_hp_params(
        lp_param_list=bucket.slots,  # DeepSpeed derives each weight's position from the sizes before it
        flat_hp_partition=bucket.share,
        gradient_dict=bucket.readable_grads,
        offload_gradient_dict=None,
        use_offload=False,
        param_group_index=0,
        partition_start=bucket.begin,
        partition_size=bucket.end - bucket.begin,
        dp_group=bucket.group,
    )


def is_elementwise(optimizer: Any) -> bool:
    """Return whether DeepSpeed accepts this optimizer for ZeRO: its update must be element-wise."""
    from deepspeed.runtime.zero.utils import is_zero_supported_optimizer

    return bool(is_zero_supported_optimizer(optimizer))


FLOPS_PROFILER = {  # valid keys of the section `flops_profiler`; DeepSpeed ignores unknown keys
    "enabled", "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed", "output_file",
}  # fmt: skip


def complaint(section: str, content: dict[str, Any]) -> str | None:
    """Return DeepSpeed's error message about a section of a ds_config, starting with the invalid key.

    None if DeepSpeed accepts the section or does not check it.
    """
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models: dict[str, Any] = {
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
    }
    if section == "flops_profiler":  # DeepSpeed ignores unknown keys in this section
        unknown_keys = sorted(content.keys() - FLOPS_PROFILER)
        return f"{unknown_keys[0]!r} is unknown" if unknown_keys else None
    model = models.get(section)
    if model is None:
        return None
    try:
        model(**{key: value for key, value in content.items() if value != "auto"})  # "auto" is filled in later
    except ValueError as error:
        if not hasattr(error, "errors"):  # not pydantic's ValidationError
            raise
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "?"  # e.g. offload_optimizer.device
        return f"{key!r} is unknown" if first["type"] == "extra_forbidden" else f"{key!r}: {first['msg']}"
    return None


def use_rng_tracker(tracker: Any) -> None:
    """Let DeepSpeed's activation checkpointing restore the RNG states of `tracker` before it recomputes activations.

    tracker: has `fork()`, `get_states()` and `set_states(states)`.
    """
    checkpointing._CUDA_RNG_STATE_TRACKER = tracker
