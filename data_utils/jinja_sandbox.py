"""Environment of Jinja chat templates, with limits on time and memory: a downloaded template is untrusted code."""

import contextlib
import json
import re
import signal
from collections.abc import Iterator
from datetime import datetime
from types import FrameType
from typing import Any

from megatron.data.workers import in_main_thread
from megatron.packages import pip_install
from megatron.tokenizer.base import TokenizerError

TIME_LIMIT = 10.0
MAX_BITS = 1 << 16
MAX_ITEMS = 1 << 26  # largest number of characters in a string or elements in a list
CHECKED_OPERATORS = frozenset(("**", "*", "+", "%"))  # checked by `check_operation`, never folded by the compiler


class TemplateLimitError(ValueError):
    """Error for a template that takes longer, or creates larger values, than any conversation needs."""


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Raise TemplateLimitError if the enclosed code runs longer than `TIME_LIMIT`; no limit outside the main thread."""
    if not in_main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TemplateLimitError(f"the chat template runs for more than {TIME_LIMIT:g} s")

    old_handler = signal.signal(signal.SIGALRM, stop)
    old_delay, old_interval = signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, old_delay, old_interval)
        signal.signal(signal.SIGALRM, old_handler)


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Raise TemplateLimitError if an operation's result would be huge.

    The time limit does not suffice, because a timer cannot interrupt an operation that runs in C.
    """
    # A format may ask for a width of a million characters, as a number or by * as a value.
    if operator == "%" and isinstance(left, str) and re.search(r"\d{6}|%[^a-zA-Z%]*\*", left):
        raise TemplateLimitError(f"the chat template uses the format {left[:40]!r}, whose result has no length limit")
    # Of numbers, it suffices to limit the operands: a sum or product of two allowed numbers has at most twice as many
    # bits, and the next checked operation refuses it if it has too many. Only powers are estimated in advance.
    numbers = []
    sizes = []  # of the operands that are strings or lists
    for value in (left, right):
        if isinstance(value, int):
            numbers.append(value)
        elif isinstance(value, (str, list, tuple, bytes)):
            sizes.append(len(value))
    bits = max(map(int.bit_length, numbers), default=0)
    if operator == "**" and len(numbers) == 2:
        bits = left.bit_length() * right if abs(left) > 1 else 0  # powers of 0 and 1 stay small
    if bits > MAX_BITS:
        raise TemplateLimitError(f"the chat template computes a number of {bits} bits, which is too large")
    items = sum(sizes)  # of a string or list that + or % makes of both
    if operator == "*" and sizes and numbers:  # a repeated string or list, such as "ab" * 3
        items = sizes[0] * numbers[0]
    if items > MAX_ITEMS:
        raise TemplateLimitError(f"the chat template creates a string or list of {items} elements, which is too long")


class GenerationBlocks:
    """Places of the `{% generation %}` blocks in a rendered text.

    exist: whether the template has such blocks.
    """

    def __init__(self) -> None:
        self.exist = False
        self._blocks: list[tuple[int, str]] = []  # first character and text of each block of the last rendering
        self._length = 0

    def render(self, template: Any, values: dict[str, Any]) -> str:
        """Render `template` and record the places of its blocks."""
        self._blocks = []
        self._length = 0
        parts = []
        for part in template.generate(values):
            parts.append(part)
            self._length += len(part)
        return "".join(parts)

    def record(self, text: str) -> None:
        """Record a block that begins after the text rendered so far."""
        self._blocks.append((self._length, text))

    def ranges_in(self, whole: str) -> list[tuple[int, int]]:
        """Return the first character and the end of each block of the last rendering, whose result is `whole`.

        Raises ValueError if a block is not where it was recorded, because Jinja renders the body of a tag such as
        `{% set %}` apart from the text around it.
        """
        ranges = []
        for begin, text in self._blocks:
            end = begin + len(text)
            if whole[begin:end] != text:
                raise ValueError(
                    "the chat template has a {% generation %} block whose place in the text is unknown, as in a "
                    "{% set %} or a macro; move the block out of the enclosing tag"
                )
            ranges.append((begin, end))
        return ranges


def sandbox_environment(now: datetime | None, blocks: GenerationBlocks) -> Any:
    """Return a jinja2 environment with the functions that chat templates use in transformers.

    now: time that strftime_now formats; None leaves strftime_now undefined. blocks: receives the places of
    `{% generation %}` blocks. Raises TokenizerError if jinja2 is not installed.
    """
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        raise TokenizerError(f"Jinja chat templates need the package jinja2: {pip_install('jinja2')}") from None

    class Generation(jinja2.ext.Extension):
        """Jinja extension that renders `{% generation %}` blocks as their content and records their places."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno  # the word `generation` itself
            blocks.exist = True
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # The block calls `_record`, which gets a function that renders the body.
            return jinja2.nodes.CallBlock(self.call_method("_record"), [], [], body).set_lineno(line)

        def _record(self, caller: Any) -> str:
            text: str = caller()
            blocks.record(text)
            return text

    class Bounded(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """A sandbox whose operators cannot create values that exhaust memory."""

        intercepted_binops = CHECKED_OPERATORS

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            check_operation(operator, left, right)
            return super().call_binop(context, operator, left, right)

    sandbox = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation])
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise_exception
    if now:
        sandbox.globals["strftime_now"] = now.strftime
    return sandbox


def _raise_exception(message: str) -> None:
    raise ValueError(f"the chat template rejects the conversation: {message}")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return `value` as JSON. This replaces Jinja's built-in tojson, which writes < as \\u003c."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
