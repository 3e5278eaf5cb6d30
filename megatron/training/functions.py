"""`pretrain()`: a task made of an entry script's functions, as in tutorials of Megatron-LM and CPM-Pretrain."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..config import Config
from ..ranks.rank_0 import print_rank_0
from ..tokenizer import Tokenizer
from .entry import run
from .task import Batch, Datasets, Task, what

ForwardStep = Callable[[Iterator[Batch] | None, Any], tuple[Tensor, Any]]
CountTargets = Callable[[Batch | None], Tensor]
TokenizerProvider = Callable[[Config, Tokenizer], Tokenizer]


def pretrain(
    train_valid_test_datasets_provider: Callable[..., Datasets],
    model_provider: Callable[[], nn.Module],
    forward_step: ForwardStep | None = None,
    extra_args_provider: None = None,
    args_defaults: Mapping[str, Any] | None = None,
    *,
    count_targets: CountTargets | None = None,
    tokenizer_provider: TokenizerProvider | None = None,
    name: str = "model",
    argv: Sequence[str] | None = None,
    exit: bool = True,
) -> None:
    """Train with the settings of the command line; a second call with the same run directory resumes.

    train_valid_test_datasets_provider() -> three datasets, None for an empty one; `dataset[n]` must give a dict
    of tensors for any n >= 0.
    model_provider() -> the model: a plain module, or a `PipelineModule` if --pipe-parallel-size is not 0; its
    `_megatron_batch_fn` turns a batch of the dataset into (inputs, targets).
    forward_step(data_iterator, model) -> (loss, anything), used without a pipeline: the loss is the sum over
    target tokens if `count_targets` is given, else their mean.
    count_targets(batch) -> the number of target tokens of a micro-batch.
    tokenizer_provider(config, tokenizer) -> the tokenizer to use, e.g. with more special tokens.
    args_defaults: defaults that this script changes; flags still override them.
    argv, exit: as in `run`.

    A datasets provider that takes the numbers of samples marks a script in CPM-Pretrain's form, see
    `megatron.compat.script`.
    Raises ValueError for an extra_args_provider: a script parses its own flags and passes the rest as `argv`.
    """
    if extra_args_provider is not None:
        raise ValueError(
            "pretrain() takes no extra_args_provider: parse the flags of the script with a parser of its own, "
            "parser.parse_known_args(), and pass the rest as argv="
        )
    functions = train_valid_test_datasets_provider, model_provider, forward_step
    from ..compat import script

    task: FunctionsTask
    if count_targets is None and tokenizer_provider is None and script.is_original(train_valid_test_datasets_provider):
        task = script.ScriptTask(functions, args_defaults or {}, name)
    else:
        task = FunctionsTask(*functions, count_targets, tokenizer_provider, args_defaults or {}, name)
    run(task, argv, exit)


class FunctionsTask(Task):
    """Task made of a script's functions, which call `get_args()`, `get_tokenizer()` and `get_timers()`."""

    makes_batches = False

    def __init__(
        self,
        datasets_provider: Callable[[], Datasets],
        model_provider: Callable[[], nn.Module],
        forward_step: ForwardStep | None,
        count_targets: CountTargets | None,
        tokenizer_provider: TokenizerProvider | None,
        defaults: Mapping[str, Any],
        name: str,
    ) -> None:
        self.datasets_provider, self.model_provider = datasets_provider, model_provider
        self.forward_step: ForwardStep = forward_step or _no_forward_step
        self.count_targets = count_targets  # type: ignore[assignment,method-assign]
        self.tokenizer_provider = tokenizer_provider
        self.defaults, self.name = defaults, name
        self._noted = False

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
        """Return the loss that `forward_step` computes. Raises ValueError if it returns no loss."""
        found: Any = self.forward_step(None if batch is None else _one_batch(batch), model)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise ValueError(f"forward_step returns {what(found)}: return (loss, anything), as `return loss, {{}}`")
        loss = found[0]
        if not isinstance(loss, Tensor) or loss.dim():
            raise ValueError(f"forward_step returns {what(loss)} as the loss: return a tensor of one number")
        self._note_what_is_not_logged(found[1])
        return loss

    def _note_what_is_not_logged(self, named: Any) -> None:
        """Print once which values next to the loss of `forward_step` go nowhere."""
        if self._noted or not isinstance(named, dict):
            return
        self._noted = True
        if others := [str(name) for name in named if name != "lm loss"]:
            print_rank_0(
                f"note: forward_step returns {', '.join(others)} next to the loss, which no line shows; let the model "
                f"return such values from get_additional_losses()"
            )


def _no_forward_step(batches: Iterator[Batch] | None, model: Any) -> tuple[Tensor, Any]:
    """Raise ValueError: only a pipeline, whose loss_fn computes the loss, does without."""
    raise ValueError(
        "pretrain() has no forward_step, which a model without a pipeline needs: pass it as the third argument"
    )


def _one_batch(batch: Batch) -> Iterator[Batch]:
    """Yield the micro-batch of one call of `forward_step`. Raises ValueError for a second one."""
    yield batch
    raise ValueError("forward_step reads a second batch in one call: it is called once for each micro-batch")
