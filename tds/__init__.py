"""A drop-in for DeepSpeed with its own pipeline engine: `import tds as deepspeed`.

Names that this package does not define are taken from DeepSpeed. torch and DeepSpeed are imported at the first use of
such a name or of one of `tds.api`: schedules and timelines need neither.

api.py        the names of this package, and DeepSpeed's
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
from typing import TYPE_CHECKING, Any

from . import _submodules

if TYPE_CHECKING:
    from .api import *  # noqa: F403

_submodules.install()


def __getattr__(name: str) -> Any:
    """Return this package's module `name`, or the name of `tds.api`."""
    if (_submodules.HERE / f"{name}.py").is_file():
        return importlib.import_module(f".{name}", __name__)
    return getattr(importlib.import_module(".api", __name__), name)


def __dir__() -> list[str]:
    return dir(importlib.import_module(".api", __name__))
