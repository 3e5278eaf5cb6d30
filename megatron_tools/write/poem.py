"""Poems in a form: lines of equal length, as in the texts of scripts/run_poet.sh: a title, and two lines a row."""

import re

import torch
from torch import Tensor

from megatron.tokenizer import Tokenizer

from .generation import Stepper
from .questions import Question
from .writer import Writer

HAN = re.compile("[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
ANY = "x"  # in a form: any Chinese character


def form_of(lines: int, characters: int) -> str:
    """Return the form of a poem: `xxxxx，xxxxx。` for each two lines of five characters, and line breaks between."""
    line = ANY * characters
    return "\n".join([f"{line}，{line}。"] * (lines // 2))


def title_question(writer: Writer, title: str) -> Question:
    """Return the prompt for a poem under this title, at the beginning of a document. Raises ValueError without one."""
    title = " ".join(title.split())
    if not title:
        raise ValueError("the title is empty; write one, such as 春江花月夜")
    question = writer.question(f"{title}\n")
    eod = writer.tokenizer.eod
    tokens = question.tokens if question.tokens[0] == eod else [eod, *question.tokens]
    return question._replace(tokens=tokens, end=eod)


class PoemStepper:
    """Stepper that allows only tokens with which a poem keeps its form, and after the form only the end token.

    A token fits at a place of the form if each of its characters does. Characters of a line that need several tokens
    never fit. own: the model's own logits [b, v], those before the choice is limited.
    """

    def __init__(self, inner: Stepper, tokenizer: Tokenizer, form: str) -> None:
        self.inner = inner
        self.form = form
        self.end = tokenizer.eod
        self.texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
        self.places: list[int] = []
        self.allowed: dict[int, list[int]] = {}

    def first(self, batch: int) -> Tensor:
        """Start `batch` poems. Return logits [b, v], -inf for each token that does not fit."""
        logits = self.inner.first(batch)
        self.places = [0] * len(logits)
        return self._fitting(logits)

    def next(self, tokens: Tensor) -> Tensor:
        """Append a token to each poem, tokens [b], and return logits [b, v], -inf for each token that does not fit."""
        for row, token in enumerate(tokens.tolist()):
            if token != self.end:
                self.places[row] += len(self.texts[token])
        return self._fitting(self.inner.next(tokens))

    def reorder(self, rows: Tensor) -> None:
        """Set poem i to the state of poem rows[i], for every i."""
        self.places = [self.places[row] for row in rows.tolist()]
        self.inner.reorder(rows)

    def _fitting(self, logits: Tensor) -> Tensor:
        self.own = logits
        fitting = torch.full_like(logits, -torch.inf)
        for row, place in enumerate(self.places):
            ids = self._allowed_at(place)
            fitting[row, ids] = logits[row, ids]
        return fitting

    def _allowed_at(self, place: int) -> list[int]:
        """Return the tokens that fit at a place of the form."""
        if place not in self.allowed:
            fitting = [token for token, text in enumerate(self.texts) if self._fits(text, place)]
            self.allowed[place] = fitting if place < len(self.form) else [self.end]
        return self.allowed[place]

    def _fits(self, text: str, place: int) -> bool:
        there = self.form[place : place + len(text)]
        if not text or len(there) < len(text):
            return False
        for character, wanted in zip(text, there, strict=True):
            fits = HAN.fullmatch(character) if wanted == ANY else character == wanted
            if not fits:
                return False
        return True
