"""Do one short training run and print measurements: `python -m tests.gpu.worker '{"flags": ...}'` prints JSON.

With `{"groups": true}` it tries the communication of a run in a world of one rank instead, and with `"whole": true` it
runs all of `megatron.training.run`, with its features.
It needs only torch, DeepSpeed and numpy, and safetensors if it loads or saves checkpoints or does a whole run.
"""

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from megatron import mpu
from megatron._torch import all_gather_in_graph, all_reduce_in_graph, is_compiled, reduce_scatter_in_graph
from megatron.config.command_line import parse
from megatron.model import global_parameters
from megatron.ranks import device as device_module
from megatron.tokenizer import Tokenizer
from megatron.training import start_engine
from tds._torch import gather_shares, scatter_sum
from tds.groups import can_split_world, gather_objects, member_group, new_groups
from tests.text_task import TextTask


def _batches(config: Any, steps: int, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Return batches in which each token id is the one before plus 1; a small model learns them in a few steps."""
    dice, d, v = torch.Generator().manual_seed(3), config.data, config.model.vocab_size

    def text(length: int) -> torch.Tensor:
        return ((torch.randint(v, (config.train.batch_size, 1), generator=dice) + torch.arange(length)) % v).to(device)

    return [
        {"text": text(d.seq_length + 1)}
        if not config.is_t5
        else {"text": text(d.enc_seq_length), "wanted": text(d.dec_seq_length + 1)}
        for _ in range(steps)
    ]


def _kernels(step: Callable[[], object], device: torch.device) -> list[str]:
    """Run a step, and return the names of its kernels (on a CPU: operations), those with the longest time first."""
    from torch.profiler import ProfilerActivity, profile

    on_device = device.type != "cpu"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    with profile(activities=kinds) as found:
        step()
        device_module.synchronize(device)
    rows: list[Any] = list(found.key_averages())
    if on_device:
        rows = [row for row in rows if row.device_type != torch.autograd.DeviceType.CPU]
        rows.sort(key=lambda row: -row.self_device_time_total)
    else:
        rows.sort(key=lambda row: -row.self_cpu_time_total)
    return [str(row.key) for row in rows]


def try_groups() -> dict[str, Any]:
    """Create the groups of a run in a world of one rank, and run every kind of collective on each; return findings."""
    device = device_module.current_device()
    bound = device if device.type == "cuda" else None
    backend = device_module.default_backend(device)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=bound)
    wanted = torch.arange(8.0, device=device)
    for name in ("pipe", "data", "model", "context", "members"):
        group = member_group([0]) if name == "members" else new_groups([[0]], urgent=name == "model")
        for dtype in (torch.float32, torch.bfloat16):
            x = wanted.to(dtype)
            dist.all_reduce(x, group=group)
            dist.broadcast(x, 0, group=group)
            share, whole = x.clone(), x.clone()
            scatter_sum(share, share, group).wait()
            gather_shares(whole, share, group).wait()
            in_graph = [
                f(x, group.group_name) for f in (all_reduce_in_graph, all_gather_in_graph, reduce_scatter_in_graph)
            ]
            for found in (x, share, whole, *in_graph):
                assert torch.equal(found.float(), wanted), f"{name}, {dtype}: {found}, expected {wanted}"
        assert gather_objects(name, group) == [name]
    device_module.synchronize(device)
    return {"backend": backend, "split": can_split_world()}


def train(
    flags: str, steps: int = 8, load: str | None = None, save: str | None = None, kernels: bool = False
) -> dict[str, Any]:
    """Train for `steps` steps; return losses and other measurements by name.

    load, save: folders of checkpoints to load before and to write after training. kernels: run one more step and also
    return the names of its kernels.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    config = parse(flags.split())
    engine = start_engine(TextTask(), config)
    device = device_module.current_device()
    if load:
        from megatron.checkpointing import find_checkpoint, load_checkpoint

        load_checkpoint(find_checkpoint(load), engine.deepspeed, config, "")
    batches = iter(_batches(config, steps, device))
    found = []
    for iteration in range(steps):
        mpu.get_rng().begin(iteration)
        found.append(engine.train_batch(batches, config.optim.lr))
    dynamo = sys.modules.get("torch._dynamo")
    counters = dynamo.utils.counters if dynamo else {}
    names = []
    if kernels:
        batch = _batches(config, 1, device)
        names = _kernels(lambda: engine.train_batch(iter(batch), config.optim.lr), device)
    if save:
        from megatron.checkpointing import Saver, TrainState

        settings = replace(config, checkpoint=replace(config.checkpoint, save=save))
        Saver(save, engine.deepspeed, settings, "").save(TrainState(iteration=steps), wait=True)
    digest = hashlib.sha256()
    for _, p in sorted(global_parameters(engine.deepspeed.module)):
        digest.update(p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return {
        "device": device.type,
        "losses": [step.loss.item() for step in found],
        "grad_norms": [float(step.grad_norm) for step in found],
        "loss_scales": [step.loss_scale for step in found],
        "skipped": [step.skipped for step in found],
        "weights": digest.hexdigest(),
        "kernels": names,
        "compiled_layers": sum(map(is_compiled, engine.deepspeed.module.modules())),
        "graph_breaks": sum(counters["graph_break"].values()) if dynamo else 0,
        "peak_mb": device_module.peak_memory_mb(device),
    }


class CountingTask(TextTask):
    """A task with data: the samples of `_batches`."""

    def datasets(self, config: Any, tokenizer: Any) -> Any:
        batches = _batches(config, config.train.train_iters, torch.device("cpu"))
        samples = [
            {name: text[i] for name, text in batch.items()} for batch in batches for i in range(len(batch["text"]))
        ]
        return (samples, None, None), []

    def batch(self, data: Any, config: Any, tokenizer: Any) -> tuple[Any, Any]:
        device = device_module.current_device()
        return super().batch({name: text.to(device) for name, text in data.items()}, config, tokenizer)


class Numbers(Tokenizer):
    """A tokenizer for numbers, which needs no package."""

    name, vocab_size, eod, fingerprint = "numbers", 64, 0, "numbers"
    specials: ClassVar = {}

    def encode(self, text: str) -> list[int]:
        return list(map(int, text.split()))

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))


def run_whole(flags: str) -> dict[str, Any]:
    """Train 8 steps in one start, and again in two; return the losses of both runs."""
    from megatron.training import run, setup  # they import safetensors, which only this function needs

    more = "--train-iters 8 --log-interval 1 --num-workers 0 --no-tensorboard --save-interval 4"
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Path(folder, "vocab.txt")  # never read, as the run tokenizes nothing
        vocabulary.touch()
        setup.load_tokenizer = lambda *_: Numbers()  # type: ignore[assignment]
        more = f"{more} --vocab-file {vocabulary} --run-dir"
        for name, starts in (("through", [""]), ("halves", ["--exit-interval 4", ""])):
            directory = Path(folder, name)
            for stop in starts:
                run(CountingTask(), f"{flags} {more} {directory} {stop}".split(), exit=False)
            rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
            found[name] = [row["lm_loss"] for row in rows if "lm_loss" in row]
    return found


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    function: Any = train
    for name, other in (("groups", try_groups), ("whole", run_whole)):
        if given.pop(name, False):
            function = other
    with contextlib.redirect_stdout(sys.stderr):
        result = function(**given)
    print(json.dumps(result), flush=True)
    os._exit(0)
