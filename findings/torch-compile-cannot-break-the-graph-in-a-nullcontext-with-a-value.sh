#!/usr/bin/env bash
# Surprise: torch.compile stops with an InternalTorchDynamoError where a graph breaks within `with nullcontext(value):`. The
#   value need not be used, and print() in the block is enough of a break. Within `with nullcontext():`, and within a context
#   of one's own that also returns a value, the same block runs as two graphs. So a model whose optional context is written as
#   `nullcontext(something)` compiles until a user's layer prints, and then fails with an error that names neither.
# Versions: torch 2.13.0. Date: 2026-11-30.
# Belief: a graph break costs speed, and torch.compile runs any code that eager Python runs; nullcontext(x) is a
#   nullcontext() whose `as` target is x.
# Source: the pages "Working with Graph Breaks" of torch.compile (breaks in `with` blocks of supported contexts are resumed)
#   and contextlib.nullcontext of Python's documentation.
# Cause: torch/_dynamo keeps what a context was entered with as a list of arguments to enter it again after the break. For a
#   nullcontext it keeps the value itself, and tuple(value) fails.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import sys
from contextlib import contextmanager, nullcontext

import torch

print("torch", torch.__version__)


@contextmanager
def own_context(value):
    yield value


CONTEXTS = {
    "nullcontext()": lambda: nullcontext(),
    "own_context(3)": lambda: own_context(3),
    "nullcontext(3)": lambda: nullcontext(3),
    "nullcontext([1, 2])": lambda: nullcontext([1, 2]),
}


def outcome(make_context, breaks):
    """Return 'right', 'wrong' or the error of a compiled function whose graph breaks in the context, if `breaks`."""

    def double_next(x):
        with make_context():
            x = x + 1
            if breaks:
                torch._dynamo.graph_break()
            return x * 2

    torch._dynamo.reset()
    x = torch.arange(4.0)
    try:
        result = torch.compile(double_next, backend="eager")(x)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "right" if torch.equal(result, 2 * (x + 1)) else "wrong"


found = {}
for name, make_context in CONTEXTS.items():
    found[name] = outcome(make_context, True)
    print(f"with {name}: without a break {outcome(make_context, False)}; with a break {found[name]}")
print("belief: all of them are right, with one graph or two")
fails = [name for name, result in found.items() if result != "right"]
holds = fails == ["nullcontext(3)", "nullcontext([1, 2])"] and all("InternalTorchDynamoError" in found[n] for n in fails)
print("HOLDS: a graph break fails in a nullcontext that holds a value" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
