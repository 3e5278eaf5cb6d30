#!/usr/bin/env bash
# Surprise: megatron-core's GPTDataset caches the loss mask of the first sample that a process reads, and sets the mask of
#   padding in that same tensor. So if the first sample has padding, every later sample has loss 0 at these positions, too,
#   whatever its tokens are. Another order of reading, or another number of processes, gives other masks.
# Versions: megatron-core 0.16.1 (the newest release), numpy 2.4.6, torch 2.13.0. Date: 2026-11-28.
# Belief: the loss mask of a sample depends on the sample alone. Source: the comment in GPTDataset.__getitem__ (for padded
#   sequences, mask the loss) and the docstring of GPTDatasetConfig.drop_last_partial_validation_sequence.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 megatron-core==0.16.1 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import sys
import warnings

warnings.filterwarnings("ignore")
import megatron.core
import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

SEQUENCE = 8
TOKENS = 37  # 4 samples with 8 targets each, and a last one with 4 targets and 4 pads


class Tokenizer:
    unique_identifiers = {"name": "numbers"}
    eod = 0
    pad = 99
    vocab_size = 100


builder = IndexedDatasetBuilder("corpus.bin", dtype=np.int32)
builder.add_document(torch.arange(1, TOKENS + 1, dtype=torch.int32), [TOKENS])
builder.finalize("corpus.idx")


def dataset():
    """Return the validation data of a process that has read no sample yet, with its last, partial sample."""
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=SEQUENCE, split="1", path_to_cache="cache", tokenizer=Tokenizer(),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        drop_last_partial_validation_sequence=False,
    )
    return GPTDataset(IndexedDataset("corpus"), "corpus", np.arange(1), None, Split.valid, config)


def targets(order):
    """Read the samples in this order in one process; return the number of targets with loss, by sample."""
    data = dataset()
    return {number: int(data[number]["loss_mask"].sum()) for number in order}


print("megatron-core", megatron.core.__version__, "numpy", np.__version__, "torch", torch.__version__)
numbers = list(range(len(dataset())))
alone = {number: targets([number])[number] for number in numbers}
print("targets with loss, each sample read by a process of its own:", alone)
(partial,) = [number for number in numbers if alone[number] < SEQUENCE]
others = [number for number in numbers if number != partial]
last = targets([*others, partial])
print("read in one process, the padded sample last:                ", dict(sorted(last.items())))
first = targets([partial, *others])
print("read in one process, the padded sample first:               ", dict(sorted(first.items())))
print("belief: three equal rows; seen: the last row has", sum(first.values()), "targets instead of", sum(alone.values()))
holds = last == alone and set(first.values()) == {SEQUENCE // 2}
print("HOLDS: the padding of the first sample masks half of every other sample" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
