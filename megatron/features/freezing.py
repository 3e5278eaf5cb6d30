"""The flag --param-groups, as far as it freezes weights."""

from torch import nn

from ..config.param_groups import describe_rules
from ..engines.param_groups import match_param_rules
from ..model.parameter_counts import sizes_of_parameters
from ..ranks.agreement import raise_on_all_ranks
from ..ranks.rank_0 import print_rank_0
from ..training.feature import Feature, Plan


class Freezing(Feature):
    """Feature that freezes the weights that --param-groups freezes."""

    def model(self, model: nn.Module, plan: Plan) -> None:
        """Freeze weights, and print how many weights each rule matches. All ranks must call this.

        Raises RunError for rules that match no weight of the model, and for rules that freeze all weights.
        """
        path = plan.config.optim.param_groups
        rules = plan.resolved.param_rules
        assert path is not None  # else the run does not have this feature
        sizes = sizes_of_parameters(model)
        with raise_on_all_ranks():
            lines = describe_rules(path, rules, sizes)
        for line in lines:
            print_rank_0(line)
        for parameter, rule in match_param_rules(model, rules).items():
            if rule.frozen is not None:
                parameter.requires_grad_(not rule.frozen)
