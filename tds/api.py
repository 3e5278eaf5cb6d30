"""Names of the package tds: its own, and DeepSpeed's for all others."""

import importlib
import os
from datetime import timedelta
from typing import Any

from . import _deepspeed, _submodules, engine_classes, optimizers, pipe
from ._deepspeed import UnsupportedDeepSpeed, complaint, use_rng_tracker
from ._deepspeed import deepspeed as _ds
from ._torch import defer_dynamo
from .base_engine import Engine
from .batches import DataEnded
from .boundary import Boundary, BoundaryError
from .diagnose import watch_startup
from .distributed_optimizer import DistributedOptimizer
from .engine import PipelineEngine
from .measure import check_scale
from .messages import say
from .mistakes import narrow_sum_warning
from .observers import Observer
from .parent_death import end_with_launcher, refuse_impossible_ranks
from .recorder import record_collectives
from .store_host import prepare_store_host

engine_classes.warn_of_stock_engines(PipelineEngine)


def initialize(*args: Any, **kwargs: Any) -> Any:
    """Call `deepspeed.initialize`, but build tds's PipelineEngine for a PipelineModule, tds's Engine for other models.

    Accepts DeepSpeed's arguments, including the older `config_params`. Returns
    `(engine, optimizer, training_dataloader, lr_scheduler)`.
    Raises UnsupportedDeepSpeed, a ValueError, for a release of DeepSpeed that tds does not support, or that trains
    wrongly with these settings, unless TDS_ANY_DEEPSPEED=1 is set.
    """
    release_warning = _deepspeed.refuse_other_releases(_ds.__version__)
    _deepspeed.patch_deepspeed()
    watch_startup()
    package = importlib.import_module(__package__)  # in which a user may have set another PipelineEngine
    with (
        optimizers.use_torch_on_cpu() as notes,
        _deepspeed.quietly(),
        engine_classes.use_engine_classes(package.PipelineEngine, Engine),
    ):
        result = _ds.initialize(*args, **kwargs)
        engine = result[0]
        _deepspeed.disable_timer_sync(engine)
        check_scale(engine, untested=release_warning is not None)  # ValueError if DeepSpeed scales gradients wrongly
    # Each of these is a warning, or None.
    problems = release_warning, _deepspeed.refuse_wrong_settings(engine), narrow_sum_warning(engine)
    notes += [f"warning: {each}" for each in problems if each]
    if notes and engine.global_rank == 0:
        say("\n".join(notes))
    return result


def init_distributed(dist_backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """Call `deepspeed.init_distributed` with the backend of the available device (gloo on a CPU)."""
    _deepspeed.refuse_other_releases(_ds.__version__)
    refuse_impossible_ranks()
    end_with_launcher()  # this process ends if its launcher dies

    # These settings must be made before the process group and its store are created.
    record_collectives()
    prepare_store_host()
    defer_dynamo()
    _deepspeed.patch_deepspeed()
    _deepspeed.set_local_rank()
    if dist_backend is None:
        dist_backend = "gloo" if _deepspeed.on_cpu() else _ds.accelerator.get_accelerator().communication_backend_name()
    timeout = kwargs.get("timeout") or timedelta(minutes=30)
    attempt = 0
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from .attempts import enter_attempt, join_attempt

        attempt = enter_attempt(timeout)

    def connect() -> None:
        if attempt:
            join_attempt(attempt, dist_backend, timeout, _deepspeed.this_device())
        _ds.init_distributed(dist_backend, *args, **kwargs)

    # A launcher of several ranks sets WORLD_SIZE. Only MPI sets other variables, which DeepSpeed reads in connect().
    if os.environ.get("WORLD_SIZE", "1") == "1":
        connect()
        watch_startup()  # MPI may have started several ranks
        return
    from .meeting import connect_ranks

    connect_ranks(connect, timeout, attempt)  # also names the ranks that do not come


def __getattr__(name: str) -> Any:
    """Return DeepSpeed's attribute or submodule `name`, for names that tds does not define."""
    if name in _submodules.MOVED_NAMES:
        return getattr(importlib.import_module(_submodules.MOVED_NAMES[name]), name)
    # An unknown name may be a submodule that is not imported yet. Names with an underscore are not: Python itself asks
    # for names such as __path__.
    if not hasattr(_ds, name) and not name.startswith("_"):
        try:
            return importlib.import_module(f"{_submodules.PACKAGE}.{name}")
        except ModuleNotFoundError:
            pass
    # For example, DeepSpeedEngine is the class of tds that replaces DeepSpeed's.
    return _submodules.tds_version_of(getattr(_ds, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_ds)})


PipelineModule = pipe.PipelineModule


__all__ = [
    "Boundary",
    "BoundaryError",
    "DataEnded",
    "DistributedOptimizer",
    "Observer",
    "PipelineEngine",
    "PipelineModule",
    "UnsupportedDeepSpeed",
    "complaint",
    "init_distributed",
    "initialize",
    "pipe",
    "use_rng_tracker",
]
