#!/usr/bin/env bash
# Surprise: DataCollatorForLanguageModeling(seed=...) in a DataLoader with workers masks the same tokens in every epoch. The
#   workers end with an epoch, the next ones get a fresh copy of the collator, and its generator starts at seed + number of
#   the worker again. Without workers, without seed= or with persistent_workers=True each epoch has masks of its own. So
#   dynamic masking has become static masking: after 10 epochs, 15 % of the tokens have been a target at least once and not 80 %.
#   With shuffle=True the masks belong to places of the epoch instead of documents: at each place the same columns are masked.
# Versions: transformers 5.24.0 (the newest release), torch 2.13.0. Date: 2026-11-30.
# Belief: the seed makes a run repeatable; within a run all masks are drawn anew, whatever the number of workers is.
# Source: the docstring of the collator (seed of the random number generator for masking) and RoBERTa's dynamic masking, for
#   which this collator is the usual tool. The pull request that added the seed (huggingface/transformers, number 36497) gives
#   each worker its own seed and does not mention epochs.
# Depends on: workers as processes (Linux); the number of masked tokens does not matter.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export HF_HOME="$work/cache" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.24.0 tokenizers==0.23.3 numpy==2.4.6
cat > program.py <<'PY'
import sys

import torch
import transformers
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader

ROWS, LENGTH, EPOCHS = 256, 64, 10
special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
vocabulary = {token: number for number, token in enumerate(special + [f"w{number}" for number in range(1000)])}
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")),
    pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
)
tokens = torch.randint(5, 1005, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row.tolist()} for row in tokens]


def targets(seed, shuffle=False, **options):
    """Return for each epoch which tokens are targets, as rows in the order of the epoch."""
    torch.manual_seed(1)
    collator = transformers.DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm_probability=0.15, seed=seed)
    loader = DataLoader(data, batch_size=16, shuffle=shuffle, collate_fn=collator, **options)
    return [torch.cat([batch["labels"] != -100 for batch in loader]) for _ in range(EPOCHS)]


cases = {
    "seed=7, no workers": targets(7),
    "no seed, 2 workers": targets(None, num_workers=2),
    "seed=7, 2 persistent workers": targets(7, num_workers=2, persistent_workers=True),
    "seed=7, 2 workers": targets(7, num_workers=2),
    "seed=7, 2 workers, shuffled": targets(7, num_workers=2, shuffle=True),
}
print("transformers", transformers.__version__, "torch", torch.__version__)
same = {}
ever = {}
for name, epochs in cases.items():
    same[name] = sum(torch.equal(epochs[0], epoch) for epoch in epochs)
    ever[name] = torch.stack(epochs).any(0).float().mean().item()
    print(f"{name}: {same[name]} of {EPOCHS} epochs have the masks of the first; {ever[name]:.1%} of the places were ever masked")
print(f"belief: 1 of {EPOCHS} epochs and {1 - 0.85 ** EPOCHS:.1%} in every row")
good, bad = list(cases)[:3], list(cases)[3:]
holds = all(same[name] == 1 and ever[name] > 0.75 for name in good)
holds = holds and all(same[name] == EPOCHS and ever[name] < 0.17 for name in bad)
print("HOLDS: with a seed and workers, all epochs have one mask" if holds else "no longer so")
sys.exit(not holds)
PY
venv/bin/python program.py
