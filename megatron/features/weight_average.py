"""The flag --ema-decay: an exponential moving average of the weights, see `tds.average`."""

from typing import Any

from tds.average import WeightAverage

from ..training.feature import Feature, Plan


class Average(Feature):
    """Feature that adds the average to the state of the optimizer."""

    def engine(self, engine: Any, plan: Plan) -> None:
        decay = plan.config.optim.ema_decay
        assert decay is not None
        WeightAverage(engine, decay)  # it hooks itself into the optimizer, which keeps it alive
