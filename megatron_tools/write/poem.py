"""Poems in a form: lines of equal length, as in the texts of scripts/run_poet.sh: a title, and two lines a row."""

import re
from functools import cache

import torch
from torch import Tensor

from megatron.tokenizer import Tokenizer

from .generation import Stepper
from .questions import Question
from .writer import Writer

CHINESE_CHARACTER = re.compile("[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
ANY_CHARACTER = "x"  # in a form: any Chinese character


def form_of(lines: int, characters: int) -> str:
    """Return the form of a poem: `xxxxx，xxxxx。` for each two lines of five characters, and line breaks between."""
    line = ANY_CHARACTER * characters
    return "\n".join([f"{line}，{line}。"] * (lines // 2))


def title_question(writer: Writer, title: str) -> Question:
    """Return the prompt for a poem under this title, at the beginning of a document. Raises ValueError without one."""
    title = " ".join(title.split())
    if not title:
        raise ValueError("the title is empty; write one, such as 春江花月夜")
    question = writer.question(f"{title}\n")
    eod = writer.tokenizer.eod
    # In training, a poem follows the end of another document.
    tokens = question.tokens if question.tokens[0] == eod else [eod, *question.tokens]
    return question._replace(tokens=tokens, end_id=eod)


class PoemStepper:
    """Stepper that allows only tokens with which a poem keeps its form, and after the form only the end token.

    A token fits at a place of the form if each of its characters does. Characters of a line that need several tokens
    never fit. model_logits: the model's own logits [b, v], those before the choice is limited.
    """

    def __init__(self, inner: Stepper, tokenizer: Tokenizer, form: str) -> None:
        self.inner = inner
        self.form = form
        self.end_id = tokenizer.eod
        self.token_texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
        self.positions: list[int] = []
        self.allowed_at = cache(self._tokens_fitting_at)  # which tokens fit at a place is computed once

    def first(self, batch: int) -> Tensor:
        """Start `batch` poems. Return logits [b, v], -inf for each token that does not fit."""
        logits = self.inner.first(batch)
        self.positions = [0] * len(logits)
        return self._fitting(logits)

    def next(self, tokens: Tensor) -> Tensor:
        """Append a token to each poem, tokens [b], and return logits [b, v], -inf for each token that does not fit."""
        for row, token in enumerate(tokens.tolist()):
            if token != self.end_id:
                self.positions[row] += len(self.token_texts[token])
        return self._fitting(self.inner.next(tokens))

    def reorder(self, rows: Tensor) -> None:
        """Set poem i to the state of poem rows[i], for every i."""
        self.positions = [self.positions[row] for row in rows.tolist()]
        self.inner.reorder(rows)

    def _fitting(self, logits: Tensor) -> Tensor:
        self.model_logits = logits
        fitting = torch.full_like(logits, -torch.inf)
        for row, position in enumerate(self.positions):
            ids = self.allowed_at(position)
            if not ids:
                raise ValueError("the tokenizer has no token that fits the form of the poem")
            fitting[row, ids] = logits[row, ids]
        return fitting

    def _tokens_fitting_at(self, position: int) -> list[int]:
        """Return the tokens that fit at a place of the form."""
        if position >= len(self.form):
            return [self.end_id]
        return [token for token, text in enumerate(self.token_texts) if self._fits(text, position)]

    def _fits(self, text: str, position: int) -> bool:
        """Return whether the form allows each character of a token's text, the first of them at `position`."""
        form_part = self.form[position : position + len(text)]
        # The token has no text, or is longer than the rest of the form.
        if not text or len(form_part) < len(text):
            return False
        for character, expected in zip(text, form_part, strict=True):
            if expected == ANY_CHARACTER:
                if not CHINESE_CHARACTER.fullmatch(character):
                    return False
            elif character != expected:
                return False
        return True
