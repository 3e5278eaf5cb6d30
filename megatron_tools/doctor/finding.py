"""Results of the doctor's checks."""

from collections.abc import Iterator
from dataclasses import dataclass

OK, WARNING, FAILED = "ok", "warning", "failed"


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    check: name of the check. state: OK, WARNING or FAILED. words: what was found. remedy: what the user should do, or
    an empty string.
    """

    check: str
    state: str
    words: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.state:8}{self.check}: {self.words}"
        if self.remedy:
            line += f"\n{'':8}  -> {self.remedy}"
        return line


Findings = Iterator[Finding]


def ok(check: str, words: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(check, OK, words)


def warning(check: str, words: str, remedy: str) -> Finding:
    """Return a finding about a problem that does not prevent the run."""
    return Finding(check, WARNING, words, remedy)


def failed(check: str, words: str, remedy: str) -> Finding:
    """Return a finding about a problem that would prevent the run or make it fail."""
    return Finding(check, FAILED, words, remedy)


def findings_of(check: str, findings: Findings) -> Findings:
    """Yield the findings of a check. If it raises an error, yield a FAILED finding with the error's message.

    findings: generator of the check, which therefore runs, and may fail, in this function.
    """
    try:
        yield from findings
    except ImportError as error:
        # A missing module has a name. An ImportError that a package raises itself may have only a message.
        reason = f"because {' '.join(str(error).split())}"
        if error.name:
            reason = f"without {error.name}"
        remedy = f"install {error.name or 'the named package'} again: pip install -r requirements.txt"
        yield failed(check, f"cannot be checked {reason}", remedy)
    except (OSError, ValueError, RuntimeError) as error:
        yield failed(check, " ".join(str(error).split()), "fix the problem that this message describes")
