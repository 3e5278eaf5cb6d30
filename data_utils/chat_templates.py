"""Chat templates: convert a conversation to tokens and a loss mask that is 1 only for the assistant's tokens.

A template writes roles and markup around message contents. Token names in this markup, such as <|im_start|>,
become single tokens. A token name inside a message is encoded as plain text, so that no message can forge a turn.

Some added tokens, such as <think>, are neither special tokens nor turn delimiters. Their names become single tokens in
assistant messages. With a Jinja template they become single tokens in messages of every role, because the rendered
text does not separate markup from contents.
"""

import contextlib
import functools
import itertools
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from re import Pattern
from typing import Any, NamedTuple, Protocol

from megatron.tokenizer.base import Tokenizer, TokenizerError, any_of
from megatron.tokenizer.load import file_of
from megatron.tokenizer.sibling_files import TEMPLATE, settings_beside, token_beside

from .document_text import check_pairs
from .jinja_sandbox import EndlessTemplate, GenerationBlocks, environment, limited

DATES = "strftime_now"  # function with which a Jinja template renders the current date
ROLES = ("system", "user", "assistant")
BEGIN, END = "<|im_start|>", "<|im_end|>"  # ChatML's tokens around a turn
# Keys of tokenizer_config.json whose token names a template may use as variables.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Message(NamedTuple):
    """One turn of a conversation. role: who speaks, one of `ROLES`. content: the text of the turn."""

    role: str
    content: str


class Piece(NamedTuple):
    """Part of a rendered conversation.

    counts: whether the tokens of `text` count in the loss.
    markup: whether `text` comes from the template itself, so that names such as <|im_end|> become special tokens.
    joined: whether a token may contain the end of the piece before and the beginning of this piece.
    """

    text: str
    counts: bool
    markup: bool
    joined: bool = False


Messages = Sequence[Message]
Pieces = tuple[Piece, ...]


class Template(Protocol):
    """Protocol of a chat template, which renders a conversation as text.

    source: `chatml` or Jinja source. date: time (ISO 8601) that the template renders as the current time, or None.
    """

    source: str
    date: str | None

    def pieces(self, messages: Messages) -> Pieces:
        """Return the rendered conversation in pieces. Raises ValueError if the template cannot render it."""
        ...

    def asking(self, messages: Messages) -> Pieces:
        """Return the prompt: the conversation up to the point where the assistant's next answer begins."""
        ...


def messages_of(record: object) -> tuple[Message, ...]:
    """Return the messages of a record.

    A record is `{"messages": [{"role", "content"}, ...]}` or `{"instruction", "input", "output"}`, and has an assistant
    message. Raises ValueError for any other record.
    """
    if not isinstance(record, dict):
        raise ValueError("the record is not a JSON object")
    if "messages" in record:
        turns = record["messages"]
    elif "instruction" in record and "output" in record:
        turns = _turns_of_instruction(record)
    else:
        raise ValueError("the record has neither 'messages' nor 'instruction' and 'output'")
    found = turns_of(turns)
    if not any(message.role == "assistant" for message in found):
        raise ValueError("there is no assistant message to train on")
    return found


def _turns_of_instruction(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an instruction, with its input below it, and the output as two turns."""
    asked = [record["instruction"], record.get("input") or ""]
    if not all(isinstance(text, str) for text in asked):
        raise ValueError("'instruction' or 'input' is not a string")
    question = "\n\n".join(filter(None, asked))
    return [{"role": "user", "content": question}, {"role": "assistant", "content": record["output"]}]


def turns_of(turns: object) -> tuple[Message, ...]:
    """Convert a list of `{"role", "content"}` to messages. Raises ValueError for anything else."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("'messages' is not a list of objects with 'role' and 'content'")
    found = []
    for turn in turns:
        message = Message(turn.get("role", ""), turn.get("content", ""))
        _check(message)
        found.append(message)
    return tuple(found)


def _check(message: Message) -> None:
    if message.role not in ROLES:
        raise ValueError(f"the role {message.role!r} is not one of {', '.join(ROLES)}")
    if not isinstance(message.content, str) or not message.content:
        raise ValueError(f"a {message.role} message has no text")
    check_pairs(message.content)


class ChatML:
    """The ChatML template: `<|im_start|>ROLE`, newline, content, `<|im_end|>`, newline."""

    source = "chatml"
    date: str | None = None
    jinja = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
        "+ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )  # this template as Jinja source, for exported tokenizers

    def pieces(self, messages: Messages) -> Pieces:
        """Return the rendered conversation in pieces; the assistant's content and <|im_end|> count in the loss."""
        found: list[Piece] = []
        for role, content in messages:
            own = role == "assistant"
            found += [Piece(f"{BEGIN}{role}\n", False, True), Piece(content, own, False)]
            found += [Piece(END, own, True), Piece("\n", False, True)]
        return tuple(found)

    def asking(self, messages: Messages) -> Pieces:
        """Return the prompt: the conversation, then `<|im_start|>assistant`, after which the model answers."""
        return *self.pieces(messages), Piece(f"{BEGIN}assistant\n", False, True)


class JinjaTemplate:
    """A Jinja template, as in Hugging Face tokenizers.

    If the template has `{% generation %}` blocks, their text counts in the loss, as in transformers. Otherwise the
    conversation is rendered up to an assistant turn and again with this turn. The text that the second rendering adds
    counts, except white space after the token that ends the turn.

    tokenizer: its special tokens and the tokens that delimit turns must not occur in messages, because the rendered
    text does not separate markup from contents.
    variables: values that the template may use besides the messages, such as eos_token.
    now: time that strftime_now formats; None leaves strftime_now undefined.
    Raises TokenizerError if jinja2 is not installed or the template is invalid.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, variables: dict[str, Any], now: datetime | None) -> None:
        self._blocks = GenerationBlocks()
        made = environment(now, self._blocks)
        import jinja2

        self.source = source
        self._template_error = jinja2.TemplateError
        self._tokenizer = tokenizer
        self.date = now.isoformat(timespec="seconds") if now and DATES in source else None
        self._variables = {"tools": None, "documents": None, **variables}
        self._marks = any_of(tokenizer.marks)
        try:
            with limited():
                self._template = made.from_string(source)
        except (jinja2.TemplateError, EndlessTemplate, RecursionError) as error:
            raise TokenizerError(f"the chat template is invalid: {error}") from None

    @property
    def has_blocks(self) -> bool:
        """True if the template marks with `{% generation %}` what counts in the loss."""
        return self._blocks.exist

    def pieces(self, messages: Messages) -> Pieces:
        """Return the rendered conversation in pieces.

        Raises ValueError if a template without `{% generation %}` changes the text of earlier turns in a later turn,
        or if a template with such blocks renders none of them.
        """
        if not self.has_blocks:
            return self.turns(messages)
        self._refuse_names(messages)
        whole = self.render(messages, False)
        return self._marked(messages, whole, self._blocks.ranges)

    def turns(self, messages: Messages) -> Pieces:
        """Return the rendered conversation in pieces of which those of the assistant count, whatever blocks mark.

        Raises ValueError if a turn changes the text of earlier turns.
        """
        self._refuse_names(messages)
        whole = self.render(messages, False)
        at = 0
        found: list[Piece] = []
        for number, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before = self.render(messages[:number], True)
            after = self.render(messages[: number + 1], False)
            if not after.startswith(before) or not whole.startswith(after) or len(before) < at:
                raise ValueError("the chat template does not allow training: a turn changes the text of earlier turns")
            said = after[len(before) :]
            marked = said.rstrip()
            if len(marked) > len(message.content.rstrip()):
                said = marked
            found.append(Piece(whole[at : len(before)], False, True))
            found.append(Piece(said, True, True))
            at = len(before) + len(said)
        found.append(Piece(whole[at:], False, True))
        return tuple(piece for piece in found if piece.text)

    def _marked(self, messages: Messages, whole: str, blocks: Sequence[tuple[int, int]]) -> Pieces:
        """Return the rendered conversation `whole` in pieces that begin and end with its blocks."""
        prompts = self._prompt_lengths(messages, whole)
        borders = {0, len(whole)}
        learned: set[int] = set()  # characters that the blocks mark
        for begin, end in blocks:
            borders |= {begin, end}
            learned.update(range(begin, end))
        if not learned:
            raise ValueError("the chat template marks no text of this conversation with {% generation %}")
        found = []
        for begin, end in itertools.pairwise(sorted(borders)):
            found.append(Piece(whole[begin:end], begin in learned, True, joined=begin not in prompts))
        return tuple(found)

    def _prompt_lengths(self, messages: Messages, whole: str) -> set[int]:
        """Return the lengths of all prompts with which the rendered conversation `whole` begins."""
        found = set()
        for number, message in enumerate(messages):
            if message.role != "assistant":
                continue
            try:
                prompt = self.render(messages[:number], True)
            except EndlessTemplate:
                raise
            except ValueError:  # the template renders only whole conversations
                continue
            if whole.startswith(prompt):
                found.add(len(prompt))
        return found

    def asking(self, messages: Messages) -> Pieces:
        """Return the prompt, up to the point where the assistant's next answer begins, as one piece."""
        self._refuse_names(messages)
        return (Piece(self.render(messages, True), False, True),)

    def _refuse_names(self, messages: Messages) -> None:
        for message in messages:
            if name := self._forbidden_names.search(message.content):
                kind = "a special token" if name[0] in self._tokenizer.specials else "a token that delimits turns"
                raise ValueError(f"a message contains {name[0]}, which is {kind}")

    @functools.cached_property
    def _forbidden_names(self) -> Pattern[str]:
        """Pattern of the token names that messages must not contain.

        The forbidden tokens are the special tokens, the tokens around user and system turns, and the tokens that
        open and close an assistant turn. If several tokens open an assistant turn, only the first of these tokens is
        forbidden; the others, such as <think>, may occur in answers.
        """
        system, asked, said = (Message(role, "\u00b6said\u00b6") for role in ROLES)
        try:
            before = self.render([asked], False)
            answered = self.render([asked, said], False)
            prompt = self.render([asked], True)
        except EndlessTemplate:
            raise
        except ValueError:  # the template rejects a conversation of only two messages
            return self._marks
        around = before + answered.rpartition(said.content)[2]
        with contextlib.suppress(ValueError):  # some templates reject system messages
            around += self.render([system, asked], False)
        names = {*self._tokenizer.specials, *self._marks.findall(around)}
        opening = self._marks.search(prompt.removeprefix(before))
        if opening:
            names.add(opening[0])
        return any_of(names)

    def render(self, messages: Messages, asks: bool) -> str:
        """Return the rendered conversation; asks: end it where the assistant's next answer begins."""
        turns = [message._asdict() for message in messages]
        try:
            with limited():
                values = {"messages": turns, "add_generation_prompt": asks, **self._variables}
                return self._blocks.render(self._template, values)
        except (self._template_error, TypeError, RecursionError, ArithmeticError, MemoryError) as error:
            raise ValueError(f"the chat template cannot render the conversation: {error}") from None


def load_template(name: str, tokenizer: Tokenizer, vocab_file: str, date: str | None = None) -> Template:
    """Return the chat template `name`: `chatml`, `tokenizer` (the tokenizer's own) or the path of a Jinja file.

    date: time to render as the current time, in ISO 8601; default: now. Raises TokenizerError for a missing template.
    """
    if name == "chatml":
        return ChatML()
    if name == "tokenizer":
        source = own_template(vocab_file)
        if source is None:
            raise TokenizerError(
                f"there is no chat template next to {vocab_file}; set --chat-template to chatml or a file"
            )
    elif not Path(name).is_file():
        raise TokenizerError(f"--chat-template {name} is neither chatml, tokenizer nor an existing file")
    else:
        source = Path(name).read_text(encoding="utf-8")
    return template_from(source, tokenizer, vocab_file, date)


def template_from(source: str, tokenizer: Tokenizer, vocab_file: str, date: str | None = None) -> Template:
    """Return the template with this source, which is `chatml` or Jinja source.

    date: time to render as the current time, in ISO 8601; default: now. Raises TokenizerError for an invalid template.
    """
    now = datetime.fromisoformat(date) if date else datetime.now()
    return _template(source, tokenizer, vocab_file, now)


def template_of_corpus(about: Mapping[str, Any], tokenizer: Tokenizer, vocab_file: str) -> Template:
    """Return the chat template recorded in `about`, the sidecar (PREFIX.json) of a corpus.

    Without `chat_date` in the sidecar, `strftime_now` stays undefined. Raises TokenizerError for an invalid template.
    """
    date = about.get("chat_date")
    now = datetime.fromisoformat(date) if date else None
    source = str(about["chat_template"])
    return _template(source, tokenizer, vocab_file, now)


def is_undated(about: Mapping[str, Any]) -> bool:
    """Return whether a corpus's chat template renders a date that its sidecar `about` does not record."""
    return DATES in str(about.get("chat_template")) and not about.get("chat_date")


def _template(source: str, tokenizer: Tokenizer, vocab_file: str, now: datetime | None) -> Template:
    if source == ChatML.source:
        return ChatML()
    path = file_of(vocab_file)
    variables = {key: token for key in NAMED if (token := token_beside(path, key)) is not None}
    return JinjaTemplate(source, tokenizer, variables, now)


def own_template(vocab_file: str) -> str | None:
    """Return the source of the chat template that comes with a tokenizer, or None if there is no template."""
    path = file_of(vocab_file).with_name(TEMPLATE)
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = settings_beside(path).get("chat_template")
    if isinstance(found, list):
        named = {each["name"]: each["template"] for each in found}
        found = named.get("default")
    if isinstance(found, str):
        return found
    return None
