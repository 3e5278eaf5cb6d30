"""Encoding of user input: text to continue, a conversation to answer, or text for fill-in-the-middle.

If a prompt contains the name of a special token, the name is encoded as text unless the user gives --special-tokens. In
conversations and fill-in-the-middle, this holds for the name of every added token (`Tokenizer.marks`), so that
untrusted input cannot forge a turn or a span.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from data_utils.chat_encoder import ChatEncoder, turn_end
from data_utils.chat_messages import Message
from data_utils.chat_templates import Template
from data_utils.document_text import check_surrogates
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

    end_id: token that ends the answer. text_before, text_after: texts to print before and after the answer.
    hidden_ids: ids that are left out when the answer is printed. other_end_ids: further tokens that end the answer.
    """

    prompt: Prompt
    tokens: list[int]
    end_id: int
    text_before: str = ""
    text_after: str = ""
    hidden_ids: frozenset[int] = frozenset()
    other_end_ids: tuple[int, ...] = ()

    @property
    def end_ids(self) -> tuple[int, ...]:
        """All tokens that end the answer."""
        return self.end_id, *self.other_end_ids


class FIMTokens(NamedTuple):
    """Ids of the fill-in-the-middle tokens, and the order in which they are used.

    bos_inside: whether bos, the token that begins a text, stands directly before the prefix, after a fill-in-the-middle
    token, instead of before all of them. suffix_first: whether the suffix comes before the prefix.
    """

    prefix: int
    middle: int
    suffix: int
    bos_inside: bool
    suffix_first: bool


@dataclass(frozen=True)
class PromptEncoder:
    """Encoder of prompts for one model.

    template: chat template, None without --chat.
    fim_tokens: fill-in-the-middle tokens, None if the model has none.
    encodes_names: if True, the name of a special token in a prompt, such as `</s>`, is encoded as this token, not text.
    continues_text: the model is a T5 trained with --objective prefix-lm, which continues text instead of filling masked
        spans.
    """

    tokenizer: Tokenizer
    template: Template | None = None
    fim_tokens: FIMTokens | None = None
    encodes_names: bool = False
    continues_text: bool = False

    def question(self, prompt: Prompt) -> Question:
        """Encode a prompt. Raises ValueError for a kind of prompt that this model does not support."""
        tokenizer = self.tokenizer
        if not isinstance(prompt, Conversation):  # the messages of a conversation have been checked
            check_surrogates("".join(prompt))
        if isinstance(tokenizer, SentinelTokenizer):
            if not isinstance(prompt, str):
                raise ValueError("a T5 fills masked spans in its prompt, such as <extra_id_0>; omit the suffix")
            return _t5_question(prompt, tokenizer, self.continues_text)
        if isinstance(prompt, Conversation):
            return self._encode_conversation(prompt)
        if isinstance(prompt, Infill):
            return self._encode_infill(prompt)
        # A prompt is encoded like corpus text. The name of an added token in it becomes this token, unless the token is
        # special; names of special tokens become tokens only if `self.encodes_names` is True.
        encoded = tokenizer.encode_names(prompt) if self.encodes_names else tokenizer.encode(prompt)
        tokens = [*tokenizer.start, *encoded]
        # Without any token, the text begins like a new document, after eod.
        return Question(prompt, tokens or [tokenizer.eod], tokenizer.eod, prompt)

    def _encode_conversation(self, conversation: Conversation) -> Question:
        """Encode a conversation that ends with a message to answer.

        The answer ends with the template's end-of-turn token or with the end-of-document token. The shown answer
        contains neither special tokens nor tokens that delimit turns.
        """
        assert self.template is not None
        pieces = self.template.prompt_pieces(conversation.messages)
        tokens, _ = ChatEncoder(self.tokenizer, append_eod=False).encode(pieces)
        eod = self.tokenizer.eod
        end_id = turn_end(self.template, self.tokenizer)
        if end_id is None:
            end_id = eod
        # Hide special tokens, and added tokens that the template uses to delimit turns, such as <|im_end|>.
        hidden_ids = set(self.tokenizer.specials.values())
        for name, token in self.tokenizer.marks.items():
            if self.template.delimiters.fullmatch(name):
                hidden_ids.add(token)
        other_end_ids = () if end_id == eod else (eod,)
        return Question(conversation, tokens, end_id, hidden_ids=frozenset(hidden_ids), other_end_ids=other_end_ids)

    def _encode_infill(self, infill: Infill) -> Question:
        """Encode a prefix and a suffix as fill-in-the-middle training does."""
        assert self.fim_tokens is not None
        prefix_id, middle_id, suffix_id, bos_inside, suffix_first = self.fim_tokens
        tokenizer = self.tokenizer
        bos = list(tokenizer.start)
        # The suffix comes after a special token (inside) and continues a text, so no space is prepended (after_text).
        suffix_tokens = tokenizer.encode_content(infill.suffix, inside=True, after_text=True)
        prefix_tokens = (
            tokenizer.encode_names(infill.prefix) if self.encodes_names else tokenizer.encode_content(infill.prefix)
        )
        if bos_inside:
            prefix_tokens = [*bos, *prefix_tokens]
            bos = []
        if suffix_first:
            tokens = [*bos, prefix_id, suffix_id, *suffix_tokens, middle_id, *prefix_tokens]
        else:
            tokens = [*bos, prefix_id, *prefix_tokens, suffix_id, *suffix_tokens, middle_id]
        return Question(infill, tokens, tokenizer.eod, infill.prefix, infill.suffix)


def _t5_question(prompt: str, tokenizer: SentinelTokenizer, continues_text: bool) -> Question:
    """Encode a text as in training: one with masked spans, or, for --objective prefix-lm, one to continue."""
    source = [*tokenizer.start, *tokenizer.encode(prompt)]
    shown_before = prompt if continues_text else ""
    # In the T5 convention, prompt and answer both end with eod. In the CPM convention, the prompt has no end token, and
    # the answer ends with the sentinel after that of its last span.
    if tokenizer.convention == "t5":
        return Question(prompt, [*source, tokenizer.eod], tokenizer.eod, shown_before)
    if not source:
        needed = "a text to continue" if continues_text else "a text with masked spans, such as <s_0>"
        raise ValueError(f"the prompt is empty; this T5 needs {needed}")
    if continues_text:
        # In the CPM convention an answer ends with the next sentinel: <s_1> for one continuation, which <s_0> begins.
        return Question(prompt, source, tokenizer.sentinels[1], shown_before)
    # A prompt without masked spans counts as one with a single span: in training, the only label of such a sample is
    # the second sentinel, too.
    num_sentinels = sum(token in tokenizer.sentinels for token in source)
    spans = max(num_sentinels, 1)
    if spans >= tokenizer.count:
        raise ValueError(f"the prompt has {spans} masked spans, but this model supports at most {tokenizer.count - 1}")
    # Three spans have the sentinels 0 to 2, so the answer ends with sentinel 3.
    return Question(prompt, source, tokenizer.sentinels[spans])


def decode_answer(tokenizer: Tokenizer, question: Question, ids: Sequence[int]) -> str:
    """Return the text of the answer's tokens `ids`, without a last character of which some bytes are still missing."""
    # An incomplete character has up to 3 byte tokens, because UTF-8 uses at most 4 bytes per character. Leave these
    # tokens out: with them, some tokenizers (Llama 2's) also decode all byte tokens before them to U+FFFD.
    for num_left_out in range(4):
        text = _decode_shown(tokenizer, question, ids[: len(ids) - num_left_out])
        if not text.endswith("\ufffd"):
            break
    return text.rstrip("\ufffd")


def _decode_shown(tokenizer: Tokenizer, question: Question, ids: Sequence[int]) -> str:
    """Return the text of `ids` up to the end of the document, without hidden ids.

    `ids` are decoded together with the text before the answer, because some tokenizers (Llama 2's) drop a leading space
    when `ids` are decoded alone.
    """
    shown_ids = []
    for token in ids:
        if token == tokenizer.eod:
            break
        if token not in question.hidden_ids:
            shown_ids.append(token)
    tokens_before = tokenizer.encode_content(question.text_before)
    text_before = tokenizer.decode(tokens_before)
    full_text = tokenizer.decode([*tokens_before, *shown_ids])
    # If the answer changed the text before it, for instance by joining bytes to a character, decode it alone.
    if not full_text.startswith(text_before):
        return tokenizer.decode(shown_ids)
    return full_text[len(text_before) :]
