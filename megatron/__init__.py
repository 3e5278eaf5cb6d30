"""Pretraining of GPT-2, Llama and T5 in any data x tensor x pipeline layout.

Names such as `get_args`, which tutorials import from `megatron`, are loaded lazily. Tools that need only the data
packages therefore do not load torch.
"""

import os
from pkgutil import extend_path
from typing import Any

if "RANK" in os.environ:
    # Hide C++ stacks, which clutter the ranks' messages. torch reads the variable when it is loaded, and not every
    # launcher passes its own variables on to other hosts.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
__path__ = extend_path(__path__, __name__)  # also find `megatron.core` if megatron-core is installed elsewhere

from ._compat import compat  # noqa: E402  # must follow the change of __path__, which decides where modules are found

compat("names").install()
_HOMES = {
    "get_args": "megatron.training.global_vars",
    "get_timers": "megatron.training.global_vars",
    "get_tokenizer": "megatron.training.global_vars",
    "print_rank_0": "megatron.ranks.rank_0",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "mpu":
        return import_module("megatron.mpu")
    return compat("names").resolve_name(__name__, name)


__version__ = "0.2.0"
