"""One rank of a case, on the stand-in or on the CPU: `python -m tests.cuda_stand_in.worker FOLDER [LIBRARY]`.

FOLDER/command.json has the command: the name of a model family or the path of a tool, then its flags. The rank writes
FOLDER/rank<N>.json: its waits, the calls that NCCL would refuse, and the order of its calls.
"""

import functools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any, NoReturn

from .waits import WAITS


def _count_waits_of_steps() -> None:
    """Count the waits in each training step of both kinds of engines."""
    from megatron.engines.engine import PipeEngine
    from megatron.engines.without_pipeline import NoPipeEngine

    for engine in (PipeEngine, NoPipeEngine):
        engine.train_batch = _counted(engine.train_batch)  # type: ignore[method-assign]


def _counted(train_batch: Any) -> Any:
    @functools.wraps(train_batch)
    def run(*args: Any, **kwargs: Any) -> Any:
        with WAITS.step():
            return train_batch(*args, **kwargs)

    return run


def install(library: Path) -> None:
    """Install the stand-in in this process, before torch is imported."""
    from . import device

    device.install(library, int(os.environ["LOCAL_RANK"]))
    from . import nccl

    nccl.install()


def _write_report(folder: Path) -> None:
    """Write what this rank has recorded."""
    from .nccl import RECORD

    report = {"waits": WAITS.steps, "refused": RECORD.refused, "events": RECORD.events}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(report))


def _report_before_exit(folder: Path) -> None:
    """Write the report also if the command ends this process with os._exit, as generate.py does on several ranks."""
    end = os._exit

    def write_and_end(code: int) -> NoReturn:
        _write_report(folder)
        end(code)

    os._exit = write_and_end  # type: ignore[assignment]


def _compile_without_kernels() -> None:
    """Let torch.compile trace functions and their gradients, and run the graphs by torch's own kernels."""
    import torch

    from megatron.features import compiling

    compiling.compiler_found = lambda: True
    torch_compile: Any = torch.compile

    def compile_traced(function: Any, options: Any = None, **more: Any) -> Any:
        return torch_compile(function, backend="aot_eager_decomp_partition", **more)

    torch.compile = compile_traced


def _run(command: list[str]) -> None:
    """Train a model, or run a tool."""
    name, *flags = command
    if name.endswith(".py"):
        sys.argv = command
        sys.path.insert(0, str(Path(name).parent))
        runpy.run_path(name, run_name="__main__")
        return
    from megatron.tasks import TASKS
    from megatron.training import run

    run(TASKS[name](), flags, exit=False)


def main() -> None:
    folder = Path(sys.argv[1])
    library = sys.argv[2] if len(sys.argv) > 2 else None
    command = json.loads((folder / "command.json").read_text())
    compiles = "--compile" in command
    if not compiles:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiled code would be Triton's, which needs a GPU
    if library:
        install(Path(library))
        _count_waits_of_steps()
        _report_before_exit(folder)
    if compiles:
        _compile_without_kernels()
    try:
        _run(command)
    finally:
        if library:
            _write_report(folder)


if __name__ == "__main__":
    main()
