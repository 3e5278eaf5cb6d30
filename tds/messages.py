"""Messages to the user: printing that never raises an error, and advice that names flags or ds_config keys."""

import contextlib
import sys

ways = {  # advice in error messages, worded for a ds_config; a program with its own flags replaces it
    "overlap": '"overlap_grad_reduce": false in the pipeline section of the ds_config',
    "no ZeRO": '"zero_optimization": {"stage": 0} in the ds_config',
    "no pipeline": "a plain module instead of the PipelineModule",
    "ranks": "torchrun --nproc-per-node",
}


def say(text: str, error: bool = False) -> None:
    """Print `text` on standard output, or standard error; ignore a closed stream or a full disk."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr if error else sys.stdout, flush=True)
