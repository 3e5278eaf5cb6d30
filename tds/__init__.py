"""A drop-in for DeepSpeed with its own pipeline engine: `import tds as deepspeed`.

Names that this package does not define are taken from DeepSpeed.

schedule.py   order of each stage's passes and messages, as a list of instructions; other_schedules.py: besides 1f1b
boundary.py   tensors that cross from one stage to the next
channel.py    point-to-point transport of tensors between stages
neighbours.py neighbours of a stage and their process groups
groups.py     cheap creation of process groups in a large world
queues.py     order in which a device moves messages
deadlocks.py  proof that a schedule cannot deadlock
recompute.py  the function by which a stage recomputes activations
batches.py    micro-batches of a step, copied when they are read
engine.py     the pipeline engine: runs the instructions of a schedule as one training step
patches.py    a user's replacements of DeepSpeed's functions: run, or refused by name
observers.py  what the engine informs about each instruction: the watchdog, timers, timelines, the user's own
untied.py     weights that stages share without a tie
step.py       state of a stage during a step
buckets.py    weights and gradients in flat memory
zero_settings.py settings of ZeRO that DeepSpeed refuses without naming their keys
layout.py     weights whose memory layout DeepSpeed's broadcasts do not accept
zero_reductions.py sums of the gradients of DeepSpeed's ZeRO optimizers
flat_matrices.py places weights in buckets, sharded anywhere or stepped as wholes
distributed_optimizer.py steps the weights in these buckets, sharded over the replicas
engine_classes.py the engines that deepspeed.initialize may choose
base_engine.py the engine for models without a pipeline, and what a pipeline engine has besides its schedule
evaluation.py eval_batch of a pipeline engine
zero3_partition.py sharding of each layer over the replicas while a model is built (ZeRO-3)
trace.py      recorder of a rank's timeline; align.py compares the ranks' clocks, timeline.py merges timelines
timetable.py  checks a schedule before it runs and predicts its timeline
parent_death.py ends ranks whose launcher died
interfaces.py choice of the network interface that reaches the other hosts
meeting.py    errors instead of hangs while the ranks connect to each other
diagnose.py   errors instead of hangs; fault_board.py exchanges faults and reports through torch's store
heartbeat.py  end of a run in which a host falls silent
store_host.py limits of the process that hosts this store in large runs
measure.py    check of how DeepSpeed scales gradients
pipe.py       PipelineModule, LayerSpec, TiedLayerSpec; sequential.py runs layers, ties.py ties modules over stages
"""

import importlib
import os
import warnings
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
from .parent_death import end_with_launcher, refuse_impossible_ranks, rejoin_store
from .recorder import record_collectives
from .store_host import prepare_store_host

_submodules.install()
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
    with (
        optimizers.use_torch_on_cpu() as notes,
        _deepspeed.quietly(),
        engine_classes.use_engine_classes(PipelineEngine, Engine),
    ):
        result = _ds.initialize(*args, **kwargs)
        engine = result[0]
        _deepspeed.disable_timer_sync(engine)
        check_scale(engine, untested=release_warning is not None)
    for each in engine._untied:  # the engine warns, too, but quietly() hides it
        warnings.warn(each, stacklevel=2)
    problems = release_warning, _deepspeed.refuse_wrong_settings(engine), narrow_sum_warning(engine)
    notes += [f"warning: {each}" for each in problems if each]
    if notes and engine.global_rank == 0:
        say("\n".join(notes))
    return result


def init_distributed(dist_backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """Call `deepspeed.init_distributed` with the backend of the available device (gloo on a CPU)."""
    _deepspeed.refuse_other_releases(_ds.__version__)
    refuse_impossible_ranks()
    end_with_launcher()
    record_collectives()
    prepare_store_host()
    defer_dynamo()
    _deepspeed.patch_deepspeed()
    if dist_backend is None:
        dist_backend = "gloo" if _deepspeed.on_cpu() else _ds.accelerator.get_accelerator().communication_backend_name()
    _deepspeed.set_local_rank()
    timeout = kwargs.get("timeout")

    def connect() -> None:
        rejoin_store(dist_backend, timeout, _deepspeed.this_device())  # only after a restart by torchrun
        _ds.init_distributed(dist_backend, *args, **kwargs)

    if os.environ.get("WORLD_SIZE", "1") == "1":
        connect()
        watch_startup()  # the launcher may be MPI, which sets other variables
        return
    from .meeting import connect_ranks

    connect_ranks(connect, timeout)


def __getattr__(name: str) -> Any:
    """Return DeepSpeed's attribute or submodule `name`, for names that tds does not define."""
    if name in _submodules.MOVED_NAMES:
        return getattr(importlib.import_module(_submodules.MOVED_NAMES[name]), name)
    if not hasattr(_ds, name) and not name.startswith("_"):  # a submodule that is not imported yet, if anything
        try:
            return importlib.import_module(f"{_submodules.PACKAGE}.{name}")
        except ModuleNotFoundError:
            pass
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
