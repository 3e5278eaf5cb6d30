"""Advice in error messages, in the vocabulary of the running program; by default keys of a ds_config."""

ways = {  # a program with its own flags replaces these
    "overlap": '"overlap_grad_reduce": false in the pipeline section of the ds_config',
    "no ZeRO": '"zero_optimization": {"stage": 0} in the ds_config',
    "no pipeline": "a plain module in the place of the PipelineModule",
    "ranks": "torchrun --nproc-per-node",
}
