"""Time and work of a training step, as `cost.py` predicts them."""

from dataclasses import dataclass


@dataclass
class Seconds:
    """Seconds that a micro-batch's forward and backward pass take on one stage, by kind of work."""

    matmuls: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    expert_parallel: float = 0.0
    weights: float = 0.0  # ZeRO 3's all-gathers of weights
    boundary: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the seconds of all kinds of work."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class Cost:
    """Time and work of one step on `devices` devices.

    passes: seconds of all forward and backward passes, with the pipeline's bubble.
    model_flops: FLOPs of the forward and backward pass on all devices. done_flops: the same with recomputation.
    """

    step: float
    passes: float
    bubble: float
    stages: list[Seconds]
    gradients: float
    optimizer: float
    model_flops: float
    done_flops: float
    tokens: int
    devices: int
    peak: float
    boundary_bytes: float
    gradient_bytes: float
    collective_bytes: float
    expert_bytes: float  # that a rank sends in all-to-alls per micro-batch

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all devices together."""
        return self.tokens / self.step

    @property
    def tflops(self) -> float:
        """TFLOP/s per device, including recomputation as in most publications."""
        return self.done_flops / self.step / self.devices / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization (Chowdhery et al. 2022), without recomputation."""
        return self.model_flops / self.step / self.devices / self.peak

    def days(self, tokens: float) -> float:
        """Return how many days training on `tokens` tokens takes."""
        return tokens / self.tokens_per_second / 86400
