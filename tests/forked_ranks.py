"""A launcher for tests that forks ranks from its own process, so that ranks need not import torch again.

Tests of the README's commands, of two nodes and of the launcher itself still start new interpreters.
"""

import atexit
import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_filters = list(warnings.filters)  # the filters before the launcher adds its own; forked ranks get these
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)


class ForkedRank:
    """A forked rank with the part of `subprocess.Popen`'s interface that torchrun uses."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        gc.freeze()  # saves time: the garbage collector of a rank does not scan objects made before the fork
        self.pid = os.fork()
        if not self.pid:
            _be(list(argv), env)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("a rank", timeout or 0)
            time.sleep(0.01)
        return self.returncode or 0


def fork_ranks() -> None:
    """Make torchrun in this process fork its ranks instead of starting interpreters."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    honest = SubprocessHandler._popen

    def popen(handler: Any, argv: Sequence[str], env: Mapping[str, str]) -> Any:
        return honest(handler, argv, env) if "-m" in argv[:4] else ForkedRank(argv, env)  # type: ignore[arg-type]

    SubprocessHandler._popen = popen  # type: ignore[method-assign,assignment]


def _be(argv: list[str], env: Mapping[str, str]) -> None:
    """Turn this forked process into `python [-u] script.py ...` in a new session; never return."""
    os.setsid()
    atexit._clear()
    for number in SIGNALS:
        if signal.getsignal(number) == signal.SIG_IGN:  # a new interpreter would ignore this signal, too
            continue
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    warnings.filters[:] = _filters  # type: ignore[index]
    for name in ("torch.distributed", *logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.NOTSET)
    os.environ.clear()
    os.environ.update(env)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os._exit(run_script([word for word in argv[1:] if word != "-u"]))


def run_script(argv: list[str]) -> int:
    """Run a script as `python argv...` in this process, including atexit functions; return its exit code."""
    code = 1
    try:
        sys.argv, sys.path[0:0] = argv, [str(Path(argv[0]).absolute().parent)]
        main = sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
        main.__file__ = argv[0]
        exec(compile(Path(argv[0]).read_text(), argv[0], "exec"), main.__dict__)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # the project replaces it
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code
