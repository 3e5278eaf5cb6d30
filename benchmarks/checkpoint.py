"""Checkpoints compared with `torch.save` and DeepSpeed: GB/s of saving and loading, and how long training is blocked.

    python benchmarks/checkpoint.py --rounds 5
    python benchmarks/checkpoint.py --rounds 5 --ranks 2

All contenders save the same weights and Adam moments (fp32) and load them back into the same engine, in turn within
every round. Every save writes new files; the previous ones are deleted. "ours", the checkpoint of this project, writes
checksums, verifies them on loading and waits until the data is on disk. The other contenders do none of this, except
those with "fsync", which wait for the disk. The last table is about asynchronous saves: how long training is
blocked, as a share of the time of a step, and how much slower steps are during a save.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import _engine
from _alternate import Step, alternate, leave, new_parser, on_ranks, spread


def build(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Return an engine after its first step, its settings, and a function that runs another step."""
    built = _engine.ours(
        f"--num-layers {args.layers} --hidden-size {args.hidden} --num-attention-heads 8 --seq-length {args.seq} "
        f"--vocab-size {args.vocab} --batch-size {args.batch} --precision fp32 --no-keep-freed-memory"
    )
    built.step()
    return built.engine.deepspeed, built.config, built.step


def contenders(engine: Any, config: Any, folder: Path) -> tuple[dict[str, Step], dict[str, Step]]:
    """Return two dicts from a contender's name to a function: the first functions save, the second ones load."""
    import torch
    import torch.distributed as dist

    from megatron.checkpointing import Saver, TrainState, find_checkpoint, load_checkpoint

    rank = dist.get_rank()
    saver = Saver(str(folder / "ours"), engine, replace(config, checkpoint=replace(config.checkpoint, keep_last=1)), "")
    state, saves_made, tags_made = TrainState(), [0], [0]

    def ours() -> None:
        state.iteration += 1
        saver.save(state)

    def torch_save(sync: bool = False) -> None:
        if rank == 0:  # Every data-parallel replica holds the same state, so one rank saves for all.
            saves_made[0] += 1
            inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
            with open(folder / f"{saves_made[0]}.pt", "wb") as file:
                torch.save({"model": engine.module.state_dict(), "optimizer": inner.state_dict()}, file)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            (folder / f"{saves_made[0] - 1}.pt").unlink(missing_ok=True)

    def deepspeed_save(sync: bool = False) -> None:
        tags_made[0] += 1
        engine.save_checkpoint(str(folder / "theirs"), tag=str(tags_made[0]))
        if rank == 0:
            for path in (folder / "theirs" / str(tags_made[0])).iterdir() if sync else ():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            shutil.rmtree(folder / "theirs" / str(tags_made[0] - 1), ignore_errors=True)

    def torch_load() -> None:
        content = torch.load(max(folder.glob("*.pt")), map_location="cpu", weights_only=True)
        engine.module.load_state_dict(content["model"])
        getattr(engine.optimizer, "optimizer", engine.optimizer).load_state_dict(content["optimizer"])

    saves = {
        "ours": ours,
        "torch.save": torch_save,
        "torch.save, fsync": lambda: torch_save(True),
        "DeepSpeed save_checkpoint": deepspeed_save,
        "DeepSpeed, fsync": lambda: deepspeed_save(True),
    }
    loads = {
        "ours": lambda: load_checkpoint(find_checkpoint(str(folder / "ours")), engine, config, "") and None,
        "torch.load": torch_load,
        "DeepSpeed load_checkpoint": lambda: engine.load_checkpoint(str(folder / "theirs")) and None,
    }
    return saves, loads


def background(engine: Any, config: Any, step: Step, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each measurement: "step", "stall", "step while saving" and "whole save".

    "stall" is the time for which a save blocks training; "whole save" is the time from its start to its end.
    """
    from megatron.checkpointing import Saver, TrainState

    saver = Saver(str(folder / "background"), engine, config, "", background=True)
    found: dict[str, list[float]] = {"step": [], "stall": [], "step while saving": [], "whole save": []}

    def timed(name: str, action: Step) -> None:
        begin = time.perf_counter()
        action()
        found[name].append(time.perf_counter() - begin)

    for iteration in range(1, rounds + 1):
        timed("step", step)
        begin = time.perf_counter()
        timed("stall", partial(saver.begin, TrainState(iteration=iteration)))
        while saver.is_writing:
            timed("step while saving", step)
        timed("stall", saver.finish)  # type: ignore[arg-type]
        found["stall"][-2:] = [sum(found["stall"][-2:])]
        found["whole save"].append(time.perf_counter() - begin)
    return found


def main() -> None:
    parser = new_parser(__doc__)
    for name, default in (("layers", 8), ("hidden", 512), ("seq", 256), ("batch", 4), ("vocab", 16000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1, help="number of data-parallel ranks (default: 1)")
    parser.add_argument("--folder", help="folder for the checkpoints (default: the system's temporary folder)")
    args = parser.parse_args()
    on_ranks(args.ranks)

    import contextlib
    import io

    import torch.distributed as dist

    engine, config, step = build(args)
    names: list[Any] = [tempfile.mkdtemp(dir=args.folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    folder = Path(names[0])
    try:
        saves, loads = contenders(engine, config, folder)
        with contextlib.redirect_stdout(io.StringIO()):
            # Else a save would also wait for the disk to write what the save before it has left in memory.
            saved, loaded = alternate(saves, args.rounds, before=os.sync), alternate(loads, args.rounds)
            waits = background(engine, config, step, folder, args.rounds)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
    gigabytes = 12 * sum(p.numel() for p in engine.module.parameters()) / 1e9
    if dist.get_rank() == 0:
        show(gigabytes, args.ranks, saved, loaded, waits)
    dist.barrier()
    leave()


def show(gigabytes: float, ranks: int, saved: Any, loaded: Any, waits: dict[str, list[float]]) -> None:
    print(f"{gigabytes:.2f} GB of weights and moments, {ranks} data-parallel rank(s)\n")
    for title, found in (("save", saved), ("load", loaded)):
        print(f"| {title} | GB/s, median (lowest to highest) | ours / it, by round |\n| --- | --- | --- |")
        for name, rounds in found.items():
            ratios = [it[0] / mine[0] for it, mine in zip(rounds, found["ours"], strict=True)]
            print(f"| {name} | {spread([gigabytes / s for s, _ in rounds], '.2f')} | {spread(ratios, '.2f')} |")
        print()
    step = statistics.median(waits["step"])
    print("| asynchronous save | ms, median (lowest to highest) | share of a step |\n| --- | --- | --- |")
    for name, seconds in waits.items():
        if seconds:
            print(f"| {name} | {spread([1e3 * s for s in seconds], '.0f')} | {statistics.median(seconds) / step:.2f} |")


if __name__ == "__main__":
    main()
