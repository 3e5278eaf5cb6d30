"""A rank process for `profile_run`, which trains and measures its layers or messages on request."""

import os
import re
import statistics
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROUNDS = 3
SIZES = (8, 1 << 20)  # sizes of measured messages in bytes


def work(flags: str, rank: int, ranks: int, port: int, pipe: Connection) -> None:
    """Run one rank, and answer requests until a stop request."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    import torch

    from megatron.config.command_line import parse
    from megatron_tools.simulate.synthetic import start
    from tds import trace

    torch.set_num_threads(1)
    run = start(parse(flags.split()))
    tracer = trace.Tracer(run.engine.device, Path(os.devnull), {"rank": rank}, 1, 10**9)
    trace.start(tracer)
    for _ in range(2):
        run.step()
    pipe.send(_about(run))
    answers: dict[str, Any] = {
        "steps": lambda count: _steps(run, tracer, count),
        "layers": lambda _: _layers(run),
        "messages": lambda _: _messages(rank),
    }
    while (asked := pipe.recv()) is not None:
        pipe.send(answers[asked[0]](asked[1]))
    os._exit(0)


def kind_of(name: str) -> str:
    """Return a layer's name without its number: layers of one kind cost the same."""
    return re.sub(r"\d+", "n", name)


def _about(run: Any) -> dict[str, Any]:
    """Return this stage's layer kinds by chunk, and its parameter counts."""
    module = run.engine.module
    kinds = [[kind_of(layer.name) for layer in module._layers[first:end]] for first, end in module.stretches]
    tied = sum(w.numel() for w in _tied(module)) if run.engine.num_stages > 1 else 0
    return {
        "stage": run.engine.stage_id,
        "kinds": kinds,
        "parameters": sum(p.numel() for p in module.parameters()),
        "tied": tied,
    }


def _tied(module: Any) -> list[Any]:
    from tds.pipe import tied_weights

    return list(tied_weights(module))


def _steps(run: Any, tracer: Any, count: int) -> list[list[tuple[Any, ...]]]:
    """Return the trace spans of consecutive steps, by step."""
    tracer.forget()
    for number in range(1, count + 1):
        tracer.iteration(number)
        run.step()
    return [[tuple(each) for each in pieces] for _, pieces in tracer.pieces()]


def _layers(run: Any) -> dict[str, tuple[float, float, float]]:
    """Return CPU seconds by layer kind: forward pass, input gradients, weight gradients."""
    import torch

    module, found = run.engine.module, defaultdict[str, list[tuple[float, ...]]](list)
    last = len(module._layers) - 1
    for _ in range(ROUNDS):
        tensors: tuple[Any, ...] = run.batch[0]
        for index, (layer, call) in enumerate(zip(module._layers, module.forward_funcs, strict=True)):
            inputs = tuple(t.detach().requires_grad_(t.is_floating_point() and index > 0) for t in tensors)
            begin = time.thread_time()
            outputs = call(inputs)
            if index == last:
                loss = module.loss_fn(outputs, run.batch[1])
                outputs = torch.stack(list(loss.values())).sum() if isinstance(loss, dict) else loss
            middle = time.thread_time()
            tensors = outputs if isinstance(outputs, tuple) else (outputs,)
            halves = _halves(inputs, tensors)
            found[kind_of(layer.name)].append((middle - begin, *halves))
    module.zero_grad(set_to_none=True)
    return {kind: tuple(statistics.median(each[i] for each in rows) for i in range(3)) for kind, rows in found.items()}  # type: ignore[misc]


def _halves(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[float, float]:
    import torch

    from tds.split_backward import backward_input

    roots = [t for t in outputs if t.requires_grad]
    begin = time.thread_time()
    deferred = backward_input(roots, [torch.ones_like(t) for t in roots], [t for t in inputs if t.requires_grad])
    middle = time.thread_time()
    deferred.run()
    return middle - begin, time.thread_time() - middle


def _messages(rank: int) -> dict[str, float]:
    """Return the seconds of a one-way message by size, and of an all-reduce per byte, between two ranks."""
    import torch
    import torch.distributed as dist

    found = {}
    for size in SIZES:
        buffer, took = torch.zeros(size, dtype=torch.uint8), []
        for _ in range(4 * ROUNDS):
            begin = time.perf_counter()
            for turn in (0, 1):
                (dist.send if turn == rank else dist.recv)(buffer, 1 - rank)
            took.append((time.perf_counter() - begin) / 2)
        found[str(size)] = statistics.median(took)
    floats, took = torch.zeros(1 << 20), []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        dist.all_reduce(floats)
        took.append((time.perf_counter() - begin) / (4 << 20))
    return {**found, "reduce": statistics.median(took)}
