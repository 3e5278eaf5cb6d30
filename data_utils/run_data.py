"""Settings, tokenizer and data sets of a run, read from its folder."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.tokenizer import load_tokenizer


def load_config(run_dir: str) -> Config:
    """Return the settings of a run. Raises ValueError if `run_dir` is not the folder of a run."""
    from megatron.checkpointing.relocation import with_own_tokenizer
    from megatron.config.command_line import from_file, read_json, refuse_removed

    path = Path(run_dir) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: --run-dir {run_dir} is not the folder of a run")
    refuse_removed(read_json(str(path)), path)
    return with_recorded_stages(with_own_tokenizer(from_file(str(path)), path.parent))


def with_recorded_stages(config: Config) -> Config:
    """Return the settings of a run with the data stages that its newest checkpoint records, if it can be read.

    Print a note if the run trained on other samples before a resume with --override-data.
    """
    from megatron.checkpointing import CheckpointReader, Wanted, find_checkpoint
    from megatron.checkpointing.data_plan import with_consumed_data
    from megatron.ranks.errors import RunError

    with suppress(OSError, ValueError, RunError):  # without a readable checkpoint, `config` stays as it is
        newest = find_checkpoint(str(config.log.run_dir))
        reordered_at = CheckpointReader(newest).state.get("reordered_at")  # samples consumed at that resume, or None
        if reordered_at:
            print(f"note: --override-data changed the samples; the run read other ones before sample {reordered_at}")
        # The stages that the checkpoint has consumed come first, then those of `config`. same_data=False means
        # --override-data, without which stages that contradict the checkpoint would stay as they are.
        config = with_consumed_data(config, newest, Wanted(same_data=False), reads_corpora=True)
    return config


def load_datasets(config: Config) -> tuple[Any, Any]:
    """Return the tokenizer and the (training, validation, test) data sets of a run."""
    from megatron.tasks import task_of
    from megatron.training.task_checks import checked_datasets

    task = task_of(config)
    if config.data.vocab_file is None:
        raise ValueError("the run has no tokenizer: give --vocab-file")
    tokenizer = task.extended(config, load_tokenizer(config.data.vocab_file, config.data.tokenizer_type))
    return tokenizer, checked_datasets(task, config, tokenizer)[0]
