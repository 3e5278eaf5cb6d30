"""Certificates of a comparison of layouts: writing them, and comparing a certificate with a repetition of its run."""

import argparse
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron.atomic import write_text
from megatron.checkpointing.certificate import AGREES, DIFFERS, FORMAT, STOPPED, Certificate, LayoutResult
from megatron.ranks.source import source_hash, versions

from .compare import Verdict, explained


def result_of(found: Verdict) -> LayoutResult:
    """Return the entry of one layout in a certificate."""
    single = [each.error for each in (found.forward, found.backward, found.state) if each is not None]
    numbers = [found.loss, found.forward_error, *found.weights.values(), *found.gradients.values(), *single]
    return LayoutResult(
        layout=found.layout,
        verdict=STOPPED if found.stopped else AGREES if found.agrees else DIFFERS,
        largest=max((each for each in numbers if each is not None), default=None),
        losses=found.loss,
        outputs=found.forward_error,
        weights=found.weights,
        gradients=found.gradients,
        words=explained(found),
    )


def certificate_of(
    args: argparse.Namespace,
    verdicts: Sequence[Verdict],
    micros: int,
    tolerance: float,
    model: Mapping[str, Any],
    source: str,
) -> Certificate:
    """Return the certificate of a comparison. Raises ValueError if the source has changed since the first run.

    args: the tool's arguments. micros: micro-batches per step. model: the model's settings. source: the source's hash
    before the first run.
    """
    if source != source_hash(args.script):
        raise ValueError(f"tds, megatron or {args.script} changed while the layouts ran; run the comparison again")
    return Certificate(
        certificate=FORMAT,
        passed=all(each.agrees for each in verdicts),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        script=args.script,
        source=source,
        versions=versions(),
        flags=list(args.flags),
        model=dict(model),
        reference=args.reference,
        steps=args.steps,
        micros=micros,
        precision=args.precision,
        keep_dropout=args.keep_dropout,
        tolerance=tolerance,
        layouts=[result_of(each) for each in verdicts],
    )


def write_certificate(path: str, certificate: Certificate) -> None:
    """Write a certificate atomically."""
    write_text(path, certificate.text(), synced=True)
    print(f"certificate -> {path} ({'passed' if certificate.passed else 'NOT PASSED'})")


def recorded_arguments(args: argparse.Namespace, then: Certificate) -> argparse.Namespace:
    """Return the tool's arguments for a repetition of the run of the certificate `then`.

    args: the arguments of --check. Its flags for the script, such as a new --data-path, follow the recorded flags.
    """
    recorded = {
        name: getattr(then, name)
        for name in ("script", "reference", "steps", "micros", "precision", "tolerance", "keep_dropout")
    }
    layouts = [each.layout for each in then.layouts]
    return argparse.Namespace(**{**vars(args), **recorded, "layouts": layouts, "flags": [*then.flags, *args.flags]})


def checked(path: Path, then: Certificate, now: Certificate) -> tuple[list[str], bool]:
    """Compare a certificate with its repetition `now`; return (lines to print, whether the certificate is confirmed).

    It is confirmed if it passed, the source, the versions and the model are the same, and all layouts agree again.
    """
    changes = [*then.changes(now.script), *then.other_models(now.model, exact=True), *_verdict_changes(then, now)]
    lines = [f"{path} of {then.date}: {'passed' if then.passed else 'did not pass: ' + ', '.join(then.failed)}"]
    lines += changes or ["source, versions, model and verdicts: as in the certificate"]
    lines.append(_difference_changes(then, now))
    confirmed = then.passed and now.passed and not changes
    return [*lines, "the certificate is confirmed" if confirmed else "the certificate is NOT CONFIRMED"], confirmed


def _verdict_changes(then: Certificate, now: Certificate) -> list[str]:
    """Return a sentence for each layout whose verdict, or whose list of weights, is not that of the certificate."""
    found = []
    for old, new in zip(then.layouts, now.layouts, strict=True):
        unlike = sorted(old.differences.keys() ^ new.differences.keys())
        if old.verdict != new.verdict:
            found.append(f"layout {old.layout!r}: {old.verdict} in the certificate, but {new.verdict} now")
        elif unlike:
            found.append(f"layout {old.layout!r}: only one of certificate and repetition has the {unlike[0]}")
    return found


def _difference_changes(then: Certificate, now: Certificate) -> str:
    """Return a sentence about how many differences are not those of the certificate to the last digit."""
    pairs = [
        (old.differences[name], new.differences[name], f"{name}, layout {old.layout!r}")
        for old, new in zip(then.layouts, now.layouts, strict=True)
        for name in old.differences.keys() & new.differences.keys()
    ]
    changed = [pair for pair in pairs if pair[0] != pair[1]]
    if not changed:
        return f"differences: all {len(pairs)} as in the certificate"
    old, new, name = max(changed, key=lambda pair: max(pair[:2]))
    return (
        f"differences: {len(changed)} of {len(pairs)} are not those of the certificate, which other CPUs may cause by "
        f"rounding; the largest of them was {old:.1e} and is {new:.1e} ({name})"
    )
