"""Train tiny models on the stand-in for CUDA and compare with the CPU: `python -m tests.cuda_stand_in [CASE ...]`.

Needs a C++ compiler and no GPU.
"""

import argparse
import signal
import sys
import time

from .build import Missing, library
from .cases import CASES
from .runs import materials, problems_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_stand_in", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"cases to run (default: all): {', '.join(CASES)}")
    args = parser.parse_args()
    unknown = [name for name in args.cases if name not in CASES]
    if unknown:
        parser.error(f"there is no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    try:
        library()
    except Missing as error:
        print(error, file=sys.stderr)
        return 1
    materials()
    # Without this, SIGTERM would end this process alone, and the ranks would continue.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    failed = 0
    for name in args.cases or CASES:
        start = time.monotonic()
        problems = problems_of(CASES[name])
        failed += bool(problems)
        result = "FAILED: " + "; ".join(problems) if problems else "ok"
        print(f"{name:24} {time.monotonic() - start:4.0f} s  {result}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
