"""Notes on choices that the machine decided: sequence parallelism, kernels and precision."""

from .. import mpu
from ..ranks import device as device_module
from ..ranks.rank_0 import print_rank_0
from ..training.feature import Feature, Plan


class Notes(Feature):
    """Feature that prints the notes before the model is built."""

    def prepare(self, plan: Plan) -> None:
        config = plan.config
        options = mpu.get_options()
        if options.sequence_parallel and config.parallel.sequence_parallel is None:
            print_rank_0(
                "note: model-parallel ranks shard activations along the sequence (sequence parallelism); "
                "--no-sequence-parallel turns this off"
            )
        precision_note = device_module.precision_note(plan.device, plan.resolved.precision)
        if precision_note:
            print_rank_0(precision_note)
