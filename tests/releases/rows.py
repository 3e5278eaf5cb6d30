"""Outcomes of the routes with the DeepSpeed and the torch of this interpreter: one row of the table of releases.

`python -m tests.releases.rows [WORD...]` prints the row as JSON; with words, it runs only the routes whose names have
all of them. `python -m tests.releases.rows --named NAME...` runs the routes with exactly these names.
"""

import json
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from itertools import groupby

import torch

import tds
from tds._contract import CONTRACT
from tests.ranks import test_drop_in as scripts
from tests.ranks import test_unusual_models as strange
from tests.support import RankFailure, on_ranks
from tests.unit.test_contract import release_names

from .routes import TOLERANCES, Measured, Route, routes, train

TIMEOUT = 120.0
ZERO_3_RUNS = 6  # before 0.19.8, 2 to 10 % of runs with ZeRO 3 on a CPU are wrong
SCRIPTS = ("script: AlexNet tutorial", "script: GPT-NeoX style", "script: checkpoint", "script: unusual weights")


def judge(measured: Measured, precision: str) -> str:
    """Return "right", or what is wrong."""
    tolerance = TOLERANCES[precision]
    if not abs(measured.factor - 1) < tolerance:
        return f"wrong: gradients x {measured.factor:.3g}"
    if measured.norm is not None and not abs(measured.norm - 1) < tolerance:
        return f"wrong: gradient norm x {measured.norm:.3g}"
    if not measured.losses < tolerance:
        return "wrong: losses"
    return "right" if measured.weights < tolerance else "wrong: weights"


def _outcomes_here(some: list[Route]) -> list[str]:
    """Run routes on this rank, one after another; return the outcome of each."""
    return [_outcome_here(route) for route in some]


def _outcome_here(route: Route) -> str:
    found = []
    for _ in range(ZERO_3_RUNS if route.zero == 3 else 1):  # no early end, which the other rank would not know of
        try:
            found.append(judge(train(route), route.precision))
        except Exception as error:
            found.append(describe(error))
    return next((each for each in found if each != "right"), "right")


def describe(error: Exception) -> str:
    """Return the kind and the first words of an error: "refused" for a ValueError of tds, else "fails"."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    ours = isinstance(error, ValueError) and re.search(r"/tds/\w+\.py$", last)
    kind = "refused" if ours else f"fails: {type(error).__name__}"
    words = " ".join(str(error).split())
    return f"{kind}: {words}"[:300]


def outcomes(some: list[Route]) -> dict[str, str]:
    """Return route name -> outcome for routes that need equally many ranks.

    All routes run in one group of processes. If a rank of this group dies or hangs, each route runs alone.
    """
    try:
        ranks = on_ranks(some[0].ranks, _outcomes_here, some, timeout=TIMEOUT)
    except RankFailure as failure:
        if len(some) > 1:
            return {name: found for route in some for name, found in outcomes([route]).items()}
        return {some[0].name: _describe_failure(failure)}
    worst = (next((each for each in found if each != "right"), "right") for found in zip(*ranks, strict=True))
    return {route.name: found for route, found in zip(some, worst, strict=True)}


def _describe_failure(failure: RankFailure) -> str:
    errors = [line for line in str(failure).splitlines() if re.match(r"\w*(Error|Exception|DeepSpeed)\b.*:", line)]
    own = [line for line in errors if "gloo" not in line] or errors  # gloo's errors follow from another rank's
    return f"fails: {own[0]}"[:300] if own else "fails: hangs"


def run_script(name: str) -> str:
    """Return the outcome of a script that was written for DeepSpeed."""
    try:
        if name == SCRIPTS[0]:
            found, expected = on_ranks(2, scripts._tutorial, "tds", 2, "uniform")[0], scripts.one_process()
        elif name == SCRIPTS[1]:
            found, expected = on_ranks(2, scripts._neox, "tds", 2, 1, 1, False)[0][0], scripts.neox_reference()
        elif name == SCRIPTS[3]:  # scalars, transposed and channels_last weights, and a pipeline with seed_layers
            plain = on_ranks(2, strange._unusual, 0, 2, False)[0]
            pipeline = on_ranks(4, strange._unusual, 2, 0, False)[0]
            found, expected = plain + pipeline, strange.plain_unusual() * 2
        else:
            return _run_checkpoint()
    except RankFailure as failure:
        return _describe_failure(failure)
    return _compare(found, expected)


def _run_checkpoint() -> str:
    """Resume from a checkpoint; the losses must be those of the run that saved it."""
    with tempfile.TemporaryDirectory() as folder:
        expected = on_ranks(2, scripts._save, "tds", folder, 2, 0)[0]
        return _compare(on_ranks(2, scripts._load, "tds", folder, 2, 0, False)[0], expected)


def _compare(found: list[float], expected: list[float]) -> str:
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    return "right" if worst < TOLERANCES["fp32"] else "wrong: losses"


def gone() -> list[str]:
    """Return the names of tds/_contract.py that this release lacks, those of instances included."""
    found = []
    for names in CONTRACT:
        everything = sorted(set(" ".join(names[2:]).split()))
        try:
            there = release_names(names.place)
        except (ImportError, AttributeError):
            there = frozenset()
        found += [f"{names.place.rpartition(':')[2]}.{name}" for name in everything if name not in there]
    return found


def taken() -> str:
    """Return "taken", or the sentence with which tds refuses this release."""
    try:
        tds.initialize()
    except tds.UnsupportedDeepSpeed as error:
        return str(error)
    except Exception:  # DeepSpeed misses its arguments, so tds has accepted the release
        pass
    return "taken"


def row(chosen: Callable[[str], bool]) -> dict[str, object]:
    """Run the routes whose names `chosen` accepts."""
    found: dict[str, str] = {}
    some_routes = [route for route in routes() if chosen(route.name)]
    for _, some in groupby(some_routes, lambda route: (route.engine, route.precision)):
        found |= outcomes(list(some))
    found |= {name: run_script(name) for name in SCRIPTS if chosen(name)}
    about = {"deepspeed": tds.__version__, "torch": torch.__version__, "tds": taken(), "lacks": gone()}
    return {**about, "routes": found}


def main(words: list[str]) -> None:
    if words[:1] == ["--named"]:
        print(json.dumps(row(words[1:].__contains__)))
    else:
        print(json.dumps(row(lambda name: all(word in name for word in words))))


if __name__ == "__main__":
    main(sys.argv[1:])
