"""Certificates of tools/verify_layout.py, which say that a model computes the same numbers in several layouts.

A run with --certificate puts its certificate into each of its checkpoints, and an export copies it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from megatron.config.fields import flag
from megatron.ranks.source import source_hash, versions

from .schema import SchemaError
from .schema import read as read_json

FILE = "certificate.json"  # its name in a checkpoint and in an export
FORMAT = 1
AGREES, DIFFERS, STOPPED = "agrees", "differs", "did not run"
INFINITE = "infinite"  # JSON has no number for it


class CertificateError(ValueError):
    """A certificate cannot be read or does not fit a run; the message names its path."""


@dataclass(frozen=True)
class LayoutResult:
    """Measurements of one layout. All differences are relative to the run in one process.

    largest: the largest of all differences; None if nothing could be compared.
    losses, outputs: largest difference of the losses and of the layers' outputs; None if not compared.
    weights, gradients: by parameter, largest difference of its initial value and of its gradient.
    words: explanations for people.
    """

    layout: str
    verdict: str
    largest: float | None
    losses: float | None
    outputs: float | None
    weights: dict[str, float]
    gradients: dict[str, float]
    words: list[str]

    @property
    def differences(self) -> dict[str, float]:
        """All differences that were measured, by name."""
        named = {"largest": self.largest, "losses": self.losses, "outputs": self.outputs}
        found = {name: value for name, value in named.items() if value is not None}
        found |= {f"weight {name}": value for name, value in self.weights.items()}
        return found | {f"gradient {name}": value for name, value in self.gradients.items()}


@dataclass(frozen=True)
class Certificate:
    """The content of a certificate: what was run, with which code, and what came out.

    certificate: version of the file format. source: `source_hash` of the entry script. model: the model's settings.
    flags: the script's flags, without those of a layout. micros: micro-batches per step over all replicas.
    passed: whether every layout agrees.
    """

    certificate: int
    passed: bool
    date: str
    script: str
    source: str
    versions: dict[str, str]
    flags: list[str]
    model: dict[str, Any]
    reference: str
    steps: int
    micros: int
    precision: str
    keep_dropout: bool
    tolerance: float
    layouts: list[LayoutResult]

    @property
    def failed(self) -> list[str]:
        """The layouts that do not agree."""
        return [each.layout for each in self.layouts if each.verdict != AGREES]

    def text(self) -> str:
        """Return the certificate as JSON."""
        return json.dumps(_coded(asdict(self)), indent=1, allow_nan=False) + "\n"

    def changes(self, script: str) -> list[str]:
        """Return one sentence for the source and for each version that is no longer that of the certificate.

        script: path of the entry script.
        """
        now, found = source_hash(script), []
        if now != self.source:
            found.append(
                f"the source has changed: tds, megatron or {script} had the hash {self.source[:12]} and now have "
                f"{now[:12]}"
            )
        here = versions()
        for name in sorted(self.versions.keys() | here.keys()):
            then = self.versions.get(name, "unknown")
            if then != here.get(name):
                found.append(f"the version of {name} was {then} and is now {here.get(name, 'unknown')}")
        return found

    def other_models(self, model: Mapping[str, Any], exact: bool = False) -> list[str]:
        """Return one sentence for each setting of `model` that makes it another type of model than the certificate's.

        Unless `exact` is set, factors and sizes may differ, because certificates are made with small models. Names,
        switches, and whether a size is given at all (not None or 0) choose the code that runs.
        """
        found = []
        for name, value in model.items():
            then = self.model.get(name)
            kinds = {type(then), type(value)}
            switch = kinds & {str, bool} or (float not in kinds and bool(then) != bool(value))
            if then != value and (exact or switch):
                found.append(f"the model had {flag(name)} {then} and now has {value}")
        return found


def _coded(value: Any) -> Any:
    """Return a JSON value in which infinite numbers are replaced by `INFINITE`."""
    if isinstance(value, dict):
        return {key: _coded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_coded(each) for each in value]
    return INFINITE if isinstance(value, float) and math.isinf(value) else value


def read_certificate(path: Path) -> Certificate:
    """Read a certificate. Raises CertificateError for a missing, foreign, newer, damaged or contradictory file."""
    try:
        content = read_json(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise CertificateError(f"there is no certificate {path}") from None
    except OSError as error:
        raise CertificateError(f"the certificate {path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, SchemaError) as error:
        why = "it is not text" if isinstance(error, UnicodeDecodeError) else error
        raise CertificateError(f"{path} is damaged, or not a certificate of tools/verify_layout.py: {why}") from None
    version = content.get("certificate")
    if type(version) is not int or version < 1:
        raise CertificateError(f"{path} is not a certificate of tools/verify_layout.py")
    if version > FORMAT:
        raise CertificateError(
            f"{path} is a certificate of format {version}, but this version of the project reads only format {FORMAT}; "
            "use a newer version"
        )
    try:
        found = _parsed(content)
        _refuse_contradictions(found)
    except SchemaError as error:
        raise CertificateError(f"the certificate {path} is damaged: {error}; make a new one") from None
    return found


def _parsed(content: dict[str, Any]) -> Certificate:
    values = _values(content, Certificate)
    layouts = [LayoutResult(**_values(each, LayoutResult)) for each in _decoded(values["layouts"])]
    return Certificate(**values | {"layouts": layouts})


def _decoded(value: Any) -> Any:
    """Undo `_coded`."""
    if isinstance(value, dict):
        return {key: _decoded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    return math.inf if value == INFINITE else value


def _values(content: Any, kind: Any) -> dict[str, Any]:
    """Return the values of a dataclass `kind` from a JSON object. Raises SchemaError, which names the key."""
    if not isinstance(content, dict):
        raise SchemaError("a layout is not an object")
    hints = get_type_hints(kind)
    for name, hint in hints.items():
        if name not in content:
            raise SchemaError(f"the key {name!r} is missing")
        if not _fits(content[name], hint):
            raise SchemaError(f"the key {name!r} has an invalid value")
    return {name: content[name] for name in hints}


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a JSON value has the type `hint`. Differences, which are all floats, must be at least 0."""
    if hint is Any:
        return True
    parts = get_args(hint)
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(_fits(each, parts[1]) for each in value.values())
    if get_origin(hint) is list:
        return isinstance(value, list) and (parts[0] is LayoutResult or all(_fits(each, parts[0]) for each in value))
    return type(value) in (parts or (hint,)) and (type(value) is not float or value >= 0)


def _refuse_contradictions(found: Certificate) -> None:
    """Raise SchemaError if verdicts do not follow from the differences, or `passed` not from the verdicts."""
    if not found.layouts:
        raise SchemaError("it lists no layout")
    for each in found.layouts:
        if each.verdict not in (AGREES, DIFFERS, STOPPED):
            raise SchemaError(f"the verdict {each.verdict!r} of layout {each.layout!r} is unknown")
        over = [name for name, value in each.differences.items() if not value <= found.tolerance]
        if each.verdict == AGREES and (over or each.losses is None):
            why = f"{over[0]} exceeds the tolerance" if over else "it has no losses"
            raise SchemaError(f"it says that layout {each.layout!r} agrees, but {why}")
    if found.passed != (not found.failed):
        raise SchemaError(f"it says that it {'passed' if found.passed else 'failed'}, but its layouts say the opposite")


def certificate_for_run(given: str, script: str, model: Mapping[str, Any]) -> str:
    """Return the text of the certificate of a run with --certificate `given`, for the run's checkpoints.

    script: path of the run's entry script. model: the run's model settings. Raises CertificateError if a layout failed,
    if the source or a version has changed, or if the certificate is that of another type of model.
    """
    found, where = read_certificate(Path(given)), f"--certificate {given}"
    if found.failed:
        raise CertificateError(f"{where} did not pass: its numbers do not agree in the layout {found.failed[0]!r}")
    again = "make a new certificate with tools/verify_layout.py, or leave out --certificate"
    if changes := found.changes(script):
        raise CertificateError(f"{where} is not that of this run: {changes[0]}; {again}")
    if others := found.other_models(model):
        raise CertificateError(f"{where} is not that of this run: {others[0]}; {again}")
    return found.text()
