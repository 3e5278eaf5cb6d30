"""Complete training runs for tests. One launch of ranks can do several runs, to save start-up time."""

import contextlib
import io
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from megatron.config.command_line import parse
from megatron.config.ds_config import resolve
from megatron.ranks import device as device_module
from megatron.ranks.initialize import world_size
from megatron.tasks import TASKS
from megatron.training import Feature, Run, set_up, train
from tests.conformance.engines import remembered_groups
from tests.support import losses

COMMON = (
    "--split 1 --hidden-dropout 0 --attention-dropout 0 --lr 1e-3 --lr-decay-style constant --warmup 0 "
    "--log-interval 1 "
    "--eval-iters 0 --save-interval 0 --make-vocab-size-divisible-by 64 --no-tensorboard --hidden-size 16 "
    "--num-attention-heads 4 "
    "--partition-method type:Block"
)
T5 = "--num-layers 2 --num-decoder-layers 3 --ff-hidden-size 24 --family t5 --enc-seq-length 32 --seq-length 32"
MODELS = {
    "gpt2": f"{COMMON} --num-layers 4 --seq-length 24",
    "llama": f"{COMMON} --num-layers 4 --seq-length 24 --num-key-value-heads 1 --ff-hidden-size 24 --qk-norm "
    "--qkv-bias --reset-position-ids",
    "t5-cpm": f"{COMMON} {T5} --span-convention cpm --reset-attention-mask",
    "t5-v1.1": f"{COMMON} {T5} --span-convention t5 --normalization rmsnorm --position-embedding relative "
    "--relative-attention-num-buckets 8 --relative-attention-max-distance 20 --no-scale-attention --no-hidden-bias "
    "--activation gated-gelu --no-tie-embeddings --kv-hidden-size 6",
}


class Start(NamedTuple):
    """Arguments of one run: the kind of model, the run directory and the flags.

    save_first: also save before the first step, so that a test can check which state the run loaded.
    """

    model: str
    run_dir: Path
    flags: str
    save_first: bool = False


def run_all(starts: Sequence[Start], data: str | None, vocab_file: str) -> None:
    """Do the training runs `starts` one after another; call this function on every rank.

    data: prefix of the corpus, or None if the flags of `starts` name the corpora.
    """
    with remembered_groups() as begin:
        for start in starts:
            begin()
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    _run(start, data, vocab_file)
            except Exception as error:
                raise RuntimeError(f"in {start}") from error


def _run(start: Start, data: str | None, vocab_file: str) -> None:
    with make(start, data, vocab_file) as run:
        if start.save_first:
            run.saver.save(run.state, wait=True)
        train(run)


def make(start: Start, data: str | None, vocab_file: str, features: Sequence[Feature] = ()) -> Run:
    """Return a run with its model, data and checkpoint loaded, ready for `train`."""
    name = start.model.split("-")[0]
    task = TASKS[name]()
    argv = f"{MODELS[start.model]} {start.flags} --run-dir {start.run_dir} --vocab-file {vocab_file}"
    argv += f" --data-path {data}" if data else ""
    config = parse(shlex.split(argv), task.defaults, world_size())
    resolved = resolve(config, world_size(), device_module.has_fast_bf16(device_module.current_device()))
    return set_up(task, config, resolved, features)


def losses_of(run_dir: Path) -> list[float]:
    return losses([json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()])


def whole_tensors(checkpoint: Path) -> dict[str, NDArray[Any]]:
    """Return key -> full tensor of a checkpoint.

    The function joins the shards that checkpoint.json lists. It does not use this project's CheckpointReader.
    """
    index: dict[str, Any] = json.loads((checkpoint / "checkpoint.json").read_text())["tensors"]
    files = {path.name: load_file(path) for path in checkpoint.glob("*.safetensors")}
    whole = {}
    for key, entry in index.items():
        pieces = sorted(entry["pieces"], key=lambda piece: int(piece["begin"]))
        whole[key] = np.concatenate([files[piece["file"]][key] for piece in pieces], axis=entry["dim"])
        assert list(whole[key].shape) == entry["shape"], key
    return whole
