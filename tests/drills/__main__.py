"""Make every fault of docs/reliability.md happen: `python -m tests.drills`, or some of them by words of their names."""

import sys

import pytest

from .faults import FAULTS


def main(words: list[str]) -> int:
    chosen = [name for name in FAULTS if not words or any(word in name for word in words)]
    if not chosen:
        print(f"no fault is called so; there are: {', '.join(FAULTS)}", file=sys.stderr)
        return 2
    tests = list(dict.fromkeys(test for name in chosen for test in FAULTS[name]))
    print(f"{len(chosen)} of {len(FAULTS)} faults, {len(tests)} drills")
    return int(pytest.main(["-q", *tests]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
