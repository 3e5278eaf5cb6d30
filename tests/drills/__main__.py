"""Run the drill of every fault in docs/reliability.md: `python -m tests.drills [WORD...]`.

With words, it runs only the faults whose names contain one of them.
"""

import sys

import pytest

from .faults import FAULTS, ONLY_FULL


def main(words: list[str]) -> int:
    chosen = [name for name in FAULTS if not words or any(word in name for word in words)]
    if not chosen:
        print(f"no fault matches {' '.join(words)}; there are: {', '.join(FAULTS)}", file=sys.stderr)
        return 2
    tests = list(dict.fromkeys(test for name in chosen for test in FAULTS[name]))
    print(f"{len(chosen)} of {len(FAULTS)} faults, {len(tests)} drills")
    usual, long = [t for t in tests if t not in ONLY_FULL], [t for t in tests if t in ONLY_FULL]
    parts = [part for part, some in ((["-q", *usual], usual), (["-q", "--full", *long], long)) if some]
    return max(int(pytest.main(part)) for part in parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
