"""What a check found."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

OK, WARNING, FAILED = "ok", "warning", "failed"


@dataclass(frozen=True)
class Finding:
    """One line of the report. remedy: what to do, where something is to be done."""

    check: str
    state: str
    words: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.state:8}{self.check}: {self.words}" + (f"\n{'':8}  -> {self.remedy}" if self.remedy else "")


def ok(check: str, words: str) -> Finding:
    """Nothing is to be done."""
    return Finding(check, OK, words)


def warning(check: str, words: str, remedy: str) -> Finding:
    """The run may start."""
    return Finding(check, WARNING, words, remedy)


def failed(check: str, words: str, remedy: str) -> Finding:
    """The run would not start, or not end well."""
    return Finding(check, FAILED, words, remedy)


def findings_of(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What `look` finds; an error of its own is a finding, too, in the words of whoever raised it."""
    try:
        yield from look()
    except ImportError as error:
        words = f"cannot look without {error.name}" if error.name else f"cannot look: {' '.join(str(error).split())}"
        yield failed(
            check,
            words,
            f"install {error.name or 'the package that the sentence names'} again: pip install -r requirements.txt",
        )
    except (OSError, ValueError, RuntimeError) as error:
        yield failed(check, " ".join(str(error).split()), "change what the sentence names")
