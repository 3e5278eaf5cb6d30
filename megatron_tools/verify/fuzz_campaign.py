"""Draws of the parity fuzzer: a summary of all draws, and the smallest settings and layout of each failure."""

import argparse
import random
import re
import tempfile
import time
from collections import Counter
from pathlib import Path

from megatron.config.fields import ConfigError
from megatron.config.messages import describe_error

from .fuzz import CaseResult, Fuzzer
from .fuzz_data import write_data
from .fuzz_ranks import preload_modules
from .fuzz_table import Case, Chosen, case_of, draw, ranges_of
from .layouts import read_layout

MAX_ATTEMPTS = 200  # draws of settings until the project accepts one
TIMEOUT = 60.0  # seconds of a run, which takes about one second
COMMAND = "python tools/verify_layout.py"


def fuzz(args: argparse.Namespace) -> bool:
    """Compare drawn cases, or the cases that the command line gives, and print a summary. Return whether all agree."""
    if args.flags and "--family" not in args.flags:
        raise ValueError("--fuzz: the flags after -- lack --family gpt2, llama or t5, as two words")
    preload_modules()
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
        self.largest_errors = {"fp64": 0.0, "fp32": 0.0}

    def run(self, args: argparse.Namespace) -> bool:
        """Run the given cases, or `args.fuzz` draws from draw `args.draw` on; print a summary."""
        begin = time.monotonic()
        if args.flags:
            for text in args.layouts:
                layout = read_layout(text)
                micros = args.micros or 2 * layout.dp  # By default, each replica gets two.
                case = Case(layout, micros, tuple(args.flags))
                # No drawn values (None): the given flags cannot be shrunk.
                self._run_case(str(layout), case, None)
        else:
            for number in range(args.draw, args.draw + args.fuzz):
                chosen = self.draw_accepted(number)
                self._run_case(f"draw {number}", case_of(chosen), chosen)
        seconds = time.monotonic() - begin
        num_draws = sum(self.layouts.values())
        print(f"{num_draws} draws in {seconds:.0f} s, {len(self.layouts)} layouts, {self.failures} failures")
        largest_text = ", ".join(f"{value:.1e} in {name}" for name, value in self.largest_errors.items() if value)
        print(f"largest relative difference of draws that agree: {largest_text or 'none'}")
        print(f"{sum(self.refused.values())} drawn settings were refused:")
        for reason, count in self.refused.most_common():
            print(f"  {count} x {reason}")
        return not self.failures

    def draw_accepted(self, number: int) -> Chosen:
        """Return the values of a draw. Those that the project refuses are drawn again; ValueError if it refuses all."""
        for attempt in range(MAX_ATTEMPTS):
            # The generator depends on seed, draw and attempt only, so a draw can be repeated.
            chosen = draw(random.Random(f"{self.seed} {number} {attempt}"), few=number % 2 == 0)
            try:
                self.fuzzer.settings_of(case_of(chosen))
            except ConfigError as error:
                self.refused[_refusal_reason(describe_error(error))] += 1
            else:
                return chosen
        raise ValueError(f"--fuzz: draw {number}: all of {MAX_ATTEMPTS} settings are refused: {dict(self.refused)}")

    def _run_case(self, name: str, case: Case, chosen: Chosen | None) -> None:
        """Run a case, count its result, and shrink it if it fails."""
        begin = time.monotonic()
        result = self.fuzzer.run(case)
        kind = result.outcome.kind
        self.layouts[str(case.layout)] += 1
        if kind == "refused":
            self.refused[_refusal_reason(result.outcome.message)] += 1
        if self.verbose or result.failed:
            seconds = time.monotonic() - begin
            print(f"{name}: {kind} {result.largest_error:.1e} {seconds:.1f} s: {case.command}", flush=True)
        if result.failed:
            self.failures += 1
            self._explain(case, chosen, result)
        else:
            largest = self.largest_errors[case.precision]
            self.largest_errors[case.precision] = max(largest, result.largest_error)

    def _explain(self, case: Case, chosen: Chosen | None, result: CaseResult) -> None:
        """Print a failure, and the smallest settings with which it remains."""
        print(_indent(result.outcome.message))
        if chosen is None:
            return
        self.fuzzer.close()  # an earlier run in the same processes cannot be the reason for a failure of new ones
        if failure_kind(self.fuzzer.run(case)) != failure_kind(result):
            print("  a second run of this draw does not fail in this way, so it is not shrunk")
            return
        smallest, last_result = shrink(self.fuzzer, chosen, result)
        settings = ", ".join(f"{name} {value}" for name, value in smallest.items())
        print(f"  smallest settings: {settings}")
        print(_indent(last_result.outcome.message))
        print(f"  {COMMAND} --seed {self.seed} {case_of(smallest).command}", flush=True)


def shrink(fuzzer: Fuzzer, chosen: Chosen, result: CaseResult) -> tuple[Chosen, CaseResult]:
    """Return the smallest values with which a failure of the same kind remains, and this failure.

    First, groups of values are set to their plain values, then single ones until none can be reset. At the end, each
    remaining value is replaced by a simpler one of its range, if there is one.
    """
    smallest = chosen
    group_size = len(smallest)
    while group_size:
        count_before = len(smallest)
        names = [name for name in smallest if name != "--family"]
        for start in range(0, len(names), group_size):
            group = names[start : start + group_size]
            # A setting that is left out has its plain value.
            reduced = {name: value for name, value in smallest.items() if name not in group}
            smallest, result = _keep_if_failing(fuzzer, reduced, smallest, result)
        # Halve the groups after each round. Rounds with single values are repeated until one resets nothing.
        if group_size > 1 or len(smallest) == count_before:
            group_size //= 2
    for name, setting_range in ranges_of(smallest.get("--family", "llama")).items():
        alternatives = list(setting_range.alternatives)
        if smallest.get(name) not in alternatives:  # the setting has its plain value, the simplest one
            continue
        # The values before the chosen one are simpler. They are tried from the nearest to the simplest.
        simpler = alternatives[: alternatives.index(smallest[name])]
        for value in reversed(simpler):
            smallest, result = _keep_if_failing(fuzzer, {**smallest, name: value}, smallest, result)
    return smallest, result


def _keep_if_failing(fuzzer: Fuzzer, values: Chosen, current: Chosen, result: CaseResult) -> tuple[Chosen, CaseResult]:
    """Return `values` and their failure if it is of the kind of `result`, the failure of `current`; else these two."""
    new_result = fuzzer.run(case_of(values))
    return (values, new_result) if failure_kind(new_result) == failure_kind(result) else (current, result)


def failure_kind(result: CaseResult) -> str:
    """Return the kind of a result; for a crash also the type of the exception."""
    # A traceback ends with a line such as `ValueError: ...`, whose first word is the type.
    last_line = result.outcome.message.strip().rpartition("\n")[2]
    return f"{result.outcome.kind} {last_line.partition(':')[0] if result.outcome.kind == 'crash' else ''}"


def _refusal_reason(message: str) -> str:
    """Return the first line of an error message, with numbers replaced by N."""
    return re.sub(r"\d[\d.]*", "N", message)[:110]


def _indent(text: str) -> str:
    lines = text.strip().splitlines()
    return "\n".join(f"  {line}" for line in lines[-12:])
