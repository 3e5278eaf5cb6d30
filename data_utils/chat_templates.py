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
from os.path import commonprefix
from pathlib import Path
from re import Pattern
from typing import Any, NamedTuple, Protocol

from megatron.tokenizer.base import Tokenizer, TokenizerError, any_name_pattern
from megatron.tokenizer.load import find_vocab_file
from megatron.tokenizer.sibling_files import TEMPLATE, read_tokenizer_config, special_token_names

from .chat_messages import ROLES, Message, refuse_unrendered
from .document_text import texts_in
from .jinja_sandbox import GenerationBlocks, TemplateLimitError, sandbox_environment, time_limit

DATE_FUNCTION = "strftime_now"  # function with which a Jinja template renders the current date
PLACEHOLDER = "\u00b6said\u00b6"  # content that no template has, so the rest of a rendered text is markup
BEGIN, END = "<|im_start|>", "<|im_end|>"  # ChatML's tokens around a turn


class Piece(NamedTuple):
    """Part of a rendered conversation.

    in_loss: whether the tokens of `text` count in the loss.
    is_markup: whether `text` comes from the template itself, so that names such as <|im_end|> become special tokens.
    joins_previous: whether a token may contain the end of the piece before and the beginning of this piece.
    """

    text: str
    in_loss: bool = False
    is_markup: bool = True
    joins_previous: bool = False


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

    @property
    def delimiters(self) -> Pattern[str]:
        """Pattern of the names of tokens that delimit turns."""

    def prompt_pieces(self, messages: Messages) -> Pieces:
        """Return the prompt: the conversation up to the point where the assistant's next answer begins."""


class ChatML:
    """The ChatML template: `<|im_start|>ROLE`, newline, content, `<|im_end|>`, newline."""

    source = "chatml"
    date: str | None = None
    delimiters = any_name_pattern((BEGIN, END))
    jinja = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
        "+ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )  # this template as Jinja source, for exported tokenizers

    def pieces(self, messages: Messages) -> Pieces:
        """Return the rendered conversation in pieces; the assistant's content and <|im_end|> count in the loss.

        Raises ValueError for a message with another key than role and content, unless its value is null or empty.
        """
        pieces: list[Piece] = []
        for message in messages:
            refuse_unrendered(message.further, "")
            is_assistant = message.role == "assistant"
            pieces += [Piece(f"{BEGIN}{message.role}\n"), Piece(message.content, is_assistant, is_markup=False)]
            pieces += [Piece(END, is_assistant), Piece("\n")]
        return tuple(pieces)

    def prompt_pieces(self, messages: Messages) -> Pieces:
        """Return the prompt: the conversation, then `<|im_start|>assistant`, after which the model answers."""
        return *self.pieces(messages), Piece(f"{BEGIN}assistant\n")


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
        sandbox = sandbox_environment(now, self._blocks)
        import jinja2

        self.source = source
        self._template_error = jinja2.TemplateError
        self._tokenizer = tokenizer
        self.date = now.isoformat(timespec="seconds") if now and DATE_FUNCTION in source else None
        self._variables = {"tools": None, "documents": None, **variables}
        self._marks = any_name_pattern(tokenizer.marks)
        try:
            with time_limit():
                self._template = sandbox.from_string(source)
        except (jinja2.TemplateError, TemplateLimitError, RecursionError) as error:
            raise TokenizerError(f"the chat template is invalid: {error}") from None

    @property
    def has_blocks(self) -> bool:
        """True if the template marks with `{% generation %}` what counts in the loss."""
        return self._blocks.exist

    def pieces(self, messages: Messages) -> Pieces:
        """Return the rendered conversation in pieces; without `{% generation %}`, those of the assistant count.

        Raises ValueError if a template without `{% generation %}` changes the text of earlier turns in a later turn,
        if a template with such blocks renders none of them, or renders them at unknown places, or if the template does
        not name a key of a message.
        """
        self._refuse_names(messages)
        rendered = self.render(messages)
        if self.has_blocks:
            return self._marked(messages, rendered, self._blocks.ranges_in(rendered))
        done = 0  # characters of `rendered` that are in pieces
        pieces: list[Piece] = []
        for number, message in enumerate(messages):
            if message.role != "assistant":
                continue
            with_answer = self.render(messages[: number + 1])
            # Many templates read messages[0], so they cannot render the empty conversation before a first answer.
            if number:
                prompt = self.render(messages[:number], add_generation_prompt=True)
            else:
                marked = self.render([Message("assistant", PLACEHOLDER)])
                # The message's own reasoning may replace an empty thought of the template.
                prompt = commonprefix([marked.partition(PLACEHOLDER)[0], with_answer])
            # Each of the three texts must begin with the shorter one, and the prompt with all text that is in pieces.
            keeps_text = with_answer.startswith(prompt) and rendered.startswith(with_answer) and len(prompt) >= done
            if not keeps_text:
                raise ValueError("the chat template does not allow training: a turn changes the text of earlier turns")
            answer = with_answer[len(prompt) :]
            # White space after the markup that ends the turn is not trained on. If the text without it is longer than
            # the content, it ends with such markup. Otherwise, the white space belongs to the content.
            stripped = answer.rstrip()
            if len(stripped) > len(message.content.rstrip()):
                answer = stripped
            pieces += [Piece(rendered[done : len(prompt)]), Piece(answer, in_loss=True)]
            done = len(prompt) + len(answer)
        pieces.append(Piece(rendered[done:]))
        if not rendered:
            raise ValueError("the chat template renders nothing of this conversation")
        return tuple(piece for piece in pieces if piece.text)

    def _marked(self, messages: Messages, rendered: str, blocks: Sequence[tuple[int, int]]) -> Pieces:
        """Return a rendered conversation in pieces that begin and end with its blocks."""
        prompts = self._prompt_lengths(messages, rendered)  # the places in `rendered` where a prompt ends
        edges = {0, len(rendered)}  # the places where pieces begin and end
        in_blocks: set[int] = set()  # characters that the blocks mark
        for begin, end in blocks:
            edges |= {begin, end}
            in_blocks.update(range(begin, end))
        if not in_blocks:
            raise ValueError("the chat template marks no text of this conversation with {% generation %}")
        pieces = []
        for begin, end in itertools.pairwise(sorted(edges)):
            # Every begin and end of a block is an edge, so a piece lies in a block if its first character does.
            # Generation begins where a prompt ends, so no token may lie across the end of a prompt. At any other edge,
            # a token may belong to both pieces.
            pieces.append(Piece(rendered[begin:end], begin in in_blocks, joins_previous=begin not in prompts))
        return tuple(pieces)

    def _prompt_lengths(self, messages: Messages, rendered: str) -> set[int]:
        """Return the lengths of all prompts with which a rendered conversation begins."""
        lengths = set()
        for number, message in enumerate(messages):
            if message.role != "assistant":
                continue
            try:
                prompt = self.render(messages[:number], add_generation_prompt=True)
            except TemplateLimitError:
                raise
            except ValueError:  # the template renders only whole conversations
                continue
            if rendered.startswith(prompt):
                lengths.add(len(prompt))
        return lengths

    def prompt_pieces(self, messages: Messages) -> Pieces:
        """Return the prompt, up to the point where the assistant's next answer begins.

        Earlier answers are pieces as in training, where no token lies across the end of a prompt, unless the template
        renders them otherwise in a prompt.
        """
        self._refuse_names(messages)
        rendered = self.render(messages, add_generation_prompt=True)
        trained: Pieces = ()
        with contextlib.suppress(ValueError):  # a prompt without answers, or a template that allows no training
            trained = self.pieces(messages)
        text = "".join(piece.text for piece in trained)
        if not rendered.startswith(text):
            return (Piece(rendered),)
        return *trained, Piece(rendered[len(text) :])

    def _refuse_names(self, messages: Messages) -> None:
        """Raise ValueError for a message with keys that the template ignores, or with the name of a special token."""
        for message in messages:
            refuse_unrendered(message.further, self.source)
        for text in texts_in([[message.content, message.further] for message in messages]):
            match = self.delimiters.search(text)
            if match:
                kind = "a special token" if match[0] in self._tokenizer.specials else "a token that delimits turns"
                raise ValueError(f"a message contains {match[0]}, which is {kind}")

    @functools.cached_property
    def delimiters(self) -> Pattern[str]:
        """Pattern of the token names that messages must not contain.

        The forbidden tokens are the special tokens, the tokens around user and system turns, and the tokens that
        open and close an assistant turn. If several tokens open an assistant turn, only the first of these tokens is
        forbidden; the others, such as <think>, may occur in answers.
        """
        system, question, answer = (Message(role, PLACEHOLDER) for role in ROLES)
        try:
            question_text = self.render([question])
            conversation = self.render([question, answer])
            prompt = self.render([question], add_generation_prompt=True)
        except TemplateLimitError:
            raise
        except ValueError:  # the template rejects a conversation of only two messages, so forbid every name
            return self._marks
        markup = conversation.rpartition(PLACEHOLDER)[2]  # what follows the assistant's answer
        # Add the text around the system and the user turn. Without a system turn, a template may write a default system
        # message, whose words may name tokens that delimit nothing.
        try:
            markup += self.render([system, question])
        except ValueError:  # some templates reject system messages
            markup += question_text
        names = {*self._tokenizer.specials, *self._marks.findall(markup)}
        # Of the text that add_generation_prompt adds to the question, such as "<|assistant|><think>", the first token.
        opening = self._marks.search(prompt.removeprefix(question_text))
        if opening:
            names.add(opening[0])
        return any_name_pattern(names)

    def render(self, messages: Messages, add_generation_prompt: bool = False) -> str:
        """Return the rendered conversation; add_generation_prompt: end it where the assistant's next answer begins."""
        values = {
            "messages": [message.for_template() for message in messages],
            "add_generation_prompt": add_generation_prompt,
            **self._variables,
        }
        try:
            with time_limit():
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
        source = tokenizer_template(vocab_file)
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
    return _build_template(source, tokenizer, vocab_file, date or datetime.now().isoformat())


def template_of_corpus(metadata: Mapping[str, Any], tokenizer: Tokenizer, vocab_file: str) -> Template:
    """Return the chat template recorded in `metadata`, the sidecar (PREFIX.json) of a corpus.

    Without `chat_date` in the sidecar, `strftime_now` stays undefined. Raises TokenizerError for an invalid template.
    """
    source = str(metadata["chat_template"])
    return _build_template(source, tokenizer, vocab_file, metadata.get("chat_date"))


def has_unrecorded_date(metadata: Mapping[str, Any]) -> bool:
    """Return whether a corpus's chat template renders a date that its sidecar `metadata` does not record."""
    return DATE_FUNCTION in str(metadata.get("chat_template")) and not metadata.get("chat_date")


def _build_template(source: str, tokenizer: Tokenizer, vocab_file: str, date: str | None) -> Template:
    now = datetime.fromisoformat(date) if date else None
    if source == ChatML.source:
        return ChatML()
    path = find_vocab_file(vocab_file)
    return JinjaTemplate(source, tokenizer, special_token_names(tokenizer, path), now)


def tokenizer_template(vocab_file: str) -> str | None:
    """Return the source of the chat template that comes with a tokenizer, or None if there is no template."""
    path = find_vocab_file(vocab_file).with_name(TEMPLATE)
    if path.is_file():
        return path.read_text(encoding="utf-8")
    # Older tokenizers have the template in tokenizer_config.json in the same folder.
    template = read_tokenizer_config(path).get("chat_template")
    if isinstance(template, list):
        # A tokenizer may have several templates by name, for example one for tool calls.
        named = {each["name"]: each["template"] for each in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
