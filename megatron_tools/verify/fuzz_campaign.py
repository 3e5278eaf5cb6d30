"""Draws of the parity fuzzer: a summary of all draws, and the smallest settings and layout of each failure."""

import argparse
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config.fields import ConfigError, describe

from .fuzz import Found, Fuzzer
from .fuzz_data import write_data
from .fuzz_ranks import start_warm
from .fuzz_table import Case, Chosen, case_of, draw, ranges_of
from .layouts import read_layout

ATTEMPTS = 200  # draws of settings until the project accepts one
TIMEOUT = 60.0  # seconds of a run, which takes about one second
COMMAND = "python tools/verify_layout.py"


def fuzz(args: argparse.Namespace) -> bool:
    """Compare drawn cases, or the cases that the command line gives, and print a summary. Return whether all agree."""
    if args.fuzz < 1:
        raise ValueError(f"--fuzz {args.fuzz} must be at least 1")
    if args.flags and "--family" not in args.flags:
        raise ValueError("--fuzz: the flags after -- lack --family gpt2, llama or t5")
    start_warm()
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder), args.seed)
        fuzzer = Fuzzer(Path(folder), args.timeout or TIMEOUT)
        try:
            return Campaign(fuzzer, args.seed, args.verbose).run(args)
        finally:
            fuzzer.close()


class Campaign:
    """A number of draws, which depend on `seed` and their own number only.

    Even draws change few settings, so that each setting is also seen alone. verbose: whether to print each draw.
    refused: reason -> how many drawn settings the project refused for this reason.
    """

    def __init__(self, fuzzer: Fuzzer, seed: int, verbose: bool) -> None:
        self.fuzzer = fuzzer
        self.seed = seed
        self.verbose = verbose
        self.refused: Counter[str] = Counter()
        self.layouts: Counter[str] = Counter()
        self.failures = 0
        self.worst = {"fp64": 0.0, "fp32": 0.0}

    def run(self, args: argparse.Namespace) -> bool:
        """Run the given cases, or `args.fuzz` draws from draw `args.draw` on; print a summary."""
        begin = time.monotonic()
        if args.flags:
            for text in args.layouts:
                layout = read_layout(text)
                self._judge(str(layout), Case(layout, args.micros or 2 * layout.dp, tuple(args.flags)), None)
        else:
            for number in range(args.draw, args.draw + args.fuzz):
                chosen = self.drawn(number)
                self._judge(f"draw {number}", case_of(chosen), chosen)
        self._print_summary(time.monotonic() - begin)
        return not self.failures

    def drawn(self, number: int) -> Chosen:
        """Return the values of a draw. Those that the project refuses are drawn again; ValueError if it refuses all."""
        for attempt in range(ATTEMPTS):
            chosen = draw(random.Random(f"{self.seed} {number} {attempt}"), few=number % 2 == 0)
            if self._accepts(chosen):
                return chosen
        raise ValueError(f"--fuzz: draw {number}: all of {ATTEMPTS} settings are refused: {dict(self.refused)}")

    def _accepts(self, chosen: Chosen) -> bool:
        """Return whether the project accepts the settings; count the reason if it refuses them."""
        try:
            self.fuzzer.settings_of(case_of(chosen))
        except ConfigError as error:
            self.refused[_reason(describe(error))] += 1
            return False
        return True

    def _judge(self, name: str, case: Case, chosen: Chosen | None) -> None:
        """Run a case, count its result, and shrink it if it fails."""
        begin = time.monotonic()
        found = self.fuzzer.run(case)
        kind = found.outcome.kind
        self.layouts[str(case.layout)] += 1
        if kind == "refused":
            self.refused[_reason(found.outcome.words)] += 1
        if self.verbose or found.failed:
            seconds = time.monotonic() - begin
            print(f"{name}: {kind} {found.error:.1e} {seconds:.1f} s: {case.command}", flush=True)
        if found.failed:
            self.failures += 1
            self._explain(case, chosen, found)
        else:
            precision = "fp32" if case.layout.zero else "fp64"
            self.worst[precision] = max(self.worst[precision], found.error)

    def _explain(self, case: Case, chosen: Chosen | None, found: Found) -> None:
        """Print a failure, and the smallest settings with which it remains."""
        print(_indented(found.outcome.words))
        if chosen is None:
            return
        self.fuzzer.close()  # an earlier run in the same processes cannot be the reason for a failure of new ones
        if kind_of(self.fuzzer.run(case)) != kind_of(found):
            print("  a second run of this draw does not fail in this way, so it is not shrunk")
            return
        smallest, last = shrink(self.fuzzer, chosen, found)
        print(f"  smallest settings: {_described(smallest)}")
        print(_indented(last.outcome.words))
        print(f"  {COMMAND} --seed {self.seed} {case_of(smallest).command}", flush=True)

    def _print_summary(self, seconds: float) -> None:
        total = sum(self.layouts.values())
        print(f"{total} draws in {seconds:.0f} s, {len(self.layouts)} layouts, {self.failures} failures")
        largest = ", ".join(f"{value:.1e} in {name}" for name, value in self.worst.items() if value)
        print(f"largest relative difference of draws that agree: {largest or 'none'}")
        print(f"{sum(self.refused.values())} drawn settings were refused:")
        for reason, count in self.refused.most_common():
            print(f"  {count} x {reason}")


def shrink(fuzzer: Fuzzer, chosen: Chosen, found: Found) -> tuple[Chosen, Found]:
    """Return the smallest values with which a failure of the same kind remains, and this failure.

    First, groups of values are set to their plain values, then single ones until none can be reset. At the end, each
    remaining value is replaced by a simpler one of its range, if there is one.
    """
    kept = chosen
    size = len(kept)
    while size:
        before = len(kept)
        names = [name for name in kept if name != "--family"]
        for at in range(0, len(names), size):
            fewer = {name: value for name, value in kept.items() if name not in names[at : at + size]}
            kept, found = _smaller(fuzzer, fewer, kept, found)
        if size > 1 or len(kept) == before:
            size //= 2
    for name, each in ranges_of(kept.get("--family", "llama")).items():
        others = list(each.others)
        simpler = others[: others.index(kept[name])] if kept.get(name) in others else []
        for value in reversed(simpler):
            kept, found = _smaller(fuzzer, {**kept, name: value}, kept, found)
    return kept, found


def _smaller(fuzzer: Fuzzer, values: Chosen, kept: Chosen, found: Found) -> tuple[Chosen, Found]:
    """Return `values` and their failure if it is of the kind of `found`, the failure of `kept`; else these two."""
    here = fuzzer.run(case_of(values))
    return (values, here) if kind_of(here) == kind_of(found) else (kept, found)


def kind_of(found: Found) -> str:
    """Return the kind of a result; for a crash also the type of the exception."""
    last = found.outcome.words.strip().rpartition("\n")[2]
    return f"{found.outcome.kind} {last.partition(':')[0] if found.outcome.kind == 'crash' else ''}"


def _described(chosen: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in chosen.items())


def _reason(words: str) -> str:
    """Return the first line of an error message, with numbers replaced by N."""
    return re.sub(r"\d[\d.]*", "N", words)[:110]


def _indented(words: str) -> str:
    lines = words.strip().splitlines()
    return "\n".join(f"  {line}" for line in lines[-12:])
