"""Check for slowdowns: run sections of `benchmarks/suite.py` in this checkout and in an earlier checkout.

    git worktree add ../before COMMIT
    python benchmarks/before.py ../before --sections train-fp32 dp pp -- --rounds 3

Each round runs a section's command in both checkouts, one after the other. Each checkout runs its own code, with the
Python that runs this script. Arguments after -- are passed to both commands. A table row whose name begins with "ours"
is compared between the checkouts by the first number after its name. This number counts as a time if the title of its
column mentions ms, % or seconds, and not "/s" or "per CPU-s"; otherwise it counts as a speed.
"""

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import suite
from _alternate import ROOT, new_parser, spread

TIME, RATE = re.compile(r"\bms\b|%|\bs\b|seconds|\+"), re.compile(r"/s\b|per CPU-s")


def rows_of(checkout: Path, command: list[str]) -> dict[str, tuple[str, float]]:
    """Run the command of a benchmark section in a checkout, and return the rows of the table that it prints.

    The result maps the name of each row that begins with "ours" to (title of the second column, first number in this
    column). The result is empty if the command fails, for example in a checkout that is older than the benchmark.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, *command], cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(
            f"{checkout}: exited with {done.returncode}: {(done.stderr.strip().splitlines() or ['?'])[-1]}",
            file=sys.stderr,
        )
    found = {}
    for table in suite.tables(done.stdout if done.returncode == 0 else ""):
        for row in table:
            name, (column, cell) = next(iter(row.values())), list(row.items())[1]
            number = re.search(suite.NUMBER, cell)
            if name.startswith("ours") and number:
                found[name] = column, float(number[0].replace(",", ""))
    return found


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("before", type=Path, help="path of the earlier checkout")
    parser.add_argument("--sections", nargs="+", required=True, choices=suite.SECTIONS, metavar="SECTION")
    parser.add_argument("--rounds", type=int, default=5)
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, more = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    print(
        f"| section | row | now, median (lowest to highest) | before | speed, now / before, by round |\n|{' --- |' * 5}"
    )
    for section in args.sections:
        script, *rest = suite.SECTIONS[section].split()
        command = [f"benchmarks/{script}", *(a.replace("_", " ") for a in rest), *more]
        pairs: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for round_ in range(args.rounds):
            both = [rows_of(checkout, command) for checkout in (ROOT, args.before)[:: 1 if round_ % 2 else -1]]
            now, before = both if round_ % 2 else both[::-1]
            for name, (column, number) in now.items():
                if name in before:
                    pairs[name, column].append((number, before[name][1]))
        for (name, column), numbers in pairs.items():
            ratios = [b / n if TIME.search(column) and not RATE.search(column) else n / b for n, b in numbers]
            nows, befores = zip(*numbers, strict=True)
            cells = spread(list(nows), ",.1f"), spread(list(befores), ",.1f"), spread(ratios, ".2f")
            print(f"| {section} | {name} | {' | '.join(cells)} |", flush=True)
        if not pairs:
            print(f"| {section} | nothing to compare | | | |", flush=True)


if __name__ == "__main__":
    main()
