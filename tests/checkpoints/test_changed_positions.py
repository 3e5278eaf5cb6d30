"""Only a run with --finetune may change a checkpoint's RoPE base and scaling, sliding window and maximum length."""

import re
from pathlib import Path

import pytest
import torch

from megatron.checkpointing import CheckpointError, CheckpointReader, Wanted
from megatron.checkpointing.contradictions import refuse_contradictions
from megatron.checkpointing.stream import LazyTensor
from megatron.checkpointing.write import write_checkpoint
from megatron.config import Config
from megatron.config.command_line import parse
from megatron.config.defaults import DEFAULTS
from megatron.ranks.errors import RunError
from tests.checkpoints.runs import Start, losses_of, run_all
from tests.support import on_ranks

FLAGS = "--train-iters 1 --batch-size 2 --precision fp32"
FARTHER = (
    "--rope-theta 500000 --rope-scaling linear --rope-scaling-factor 2 --sliding-window 20 --max-position-embeddings 48"
)


def _goes_on(folder: str, data: str, vocab_file: str) -> tuple[str, str]:
    run_all([Start("llama", Path(folder) / "first", FLAGS)], data, vocab_file)
    load = f"{FLAGS} --load {folder}/first {FARTHER}"
    said = []
    for more in ("", "--finetune --rotary-percent 0.5"):
        with pytest.raises(RuntimeError) as error:
            run_all([Start("llama", Path(folder) / "refused", f"{load} {more}")], data, vocab_file)
        assert isinstance(error.value.__cause__, RunError)
        said.append(str(error.value.__cause__))
    run_all([Start("llama", Path(folder) / "farther", f"{load} --finetune")], data, vocab_file)
    return said[0], said[1]


def test_longer_texts_begin_from_weights(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    ((plain, other),) = on_ranks(1, _goes_on, str(tmp_path), tiny_data, vocab_file)
    assert "--rope-theta is 10000.0 in the checkpoint and 500000.0 in this run" in plain
    assert re.search(rf"another --run-dir.* --load {tmp_path}/first/checkpoints/iter_\d+ --finetune", plain)
    assert "--rotary-percent is 1.0 in the checkpoint and 0.5 in this run" in other and "--finetune" not in other
    first, farther = losses_of(tmp_path / "first"), losses_of(tmp_path / "farther")
    assert len(first) == len(farther) == 1 and first != farther


def test_a_run_that_resumes_from_its_own_checkpoint_keeps_its_positions(tmp_path: Path) -> None:
    """The --finetune with which a run was started is for --load, not for the checkpoints of the run itself."""

    def config(*flags: str) -> Config:
        return parse(["--vocab-size", "50", "--load", "base", "--finetune", *flags], DEFAULTS["llama"])

    path = tmp_path / "iter_0000003"
    weight = LazyTensor("weight.x", (1,), torch.float32, lambda: torch.ones(1))
    same = config("--rope-theta", "500000")
    write_checkpoint(path, [weight], same, "")
    reader = CheckpointReader(path)
    other = config("--rope-theta", "20", "--sliding-window", "2")
    refuse_contradictions(reader, same, None, Wanted.from_config(same, beside_load=True))
    with pytest.raises(CheckpointError, match="--rope-theta is 500000.0 in the checkpoint and 20.0 in this run"):
        refuse_contradictions(reader, other, None, Wanted.from_config(other, beside_load=True))
    refuse_contradictions(reader, other, None, Wanted.from_config(other))
    # Without --load, --finetune alone would be refused: these values need a new run.
    resumed = parse(["--vocab-size", "50", "--rope-theta", "20"], DEFAULTS["llama"])
    with pytest.raises(CheckpointError, match=f"another --run-dir.* --load {path} --finetune"):
        refuse_contradictions(reader, resumed, None, Wanted.from_config(resumed))
