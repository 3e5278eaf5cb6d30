"""Size of a checkpoint and free memory of this machine.

`megatron.estimate.per_rank` estimates the memory of a rank.
"""

from megatron.config import Config


def checkpoint_bytes(config: Config) -> float:
    """Return the bytes of one checkpoint: the weights and the optimizer's moments of trained weights."""
    from megatron.config.param_groups import read_param_rules
    from megatron.estimate.frozen import count_trained
    from megatron.estimate.per_rank import moment_elements
    from megatron.estimate.sizes import Count, layers_of, parameters

    rules = read_param_rules(config.optim.param_groups) if config.optim.param_groups else ()
    trained = count_trained(layers_of(config), rules, config)
    p = config.parallel
    # `trained.hidden` counts the matrices on one rank: with 2 expert-parallel and 4 model-parallel ranks, half of the
    # experts, and a quarter of each matrix. So add the experts of the other rank, and multiply the sum by 4.
    other_experts = trained.expert_matrices * (p.expert_parallel_size - 1)
    hidden = (trained.hidden + other_experts) * p.model_parallel_size
    # The counts of one rank that holds the whole model. `moment_elements` reads only these two fields.
    unsharded = Count(held=trained.whole, hidden=hidden)
    width = 8.0 if config.train.dtype == "fp64" else 4.0  # bytes of each weight and each moment: others are fp32
    return width * (parameters(config) + moment_elements(unsharded, config))


def machine_bytes() -> float | None:
    """Return the bytes of memory that a run can use on this machine; None if the system does not report them."""
    # The limit of a container (cgroup) may be lower than the free memory of the machine.
    limits: list[float] = []
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("MemAvailable"):  # such as `MemAvailable:   31900 kB`
                    limits.append(1024.0 * int(line.split()[1]))
        with open("/sys/fs/cgroup/memory.max", encoding="utf-8") as file:
            text = file.read().strip()
            if text.isdecimal():  # without a limit, the text is `max`
                limits.append(float(text))
    except OSError:  # a system without this file does not report the limit
        pass
    return min(limits, default=None)
