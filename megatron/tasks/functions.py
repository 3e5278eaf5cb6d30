"""`pretrain()`, which trains with an entry script's functions, and the task that calls these functions."""

import inspect
import sys
from argparse import ArgumentError, ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .._compat import compat
from ..config import Config
from ..config.fields import ConfigError
from ..config.flags import SettingsParser, build_parser
from ..ranks.rank_0 import print_rank_0
from ..tokenizer import Tokenizer
from ..training.entry import run
from ..training.feature import Feature
from ..training.global_vars import set_own_flags
from ..training.task import Batch, Datasets, Task, describe

ForwardStep = Callable[[Iterator[Batch] | None, Any], tuple[Tensor, Any]]
CountTargets = Callable[[Batch | None], Tensor]
TokenizerProvider = Callable[[Config, Tokenizer], Tokenizer]


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
    return the mean over the target tokens of a micro-batch, see `ScriptTask` of `megatron_compat`; ValueError if
    `count_targets` is given.
    extra_args_provider(parser) adds the script's own flags to an argparse parser; `get_args()` has their values. They
    are not saved with the run, so a resumed run needs them again.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    own_values: dict[str, Any] = {}
    if extra_args_provider is not None:
        try:
            own_values, words = parse_own_flags(extra_args_provider, words)
        except ConfigError as error:
            if not exit:
                raise
            sys.exit(f"{Path(sys.argv[0]).name}: {error}")
    set_own_flags(own_values)
    # The arguments with which both classes of tasks begin.
    functions = train_valid_test_datasets_provider, model_provider, forward_step
    defaults = args_defaults or {}
    task: Task
    if _wants_counts(train_valid_test_datasets_provider):
        if count_targets is not None:
            raise ValueError(
                "pretrain() has count_targets, but its data-set provider takes the numbers of samples, with which "
                "forward_step returns a mean: leave count_targets out, or let the provider take no argument"
            )
        task = compat("script").ScriptTask(*functions, defaults, name, tokenizer_provider)
    else:
        task = FunctionsTask(*functions, defaults, name, count_targets, tokenizer_provider)
    run(task, words, exit, features=features)


def _wants_counts(provider: Callable[..., Any]) -> bool:
    """Return whether a data-set provider requires the numbers of samples, as those of CPM-Pretrain's scripts do."""
    try:
        parameters = inspect.signature(provider).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # A positional parameter without a default is required. *args and **kwargs, which are optional, have none either.
    return any(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)


def parse_own_flags(add_args: Callable[[ArgumentParser], Any], argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the flags that `add_args` adds, and the words of `argv` that belong to no such flag.

    Raises ConfigError for a flag that this project has, and for a missing or invalid value. Prints the flags for -h.
    """
    try:
        add_args(build_parser())  # raises ArgumentError for a flag that the parser has
    except ArgumentError as error:
        raise ConfigError(f"extra_args_provider adds a flag that this project has ({error}); rename it") from None
    parser = SettingsParser(add_help=False, allow_abbrev=False)
    add_args(parser)
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        return {}, list(argv)  # the run prints the help on the other flags later, and exits
    namespace, other_words = parser.parse_known_args(argv)
    return vars(namespace), other_words


class FunctionsTask(Task):
    """Task that calls a script's functions, which may use `get_args()`, `get_tokenizer()` and `get_timers()`."""

    makes_batches = False

    def __init__(
        self,
        datasets_provider: Callable[[], Datasets],
        model_provider: Callable[[], nn.Module],
        forward_step: ForwardStep | None,
        defaults: Mapping[str, Any],
        name: str,
        count_targets: CountTargets | None = None,
        tokenizer_provider: TokenizerProvider | None = None,
    ) -> None:
        self.datasets_provider = datasets_provider
        self.model_provider = model_provider
        self.forward_step: ForwardStep = forward_step or _no_forward_step
        # This replaces the method of Task. None: the engine counts each micro-batch as one target.
        self.count_targets = count_targets  # type: ignore[assignment,method-assign]
        self.tokenizer_provider = tokenizer_provider
        self.defaults = defaults
        self.name = name
        self._has_noted = False  # whether `_note_unlogged_values` has looked at the values

    def extended(self, config: Config, tokenizer: Tokenizer) -> Tokenizer:
        return self.tokenizer_provider(config, tokenizer) if self.tokenizer_provider else tokenizer

    def datasets(self, config: Config, tokenizer: Tokenizer) -> tuple[Datasets, list[str]]:
        return self.datasets_provider(), []

    def model(self, config: Config, tokenizer: Tokenizer | None) -> nn.Module:
        return self.model_provider()

    def batch(self, data: Batch | None, config: Config, tokenizer: Tokenizer | None) -> Any:
        """Return the batch unchanged: the script's own functions process it."""
        return data

    checked_batch = batch

    def loss(self, model: Any, batch: Any) -> Tensor:
        """Return the loss that `forward_step` computes, a scalar []. Raises ValueError if it returns no loss."""
        # `forward_step` takes an iterator, as in Megatron-LM, and None on a rank that reads no data.
        batches = None if batch is None else _one_batch(batch)
        result: Any = self.forward_step(batches, model)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise ValueError(
                f"forward_step returns {describe(result)}: return (loss, anything), for example `return loss, {{}}`"
            )
        loss, named_values = result
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            raise ValueError(f"forward_step returns {describe(loss)} as the loss: return a tensor of one number")
        self._note_unlogged_values(named_values)
        return loss

    def _note_unlogged_values(self, named_values: Any) -> None:
        """Print, once in a run, that values which `forward_step` returns besides the loss are not logged."""
        if self._has_noted or not isinstance(named_values, dict):
            return
        self._has_noted = True
        unlogged = [str(name) for name in named_values if name != "lm loss"]
        if unlogged:
            print_rank_0(
                f"note: forward_step returns {', '.join(unlogged)} besides the loss; these values are not logged; "
                "a feature can log what the model returns from get_additional_losses(), which is in step.aux"
            )


def _no_forward_step(batches: Iterator[Batch] | None, model: Any) -> tuple[Tensor, Any]:
    """Raise ValueError: no `forward_step` was given, but a model without a pipeline needs this function."""
    raise ValueError(
        "pretrain() has no forward_step, which a model without a pipeline needs: pass it as the third argument"
    )


def _one_batch(batch: Batch) -> Iterator[Batch]:
    """Yield the micro-batch of one call of `forward_step`. Raises ValueError if the call reads a second batch."""
    yield batch
    raise ValueError(
        "forward_step reads a second batch in one call: read only one, as forward_step is called for each micro-batch"
    )
