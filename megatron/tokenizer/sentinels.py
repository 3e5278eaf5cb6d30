"""A tokenizer with the special tokens of T5 behind its own: padding, and a sentinel for each masked span."""

import re
from collections.abc import Sequence

from .base import Tokenizer

MARK = re.compile(r"<(?:extra_id_|s_)(\d+)>")


class SentinelTokenizer(Tokenizer):
    """`tokenizer`'s ids, then one for padding, then `count` sentinels.

    convention `t5`: the first sentinel has the last id and they descend, as in Hugging Face;
    `cpm`: they ascend. In text they are `<extra_id_0>` or `<s_0>`, and either is understood. The
    fingerprint is that of the tokenizer: corpora hold none of these ids.
    """

    def __init__(self, tokenizer: Tokenizer, count: int, convention: str) -> None:
        self.base, self.count, self.convention = tokenizer, count, convention
        self.name, self.fingerprint, self.eod = tokenizer.name, tokenizer.fingerprint, tokenizer.eod
        self.pad = tokenizer.vocab_size
        self.vocab_size = tokenizer.vocab_size + 1 + count
        ids = range(self.pad + 1, self.vocab_size)
        self.sentinels = tuple(reversed(ids)) if convention == "t5" else tuple(ids)  # of span 0, 1, ...
        self.specials = {**tokenizer.specials, "<pad>": self.pad}
        self._number = {id_: i for i, id_ in enumerate(self.sentinels)}

    def encode(self, text: str) -> list[int]:
        """Raises ValueError for a sentinel that there is not."""
        ids: list[int] = []
        at = 0
        for mark in MARK.finditer(text):
            number = int(mark[1])
            if number >= self.count:
                raise ValueError(f"{mark[0]} in the text: the model has {self.count} sentinels, 0 to {self.count - 1}")
            ids += self.base.encode(text[at : mark.start()]) if mark.start() > at else []
            ids.append(self.sentinels[number])
            at = mark.end()
        return ids + (self.base.encode(text[at:]) if at < len(text) else [])

    def decode(self, ids: Sequence[int]) -> str:
        """Text with sentinels in it; padding is left out."""
        name = "extra_id_" if self.convention == "t5" else "s_"
        parts: list[str] = []
        run: list[int] = []
        for id_ in [*map(int, ids), self.pad]:
            if id_ < self.pad:
                run.append(id_)
                continue
            parts += [self.base.decode(run)] if run else []
            parts += [f"<{name}{self._number[id_]}>"] if id_ in self._number else []
            run = []
        return "".join(parts)
