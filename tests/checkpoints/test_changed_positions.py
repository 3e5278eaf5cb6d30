"""Only a run with --finetune may change a checkpoint's RoPE base and scaling, sliding window and maximum length."""

from pathlib import Path

import pytest

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
    assert plain.endswith("pass --finetune to continue with this run's values")
    assert "--rotary-percent is 1.0 in the checkpoint and 0.5 in this run" in other and "--finetune" not in other
    first, farther = losses_of(tmp_path / "first"), losses_of(tmp_path / "farther")
    assert len(first) == len(farther) == 1 and first != farther
