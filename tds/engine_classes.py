"""The engine classes that `deepspeed.initialize` may choose, and those that a client derives from DeepSpeed's."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from ._deepspeed import DeepSpeedEngine, StockPipelineModule, deepspeed
from .messages import say
from .optimizer_state import complete_weights
from .patches import PACKAGE, maker


@contextmanager
def replaced_by(pipeline: type, plain: type) -> Iterator[None]:
    """Make `deepspeed.initialize` build `pipeline` for a PipelineModule and `plain` for any other model.

    DeepSpeed's engines for other modules and settings, such as DualPipeVEngine, raise ValueError. A subclass of tds's
    engine that the user has put in place of DeepSpeed's is built instead; anything else in its place raises ValueError.
    """
    before = {"PipelineEngine": deepspeed.PipelineEngine, "DeepSpeedEngine": deepspeed.DeepSpeedEngine, **engines()}
    chosen = {
        "PipelineEngine": _chosen("PipelineEngine", pipeline),
        "DeepSpeedEngine": _chosen("DeepSpeedEngine", plain),
    }
    for name in before:
        setattr(deepspeed, name, chosen.get(name, partial(_refuse_engine, name)))
    try:
        yield
    finally:
        for name, stock in before.items():
            setattr(deepspeed, name, stock)


def _chosen(name: str, ours: type) -> Any:
    """Return the class to build where DeepSpeed has `deepspeed.NAME`: the user's subclass of `ours`, or `ours`."""
    user = getattr(deepspeed, name)
    if not maker(user):
        return ours
    if isinstance(user, type) and issubclass(user, ours):
        return user
    raise ValueError(
        f"deepspeed.{name} is replaced by {maker(user)}, which {PACKAGE}.initialize does not build: derive it from "
        f"{PACKAGE}.{name}"
    )


def report_stock(ours: type) -> None:
    """Make DeepSpeed's engines report on rank 0 that they are built for a PipelineModule, unless derived from `ours`.

    A project may also have a copy of DeepSpeed's PipelineEngine, derived from DeepSpeedEngine.
    """
    honest = DeepSpeedEngine.__init__

    @wraps(honest)
    def init(engine: Any, *args: Any, **kwargs: Any) -> None:
        honest(engine, *args, **kwargs)
        runs_pipeline = isinstance(engine.module, StockPipelineModule)
        if runs_pipeline and not isinstance(engine, ours) and engine.global_rank == 0:
            kind = type(engine)
            say(
                f"warning: {kind.__module__}.{kind.__qualname__} is DeepSpeed's pipeline engine or a copy of it, but "
                f"{PACKAGE} is imported: use {PACKAGE}.initialize, or derive the class from {PACKAGE}.PipelineEngine"
            )

    DeepSpeedEngine.__init__ = init


def engines() -> dict[str, type]:
    """Return the engine classes for training that the package deepspeed has, by name."""
    found = vars(deepspeed).items()
    return {name: each for name, each in found if isinstance(each, type) and issubclass(each, DeepSpeedEngine)}


def _refuse_engine(name: str, *_: Any, model: Any = None, **__: Any) -> Any:
    if name == "DeepSpeedHybridEngine":
        cause = 'the section "hybrid_engine" of the ds_config; leave it out'
    else:
        cause = f"a {type(model).__name__}; use tds.PipelineModule, whose schedules are in docs/tds.md"
    raise ValueError(f"tds does not have DeepSpeed's {name}, which it would use because of {cause}")


class DeepSpeedMethods:
    """First base class of tds's PipelineEngine.

    A client's engine calls methods such as `super(PipelineEngine, self).forward(inputs)`, since DeepSpeed's
    PipelineEngine disables its own. But above tds's PipelineEngine comes DeepSpeed's, so this class stands between.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on one micro-batch, as DeepSpeedEngine does."""
        return DeepSpeedEngine.forward(self, *args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute gradients of one micro-batch's loss, as DeepSpeedEngine does."""
        return DeepSpeedEngine.backward(self, *args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer at the end of an accumulation, as DeepSpeedEngine does."""
        return DeepSpeedEngine.step(self, *args, **kwargs)

    def module_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of this stage's module, which the PipelineEngine writes to files instead."""
        complete_weights(self)
        return DeepSpeedEngine.module_state_dict(self, *args, **kwargs)
