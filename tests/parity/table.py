"""Print the tables of GPT-2's losses in every layout: python -m tests.parity.table [sgd, adam or muon]."""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.materials import random_corpus, small_tokenizer

from .guard_and_average import DECAY, GUARD, STEPS, Average, Guard, averages, skipped
from .layouts import LAYOUTS, LEARNS, Layout, ours, plain
from .test_mup import FLAGS, MUP, SCALES, factors
from .test_param_groups import MIXED, mixed

SHOWN = (1, 5, 10, 20)


def row(name: str, found: list[float], expected: list[float]) -> str:
    worst = np.abs(np.array(found) / np.array(expected) - 1).max()
    cells = [name, *(f"{found[step - 1]:.6f}" for step in SHOWN), f"{worst:.1e}" if worst else "0"]
    return "| " + " | ".join(cells) + " |"


def named(layout: Layout) -> str:
    return (
        f"pp {layout.pp}, dp {layout.dp}, tp {layout.tp}"
        + (f", ZeRO {layout.zero}" if layout.zero else "")
        + (f", {layout.schedule}" if layout.schedule != "1f1b" else "")
    )


def features(where: Path, data: str, vocab_file: str) -> None:
    """Print largest relative differences from plain torch for Adam, with a column for each feature.

    With --ema-decay, these are differences of the average; with the other flags, differences of losses.
    """
    groups = where / "groups.json"
    groups.write_text(json.dumps(MIXED))
    guard, average = Guard(), Average()
    expected = {
        "--param-groups": plain(data, vocab_file, "adam", settings=mixed, steps=LEARNS),
        "muP": plain(data, vocab_file, "adam", settings=factors, scales=SCALES, steps=LEARNS, **MUP),
        "--skip-step-sigma": plain(data, vocab_file, "adam", rejects=guard, steps=STEPS),
        "--ema-decay": plain(data, vocab_file, "adam", watch=average, steps=LEARNS),
    }
    flags = {"--param-groups": ["--param-groups", str(groups)], "muP": FLAGS}
    flags |= {"--skip-step-sigma": [*GUARD], "--ema-decay": ["--ema-decay", str(DECAY)]}
    print(f"| layout | {' | '.join(expected)} |\n| --- |" + " --- |" * len(expected))
    for layout in LAYOUTS:
        worst = []
        for name, losses in expected.items():
            run = where / f"{layout}{name}"
            found = ours(layout, run, data, vocab_file, *flags[name], optimizer="adam", steps=len(losses))
            worst.append(np.abs(np.array(found) / np.array(losses) - 1).max())
            if name == "--skip-step-sigma" and skipped(run) != guard.skipped:
                raise ValueError(f"{layout} skips the steps {skipped(run)}, plain torch {guard.skipped}")
        worst[-1] = average.distance(averages(run))
        print(f"| Adam, {named(layout)} | " + " | ".join(f"{each:.1e}" for each in worst) + " |", flush=True)


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
            found = ours(layout, where / str(layout), data, vocab_file, optimizer=optimizer, steps=SHOWN[-1])
            print(row(named(layout), found, expected), flush=True)
        if optimizer == "sgd":
            features(where, data, vocab_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
