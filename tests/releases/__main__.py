"""Measure what is right with which releases of DeepSpeed, torch and the other packages.

    python -m tests.releases                                    # the installed releases
    python -m tests.releases --deepspeed 0.19.0 0.19.7 --write  # others, too; keep the rows for docs/releases.md
    python -m tests.releases --torch 2.15.0 --routes pipeline fp32
    python -m tests.releases --packages                         # contracts of the other packages, oldest to newest
    python -m tests.releases --packages zstandard transformers==5.3.0

Each release is installed with pip into a folder of its own, which precedes the installed packages in PYTHONPATH. The
environment of this Python is not changed. TDS_ANY_DEEPSPEED is set, so that unsupported releases run, too.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from docs.site.releases import FILE, PACKAGES, add_package, add_row
from tests.support import ROOT

from .watch import WATCHED

TIMEOUT = 900
# DeepSpeed's setup imports torch. The requirements of both packages are installed already.
HOW = {"deepspeed": ["--no-deps", "--no-build-isolation"], "megatron-core": ["--no-deps"]}


def install(package: str, version: str, folder: Path) -> str:
    """Install a release into a folder of its own, unless it is there; return the folder."""
    target = folder / f"{package}-{version}"
    if not target.is_dir():
        how = HOW.get(package, [])
        if package == "lm-eval":  # it requires torch, and another build of torch would take gigabytes
            how = [f"torch=={installed('torch').partition('+')[0]}"]
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(target), *how, f"{package}=={version}"]
        subprocess.run(command, env=os.environ | {"DS_BUILD_OPS": "0"}, check=True)
    return str(target)


def run_module(name: str, paths: list[str], words: list[str], insist: bool) -> dict[str, Any]:
    """Run a module of this folder with the releases in `paths`, or with the installed ones; return its row."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, str(ROOT)]),
        "TDS_ANY_DEEPSPEED": str(int(insist)),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", f"tests.releases.{name}", *words]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def measure(paths: list[str], words: list[str]) -> dict[str, Any]:
    """Return the row of the releases in `paths`, or of the installed ones.

    All routes run with TDS_ANY_DEEPSPEED. Those with wrong numbers run without it, too: tds should refuse them.
    """
    row = run_module("rows", paths, words, insist=True)
    wrong = [name for name, found in row["routes"].items() if found.startswith("wrong")]
    default = run_module("rows", paths, ["--named", *wrong], insist=False)
    if default["tds"] == "taken":
        row["routes"] |= {name: f"{found}; TDS_ANY_DEEPSPEED=1: {row['routes'][name]}"
                          for name, found in default["routes"].items()}  # fmt: skip
    return {"date": str(datetime.date.today()), **row, "tds": default["tds"]}


def measure_package(name: str, release: str, folder: Path, write: bool) -> None:
    """Measure and print the contracts of a release of a package."""
    row = run_module("watch", [install(name, release, folder)], [name], insist=False)
    bad = {contract: found for contract, found in row["contracts"].items() if found != "right"}
    right = len(row["contracts"]) - len(bad)
    print(f"{name} {row['release']}: {right} of {len(row['contracts'])} contracts are right")
    print("".join(f"  {contract}: {found}\n" for contract, found in bad.items()), end="", flush=True)
    if write:
        add_package({"date": str(datetime.date.today()), **row})


def measure_packages(names: list[str], folder: Path, write: bool) -> None:
    """Measure packages. names: NAME for the oldest to the newest release, or NAME==RELEASE; [] for all packages."""
    for each in names or list(WATCHED):
        name, _, release = each.partition("==")
        for chosen in [release] if release else WATCHED[name].releases:
            measure_package(name, chosen, folder, write)


def measure_routes(args: argparse.Namespace, folder: Path) -> None:
    """Measure and print the routes of training with the releases of DeepSpeed and torch in `args`."""
    for torch in args.torch:
        for deepspeed in args.deepspeed:
            chosen = (("deepspeed", deepspeed), ("torch", torch))
            row = measure([install(*each, folder) for each in chosen if each[1]], args.routes)
            wrong = {name: found for name, found in row["routes"].items() if found != "right"}
            print(f"DeepSpeed {row['deepspeed']}, torch {row['torch']}: {row['tds']}", flush=True)
            print(f"  {len(row['routes']) - len(wrong)} of {len(row['routes'])} routes are right")
            print("".join(f"  {name}: {found}\n" for name, found in wrong.items()), end="", flush=True)
            if args.write:
                add_row(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", nargs="+", default=[""], metavar="RELEASE", help="default: the installed one")
    parser.add_argument("--torch", nargs="+", default=[""], metavar="RELEASE", help="default: the installed one")
    parser.add_argument("--routes", nargs="+", default=[], metavar="WORD", help="only routes with all of these words")
    parser.add_argument("--packages", nargs="*", metavar="NAME[==RELEASE]", help="measure packages instead of routes")
    parser.add_argument("--folder", type=Path, help="keep the installed releases here (default: delete them)")
    files = f"{FILE.relative_to(ROOT)} or {PACKAGES.name}"
    parser.add_argument("--write", action="store_true", help=f"add the rows to {files}")
    args = parser.parse_args()
    unknown = {each.partition("==")[0] for each in args.packages or ()} - WATCHED.keys()
    if unknown:
        parser.error(f"--packages: no contracts for {', '.join(unknown)}; choose from {', '.join(WATCHED)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        if args.packages is None:
            measure_routes(args, folder)
        else:
            measure_packages(args.packages, folder, args.write)


if __name__ == "__main__":
    main()
