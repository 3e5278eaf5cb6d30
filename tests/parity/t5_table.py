"""Print the table of T5's losses in every layout: python -m tests.parity.t5_table."""

import tempfile
from pathlib import Path

import numpy as np

from tests.materials import random_corpus, small_tokenizer

from .t5_layouts import STEPS, Way, expected, losses

GRIDS = ((1, 1, 1), (2, 1, 1), (2, 1, 2), (2, 2, 2), (3, 2, 1), (4, 2, 1), (4, 1, 2), (0, 2, 2))
NAMES = {"t5": "T5 v1.1", "cpm": "CPM-2"}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        vocab_file = small_tokenizer(where)
        data = random_corpus(where, vocab_file)
        ways = [Way(variant) for variant in NAMES]
        wanted = [expected(way, data, vocab_file) for way in ways]
        found = {grid: losses(grid, ways, data, vocab_file) for grid in GRIDS}
        heads = f"loss at step 1 | loss at step {STEPS} | largest relative difference in {STEPS} steps"
        print(f"| variant | layout | {heads} |")
        print("| --- | --- | --- | --- | --- |")
        for i, way in enumerate(ways):
            name = NAMES[way.variant]
            print(f"| {name} | plain torch, one process | {wanted[i][0]:.6f} | {wanted[i][-1]:.6f} | 0 |")
            for grid, each in found.items():
                worst = np.abs(np.array(each[i]) / np.array(wanted[i]) - 1).max()
                layout = "pp {}, dp {}, tp {}".format(*grid)
                print(f"| {name} | {layout} | {each[i][0]:.6f} | {each[i][-1]:.6f} | {worst:.1e} |")


if __name__ == "__main__":
    main()
