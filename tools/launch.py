"""Start the ranks of a run on this machine (or this node of several): torchrun, without its wall of text on failure.

Takes torchrun's own arguments, then the script and its arguments. The script's ranks say
themselves what went wrong; the exit code is that of the first rank that failed.
"""

import logging
import os
import sys
import warnings

EXAMPLES = """\
examples:
  python tools/launch.py --standalone --nproc-per-node 2 pretrain_gpt2.py --pipe-parallel-size 2 --data-path ...
  python tools/launch.py --nnodes 2 --node-rank 0 --master-addr node1 --master-port 6000 --nproc-per-node 8 \\
      pretrain_gpt2.py ..."""


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{__doc__}\n{EXAMPLES}")
        return 0
    # One thread a rank unless the user says otherwise: ranks share the cores of this machine.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or stacks of C++ stand between what the ranks say
    warnings.simplefilter("ignore")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        run(parse_args(argv))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code < 0:
            print(f"launch.py: rank {rank} was ended by signal {-code}", file=sys.stderr)
        return code if code > 0 else 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
