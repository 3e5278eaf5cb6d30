#!/usr/bin/env bash
# Surprise: a MetricCollection with Perplexity() and Perplexity(ignore_index=0) reports the first number twice, for good, if its first
#   batch has no pads: 1.743 as "no pads" where the right value is 34.821. The same happens to a MulticlassAccuracy with and without
#   ignore_index: 0.858 instead of 0.090. Another order of the same batches gives other results, and reset() does not help: epochs
#   that begin with padded batches are wrong too. With compute_groups=False, or each metric on its own, all values are right.
# Versions: torchmetrics 1.9.0 (the newest release), torch 2.13.0, numpy 2.4.6. Date: 2026-11-30.
# Belief: metrics share their states only if they would do the same with every batch, and a metric does not depend on its neighbours
#   in a collection or on the order of the batches.
# Source: the docstring of MetricCollection (compute groups are metrics with the same underlying state, found to save computation).
# Cause: _merge_compute_groups in torchmetrics/collections.py compares the numbers in the states after the first update, not the
#   metrics. Two metrics whose numbers agree then share one state, and only the first of them sees the later batches.
# Checked: Lightning-AI/torchmetrics issues 2596 (metrics of one's own that differ in a filter), 2916 (BLEU of several orders) and pull
#   request 1896 (MeanMetric and SumMetric after a single value): all closed, and 1.9.0 still decides by the first batch. The case of
#   ignore_index and pads was not found.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 torchmetrics==1.9.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import sys
from importlib.metadata import version

import torch
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity

torch.set_num_threads(1)
VOCABULARY, PAD = 50, 0


def batch(pads):
    """Return logits and targets of 8 rows of 32 tokens; the model knows where the pads are and little about the tokens."""
    targets = torch.randint(1, VOCABULARY, (8, 32))
    targets[:, 32 - pads:] = PAD
    logits = torch.randn(8, 32, VOCABULARY)
    logits.scatter_add_(2, targets[..., None], torch.where(targets == PAD, 12.0, 1.0)[..., None])
    return logits, targets


def pair(kind, **options):
    """Return a collection of one metric over all tokens and one without pads."""
    if kind == "perplexity":
        return MetricCollection({"all": Perplexity(), "no pads": Perplexity(ignore_index=PAD)}, **options)
    every = MulticlassAccuracy(VOCABULARY, average="micro")
    return MetricCollection({"all": every, "no pads": MulticlassAccuracy(VOCABULARY, average="micro", ignore_index=PAD)}, **options)


def measure(collection, batches):
    """Return the values after all batches."""
    for logits, targets in batches:
        if isinstance(collection["all"], MulticlassAccuracy):
            logits = logits.transpose(1, 2)
        collection.update(logits, targets)
    return {name: round(value.item(), 3) for name, value in collection.compute().items()}


print("torchmetrics", version("torchmetrics"), "torch", torch.__version__)
torch.manual_seed(0)
batches = [batch(0)] + [batch(30) for _ in range(9)]
orders = {"the batch without pads first": batches, "the batch without pads last": batches[::-1]}
holds = True
for kind in ("perplexity", "accuracy"):
    right = measure(pair(kind, compute_groups=False), batches)
    print(f"{kind}: right values (compute_groups=False)       {right}")
    seen = {}
    for order, some in orders.items():
        collection = pair(kind)
        seen[order] = measure(collection, some)
        print(f"{kind}: {order:28} {seen[order]}")
        if some is batches:
            collection.reset()
            again = measure(collection, batches[::-1])
            print(f"{kind}: the same collection after reset(), the batch without pads last {again}")
    first, last = seen.values()
    holds = holds and right["all"] != right["no pads"] and last == right
    holds = holds and first == again == {"all": right["all"], "no pads": right["all"]}
print("belief: all three lines of a metric are equal to the right values")
print("HOLDS: two metrics that agree on the first batch of a collection share their state for good" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
