#!/usr/bin/env bash
# Surprise: the number of samples that a run asks for changes which samples megatron-core's GPTDataset gives first. It
#   shuffles all epochs of the run as one list, and holds back the last epoch only if less than 80 % of it is needed. So
#   a run that is prolonged and resumed repeats some samples and skips others, without a message. In a run of 1.9 epochs,
#   the first epoch also misses a quarter of the documents; in a run of 1.7 epochs it has all of them.
# Versions: megatron-core 0.16.1, numpy 2.4.6, torch 2.13.0. Date: 2026-11-28.
# Belief: sample n depends on data, seed and n; a longer run begins like a shorter one. Source: Megatron Core's page on
#   its datasets (index i of the shuffle index names a sample; --seed makes it reproducible), and
#   the flag --override-opt_param-scheduler, which is there to prolong runs.
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

DOCUMENTS = 400
TOKENS = 33  # of a document; a sample has 32 targets, so an epoch has about 412 samples
EPOCH = DOCUMENTS * TOKENS // 32


class Tokenizer:
    unique_identifiers = {"name": "numbers"}
    eod = 0
    pad = 0
    vocab_size = DOCUMENTS * TOKENS


builder = IndexedDatasetBuilder("corpus.bin", dtype=np.int32)
for document in range(DOCUMENTS):
    first = document * TOKENS
    builder.add_document(torch.arange(first, first + TOKENS, dtype=torch.int32), [TOKENS])
builder.finalize("corpus.idx")


def first_samples(epochs):
    """Return the first tokens of the first epoch's samples in a run of this many epochs."""
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=32, split="1", path_to_cache="cache", tokenizer=Tokenizer(),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
    )
    documents = np.arange(DOCUMENTS)
    samples = int(epochs * EPOCH)
    data = GPTDataset(IndexedDataset("corpus"), "corpus", documents, samples, Split.train, config)
    return [int(data[number]["tokens"][0]) for number in range(EPOCH - 1)]


print("megatron-core", megatron.core.__version__, "numpy", np.__version__)
seen = {}
for epochs in (1.5, 1.7, 1.0, 1.9, 2.9):
    seen[epochs] = first_samples(epochs)
    same = sum(a == b for a, b in zip(seen[epochs], seen[1.5]))
    documents = len({token // TOKENS for token in seen[epochs]})
    print(f"run of {epochs} epochs: first samples begin with tokens {seen[epochs][:5]}; of the first {EPOCH - 1}, "
          f"{same} are as in the run of 1.5 epochs, and {documents} different documents begin them")
print("belief: all rows begin alike; seen: only those of 1.5 and 1.7 epochs do")
alike = [epochs for epochs in seen if seen[epochs] == seen[1.5]]
heads = {tuple(samples[:5]) for samples in seen.values()}
holds = alike == [1.5, 1.7] and len(heads) == 4
print("HOLDS: runs of 1.0, 1.5, 1.9 and 2.9 epochs begin with four other lists of samples" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
