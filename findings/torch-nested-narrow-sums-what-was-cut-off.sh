#!/usr/bin/env bash
# Surprise: sums over all elements of a jagged tensor from torch.nested.narrow include the elements that narrow has cut off. With rows of
#   6 numbers cut to the lengths 2, 1 and 3 and 10 at the other places, x.sum() is 142 instead of 22; mean, max and F.l1_loss are
#   wrong in the same way, so padding enters a loss, and its gradient has values at the padding. x.sum(dim=1), of each row, is
#   refused for this view, so silence looks like support. A nested tensor with a copy of the same rows gives 22.
# Versions: torch 2.13.0 on a CPU. Date: 2026-11-29.
# Belief: x.sum() is the sum of the rows that x.unbind() returns.
# Source: the documentation of torch.nested (narrow: a nested tensor view of the given lengths of each row; operations act on the rows).
# Cause: the view keeps the whole buffer beside offsets and lengths, and the reductions without dim in torch/nested/_internal/ops.py
#   work on the buffer (_values), not on the rows.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import sys
import warnings

warnings.filterwarnings("ignore")
import torch
import torch.nn.functional as F

LENGTHS = [2, 1, 3]


def padded():
    """Return [3, 6, 1]: small numbers at the places that count, and 10 at the others."""
    rows = torch.tensor([[3.0, 4, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0], [2, 1, 7, 0, 0, 0]])
    places = torch.arange(6)[None] >= torch.tensor(LENGTHS)[:, None]
    return rows.masked_fill(places, 10.0).unsqueeze(-1)


def cut(tensor):
    starts = torch.zeros(len(LENGTHS), dtype=torch.int64)
    return torch.nested.narrow(tensor, 1, starts, torch.tensor(LENGTHS), layout=torch.jagged)


def copied(tensor):
    rows = [row[:length] for row, length in zip(tensor, LENGTHS)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


OPERATIONS = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "max": lambda x: x.max(),
    "l1_loss with twice the tensor": lambda x: F.l1_loss(x, x * 2),
}
print("torch", torch.__version__)
x = cut(padded())
rows = list(x.unbind())
flat = torch.cat(rows)
print("rows:", [row.flatten().tolist() for row in rows])
holds = [len(row) for row in rows] == LENGTHS
for name, function in OPERATIONS.items():
    right = function(flat).item()
    of_view = function(cut(padded())).item()
    of_copy = function(copied(padded())).item()
    print(f"{name}: of the rows {right:.4g}, of the view {of_view:.4g}, of a copy of the rows {of_copy:.4g}")
    holds = holds and abs(of_copy - right) < 1e-4
    holds = holds and abs(of_view - right) > 0.1
try:
    cut(padded()).sum(dim=1)
    is_refused = False
except RuntimeError as error:
    is_refused = True
    print("sum of each row:", error)
holds = holds and is_refused
source = padded().requires_grad_()
cut(source).sum().backward()
at_padding = source.grad.sum().item() - sum(LENGTHS)
print(f"gradient of the sum: {source.grad.count_nonzero().item()} of {source.numel()} places are not zero, {sum(LENGTHS)} count")
holds = holds and source.grad.count_nonzero().item() == source.numel() and at_padding == source.numel() - sum(LENGTHS)
print("belief: the sum of the view is that of its rows, 22")
print("HOLDS: reductions of the view include what was cut off" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
