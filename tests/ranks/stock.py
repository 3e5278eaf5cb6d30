"""What stock DeepSpeed does with the cases of test_tds.py: python -m tests.ranks.stock prints the table of docs/tds.md."""

from typing import Any

import pytest

from tests.support import RankFailure, on_ranks

from .test_tds import KINDS, STEPS, _train, loss_fn, reference

CASES: list[tuple[str, str, float, list[int]]] = [
    *((f"({kinds.replace(' ', ', ')})", kinds, 0.0, [4] * STEPS) for kinds in KINDS),
    ("(grad), clipping by the global norm", "grad", 0.05, [4] * STEPS),
    ("(grad), another size each step", "grad", 0.0, [4, 7, 1]),
]


def outcome(expected: list[float], stages: int, *args: Any) -> str:
    try:
        found = on_ranks(stages, _train, args[0], stages, 1, *args[1:], timeout=20)
    except RankFailure as failure:
        lines = [line for line in str(failure).splitlines() if "Error" in line and line[0] not in " -"]
        errors = [line for line in lines if "gloo" not in line] or lines  # a dead neighbour is a consequence
        return f"crashes: {errors[0].replace('|', '/')[:70]}" if errors else "hangs"
    return "right" if found[0] == pytest.approx(expected, rel=1e-5) else "**wrong numbers**"


def main() -> None:
    print("| boundary tuple | stages | stock DeepSpeed | TDS |\n| --- | --- | --- | --- |")
    for name, kinds, clip, rows in CASES:
        expected = reference(kinds, 1, loss_fn, clip, rows.__getitem__)
        for stages in (2, 3):
            cells = [outcome(expected, stages, kinds, loss_fn, clip, rows, {}, stock) for stock in (True, False)]
            print(f"| {name} | {stages} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
