"""Patches of DeepSpeed's pipeline by a user's code: tds runs those that mean the same in it, and refuses the others."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, NamedTuple

from ._deepspeed import StockPipelineEngine, StockPipelineModule

PACKAGE = __name__.partition(".")[0]

# Each block begins with what to do instead of a patch. Then come names that DeepSpeed's pipeline runs and tds does not:
# a class or module, and in it functions, classes and keys of `_INSTRUCTION_MAP`. A star means all functions of a class
# and of its bases.
TABLE = """
register your order of passes with tds.schedule.register
    runtime.pipe.engine.PipelineEngine      _train_schedule _inference_schedule _exec_schedule
    runtime.pipe.engine                     schedule
    runtime.pipe.schedule                   TrainSchedule InferenceSchedule PipeSchedule
    runtime.pipe.schedule.TrainSchedule     *
    runtime.pipe.schedule.InferenceSchedule *
    runtime.pipe.schedule.PipeSchedule      *

use hooks of the layers, an observer in engine.observers, or a subclass of tds.PipelineEngine with its own train_batch
    runtime.pipe.engine.PipelineEngine      _exec_forward_pass _exec_backward_pass ForwardPass BackwardPass
    runtime.pipe.engine.PipelineEngine      _reentrant_activation_checkpointing
    runtime.pipe.engine.PipelineEngine      _backward_prologue _backward_epilogue _backward_post_hook
    runtime.engine.DeepSpeedEngine          forward backward

change batches in engine.set_batch_fn or in the iterator; the first and the last stage read it at the start of a step
    runtime.pipe.engine.PipelineEngine      _exec_load_micro_batch LoadMicroBatch

leave the patch out, since tds sends any tuple of tensors
    runtime.pipe.engine.PipelineEngine      _exec_send_activations _exec_recv_activations SendActivation RecvActivation
    runtime.pipe.engine.PipelineEngine      _exec_send_grads _exec_recv_grads SendGrad RecvGrad
    runtime.pipe.engine.PipelineEngine      _send_tensor_meta _recv_tensor_meta _reserve_pipe_buffers
    runtime.pipe.engine.PipelineEngine      _allocate_zeros _allocate_buffer _allocate_or_extend_buffers
    runtime.pipe.engine                     p2p
    runtime.pipe.p2p                        send recv can_send_recv

use hooks of the weights, since tds sums the gradients of tied weights over their stages
    runtime.pipe.engine.PipelineEngine      _exec_reduce_tied_grads ReduceTiedGrads
    runtime.pipe.module.PipelineModule      get_tied_weights_and_groups allreduce_tied_weight_gradients

scale or name losses in loss_fn, which may return a dict and have a method count_targets
    runtime.pipe.engine.PipelineEngine      _aggregate_total_loss _reduce_outputs _bcast_pipe_scalar
    runtime.pipe.engine.PipelineEngine      _loss_stage_global_rank _backward_prologue_per_tensor _scale_loss_by_gas
    runtime.engine.DeepSpeedEngine          _backward_prologue_per_tensor

leave the patch out, since tds clips by the norm over all stages
    runtime.engine.DeepSpeedEngine          clip_fp32_gradients

give partition_method a list of cuts, or derive a class from tds.PipelineModule
    runtime.pipe.module.PipelineModule      _partition_layers stage_owner

patch tds.PipelineEngine, or derive a class from it
    runtime.pipe.engine.PipelineEngine      train_batch eval_batch
"""
OVERRIDDEN = "train_batch", "eval_batch", "_partition_layers", "stage_owner"  # tds runs its own, or a subclass's
# Names by which DeepSpeed reduces gradients over the replicas. tds runs replacements of them, unless it reduces itself.
REDUCING_TABLE = """
replace it before tds.initialize, and use no tds.DistributedOptimizer, which reduces during the backward pass
    runtime.pipe.engine.PipelineEngine      ReduceGrads _exec_reduce_grads _bf16_reduce_grads
    runtime.pipe.engine.PipelineEngine      allreduce_gradients buffered_allreduce_fallback
    runtime.pipe.engine.PipelineEngine      _get_gradients_for_reduction _reduce_non_expert_gradients
    runtime.pipe.engine.PipelineEngine      allreduce_no_retain allreduce_and_copy allreduce_bucket
    runtime.engine.DeepSpeedEngine          buffered_allreduce_fallback
    runtime.engine                          split_half_float_double_sparse
"""


class PatchPoint(NamedTuple):
    """A name in `place`, a class or module of DeepSpeed, and what to do instead of replacing it."""

    place: Any
    name: str
    advice: str

    def __str__(self) -> str:
        if isinstance(self.place, ModuleType):
            return f"{self.place.__name__}.{self.name}"
        member = f"_INSTRUCTION_MAP[{self.name}]" if self.name[0].isupper() else self.name
        return f"{self.place.__module__}.{self.place.__qualname__}.{member}"


def _parse_table(table: str) -> Iterator[PatchPoint]:
    """Yield the names in a table of the form of TABLE."""
    for block in table.strip().split("\n\n"):
        advice, *lines = block.splitlines()
        for line in lines:  # e.g. "runtime.pipe.p2p  send recv": a class or module of DeepSpeed, and names in it
            path, *names = line.split()
            place = resolve_name(f"deepspeed.{path}")
            for name in _function_names(place) if names == ["*"] else names:
                yield PatchPoint(place, name, advice)


def _function_names(kind: type) -> Iterator[str]:
    """Yield the names of the methods and properties of a class and its bases, except those that every class has."""
    for name in dir(kind):
        value = getattr(kind, name)
        is_function = callable(value) or isinstance(value, property)
        is_in_every_class = hasattr(object, name) and name != "__init__"  # but a replaced __init__ matters
        if is_function and not is_in_every_class:
            yield name


IGNORED_POINTS = list(_parse_table(TABLE))
REDUCTION_POINTS = list(_parse_table(REDUCING_TABLE))


def refuse_patches(engine: Any, module: Any, reduces: bool = False) -> None:
    """Raise ValueError if code outside DeepSpeed and tds has replaced a function that only DeepSpeed's pipeline runs.

    engine: a pipeline engine of tds, which need not be built yet. module: the PipelineModule.
    reduces: whether tds reduces the gradients over the replicas without DeepSpeed.
    """
    points = IGNORED_POINTS
    if reduces:
        points = IGNORED_POINTS + REDUCTION_POINTS
    patch = _first_patch(points, type(engine), vars(engine), type(module))
    if patch:
        point, author = patch
        raise ValueError(f"{point} is replaced by {author}, which tds does not run: {point.advice}")
    if reduces and not getattr(engine, "pipeline_enable_backward_allreduce", True):
        raise ValueError(
            "pipeline_enable_backward_allreduce is False, but tds reduces gradients during the backward pass: set "
            '"pipeline": {"overlap_grad_reduce": false} in the ds_config, and use no tds.DistributedOptimizer'
        )


def is_reduction_replaced(engine_class: type) -> bool:
    """Return whether the user has replaced a function by which DeepSpeed reduces gradients over the replicas."""
    return _first_patch(REDUCTION_POINTS, engine_class, {}, object) is not None


def _first_patch(
    points: Sequence[PatchPoint], engine_class: type, attributes: Mapping[str, Any], module: type
) -> tuple[PatchPoint, str] | None:
    """Return the first of `points` that a user has replaced, and the name of the replacement; see `_value_in_use`."""
    for point in points:
        author = foreign_name(_value_in_use(point, engine_class, attributes, module))
        if author:
            return point, author
    return None


def instruction_handler(engine: Any, instruction: str, method: str) -> Callable[[], Any]:
    """Return what runs an instruction of DeepSpeed: the user's function in `_INSTRUCTION_MAP`, or the engine's method.

    instruction: name of the instruction's class, such as OptimizerStep.
    """
    function = _instruction_map(type(engine)).get(instruction)
    return partial(function, engine) if function and foreign_name(function) else getattr(engine, method)


def foreign_name(value: Any) -> str | None:
    """Return the name of a function, class or module that neither DeepSpeed nor tds defines, else None.

    For example, "my_project.train.forward" for a function that a user has put in place of DeepSpeed's.
    """
    if value is None:
        return None
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, ModuleType):
        module_name = value.__name__
        name = module_name
    else:
        # functools.wraps copies __module__, but not the globals of a function, which belong to the defining module.
        defining_module = getattr(value, "__globals__", {}).get("__name__")
        # A class has no globals but a `__module__`. For a value without either, the module of its class counts.
        module_name = str(defining_module or getattr(value, "__module__", None) or type(value).__module__)
        name = f"{module_name}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    package = module_name.partition(".")[0]
    return None if package in ("deepspeed", PACKAGE) else name


def _value_in_use(point: PatchPoint, engine_class: type, attributes: Mapping[str, Any], module: type) -> Any:
    """Return the value of `point` in an engine of this class with these attributes, or in its `module`.

    The caller checks whether a user has defined this value. None stands for a replacement that does run, so that it is
    not reported.
    """
    name = point.name
    in_deepspeed = vars(point.place).get(name)
    # These two classes have subclasses in tds, or the user's. A patch of any other class or module is found in itself.
    owner = {StockPipelineEngine: engine_class, StockPipelineModule: module}.get(point.place)
    if owner is None:
        return in_deepspeed
    if name[0].isupper():  # the class of an instruction
        return _instruction_map(engine_class).get(name)
    value = getattr(owner, name, None)
    if name in OVERRIDDEN:
        # tds has its own method, so a patch of DeepSpeed's class runs only if a subclass has taken it over, for example
        # by train_batch = StockPipelineEngine.train_batch.
        return None if value is in_deepspeed else in_deepspeed
    if owner is engine_class:
        return attributes.get(name) or value  # an attribute of the engine hides that of its class
    return value


def _instruction_map(engine_class: Any) -> dict[str, Any]:
    """Return DeepSpeed's functions of instructions by the names of the instructions."""
    return {each.__name__: function for each, function in engine_class._INSTRUCTION_MAP.items()}
