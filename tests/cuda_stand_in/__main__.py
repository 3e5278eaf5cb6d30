"""Train tiny models on the stand-in for CUDA and compare with the CPU: `python -m tests.cuda_stand_in [CASE ...]`.

Needs a C++ compiler and no GPU.
"""

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.materials import random_corpus, small_tokenizer

from .build import Missing, library
from .cases import CASES
from .runs import Materials, problems_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_stand_in", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"cases to run (default: all): {', '.join(CASES)}")
    args = parser.parse_args()
    unknown = [name for name in args.cases if name not in CASES]
    if unknown:
        parser.error(f"there is no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    try:
        path = library()
    except Missing as error:
        print(error, file=sys.stderr)
        return 1
    # Without this, SIGTERM would end this process alone, and the ranks would continue.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = small_tokenizer(Path(folder))
        materials = Materials(str(path), random_corpus(Path(folder), tokenizer), tokenizer)
        failed = sum([is_wrong(name, materials) for name in args.cases or CASES])
    return int(failed > 0)


def is_wrong(name: str, materials: Materials) -> bool:
    """Run a case, print its result, and return whether anything is wrong."""
    start = time.monotonic()
    problems = problems_of(CASES[name], materials)
    result = "FAILED: " + "; ".join(problems) if problems else "ok"
    print(f"{name:24} {time.monotonic() - start:4.0f} s  {result}", flush=True)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
