"""Ordered parallel map on a Ray cluster (Moritz et al. 2018); gives the same results as parallel.ordered_map.

Ray starts the processes, transfers items and results, and repeats the items of a failed machine. All machines need the
project and the data under the same paths.
"""

import importlib
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from megatron.packages import pip_install

from .streams import InputError

Item = TypeVar("Item")
Result = TypeVar("Result")
ITEMS_PER_PROCESS = 3  # items in flight for each process
MAX_RETRIES = 3  # how often an item is processed again if its process dies
ROOT = Path(__file__).resolve().parent.parent


# Module that this process of the cluster has imported and initialised, by name
_modules: dict[str, Any] = {}


def _call(folder: str, module: str, start: str, settings: tuple[Any, ...], function: str, item: Any) -> Any:
    """Call a function of a tool's module, which the first call in a process imports and initialises.

    The module of a running script is called `__main__`, so another process cannot import its functions from there.
    folder: working directory of the main process. start, function: names of functions in `module`; `start(*settings)`
    initialises a process, and the result is `function(item)`.
    """
    if module not in _modules:
        os.chdir(folder)
        imported = importlib.import_module(module)
        getattr(imported, start)(*settings)
        _modules[module] = imported
    return getattr(_modules[module], function)(item)


def connect(address: str) -> Any:
    """Connect to a Ray cluster and return the package ray.

    address: address of a cluster, `auto` for the cluster that this machine belongs to, or `local` to start one here.
    Raises InputError if Ray is not installed or the cluster is not reachable.
    """
    try:
        import ray
    except ImportError:
        raise InputError(f"--ray needs the package ray: {pip_install('ray')}") from None
    # Ray starts worker processes before it knows which code they will run, so the import path is set for all of them.
    paths = [str(ROOT), os.environ.get("PYTHONPATH")]
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, paths))}}
    options: dict[str, Any] = {"runtime_env": environment, "log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        options["include_dashboard"] = False
    try:
        ray.init(address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(
            f"--ray {address} is not a reachable Ray cluster ({' '.join(str(error).split())[:200]})"
        ) from None
    return ray


def ordered_map_on_ray(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int,
    start: Callable[..., None],
    settings: tuple[Any, ...],
    address: str,
) -> Iterator[Result]:
    """Compute `work` for all items in processes of a Ray cluster, and yield the results in the order of the items.

    At most `workers` processes work at once, fewer if the cluster has fewer free CPUs. Each process first calls
    `start(*settings)`. `work` and `start` must be top-level functions of a module or of the running script.
    address: as for `connect`.
    """
    ray = connect(address)
    # The processes must import a running script by its file, as `__main__` is another module there.
    script = sys.modules["__main__"].__file__ if work.__module__ == "__main__" else None
    module = Path(script).stem if script else work.__module__
    task = ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(_call)
    workers = max(workers, 1)
    running: list[Any] = []  # at most `workers`
    pending: deque[Any] = deque()  # running or done, in the order of the items, until the result is yielded
    try:
        for item in items:
            if len(running) == workers:
                running = ray.wait(running)[1]  # wait until one is done; [1] holds the others
            running.append(task.remote(os.getcwd(), module, start.__name__, settings, work.__name__, item))
            pending.append(running[-1])
            # The oldest item first, so that results come in the order of the items.
            if len(pending) >= workers * ITEMS_PER_PROCESS:
                yield ray.get(pending.popleft())
        while pending:
            yield ray.get(pending.popleft())
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None  # the error that `work` or `start` raised
    except ray.exceptions.RayError as error:
        raise RuntimeError(f"Ray failed to process a chunk: {' '.join(str(error).split())[:300]}") from None
    finally:
        ray.shutdown()
