"""Starts import only what they need: no torch for help and schedules, no torch._dynamo for an optimizer."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

TOOLS = sorted(path.stem for path in (ROOT / "tools").glob("[a-z]*.py"))
HEAVY = "torch", "deepspeed", "transformers", "matplotlib"


def _run(program: str) -> tuple[set[str], str]:
    """Run `program` in a new interpreter; return which of `HEAVY` and torch._dynamo it imported, and its output."""
    report = f"import sys; print('imported:', *({{*{HEAVY!r}, 'torch._dynamo'}} & set(sys.modules)))"
    command = [sys.executable, "-c", f"import atexit; atexit.register(lambda: exec({report!r}))\n{program}"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rest, _, names = output.rpartition("imported:")
    return set(names.split()), rest


@pytest.mark.parametrize("tool", TOOLS)
def test_help_imports_no_heavy_library(tool: str) -> None:
    module = re.findall(r"from (\S+) import cli", Path(ROOT, "tools", f"{tool}.py").read_text(encoding="utf-8"))[0]
    program = f"import sys; sys.argv = ['{tool}.py', '--help']\nfrom {module} import cli\ncli()"
    assert _run(program)[0] == set()


def test_schedules_and_timelines_need_no_torch() -> None:
    program = "from tds import schedule, timeline, timetable, other_schedules\nassert schedule.BUILT_IN"
    assert _run(program)[0] == set()
    assert _run("import tds; tds.PipelineModule")[0] >= {"torch", "deepspeed"}


STEPS = """
import torch
from tds import _torch
if {defer}:
    _torch.defer_dynamo()

def closure():
    optimizer.zero_grad()
    loss = weight.square().sum()
    loss.backward()
    return loss.item()

for name in "AdamW", "SGD", "Adagrad":
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = getattr(torch.optim, name)([weight], lr=0.1)
    for _ in range(3):
        print(name, optimizer.step(closure), weight.tolist(), torch.is_grad_enabled())
    optimizer.load_state_dict(optimizer.state_dict())
"""


def test_optimizers_do_without_dynamo() -> None:
    deferred, losses = _run(STEPS.format(defer=True))
    usual, usual_losses = _run(STEPS.format(defer=False))
    assert "torch._dynamo" not in deferred
    assert "torch._dynamo" in usual, "torch no longer needs defer_dynamo()"
    assert losses == usual_losses and losses.count("\n") == 9


def test_compiled_code_gets_the_methods_of_torch() -> None:
    """Once torch._dynamo is imported, each method is again the one that torch excludes from graphs."""
    program = STEPS.format(defer=True) + "import torch._dynamo\noptimizer.step(closure)\n"
    program += "print(hasattr(torch.optim.Optimizer.zero_grad.__wrapped__.__wrapped__, '__dynamo_disable'))"
    assert _run(program)[1].strip().endswith("True")


# Each module is the first that imports DeepSpeed, in a fork of a process that has imported torch only.
FORKS = """
import os, sys, torch
assert "deepspeed" not in sys.modules
for module in "optimizer_state", "pipe", "engine", "untied", "saving":
    if not os.fork():
        __import__(f"tds.{module}")
        assert "deepspeed" in sys.modules
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, module
"""


def test_every_module_imports_deepspeed_quietly() -> None:
    """Any module may be the first that needs DeepSpeed, which otherwise prints that it has found no GPU."""
    done = subprocess.run([sys.executable, "-c", FORKS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
