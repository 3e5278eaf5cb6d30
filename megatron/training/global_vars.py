"""Global access to settings, tokenizer and timers for entry scripts such as pretrain_gpt2.py.

Other code gets settings, tokenizer and timers as arguments.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from .._compat import compat
from ..config import Config
from ..timers import Timers
from ..tokenizer import Tokenizer

T = TypeVar("T")


class _Current:
    config: Config | None = None
    number_format: str | None = None
    args: Any = None
    tokenizer: Tokenizer | None = None
    timers: Timers | None = None
    own_flags: Mapping[str, Any] = {}  # values of the script's own flags, which `get_args()` has, too


def publish(config: Config, tokenizer: Tokenizer | None, timers: Timers, number_format: str) -> None:
    """Set the objects that `get_args()`, `get_tokenizer()` and `get_timers()` return.

    number_format: the number format of the weights, which --precision auto leaves open.
    """
    _Current.config = config
    _Current.number_format = number_format
    _Current.args = None
    _Current.tokenizer = tokenizer
    _Current.timers = timers


def set_own_flags(values: Mapping[str, Any]) -> None:
    """Set the values of the script's own flags, as further attributes of `get_args()`, for runs that start later."""
    _Current.own_flags = values


def _require_published(value: T | None, what: str) -> T:
    if value is None:
        raise RuntimeError(f"no {what} yet: pretrain() creates the {what} before it calls your functions")
    return value


def get_args() -> Any:
    """Return the settings of this run as one flat, read-only object: `args.hidden_size`."""
    if _Current.args is None:
        config = _require_published(_Current.config, "settings")
        _Current.args = compat("args").Args(config, _Current.own_flags, _Current.number_format)
    return _Current.args


def get_tokenizer() -> Tokenizer:
    """Return the tokenizer of this run."""
    return _require_published(_Current.tokenizer, "tokenizer")


def get_timers() -> Timers:
    """Return the timers of this run."""
    return _require_published(_Current.timers, "timers")
