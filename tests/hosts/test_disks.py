"""A run on hosts without a shared disk ends before its first step."""

from pathlib import Path

from megatron.checkpointing import shared_folder

from .lab import lab, needs_hosts
from .ranks import start_ranks
from .runs import train_gpt2


def _train(flags: str) -> None:
    shared_folder.VISIBILITY_TIMEOUT = 1.0
    train_gpt2(flags)


@needs_hosts
def test_separate_disks_are_refused_before_the_first_step(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    own = tmp_path / "run"
    own.mkdir()
    flags = f"--pipe-parallel-size 2 --train-iters 3 --run-dir {own} --data-path {tiny_data} --vocab-file {vocab_file}"
    with lab(2, shares=own) as net:
        ranks = start_ranks(net, tmp_path, _train, flags)
        first = ranks[0].end(60)
        ranks[1].kill()  # it waits for rank 0 to print the error of both
    assert first.code == 1
    assert "--run-dir" in first.stderr and "node2" in first.stderr, first.stderr
    assert "iteration" not in first.stderr and "Traceback" not in first.stderr
    assert first.seconds < 30
