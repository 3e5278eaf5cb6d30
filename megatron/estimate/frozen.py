"""Number of parameters that are trained if --param-groups freezes others."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from ..config import Config
from ..config.param_groups import ParamRule
from ..model.layers import Layer, global_names
from .sizes import Count, count_layers, layers_of

ANY_WEIGHT = "\0"  # in place of the name of a weight: only a pattern for all weights of a layer matches it


def count_trained(layers: Sequence[Layer], rules: Sequence[ParamRule], config: Config) -> Count:
    """Return the number of parameters of those `layers` that `rules` do not freeze as a whole.

    If rules freeze some weights of a layer only, all its weights count as trained, so memory is rather overestimated.
    """
    whole_model = layers_of(config)
    prefixes = {}  # name of a layer -> first characters of the names of its weights, which tied layers share
    for layer, name in zip(whole_model, global_names(whole_model), strict=True):
        prefixes[layer.name] = f"{name}."
    trained = []
    for layer in layers:
        is_frozen = False
        for rule in rules:
            if rule.frozen and fnmatchcase(prefixes[layer.name] + ANY_WEIGHT, rule.pattern):
                is_frozen = True
            elif rule.frozen is False and _may_match(rule.pattern, prefixes[layer.name]):
                is_frozen = False
        if not is_frozen:
            trained.append(layer)
    return count_layers(trained, config)


def _may_match(pattern: str, prefix: str) -> bool:
    """Return whether some name that begins with `prefix` might match `pattern`."""
    # Up to a *, which matches all that follows, each unit of the pattern matches one character: [01], ? or itself.
    head, _, _ = pattern.partition("*")
    units = re.findall(r"\[[^]]+\]|.", head)[: len(prefix)]
    return fnmatchcase(prefix[: len(units)], "".join(units))
