"""Check of the ds_config, the layout and the files of a run, before a script prepares its corpus for hours.

Run it as `python -m megatron.features.early_check gpt2 RANKS FLAGS...`, after `megatron.config.check` for the flags.
"""

import sys

from ..config.check import exit_on_config_error
from ..config.command_line import parse
from ..config.defaults import DEFAULTS
from ..config.ds_config import resolve
from ..config.fields import ConfigError, raise_first_problem
from ..training.inputs import load_problems
from .task_sets import split_word


def main() -> None:
    """Exit with code 0 unless a check fails, else print the training script's error message and exit with code 2."""
    family, world_size, *argv = sys.argv[1:]
    ranks = int(world_size)
    with exit_on_config_error(f"pretrain_{family}.py"):
        config = parse(argv, DEFAULTS[family], ranks).with_derived_iters(ranks)
        # A check that fails raises ConfigError. The results of the checks are not needed.
        try:
            resolve(config, ranks, fast_bf16=False)
        except ConfigError:  # other machines may run it, where `--precision auto` is bf16 and not fp32
            resolve(config, ranks, fast_bf16=True)
        raise_first_problem(load_problems(config))
        for word in config.train.eval_tasks or ():
            split_word(word)  # only its ConfigError for a missing file counts


if __name__ == "__main__":
    main()
