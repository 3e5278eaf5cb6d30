"""Encoding of user input: text to continue, a conversation to answer, or text for fill-in-the-middle.

If a prompt contains the name of a special token, the name is encoded as text unless the user gives --special-tokens. In
conversations and fill-in-the-middle, this holds for the name of every added token (`Tokenizer.marks`), so that
untrusted input cannot forge a turn or a span.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from data_utils.chat_encoder import ChatEncoder, turn_end
from data_utils.chat_templates import Message, Template
from megatron.tokenizer import SentinelTokenizer, Tokenizer


class Infill(NamedTuple):
    """The text before and after the missing part, for fill-in-the-middle."""

    prefix: str
    suffix: str


@dataclass(frozen=True)
class Conversation:
    """Messages of a conversation. The model is to answer the last message."""

    messages: tuple[Message, ...]


Prompt = str | Infill | Conversation


class Question(NamedTuple):
    """A prompt as tokens.

    end: token that ends the answer. before, after: texts to print before and after the answer. hidden: ids that are
    left out when the answer is printed.
    """

    prompt: Prompt
    tokens: list[int]
    end: int
    before: str = ""
    after: str = ""
    hidden: frozenset[int] = frozenset()


class Marks(NamedTuple):
    """Ids of the fill-in-the-middle tokens, and the order in which they are used.

    inside: whether bos, the token that begins a text, comes after the first fill-in-the-middle token instead of before
    it. spm: whether the suffix comes before the prefix.
    """

    prefix: int
    middle: int
    suffix: int
    inside: bool
    spm: bool


@dataclass(frozen=True)
class Reader:
    """Encoder of prompts for one model.

    template: chat template, None without --chat.
    marks: fill-in-the-middle tokens, None if the model has none.
    names: if True, the name of a special token in a prompt, such as `</s>`, is encoded as that token, not as text.
    continues_text: the model is a T5 trained with --objective prefix-lm, which continues text instead of filling masked
        spans.
    """

    tokenizer: Tokenizer
    template: Template | None = None
    marks: Marks | None = None
    names: bool = False
    continues_text: bool = False

    def question(self, asked: Prompt) -> Question:
        """Encode a prompt. Raises ValueError for a kind of prompt that this model does not support."""
        tokenizer = self.tokenizer
        if isinstance(tokenizer, SentinelTokenizer):
            if not isinstance(asked, str):
                raise ValueError("a T5 fills masked spans in its prompt, such as <extra_id_0>; omit the suffix")
            return _t5_question(asked, tokenizer, self.continues_text)
        if isinstance(asked, Conversation):
            return self._of_conversation(asked)
        if isinstance(asked, Infill):
            return self._of_infill(asked)
        # A prompt is encoded like corpus text. The name of an added token in it becomes this token, unless the token is
        # special; names of special tokens become tokens only if `self.names` is True.
        found = tokenizer.encode_names(asked) if self.names else tokenizer.encode(asked)
        ids = [*tokenizer.start, *found]
        return Question(asked, ids or [tokenizer.eod], tokenizer.eod, asked)

    def _of_conversation(self, asked: Conversation) -> Question:
        """Encode a conversation that ends with a message to answer.

        The answer ends with the template's end-of-turn token, or with the end-of-document token if the template has
        none. The shown answer contains no special tokens.
        """
        assert self.template is not None
        pieces = self.template.asking(asked.messages)
        tokens, _ = ChatEncoder(self.tokenizer, append_eod=False).encode(pieces)
        hidden = set(self.tokenizer.specials.values())
        end = turn_end(self.template, self.tokenizer)
        if end is None:
            end = self.tokenizer.eod
        else:
            hidden.add(end)
        return Question(asked, tokens, end, hidden=frozenset(hidden))

    def _of_infill(self, asked: Infill) -> Question:
        """Encode a prefix and a suffix as fill-in-the-middle training does."""
        assert self.marks is not None
        prefix, middle, suffix, inside, spm = self.marks
        tokenizer = self.tokenizer
        start = list(tokenizer.start)
        tail = tokenizer.encode_content(asked.suffix, inside=True)
        head = tokenizer.encode_names(asked.prefix) if self.names else tokenizer.encode_content(asked.prefix)
        if spm and inside:
            tokens = [prefix, suffix, *tail, middle, *start, *head]
        elif spm:
            tokens = [*start, prefix, suffix, *tail, middle, *head]
        elif inside:
            tokens = [prefix, *start, *head, suffix, *tail, middle]
        else:
            tokens = [*start, prefix, *head, suffix, *tail, middle]
        return Question(asked, tokens, tokenizer.eod, asked.prefix, asked.suffix)


def _t5_question(asked: str, tokenizer: SentinelTokenizer, continues: bool) -> Question:
    """Encode a text as in training: one with masked spans, or, for --objective prefix-lm, one to continue."""
    source = tokenizer.encode(asked)
    before = asked if continues else ""
    if tokenizer.convention == "t5":
        return Question(asked, [*source, tokenizer.eod], tokenizer.eod, before)
    if not source:
        needed = "a text to continue" if continues else "a text with masked spans, such as <s_0>"
        raise ValueError(f"the prompt is empty; this T5 needs {needed}")
    if continues:
        return Question(asked, source, tokenizer.sentinels[1], before)
    spans = sum(token in tokenizer.sentinels for token in source)
    if spans >= tokenizer.count:
        raise ValueError(f"the prompt has {spans} masked spans, but this model supports at most {tokenizer.count - 1}")
    return Question(asked, source, tokenizer.sentinels[spans])


def answer(tokenizer: Tokenizer, question: Question, ids: Sequence[int]) -> str:
    """Return the text of the answer's tokens `ids`, without a last character of which some bytes are still missing."""
    return _written(tokenizer, question, ids).rstrip("\ufffd")


def _written(tokenizer: Tokenizer, question: Question, ids: Sequence[int]) -> str:
    """Return the text of `ids` up to the end of the document, without hidden ids.

    After a text prompt, `ids` are decoded together with the prompt, because some tokenizers (Llama 2's) drop a leading
    space when `ids` are decoded alone.
    """
    written = itertools.takewhile(lambda i: i != tokenizer.eod, ids)
    shown = [i for i in written if i not in question.hidden]
    if not isinstance(question.prompt, str):
        return tokenizer.decode(shown)
    read = question.tokens
    if isinstance(tokenizer, SentinelTokenizer) and read[-1:] == [tokenizer.eod]:  # omit the end token
        read = read[:-1]
    known = tokenizer.decode(read)
    whole = tokenizer.decode([*read, *shown])
    return whole[len(known) :] if whole.startswith(known) else tokenizer.decode(shown)
