"""Run checks on this machine's accelerator: `python -m tests.gpu [NAME...]`.

The checks need only torch, DeepSpeed and numpy.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from megatron.ranks import device as device_module

from .checks import CHECKS, Impossible


def result_of(name: str) -> tuple[str, bool]:
    """Run the check `name`; return its result as text, and whether the check failed."""
    try:
        return f"ok: {CHECKS[name]()}", False
    except Impossible as error:
        return f"skipped: {error}", False
    except Exception as error:  # whatever the error, the other checks must run
        return f"FAILED: {type(error).__name__}: {error}", True


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"checks to run (default: all): {', '.join(CHECKS)}")
    parser.add_argument("--jobs", type=int, default=4, help="checks to run in parallel (default: 4)")
    args = parser.parse_args()
    if unknown := set(args.names) - set(CHECKS):
        parser.error(f"there is no check {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    print(f"on {device_module.current_device()}")
    names = args.names or list(CHECKS)
    with ThreadPoolExecutor(args.jobs) as pool:
        failed = 0
        for name, (text, bad) in zip(names, pool.map(result_of, names), strict=True):
            print(f"{name:44} {text}", flush=True)
            failed += bad
    sys.exit(failed > 0)


main()
