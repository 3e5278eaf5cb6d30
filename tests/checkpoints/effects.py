"""What a training run does that can be observed: the tests compare two runs that differ in one setting."""

import contextlib
import gc
import gzip
import hashlib
import io
import json
import re
import shlex
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron import mpu
from megatron.config.command_line import parse
from megatron.config.ds_config import resolve
from megatron.ranks import device as device_module
from megatron.ranks.initialize import use_step_timeout, world_size
from megatron.tasks import TASKS
from megatron.training import Run, set_up, train
from tests.conformance.engines import remembered_groups

from .runs import MODELS, whole_tensors

Seen = dict[str, Any]
SHARED = "--train-iters 3 --batch-size 2"
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?")


class Trial(NamedTuple):
    """One run: the kind of model and the flags, in which {here} is a folder with `inputs`."""

    model: str
    flags: str
    precision: str = "fp32"


class _Operations(TorchDispatchMode):
    """Counter and order of torch's operations, by name and shape of the first tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.order = hashlib.sha256()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shape = next((tuple(each.shape) for each in args if isinstance(each, torch.Tensor)), ())
        name = f"{func} {shape}"
        self.found[name] += 1
        self.order.update(name.encode())
        return func(*args, **(kwargs or {}))


class _Saved:
    """Counter of the tensors that autograd saves for the backward pass, by shape and dtype."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.found[f"{tensor.dtype} {tuple(tensor.shape)}"] += 1
        return tensor


def observe_all(trials: Sequence[Trial], here: Path) -> list[Seen]:
    """Do the runs `trials` one after another on every rank; return what each one does that can be observed."""
    found = []
    with remembered_groups() as begin:
        for number, trial in enumerate(trials):
            begin()
            found.append(_observe(trial, here, here / f"run{number}"))
    return found


def _observe(trial: Trial, here: Path, run_dir: Path) -> Seen:
    seen: Seen = {"notes": [], "error": ""}
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            _run(trial, here, run_dir, seen)
    except Exception as error:
        seen["error"] = " ".join(str(error).split())
    lines = [_NUMBER.sub("#", line.partition(" | rank ")[0]) for line in out.getvalue().splitlines()]
    seen["lines"] = Counter(" ".join(line.replace(str(run_dir), "RUN").split()) for line in lines)
    seen |= _written(run_dir)
    return seen


def _run(trial: Trial, here: Path, run_dir: Path, seen: Seen) -> None:
    task = TASKS[trial.model.split("-")[0]]()
    flags = f"{MODELS[trial.model]} {SHARED} --precision {trial.precision} {trial.flags}".format(here=here)
    given = ["--run-dir", str(run_dir), *shlex.split(flags)]
    config = parse(given, task.defaults, world_size(), seen["notes"].append)
    if not config.data.names_corpora:
        given += ["--data-path", str(here / "tiny")]
        config = parse(given, task.defaults, world_size())
    resolved = resolve(config, world_size(), device_module.has_fast_bf16(device_module.current_device()))
    seen["notes"] += resolved.notes
    operations = _Operations()
    saved = _Saved()
    hooks = torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor)
    with _calls(seen), set_up(task, config, resolved) as run:
        seen["attributes"] = _attributes(run)
        if config.train.deepspeed_config:
            seen["deepspeed"] = _simple(run.engine.deepspeed.optimizer) | _simple(run.engine.deepspeed)
        with operations, hooks:
            train(run)
    seen["operations"] = operations.found
    seen["order"] = operations.order.hexdigest()
    seen["saved"] = saved.found


def _attributes(run: Run) -> Seen:
    """Return limits and choices that a short run without faults never meets."""
    engine = run.engine.deepspeed
    use_step_timeout(run.config)
    watch = getattr(run.engine, "watch", None)
    watchdog = watch.watchdog if watch else getattr(engine, "watchdog", None)
    return {
        "engine": type(engine).__name__,
        "optimizer": type(getattr(engine, "optimizer", None)).__name__,
        "onednn": mpu.get_options().onednn,
        "overlap": mpu.get_options().overlap,
        "watchdog": getattr(watchdog, "timeout", None),
    }


def _simple(of: Any) -> Seen:
    """Return the attributes of DeepSpeed's optimizer or engine that are numbers, words or simple objects of those."""
    found = {}
    for name, value in vars(of).items():
        if isinstance(value, (int, float, str, torch.dtype)):
            found[name] = str(value)
        elif name in ("loss_scaler", "monitor", "flops_profiler"):
            found[name] = f"{type(value).__name__} {_simple(value)}"
    return found


@contextlib.contextmanager
def _calls(seen: Seen) -> Iterator[None]:
    """Count garbage collections on request, started threads and calls that keep freed memory, as seen["calls"]."""
    calls: Counter[str] = Counter()
    seen["calls"] = calls
    collect, start = gc.collect, threading.Thread.start

    def collected(*args: Any) -> int:
        calls["gc.collect"] += 1
        return collect(*args)

    def started(self: threading.Thread) -> None:
        calls[f"thread {re.sub('[0-9]+', '#', self.name)}"] += 1
        start(self)

    def process(self: Any) -> None:
        calls["worker process"] += 1
        popen(self)

    popen = torch.multiprocessing.Process.start  # type: ignore[attr-defined]
    with (
        mock.patch.object(gc, "collect", collected),
        mock.patch.object(threading.Thread, "start", started),
        mock.patch.object(torch.multiprocessing.Process, "start", process),
        mock.patch.object(device_module, "keep_freed_memory", lambda device: calls.update(["keep_freed_memory"])),
    ):
        yield


def _written(run_dir: Path) -> Seen:
    """Return the names of the files of a run, its rows of metrics and the last checkpoint without the settings."""
    if not run_dir.is_dir():
        return {"files": {}, "rows": [], "checkpoint": None}
    files = [str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.name != "run.lock"]
    names = Counter(re.sub(r"\d{9,}\S*", "#", name) for name in files)
    metrics = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    for row in rows:
        row.pop("straggler", None)  # depends on what else the machine does
    last = sorted(run_dir.glob("checkpoints/iter_*/checkpoint.json"))
    checkpoint = _checkpoint(last[-1].parent) if last else None
    return {"files": names, "rows": rows, "checkpoint": checkpoint, "events": _events(run_dir)}


def _events(run_dir: Path) -> dict[str, int]:
    """Return the number of iterations in each timeline and profile, by file."""
    found = {}
    for path in [*run_dir.glob("trace/*.json*"), *run_dir.glob("profile/*.json*")]:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        found[path.name] = len(re.findall(r'"(?:train_batch|ProfilerStep[^"]*)"', text))
    return found


def _checkpoint(folder: Path) -> Seen:
    content = json.loads((folder / "checkpoint.json").read_text())
    for settings in ("config", "settings", "versions", "created", "time", "sums"):
        content.pop(settings, None)
    tensors = whole_tensors(folder)
    content["values"] = {name: hashlib.sha256(each.tobytes()).hexdigest() for name, each in tensors.items()}
    return content


def flat(seen: Any, at: str = "") -> dict[str, Any]:
    """Return what was seen as dotted name -> value."""
    if isinstance(seen, dict):
        return {name: value for key, each in seen.items() for name, value in flat(each, f"{at}.{key}").items()}
    if isinstance(seen, list):
        return {name: value for i, each in enumerate(seen) for name, value in flat(each, f"{at}.{i}").items()}
    return {at: seen}


def differences(base: Seen, again: Seen, changed: Seen) -> list[str]:
    """Return the names of what differs in `changed` from `base`, without what differs when the run is repeated."""
    one, two, three = (flat({k: v for k, v in each.items() if k != "notes"}) for each in (base, again, changed))
    noise = {name for name in one.keys() | two.keys() if one.get(name) != two.get(name)}
    return sorted(name for name in one.keys() | three.keys() if one.get(name) != three.get(name) and name not in noise)
