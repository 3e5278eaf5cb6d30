"""`pretrain()`, which trains with an entry script's functions, as in tutorials of Megatron-LM and CPM-Pretrain."""

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..config.fields import ConfigError
from ..training.entry import run
from ..training.feature import Feature
from ..training.global_vars import set_own_flags
from ..training.task import Datasets
from .args import own_flags
from .script import CountTargets, ForwardStep, FunctionsTask, ScriptTask, TokenizerProvider, is_original


def pretrain(
    train_valid_test_datasets_provider: Callable[..., Datasets],
    model_provider: Callable[[], nn.Module],
    forward_step: ForwardStep | None = None,
    extra_args_provider: Callable[[ArgumentParser], Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    *,
    count_targets: CountTargets | None = None,
    tokenizer_provider: TokenizerProvider | None = None,
    name: str = "model",
    argv: Sequence[str] | None = None,
    exit: bool = True,
    features: Sequence[Feature] = (),
) -> None:
    """Train with the settings of the command line; a second call with the same run directory resumes.

    train_valid_test_datasets_provider() -> the training, validation and test data sets; None instead of an empty
    data set. `dataset[n]` must return a dict of tensors for any n >= 0.
    model_provider() -> the model: a plain module, or a `PipelineModule` if --pipe-parallel-size is not 0. The
    `_megatron_batch_fn` of a `PipelineModule` turns a batch of the data set into (inputs, targets).
    forward_step(data_iterator, model) -> (loss, anything), used without a pipeline. The loss must be the sum over
    target tokens if `count_targets` is given, else the mean over target tokens.
    count_targets(batch) -> the number of target tokens of a micro-batch.
    tokenizer_provider(config, tokenizer) -> the tokenizer to use, e.g. with more special tokens.
    args_defaults: values that replace defaults of settings; flags override these values.
    argv: the flags, by default those of the command line. exit: whether to end the process when the run ends.
    features: optional parts of your own, see `megatron.training.Feature`.

    As in CPM-Pretrain, the data-set provider may take the numbers of samples as an argument. Then `forward_step` must
    return the mean over the target tokens of a micro-batch, see `megatron.compat.script.ScriptTask`.
    extra_args_provider(parser) adds the script's own flags to an argparse parser; `get_args()` has their values. They
    are not saved with the run, so a resumed run needs them again.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    own: dict[str, Any] = {}
    if extra_args_provider is not None:
        try:
            own, words = own_flags(extra_args_provider, words)
        except ConfigError as error:
            if not exit:
                raise
            sys.exit(f"{Path(sys.argv[0]).name}: {error}")
    set_own_flags(own)
    functions = train_valid_test_datasets_provider, model_provider, forward_step
    defaults = args_defaults or {}
    more = (count_targets, tokenizer_provider)
    original = more == (None, None) and is_original(train_valid_test_datasets_provider)
    task = ScriptTask(*functions, defaults, name) if original else FunctionsTask(*functions, defaults, name, *more)
    run(task, words, exit, features=features)
