"""The built-in schedules besides 1f1b: gpipe, interleaved and zb-h1."""

from collections.abc import Iterator

from .schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    alternate,
    forward_order,
    with_messages,
)


def gpipe(stage: int, stages: int, micros: int) -> Iterator[Instruction]:
    """Yield all forward passes, then all backward passes (Huang et al. 2019).

    Each stage keeps the activations of all micro-batches until the backward passes.

        stage 0 | F0 F1 F2 F3             B0 B1 B2 B3
        stage 1 |    F0 F1 F2 F3       B0 B1 B2 B3
        stage 2 |       F0 F1 F2 F3 B0 B1 B2 B3
    """
    order = [*map(Forward, range(micros)), *map(Backward, range(micros))]
    return with_messages(order, stage, stages)


def interleaved(stage: int, stages: int, micros: int, chunks: int = 2) -> Iterator[Instruction]:
    """Yield 1F1B over several chunks per stage (Narayanan et al. 2021).

    Micro-batches go through the chunks in groups of `stages`: the first group through chunk 0, then through chunk
    1 ..., then the next group. A pass over one chunk takes 1/chunks of the time of a pass in 1F1B, so the idle time
    at the start and end of a step is 1/chunks of that in 1F1B. The price is `chunks` times as many messages. If
    `stages` does not divide the number of micro-batches, the groups are larger and a stage keeps more activations.
    """
    forward = []
    backward = []
    for micro, chunk in forward_order(stages, micros, chunks):
        forward.append(Forward(micro, chunk))
        # In the backward passes, each group goes through the last chunk first.
        backward.append(Backward(micro, chunks - 1 - chunk))
    # The warm-up is that of Megatron-LM: twice as long as in 1F1B, and one group for each further chunk.
    num_groups = max(micros // stages, 1)
    group_size = -(-micros // num_groups)  # of the largest group: 11 micro-batches on 4 stages form groups of 5 and 6
    warmup = (stages - 1 - stage) * 2 + (chunks - 1) * group_size
    order = alternate(forward, backward, warmup)
    return with_messages(order, stage, stages, chunks)


def zero_bubble(stage: int, stages: int, micros: int) -> Iterator[Instruction]:
    """Yield ZB-H1 (Qi et al. 2023): 1F1B with split backward passes, so that weight gradients fill the bubble.

        stage 0 | F0 F1 F2       B0 W0 F3 B1 W1 B2 W2 B3 W3
        stage 1 |    F0 F1    B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        stage 2 |       F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    The gradient of the inputs (B) goes to the previous stage as soon as possible, and stage s delays weight gradients
    (W) by s micro-batches. No stage keeps more micro-batches than the first stage in 1F1B. The bubble shrinks
    from (stages - 1)(F + B + W) to (stages - 1)(F + B - W), where F, B and W are the times of the passes.
    """
    warmup = min(stages - 1 - stage, micros)
    forward = list(map(Forward, range(micros)))
    backward = list(map(BackwardInput, range(micros)))
    order = []
    for each in alternate(forward, backward, warmup):
        order.append(each)
        if isinstance(each, BackwardInput) and each.micro >= stage:
            order.append(BackwardWeight(each.micro - stage))
    # The weight gradients that are still delayed: the last `stage` of them, or all if there are fewer micro-batches.
    order += map(BackwardWeight, range(max(micros - stage, 0), micros))
    return with_messages(order, stage, stages)
