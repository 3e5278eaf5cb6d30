"""What an entry script may ask for anywhere: the settings, the tokenizer, the timers.

Only entry scripts ask; the packages below are handed what they need.
"""

from typing import TypeVar

from ..compat.args import ScriptArgs as Args
from ..config import Config
from ..tokenizer import Tokenizer
from .metrics import Timers

T = TypeVar("T")


class _Current:
    args: Args | None = None
    tokenizer: Tokenizer | None = None
    timers: Timers | None = None


def publish(config: Config, tokenizer: Tokenizer | None, timers: Timers) -> None:
    """Make these the ones that `get_args()` and its kin answer with."""
    _Current.args, _Current.tokenizer, _Current.timers = Args(config), tokenizer, timers


def _known(value: T | None, what: str) -> T:
    if value is None:
        raise RuntimeError(f"no {what} yet: pretrain() sets it up before it calls your functions")
    return value


def get_args() -> Args:
    """The settings of this run, flat and read-only: `args.hidden_size`."""
    return _known(_Current.args, "settings")


def get_tokenizer() -> Tokenizer:
    """That of this run."""
    return _known(_Current.tokenizer, "tokenizer")


def get_timers() -> Timers:
    """Those of this run."""
    return _known(_Current.timers, "timers")
