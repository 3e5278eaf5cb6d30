"""What a user asks, as a model reads it: a text to go on with, a conversation to answer, a text with a gap to fill.

Names of special tokens in a text are text unless the user says otherwise, and in conversations and gaps those of all marks are, so that nothing
passed on from others pretends to be a turn or a gap.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..tokenizer import SentinelTokenizer, Tokenizer
from ..tokenizer.chat import ChatEncoder, Message, Template, turn_end


class Gap(NamedTuple):
    """The text before and after what is to be written."""

    prefix: str
    suffix: str


@dataclass(frozen=True)
class Conversation:
    """Turns of which the last is to be answered."""

    messages: tuple[Message, ...]


Asked = str | Gap | Conversation


class Question(NamedTuple):
    """What is asked as tokens, and the token that ends an answer.

    before, after: what stands around the answer in the text that is shown. hidden: ids that are left out of it.
    """

    prompt: Asked
    tokens: list[int]
    end: int
    before: str = ""
    after: str = ""
    hidden: frozenset[int] = frozenset()


class Marks(NamedTuple):
    """Ids that mark the pieces of a text with a gap. inside: a text begins behind the first mark, as `megatron.data.fim` has it, not before it.

    spm: the suffix comes first.
    """

    prefix: int
    middle: int
    suffix: int
    inside: bool
    spm: bool


@dataclass(frozen=True)
class Reader:
    """Turns what is asked into tokens. template: of conversations. marks: of gaps. names: those of special tokens in a text stand for these tokens.

    goes_on: a T5 that was taught to go on with a text (--objective prefix-lm), not to fill its gaps.
    """

    tokenizer: Tokenizer
    template: Template | None = None
    marks: Marks | None = None
    names: bool = False
    goes_on: bool = False

    def question(self, asked: Asked) -> Question:
        """Raises ValueError for what this model cannot be asked."""
        if isinstance(self.tokenizer, SentinelTokenizer):
            if not isinstance(asked, str):
                raise ValueError(
                    "a T5 fills the gaps that its prompt names, such as <extra_id_0>: leave the suffix out"
                )
            return _to_go_on(asked, self.tokenizer) if self.goes_on else _of_t5(asked, self.tokenizer)
        if isinstance(asked, Conversation):
            return self._of_conversation(asked)
        if isinstance(asked, Gap):
            return self._of_gap(asked)
        tokenizer = self.tokenizer
        # A text goes on as one of the corpus would, in which marks that are not special are tokens.
        found = tokenizer.encode_names(asked) if self.names else tokenizer.encode(asked)
        ids = [*tokenizer.start, *found]
        return Question(asked, ids or [tokenizer.eod], tokenizer.eod, asked)

    def _of_conversation(self, asked: Conversation) -> Question:
        """Ended by the mark that ends a turn in this template, else by the end of a document; an answer shows no special tokens."""
        assert self.template is not None
        tokens, _ = ChatEncoder(self.tokenizer, append_eod=False).encode(self.template.asking(asked.messages))
        end = turn_end(self.template, self.tokenizer)
        hidden = frozenset(self.tokenizer.specials.values()) | ({end} if end is not None else set())
        return Question(asked, tokens, self.tokenizer.eod if end is None else end, hidden=hidden)

    def _of_gap(self, asked: Gap) -> Question:
        assert self.marks is not None
        prefix, middle, suffix, inside, spm = self.marks
        tokenizer = self.tokenizer
        start, tail = list(tokenizer.start), tokenizer.encode_content(asked.suffix, inside=True)
        head = tokenizer.encode_names(asked.prefix) if self.names else tokenizer.encode_content(asked.prefix)
        first = [prefix, *start] if inside else [*start, prefix]
        tokens = [*first, *head, suffix, *tail, middle]
        if spm:
            tokens = (
                [prefix, suffix, *tail, middle, *start, *head] if inside else [*first, suffix, *tail, middle, *head]
            )
        return Question(asked, tokens, self.tokenizer.eod, asked.prefix, asked.suffix)


def _of_t5(asked: str, tokenizer: SentinelTokenizer) -> Question:
    source = tokenizer.encode(asked)
    if tokenizer.convention == "t5":
        return Question(asked, [*source, tokenizer.eod], tokenizer.eod)
    if not source:
        raise ValueError("the prompt is empty: this T5 fills gaps in a text, such as <s_0>")
    gaps = sum(token in tokenizer.sentinels for token in source)
    if gaps >= tokenizer.count:
        raise ValueError(
            f"{gaps} gaps in the prompt: the model has {tokenizer.count} sentinels, one of them to close with"
        )
    return Question(asked, source, tokenizer.sentinels[gaps])


def _to_go_on(asked: str, tokenizer: SentinelTokenizer) -> Question:
    """As `megatron.data.t5_dataset` lays out a prefix and what comes after it."""
    source = tokenizer.encode(asked)
    if tokenizer.convention == "t5":
        return Question(asked, [*source, tokenizer.eod], tokenizer.eod, asked)
    if not source:
        raise ValueError("the prompt is empty: this T5 goes on with a text")
    return Question(asked, source, tokenizer.sentinels[1], asked)


def answer(tokenizer: Tokenizer, question: Question, ids: Sequence[int]) -> str:
    """Return the text that `_written` gives, up to its last whole character: ids may end between the bytes of one."""
    return _written(tokenizer, question, ids).rstrip("\ufffd")


def _written(tokenizer: Tokenizer, question: Question, ids: Sequence[int]) -> str:
    """The text of `ids` up to the end of a document, without what is hidden. After a text it goes on as that does: alone, some tokenizers (Llama 2's) would drop the space in front."""
    written = itertools.takewhile(lambda i: i != tokenizer.eod, ids)
    shown = [i for i in written if i not in question.hidden]
    if not isinstance(question.prompt, str):
        return tokenizer.decode(shown)
    read = question.tokens
    if isinstance(tokenizer, SentinelTokenizer) and read[-1:] == [tokenizer.eod]:  # the end of what an encoder reads
        read = read[:-1]
    known, whole = tokenizer.decode(read), tokenizer.decode([*read, *shown])
    return whole[len(known) :] if whole.startswith(known) else tokenizer.decode(shown)
