"""A custom dataset for our GPT-2: sums generated on demand, so no corpus and no preprocessing are needed.

    python tools/train_tokenizer.py --input corpus/sample.jsonl --vocab-size 4000 --output runs/sums/tokenizer.model
    python tools/launch.py --standalone --nproc-per-node 2 examples/own_dataset.py --pipe-parallel-size 2 \
        --vocab-file runs/sums/tokenizer.model --run-dir runs/sums --num-layers 2 --hidden-size 64 \
        --num-attention-heads 2 --seq-length 32 --train-iters 200 --lr 3e-3

It shows the requirement on a dataset: sample n depends on n alone. If so, the layout, resuming and the number of reader
processes never change which samples are read. It prints the training log, in which the loss falls as the model learns
what sums look like.
"""

import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # imports from the checkout, no installation needed

from megatron.tasks import GPT2
from megatron.training import run


class Sums:
    """Dataset with sample n = {"text": [s + 1]}: sums such as `37+48=85`, until the window is full."""

    def __init__(self, tokenizer, length, seed):
        self.tokenizer, self.length, self.seed = tokenizer, length, seed

    def __getitem__(self, n):  # any n >= 0; the dataset decides what an epoch is
        drawn = random.Random(f"{self.seed} {n}")  # depends on n alone, never on samples read before
        ids = []
        while len(ids) <= self.length:
            a, b = drawn.randrange(100), drawn.randrange(100)
            ids += [*self.tokenizer.encode(f"{a}+{b}={a + b}"), self.tokenizer.eod]
        return {"text": torch.tensor(ids[: self.length + 1])}


class OwnData(GPT2):
    """GPT-2 with a custom dataset."""

    name = "sums"

    def datasets(self, config, tokenizer):
        """Return ((training, validation, test), notes to print); a dataset may be None."""
        length = config.data.seq_length
        return (Sums(tokenizer, length, "train"), Sums(tokenizer, length, "valid"), None), [
            "sums of two numbers below 100"
        ]


if __name__ == "__main__":
    run(OwnData())
