"""The flag --precision fp8: linear layers of transformer layers multiply in fp8, see `mpu/fp8.py`."""

from dataclasses import replace

from torch import nn

from .. import mpu
from ..model.layer_stack import transformer_layers
from ..mpu.fp8 import SIZE_MULTIPLE
from ..ranks.agreement import raise_on_all_ranks
from ..ranks.errors import RunError
from ..ranks.objects import gather_objects
from ..training.feature import Feature, Plan


class Fp8(Feature):
    """Feature that turns on fp8 in the linear layers of a model."""

    def model(self, model: nn.Module, plan: Plan) -> None:
        with raise_on_all_ranks():
            num_layers = use_fp8(model)
        if not any(gather_objects(num_layers)):  # a stage of a pipeline may have none
            raise RunError(
                "--precision fp8 is for the linear layers of megatron.model.block.TransformerLayer, but the model "
                "contains no such layer; use --precision bf16"
            )


def use_fp8(model: nn.Module) -> int:
    """Let the linear layers inside the transformer layers of `model` multiply in fp8; return how many they are.

    Raises ValueError for a weight whose shard has a size that is not a multiple of 16.
    """
    num_layers = 0
    for layer in transformer_layers(model):
        for name, module in layer.named_modules():
            if isinstance(module, (mpu.ColumnParallelLinear, mpu.RowParallelLinear)):
                shape = mpu.spec_of(module.weight).local_shape  # ZeRO 3 may hold the weight itself as an empty tensor
                if any(size % SIZE_MULTIPLE for size in shape):
                    raise ValueError(
                        f"--precision fp8 needs weights whose sizes on each rank are multiples of {SIZE_MULTIPLE}, but "
                        f"{name} of a transformer layer has {shape[0]} x {shape[1]}; change --hidden-size, "
                        "--ff-hidden-size, the number of heads or --model-parallel-size, or use --precision bf16"
                    )
                module.options = replace(module.options, fp8=True)
                num_layers += 1
    return num_layers
