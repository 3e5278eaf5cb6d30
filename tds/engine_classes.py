"""The engine classes that `deepspeed.initialize` may choose, each of which tds replaces or refuses."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ._deepspeed import DeepSpeedEngine, deepspeed


@contextmanager
def replaced_by(pipeline: type, plain: type) -> Iterator[None]:
    """Make `deepspeed.initialize` build `pipeline` for a PipelineModule and `plain` for any other model.

    DeepSpeed's engines for other modules and settings, such as DualPipeVEngine, raise ValueError.
    """
    before = engines()
    for name in before:
        setattr(deepspeed, name, partial(_refuse_engine, name))
    deepspeed.PipelineEngine = pipeline
    deepspeed.DeepSpeedEngine = plain
    try:
        yield
    finally:
        for name, stock in before.items():
            setattr(deepspeed, name, stock)


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
