"""A conversation as tokens, and which of them a model learns to write: what the assistant says, and the mark that ends it.

A template writes roles and marks around the contents. Names of tokens (`Tokenizer.marks`) stand for these tokens in what the template writes,
and never in a content, so that no text can pretend to be a turn of its own. But the assistant may write tokens that are neither special
nor part of the frame of a turn, such as <think>; where a template in Jinja writes, which does not keep the two apart, everybody may.
"""

import contextlib
import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from re import Pattern
from typing import Any, NamedTuple, Protocol

from .base import Tokenizer, TokenizerError, any_of
from .beside import TEMPLATE, settings_beside, token_beside
from .load import file_of
from .sandbox import BOUNDED, EndlessTemplate, limited, refuse_large

DATES = "strftime_now"  # what a template calls that writes a date
ROLES = ("system", "user", "assistant")
BEGIN, END = "<|im_start|>", "<|im_end|>"  # of ChatML
# What templates know besides the messages, where tokenizer_config.json says it.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Message(NamedTuple):
    """One turn of a conversation. role: one of `ROLES`."""

    role: str
    content: str


class Piece(NamedTuple):
    """Some text of a conversation. counts: whether it is learned. markup: whether names in it stand for tokens."""

    text: str
    counts: bool
    markup: bool


class Template(Protocol):
    """How a conversation is written. source: what tells this template from others. date: the time, in ISO 8601, that it writes as now, if it asks."""

    source: str
    date: str | None

    def pieces(self, messages: Sequence[Message]) -> tuple[Piece, ...]:
        """The text in pieces. Raises ValueError for a conversation that the template cannot write."""
        ...

    def asking(self, messages: Sequence[Message]) -> tuple[Piece, ...]:
        """The same up to where the assistant begins to answer the last message."""
        ...


def messages_of(record: object) -> tuple[Message, ...]:
    """The conversation of a record `{"messages": [{"role", "content"}, ...]}` or `{"instruction", "input", "output"}`.

    Raises ValueError for anything else, and where the assistant says nothing.
    """
    if not isinstance(record, dict):
        raise ValueError("not an object with messages")
    if "messages" in record:
        found = turns_of(record["messages"])
    elif "instruction" in record and "output" in record:
        asked = [record["instruction"], record.get("input") or ""]
        if not all(isinstance(text, str) for text in asked):
            raise ValueError("'instruction' or 'input' is not a text")
        question = "\n\n".join(text for text in asked if text)
        found = Message("user", question), Message("assistant", record["output"])
        for message in found:
            _check(message)
    else:
        raise ValueError("neither 'messages' nor 'instruction' and 'output'")
    if not any(message.role == "assistant" for message in found):
        raise ValueError("no message of the assistant, from which alone is learned")
    return found


def turns_of(turns: object) -> tuple[Message, ...]:
    """A list of `{"role", "content"}`. Raises ValueError for anything else."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("'messages' is not a list of objects with 'role' and 'content'")
    found = tuple(Message(turn.get("role", ""), turn.get("content", "")) for turn in turns)
    for message in found:
        _check(message)
    return found


def _check(message: Message) -> None:
    if message.role not in ROLES:
        raise ValueError(f"the role {message.role!r} is none of {', '.join(ROLES)}")
    if not isinstance(message.content, str) or not message.content:
        raise ValueError(f"a message of the {message.role} without a text")
    try:
        message.content.encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair, which no Unicode text has") from None


class ChatML:
    """`<|im_start|>ROLE`, a line break, the content, `<|im_end|>`, a line break."""

    source = "chatml"
    date: str | None = None
    jinja = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )  # the same for transformers

    def pieces(self, messages: Sequence[Message]) -> tuple[Piece, ...]:
        """See Template."""
        found: list[Piece] = []
        for role, content in messages:
            own = role == "assistant"
            found += [Piece(f"{BEGIN}{role}\n", False, True), Piece(content, own, False)]
            found += [Piece(END, own, True), Piece("\n", False, True)]
        return tuple(found)

    def asking(self, messages: Sequence[Message]) -> tuple[Piece, ...]:
        """See Template."""
        return *self.pieces(messages), Piece(f"{BEGIN}assistant\n", False, True)


class JinjaTemplate:
    """A template in Jinja, as Hugging Face's tokenizers have them.

    What the assistant says is found by writing the conversation up to each of its turns and once more with it. White space after the
    mark that ends a turn does not count. tokenizer: whose special tokens, and other names in the frame of a turn, no content may hold, as
    a template does not keep the two apart.
    variables: what templates know besides the messages, such as eos_token. now: what strftime_now writes; None: templates do not know
    it. Raises TokenizerError without jinja2 or for a template with a mistake.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, variables: dict[str, Any], now: datetime | None) -> None:
        try:
            import jinja2
            import jinja2.ext
            import jinja2.sandbox
        except ImportError:
            raise TokenizerError("this chat template needs the package jinja2: pip install jinja2") from None

        class Generation(jinja2.ext.Extension):
            """Tags around what the assistant says, which some templates have; what is between them is written as it stands."""

            tags = {"generation"}

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def refuse(message: str) -> None:
            raise ValueError(f"the chat template refuses it: {message}")

        def tojson(
            value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
        ) -> str:  # Jinja's own writes < as \u003c
            return json.dumps(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )

        class Bounded(jinja2.sandbox.ImmutableSandboxedEnvironment):
            """A sandbox in which no operator makes a value that fills the memory."""

            intercepted_binops = BOUNDED

            def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
                refuse_large(operator, left, right)
                return super().call_binop(context, operator, left, right)

        extensions = ["jinja2.ext.loopcontrols", Generation]
        environment = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = tojson
        environment.globals |= {"raise_exception": refuse, **({"strftime_now": now.strftime} if now else {})}
        self.source, self._mistake, self._tokenizer = source, jinja2.TemplateError, tokenizer
        self.date = now.isoformat(timespec="seconds") if now and DATES in source else None
        self._variables = {"tools": None, "documents": None, **variables}
        self._marks = any_of(tokenizer.marks)
        try:
            with limited():
                self._template = environment.from_string(source)
        except (jinja2.TemplateError, EndlessTemplate, RecursionError) as error:
            raise TokenizerError(f"the chat template has a mistake: {error}") from None

    def pieces(self, messages: Sequence[Message]) -> tuple[Piece, ...]:
        """See Template. Raises ValueError where a turn changes what was written before it."""
        self._refuse_names(messages)
        whole, at = self._written(messages, False), 0
        found: list[Piece] = []
        for number, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before = self._written(messages[:number], True)
            after = self._written(messages[: number + 1], False)
            if not after.startswith(before) or not whole.startswith(after) or len(before) < at:
                raise ValueError("the chat template does not write a conversation turn by turn")
            said = after[len(before) :]
            marked = said.rstrip()
            said = marked if len(marked) > len(message.content.rstrip()) else said
            found += [Piece(whole[at : len(before)], False, True), Piece(said, True, True)]
            at = len(before) + len(said)
        return tuple(piece for piece in (*found, Piece(whole[at:], False, True)) if piece.text)

    def asking(self, messages: Sequence[Message]) -> tuple[Piece, ...]:
        """See Template."""
        self._refuse_names(messages)
        return (Piece(self._written(messages, True), False, True),)

    def _refuse_names(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if name := self._frame.search(message.content):
                kind = "a special token" if name[0] in self._tokenizer.specials else "a token of its own"
                raise ValueError(f"a content holds {name[0]}, which is {kind}")

    @functools.cached_property
    def _frame(self) -> Pattern[str]:
        """What no content may hold: special tokens, those around turns of the user and the system, and the one that opens and those
        that end a turn of the assistant. Behind the first, a template may go on with what may be said, such as <think>."""
        system, asked, said = (Message(role, "\u00b6said\u00b6") for role in ROLES)
        try:
            before = self._written([asked], False)
            around = before + self._written([asked, said], False).rpartition(said.content)[2]
            opening = self._marks.search(self._written([asked], True).removeprefix(before))
        except EndlessTemplate:
            raise
        except ValueError:  # a template that wants more than this
            return self._marks
        with contextlib.suppress(ValueError):  # of one that knows no systems
            around += self._written([system, asked], False)
        return any_of({*self._tokenizer.specials, *self._marks.findall(around), *([opening[0]] if opening else [])})

    def _written(self, messages: Sequence[Message], asks: bool) -> str:
        turns = [message._asdict() for message in messages]
        try:
            with limited():
                return self._template.render(messages=turns, add_generation_prompt=asks, **self._variables)
        except (self._mistake, TypeError, RecursionError, ArithmeticError, MemoryError) as error:
            raise ValueError(f"the chat template cannot write it: {error}") from None


def load_template(name: str, tokenizer: Tokenizer, vocab_file: str, date: str | None = None) -> Template:
    """The template `chatml`, the `tokenizer`'s own, or that of a Jinja file. Raises TokenizerError where there is none. date: see template_from."""
    if name == "chatml":
        return ChatML()
    if name == "tokenizer":
        source = own_template(vocab_file)
        if source is None:
            raise TokenizerError(
                f"there is no chat template next to {vocab_file}: give --chat-template chatml or a file"
            )
    elif not Path(name).is_file():
        raise TokenizerError(f"--chat-template {name} is no file, and neither chatml nor tokenizer")
    else:
        source = Path(name).read_text(encoding="utf-8")
    return template_from(source, tokenizer, vocab_file, date)


def template_from(source: str, tokenizer: Tokenizer, vocab_file: str, date: str | None = None) -> Template:
    """The template of this source (see Template). date: the time that it takes for now, in ISO 8601; default: now.

    Raises TokenizerError for one with a mistake.
    """
    return _template(source, tokenizer, vocab_file, datetime.fromisoformat(date) if date else datetime.now())


def template_of_corpus(about: Mapping[str, Any], tokenizer: Tokenizer, vocab_file: str) -> Template:
    """The template that a sidecar names. Without a date there, its corpus was made when no template knew strftime_now, and had none in it.

    Raises TokenizerError for one with a mistake.
    """
    date = about.get("chat_date")
    return _template(str(about["chat_template"]), tokenizer, vocab_file, datetime.fromisoformat(date) if date else None)


def is_undated(about: Mapping[str, Any]) -> bool:
    """Whether a sidecar has a template that writes a date, and was made before it did."""
    return DATES in str(about.get("chat_template")) and not about.get("chat_date")


def _template(source: str, tokenizer: Tokenizer, vocab_file: str, now: datetime | None) -> Template:
    if source == ChatML.source:
        return ChatML()
    path = file_of(vocab_file)
    variables = {key: token for key in NAMED if (token := token_beside(path, key)) is not None}
    return JinjaTemplate(source, tokenizer, variables, now)


def own_template(vocab_file: str) -> str | None:
    """The source of the template that comes with a tokenizer, if one does."""
    path = file_of(vocab_file).with_name(TEMPLATE)
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = settings_beside(path).get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {each["name"]: each["template"] for each in found}.get("default")
    return found if isinstance(found, str) else None


class ChatEncoder:
    """Pieces to ids. append_eod: end a conversation that the assistant ends with `eod`, which counts, too."""

    def __init__(self, tokenizer: Tokenizer, append_eod: bool) -> None:
        self._tokenizer, self._append_eod = tokenizer, append_eod
        self._marks = any_of(tokenizer.marks)
        self._own = any_of(name for name in tokenizer.marks if name not in (*tokenizer.specials, BEGIN, END))

    def encode(self, pieces: Sequence[Piece]) -> tuple[list[int], list[int]]:
        """(token ids, of each 1 if it counts in the loss, else 0). Neighbouring texts that count alike are encoded as one."""
        pieces = list(pieces)
        spare = pieces[-1].text.isspace() and not pieces[-1].counts
        ends = self._append_eod and pieces[-2 if spare and len(pieces) > 1 else -1].counts
        if ends and spare:
            del pieces[-1]
        ids: list[int] = []
        counts: list[int] = []
        text, learned = "", False

        def flush() -> None:
            nonlocal text
            if text:
                made = self._tokenizer.encode_content(text, inside=bool(ids))
                ids.extend(made)
                counts.extend([int(learned)] * len(made))
                text = ""

        for piece in pieces:
            if piece.counts != learned:
                flush()
                learned = piece.counts
            for number, part in enumerate(self._parts(piece)):
                if number % 2:
                    flush()
                    ids.append(self._tokenizer.marks[part])
                    counts.append(int(learned))
                else:
                    text += part
        flush()
        if ends and ids[-1] != self._tokenizer.eod:
            ids.append(self._tokenizer.eod)
            counts.append(1)
        return ids, counts

    def _parts(self, piece: Piece) -> list[str]:
        """Text and names of tokens by turns."""
        if not piece.markup and not piece.counts:
            return [piece.text]
        return (self._marks if piece.markup else self._own).split(piece.text)


def missing_marks(template: Template, tokenizer: Tokenizer) -> list[str]:
    """Names of a built-in template that are no tokens of the tokenizer: they are written as text."""
    return [name for name in (BEGIN, END) if template.source == "chatml" and name not in tokenizer.marks]


def ignores_generation_prompt(template: Template) -> bool:
    """Return whether a prompt lacks the header of an answer, so that a model must write the header before its answer."""
    question = [Message("user", "a")]
    try:
        prompt, conversation = (
            "".join(piece.text for piece in pieces) for pieces in (template.asking(question), template.pieces(question))
        )
    except ValueError:  # the template refuses a question without a system prompt
        return False
    return prompt == conversation


def turn_end(template: Template, tokenizer: Tokenizer) -> int | None:
    """The id that ends what the assistant says; None where the template ends it with text."""
    pieces = template.pieces([Message("user", "a"), Message("assistant", "a")])
    ids, counts = ChatEncoder(tokenizer, append_eod=False).encode(pieces)
    last = [i for i, counted in zip(ids, counts, strict=True) if counted][-1]
    return last if last in tokenizer.marks.values() else None
