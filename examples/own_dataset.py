"""A data set of your own under our GPT-2: sums that are made when they are asked for, so there is no corpus and no preprocessing.

    python tools/train_tokenizer.py --input corpus/sample.jsonl --vocab-size 4000 --output runs/sums/tokenizer.model
    python tools/launch.py --standalone --nproc-per-node 2 examples/own_dataset.py --pipe-parallel-size 2 --vocab-file runs/sums/tokenizer.model \
        --run-dir runs/sums --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --train-iters 200 --lr 3e-3

It shows what a data set has to be: sample n is a function of n alone, so layouts, resuming and readers never show in what is read. It prints
what every run prints; the loss falls as the model learns what sums look like.
"""

import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it runs without an installation, too

from megatron.tasks import GPT2
from megatron.training import run


class Sums:
    """Sample n: {"text": [s + 1]}, sums such as `37+48=85` one after the other, until the window is full."""

    def __init__(self, tokenizer, length, seed):
        self.tokenizer, self.length, self.seed = tokenizer, length, seed

    def __getitem__(self, n):  # for any n >= 0: epochs are your affair
        drawn = random.Random(f"{self.seed} {n}")  # of n alone; never of a state that grows with what was read before
        ids = []
        while len(ids) <= self.length:
            a, b = drawn.randrange(100), drawn.randrange(100)
            ids += [*self.tokenizer.encode(f"{a}+{b}={a + b}"), self.tokenizer.eod]
        return {"text": torch.tensor(ids[: self.length + 1])}


class OwnData(GPT2):
    """GPT-2 in all but what it reads."""

    name = "sums"

    def datasets(self, config, tokenizer):
        """((training, validation, test), notes that are printed); None where there is none."""
        length = config.data.seq_length
        return (Sums(tokenizer, length, "train"), Sums(tokenizer, length, "valid"), None), [
            "sums of two numbers below 100"
        ]


if __name__ == "__main__":
    run(OwnData())
