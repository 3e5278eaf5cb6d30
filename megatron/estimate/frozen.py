"""Number of parameters that are trained if --param-groups freezes others."""

from collections.abc import Sequence

from ..config import Config
from ..config.param_groups import ParamRule, match_rules
from ..model.layers import Layer, global_names
from .sizes import Count, count_layers, layers_of

ANY_WEIGHT = "\0"  # in place of the name of a weight: only a pattern for all weights of a layer matches it


def count_trained(layers: Sequence[Layer], rules: Sequence[ParamRule], config: Config) -> Count:
    """Return the number of parameters of those `layers` that `rules` do not freeze as a whole.

    If rules freeze some weights of a layer only, all its weights count as trained, so memory is rather overestimated.
    """
    whole_model = layers_of(config)
    names = {}  # name of a layer -> name of its module, which tied layers share
    for layer, name in zip(whole_model, global_names(whole_model), strict=True):
        names[layer.name] = f"{name}.{ANY_WEIGHT}"
    rule_of = match_rules(rules, names.values())
    trained = []
    for layer in layers:
        rule = rule_of.get(names[layer.name])
        if rule is None or not rule.frozen:
            trained.append(layer)
    return count_layers(trained, config)
