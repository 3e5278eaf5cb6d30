"""`python -m tests.gpu [NAME...]`: checks on this machine's accelerator; needs only torch, DeepSpeed and numpy."""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from megatron.ranks import device as device_module

from .checks import CHECKS, Impossible


def said(name: str) -> tuple[str, bool]:
    """Run a check; return its result as text, and whether it failed."""
    try:
        return f"ok: {CHECKS[name]()}", False
    except Impossible as error:
        return f"not here: {error}", False
    except Exception as error:  # whatever fails, the other checks must run
        return f"FAILED: {type(error).__name__}: {error}", True


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CHECKS)}; default: all")
    parser.add_argument("--jobs", type=int, default=4, help="checks that run side by side")
    args = parser.parse_args()
    if unknown := set(args.names) - set(CHECKS):
        parser.error(f"there is no check {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    print(f"on {device_module.current()}")
    names = args.names or list(CHECKS)
    with ThreadPoolExecutor(args.jobs) as pool:
        failed = 0
        for name, (text, bad) in zip(names, pool.map(said, names), strict=True):
            print(f"{name:44} {text}", flush=True)
            failed += bad
    sys.exit(failed > 0)


main()
