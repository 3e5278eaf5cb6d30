"""Print the table of docs/tds.md: the result of every conformance case in DeepSpeed's own engine and in tds.

Run it as `python -m tests.conformance.table`.
"""

import argparse
import os
import tempfile

import torch

from tests.support import RankFailure, on_ranks

from .cases import CASES, Case
from .engines import train


def _train(engine: str, name: str, stages: int, tensor: int, extensions: str) -> tuple[float, float]:
    os.environ["TORCH_EXTENSIONS_DIR"] = extensions  # DeepSpeed compiles extensions once for all cases
    case = next(case for case in CASES if case.name == name)
    return train(engine, case, stages, tensor, {}, torch.float32)


def outcome(engine: str, case: Case, stages: int, tensor: int, extensions: str, timeout: float) -> str:
    try:
        found = on_ranks(stages * tensor, _train, engine, case.name, stages, tensor, extensions, timeout=timeout)
    except RankFailure as failure:
        lines = [line for line in str(failure).splitlines() if "Error" in line and line[0] not in " -"]
        errors = [line for line in lines if "gloo" not in line] or lines  # gloo only reports that another rank failed
        return f"crashes: {errors[0].replace('|', '/')[:60]}" if errors else "hangs"
    return "right" if max(max(each) for each in found) <= 1e-5 else "**wrong numbers**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", default=["stock", "tds"], choices=["stock", "tds"])
    parser.add_argument("--cases", default="", help="run only cases whose name contains this")
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        help="most seconds per case (default: 60); stock DeepSpeed compiles some optimizers for minutes",
    )
    args = parser.parse_args()
    engines = args.engines
    print(f"| case | stages x tensor-parallel | {' | '.join(engines)} |\n| --- | --- |{' --- |' * len(engines)}")
    with tempfile.TemporaryDirectory() as extensions:
        for case in (case for case in CASES if args.cases in case.name):
            for stages, tensor in ((2, 1), (3, 1), (2, 2)):
                cells = [outcome(engine, case, stages, tensor, extensions, args.timeout) for engine in engines]
                print(f"| {case.name} | {stages} x {tensor} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
