"""Print the table of GPT-2's losses in every layout: python -m tests.parity.table [sgd, adam or muon]."""

import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.materials import random_corpus, small_tokenizer

from .layouts import LAYOUTS, ours, plain

SHOWN = (1, 5, 10, 20)


def row(name: str, found: list[float], expected: list[float]) -> str:
    worst = np.abs(np.array(found) / np.array(expected) - 1).max()
    cells = [name, *(f"{found[step - 1]:.6f}" for step in SHOWN), f"{worst:.1e}" if worst else "0"]
    return "| " + " | ".join(cells) + " |"


def main(optimizer: str = "sgd") -> None:
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        vocab_file = small_tokenizer(where)
        data = random_corpus(where, vocab_file)
        expected = plain(data, vocab_file, optimizer, steps=SHOWN[-1])
        heads = " | ".join(f"loss at step {step}" for step in SHOWN)
        print(f"| layout | {heads} | largest relative difference in {SHOWN[-1]} steps |")
        print("| --- |" + " --- |" * (len(SHOWN) + 1))
        print(row("plain torch, one process", expected, expected))
        for layout in LAYOUTS if optimizer != "muon" else [each for each in LAYOUTS if each.zero <= 1]:
            name = f"pp {layout.pp}, dp {layout.dp}, tp {layout.tp}" + (f", ZeRO {layout.zero}" if layout.zero else "")
            found = ours(layout, where / str(layout), data, vocab_file, optimizer=optimizer, steps=SHOWN[-1])
            print(row(name, found, expected), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
