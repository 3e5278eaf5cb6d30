"""Token ids and loss masks of conversations that a chat template has rendered."""

import itertools
from collections.abc import Sequence

from megatron.tokenizer.base import WHITE_SPACE, Tokenizer, any_name_pattern

from .chat_messages import Message
from .chat_templates import BEGIN, END, PLACEHOLDER, JinjaTemplate, Piece, Template


class _TokenBuffer:
    """Token ids and loss mask of a conversation, while it is encoded part by part."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.ids: list[int] = []
        self.loss_mask: list[int] = []
        self._text = ""
        self._in_loss = bytearray()  # for each character of `_text`: 1 if it counts in the loss
        self._cuts: list[int] = []  # places in `_text` that no token may lie across
        self._follows_text = False  # whether the last of `ids` is a token of text

    def add_token(self, token: int, in_loss: bool) -> None:
        """Add a special token after the text so far. It counts in the loss if white space that it absorbs does."""
        # A token with `lstrip`, as in Hugging Face tokenizers, absorbs the white space at the end of the text.
        if token in self._tokenizer.lstrip_ids:
            self._text = self._text.rstrip(WHITE_SPACE)
            end = len(self._text)
            in_loss = in_loss or any(self._in_loss[end:])
            del self._in_loss[end:]
        self.flush()  # the ids of the text precede this token
        self.ids.append(token)
        self.loss_mask.append(int(in_loss))
        self._follows_text = False

    def add_text(self, text: str, in_loss: bool) -> None:
        """Add text, which is encoded together with the text that is added next."""
        # The last id is a special token, and no text waits to be encoded after it.
        follows_token = self.ids and not self._text and not self._follows_text
        # A token with `rstrip`, as in Hugging Face tokenizers, absorbs the white space at the beginning of the text. It
        # then counts in the loss if this white space does.
        if follows_token and self.ids[-1] in self._tokenizer.rstrip_ids:
            rest = text.lstrip(WHITE_SPACE)
            if in_loss and rest != text:
                self.loss_mask[-1] = 1
            text = rest
        self._text += text
        self._in_loss += bytes([in_loss]) * len(text)  # a byte, 0 or 1, for each character

    def cut(self) -> None:
        """Encode the text before this place and the text after it separately."""
        self._cuts.append(len(self._text))

    def flush(self) -> None:
        """Encode the text that was added since the last call."""
        edges = [0, *self._cuts, len(self._text)]
        for begin, end in itertools.pairwise(edges):
            text = self._text[begin:end]
            if text:
                self._encode(text, self._in_loss[begin:end])
        self._text = ""
        self._in_loss = bytearray()
        self._cuts = []

    def _encode(self, text: str, in_loss: bytearray) -> None:
        """Append the ids of a text, and for each id whether it counts in the loss.

        in_loss: 1 for each character that counts, else 0.
        """
        # Only if a part of the text counts, the places of its tokens are needed. Some tokenizers know no places (None).
        spans = None
        counts_in_part = 0 < in_loss.count(1) < len(text)
        if counts_in_part:
            spans = self._tokenizer.content_spans(text, bool(self.ids), self._follows_text)
        if spans is not None:
            self._follows_text = True
            for token, begin, end in spans:
                # A token without characters of its own, such as a byte of a character, counts as the one at `begin`.
                covered = in_loss[begin : max(end, begin + 1)]
                self.ids.append(token)
                self.loss_mask.append(int(any(covered)))
            return
        # Without places, each run of characters that count, or do not count, is encoded alone: with in_loss 0 0 1 1 1,
        # the runs are text[0:2] and text[2:5].
        start = 0
        for counted, characters in itertools.groupby(in_loss):
            end = start + len(list(characters))
            ids = self._tokenizer.encode_content(text[start:end], bool(self.ids), self._follows_text)
            self._follows_text = True
            self.ids += ids
            self.loss_mask += [counted] * len(ids)
            start = end


class ChatEncoder:
    """Encoder that turns rendered conversations into token ids and a loss mask.

    append_eod: append the token `eod`, which counts in the loss, to each conversation that ends with an assistant turn.
    """

    def __init__(self, tokenizer: Tokenizer, append_eod: bool) -> None:
        self._tokenizer = tokenizer
        self._append_eod = append_eod
        self._markup_names = any_name_pattern(tokenizer.marks)
        delimiters = (*tokenizer.specials, BEGIN, END)
        self._answer_names = any_name_pattern(name for name in tokenizer.marks if name not in delimiters)

    def encode(self, pieces: Sequence[Piece]) -> tuple[list[int], list[int]]:
        """Return (token ids, loss mask).

        The text of a piece is encoded together with that of the piece before if it `joins_previous` or has the same
        `in_loss`. A token that lies in several pieces counts if one of them does.
        """
        pieces = list(pieces)
        # Only a conversation that ends with an answer gets the token `eod`. ChatML ends an answer with the pieces "Hi",
        # "<|im_end|>" and "\n", of which only the newline is not in the loss. So the piece before a final newline shows
        # whether the last turn is an answer.
        last_piece = pieces[-1]
        has_final_space = last_piece.text.isspace() and not last_piece.in_loss
        if has_final_space and len(pieces) > 1:
            last_piece = pieces[-2]
        needs_eod = self._append_eod and last_piece.in_loss
        # The token `eod` takes the place of the newline: "Hi", "<|im_end|>", eod.
        if needs_eod and has_final_space:
            del pieces[-1]
        buffer = _TokenBuffer(self._tokenizer)
        previous_in_loss = False
        for piece in pieces:
            if piece.in_loss != previous_in_loss and not piece.joins_previous:
                buffer.cut()
            previous_in_loss = piece.in_loss
            self._add(buffer, piece)
        buffer.flush()
        # The markup that ends an answer may be the token `eod` itself, as </s> in Llama 2.
        if needs_eod and buffer.ids[-1] != self._tokenizer.eod:
            buffer.add_token(self._tokenizer.eod, in_loss=True)
        return buffer.ids, buffer.loss_mask

    def _add(self, buffer: _TokenBuffer, piece: Piece) -> None:
        """Add a piece's text and the special tokens that it names."""
        parts = [piece.text]
        if piece.is_markup:
            parts = self._markup_names.split(piece.text)
        elif piece.in_loss:
            parts = self._answer_names.split(piece.text)
        for index, part in enumerate(parts):
            if index % 2:  # names of tokens stand between the texts
                buffer.add_token(self._tokenizer.marks[part], piece.in_loss)
            else:
                buffer.add_text(part, piece.in_loss)


def missing_chatml_tokens(template: Template, tokenizer: Tokenizer) -> list[str]:
    """Return ChatML's token names that are no tokens of the tokenizer; [] if the template is not ChatML."""
    return [name for name in (BEGIN, END) if template.source == "chatml" and name not in tokenizer.marks]


def ignores_generation_prompt(template: Template) -> bool:
    """Return whether the template ignores add_generation_prompt, so that prompts lack the assistant header.

    Templates without such a header, or with the header in the user's turn, have nothing to add to a prompt.
    """
    if not isinstance(template, JinjaTemplate):  # ChatML adds the header
        return False
    question = Message("user", "a")
    try:
        prompt = template.render([question], add_generation_prompt=True)
        if prompt != template.render([question]):  # the template adds something for add_generation_prompt
            return False
        conversation = template.render([question, Message("assistant", PLACEHOLDER)])
    except ValueError:  # the template rejects a question without a system prompt
        return False
    # If the prompt is "<user>a" and the conversation "<user>a<bot>PLACEHOLDER", the prompt lacks the header "<bot>".
    before_answer = conversation.partition(PLACEHOLDER)[0]
    header = before_answer.removeprefix(prompt)
    return bool(header.strip())


def turn_end(template: Template, tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that ends an assistant's turn, or None if plain text ends the turn.

    If several tokens follow an answer, as in Phi-3, the first of them ends the turn, and the others the conversation.
    """
    markup_after_answer = END
    if isinstance(template, JinjaTemplate):
        conversation = [Message("user", "a"), Message("assistant", PLACEHOLDER)]
        try:
            text = template.render(conversation)
        except ValueError:  # some templates need a system message
            text = template.render([Message("system", "a"), *conversation])
        markup_after_answer = text.rpartition(PLACEHOLDER)[2]
    # match() looks only at the beginning, so text in front of a token counts as the end of the turn.
    match = any_name_pattern(tokenizer.marks).match(markup_after_answer.lstrip())
    return tokenizer.marks[match[0]] if match else None
