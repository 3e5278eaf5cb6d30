"""The memory that the planner predicts for mixtures of experts is within 10% of the peak measured on ranks."""

import pytest

from tests.support import FULL, command


@FULL
@pytest.mark.parametrize("case", ["experts-fp32-ep2", "experts-fp32-recompute", "experts-bf16-ep2-zero1"])
def test_experts(case: str) -> None:
    done = command("python", "benchmarks/plan_memory.py", "--only", case, timeout=300)
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith(f"| {case} |"))
    measured, predicted = (float(cell) for cell in row.split("|")[3:5])
    assert predicted == pytest.approx(measured, rel=0.1)
