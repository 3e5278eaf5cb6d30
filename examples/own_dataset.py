"""A custom dataset for our GPT-2: sums generated on demand, so no corpus and no preprocessing are needed.

    python tools/train_tokenizer.py --input corpus/sample.jsonl --vocab-size 4000 --output runs/sums/tokenizer.model
    python tools/launch.py --standalone --nproc-per-node 2 examples/own_dataset.py --pipe-parallel-size 2 \
        --vocab-file runs/sums/tokenizer.model --run-dir runs/sums --num-layers 2 --hidden-size 64 \
        --num-attention-heads 2 --seq-length 32 --train-iters 200 --lr 3e-3

The example shows the one requirement that a dataset must meet: sample n depends on n alone. Then the samples are equal
in every parallel layout, after a resume, and with any number of reader processes. The example prints the training log.
The loss falls as the model learns what sums look like.
"""

import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # import megatron from this checkout

from megatron.tasks import GPT2
from megatron.training import run


class Sums:
    """Dataset of sums such as `37+48=85`; sample n is {"text": token ids [s + 1]} for sequence length s."""

    def __init__(self, tokenizer, length, seed):
        self.tokenizer, self.length, self.seed = tokenizer, length, seed

    def __getitem__(self, n):  # n may be any number >= 0; this dataset never repeats
        drawn = random.Random(f"{self.seed} {n}")  # other sums for validation than for training
        ids = []
        while len(ids) <= self.length:
            a, b = drawn.randrange(100), drawn.randrange(100)
            ids += [*self.tokenizer.encode(f"{a}+{b}={a + b}"), self.tokenizer.eod]
        return {"text": torch.tensor(ids[: self.length + 1])}


class OwnData(GPT2):
    """GPT-2 with a custom dataset."""

    name = "sums"

    def datasets(self, config, tokenizer):
        """Return ((training, validation, test datasets), notes to print); None stands for no dataset."""
        length = config.data.seq_length
        return (Sums(tokenizer, length, "train"), Sums(tokenizer, length, "valid"), None), [
            "sums of two numbers below 100"
        ]


if __name__ == "__main__":
    run(OwnData())
