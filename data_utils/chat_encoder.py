"""Token ids and loss masks of conversations that a chat template has rendered."""

import itertools
from collections.abc import Sequence

from megatron.tokenizer.base import Tokenizer, any_of

from .chat_templates import BEGIN, END, JinjaTemplate, Message, Piece, Template


class _Encoded:
    """Token ids and loss mask of a conversation, while it is encoded part by part."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.ids: list[int] = []
        self.counts: list[int] = []
        self._text = ""
        self._learned = bytearray()  # for each character of `_text`: 1 if it counts in the loss

    def add_token(self, token: int, counts: bool) -> None:
        """Add a token that the text names."""
        self.flush()
        self.ids.append(token)
        self.counts.append(int(counts))

    def add_text(self, text: str, counts: bool) -> None:
        """Add text, which is encoded together with the text that is added next."""
        self._text += text
        self._learned += bytes([counts]) * len(text)

    def flush(self) -> None:
        """Encode the text that was added since the last call."""
        text = self._text
        learned = self._learned
        self._text = ""
        self._learned = bytearray()
        if not text:
            return
        spans = None
        if 0 < learned.count(1) < len(text):
            spans = self._tokenizer.content_spans(text, inside=bool(self.ids))
        if spans is not None:
            for token, begin, end in spans:
                covered = learned[begin : max(end, begin + 1)]
                self.ids.append(token)
                self.counts.append(int(any(covered)))
            return
        at = 0
        for counts, characters in itertools.groupby(learned):
            end = at + len(list(characters))
            made = self._tokenizer.encode_content(text[at:end], inside=bool(self.ids))
            self.ids += made
            self.counts += [counts] * len(made)
            at = end


class ChatEncoder:
    """Encoder that turns rendered conversations into token ids and a loss mask.

    append_eod: append the token `eod`, which counts in the loss, to each conversation that ends with an assistant turn.
    """

    def __init__(self, tokenizer: Tokenizer, append_eod: bool) -> None:
        self._tokenizer = tokenizer
        self._append_eod = append_eod
        self._marks = any_of(tokenizer.marks)
        self._own = any_of(name for name in tokenizer.marks if name not in (*tokenizer.specials, BEGIN, END))

    def encode(self, pieces: Sequence[Piece]) -> tuple[list[int], list[int]]:
        """Return (token ids, loss mask).

        The text of adjacent pieces that are `joined` or have equal `counts` is encoded together. A token that lies in
        several pieces counts if one of them does.
        """
        pieces = list(pieces)
        last = pieces[-1]
        spare = last.text.isspace() and not last.counts
        if spare and len(pieces) > 1:
            last = pieces[-2]
        ends = self._append_eod and last.counts
        if ends and spare:
            del pieces[-1]
        found = _Encoded(self._tokenizer)
        learned = False
        for piece in pieces:
            if piece.counts != learned and not piece.joined:
                found.flush()
            learned = piece.counts
            self._add(found, piece)
        found.flush()
        if ends and found.ids[-1] != self._tokenizer.eod:
            found.add_token(self._tokenizer.eod, True)
        return found.ids, found.counts

    def _add(self, found: _Encoded, piece: Piece) -> None:
        """Add a piece's text and its special tokens, which alternate in `_parts`."""
        for number, part in enumerate(self._parts(piece)):
            if number % 2:
                found.add_token(self._tokenizer.marks[part], piece.counts)
            else:
                found.add_text(part, piece.counts)

    def _parts(self, piece: Piece) -> list[str]:
        """Split a piece into text (even indices) and token names (odd indices)."""
        if piece.markup:
            return self._marks.split(piece.text)
        if piece.counts:
            return self._own.split(piece.text)
        return [piece.text]


def missing_marks(template: Template, tokenizer: Tokenizer) -> list[str]:
    """Return ChatML's token names that are no tokens of the tokenizer; [] if the template is not ChatML."""
    return [name for name in (BEGIN, END) if template.source == "chatml" and name not in tokenizer.marks]


def ignores_generation_prompt(template: Template) -> bool:
    """Return whether the template ignores add_generation_prompt, so that prompts lack the assistant header."""
    question = [Message("user", "a")]
    if not isinstance(template, JinjaTemplate):
        return False
    try:
        return template.render(question, True) == template.render(question, False)
    except ValueError:  # the template rejects a question without a system prompt
        return False


def turn_end(template: Template, tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that ends an assistant's turn, or None if plain text ends the turn."""
    conversation = [Message("user", "a"), Message("assistant", "a")]
    # Blocks may leave out the token that ends the turn.
    pieces = template.turns(conversation) if isinstance(template, JinjaTemplate) else template.pieces(conversation)
    ids, counts = ChatEncoder(tokenizer, append_eod=False).encode(pieces)
    learned = [token for token, counted in zip(ids, counts, strict=True) if counted]
    last = learned[-1]
    if last in tokenizer.marks.values():
        return last
    return None
