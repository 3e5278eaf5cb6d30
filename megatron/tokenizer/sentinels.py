"""Tokenizer with the special tokens of T5: a padding token and sentinels, which replace masked spans."""

from collections.abc import Sequence

from .base import SENTINEL, WHITE_SPACE, Tokenizer


class SentinelTokenizer(Tokenizer):
    """Tokenizer that adds a padding token and `count` sentinels to `tokenizer`.

    If `tokenizer` has sentinels, the first `count` of them are used. Otherwise the sentinels get new ids after the last
    id of `tokenizer`. In a text, `<extra_id_0>` and `<s_0>` both stand for the first sentinel.
    convention: order of new ids: descending (`t5`, as in Hugging Face) or ascending (`cpm`).
    decoder_start: id that begins the decoder's input.
    The fingerprint is that of `tokenizer`, because corpora contain no sentinels.
    Raises ValueError if `tokenizer` has sentinels, but fewer than `count`.
    """

    def __init__(self, tokenizer: Tokenizer, count: int, convention: str) -> None:
        self.base = tokenizer
        self.count = count
        self.convention = convention
        self.name = tokenizer.name
        self.fingerprint = tokenizer.fingerprint
        self.contradiction = tokenizer.contradiction
        self.eod = tokenizer.eod
        self.start = tokenizer.start
        self._prefix = "extra_id_" if convention == "t5" else "s_"
        # Without a padding token in `tokenizer`, padding gets the first new id, and sentinels the following ones.
        self.pad = tokenizer.specials.get("<pad>", tokenizer.vocab_size)
        size = max(tokenizer.vocab_size, self.pad + 1)
        own_ids = own_sentinels(tokenizer, convention)
        if own_ids:
            if len(own_ids) < count:
                raise ValueError(
                    f"the tokenizer has only {len(own_ids)} sentinels; set --num-sentinels to at most {len(own_ids)}"
                )
            self.sentinels = own_ids[:count]
        else:
            new_ids = list(range(size, size + count))
            size += count
            if convention == "t5":
                new_ids.reverse()
            self.sentinels = tuple(new_ids)
        self.vocab_size = size
        self.specials = {**tokenizer.specials, "<pad>": self.pad}
        self.decoder_start = self.pad if convention == "t5" else self.sentinels[0]
        self._number = {id_: i for i, id_ in enumerate(self.sentinels)}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text that may contain sentinels.

        Raises ValueError if the number of a sentinel is not below `count`.
        """
        ids = []
        start = 0  # of the text after the previous sentinel
        for mark in SENTINEL.finditer(text):
            number = int(mark[1])
            if number >= self.count:
                raise ValueError(f"the text contains {mark[0]}, but the model has only sentinels 0 to {self.count - 1}")
            sentinel = self.sentinels[number]
            end = mark.start()  # of the text before this sentinel
            # Some sentinels absorb the white space before or after them, so it belongs to no text.
            if sentinel in self.base.lstrip_ids:
                end = len(text[:end].rstrip(WHITE_SPACE))
            ids += self._encode_between(text, start, end)
            ids.append(sentinel)
            start = mark.end()
            if sentinel in self.base.rstrip_ids:
                start = len(text) - len(text[start:].lstrip(WHITE_SPACE))
        return ids + self._encode_between(text, start, len(text))

    def _encode_between(self, text: str, begin: int, end: int) -> list[int]:
        if begin == end:
            return []
        # Only the text before the first sentinel starts a document.
        return self.base.encode_inside(text[begin:end]) if begin else self.base.encode(text[:end])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, with sentinels by name and without padding and ids beyond the vocabulary."""
        parts = []
        text_ids: list[int] = []  # ids of the base tokenizer since the last sentinel
        for id_ in map(int, ids):
            if id_ == self.pad or id_ in self._number:
                parts.append(self._decode_text(text_ids))
                text_ids = []
                if id_ in self._number:
                    parts.append(f"<{self._prefix}{self._number[id_]}>")
            elif id_ < self.base.vocab_size:
                text_ids.append(id_)
        return "".join([*parts, self._decode_text(text_ids)])

    def _decode_text(self, text_ids: list[int]) -> str:
        return self.base.decode(text_ids) if text_ids else ""


def own_sentinels(tokenizer: Tokenizer, convention: str) -> tuple[int, ...]:
    """Return the ids of the sentinels that a tokenizer defines by name, like the tokenizers of T5 and CPM-2.

    The names are `<extra_id_0>`, `<extra_id_1>`, ... for convention `t5`, and `<s_0>`, `<s_1>`, ... otherwise.
    """
    prefix = "<extra_id_" if convention == "t5" else "<s_"
    ids: list[int] = []
    while f"{prefix}{len(ids)}>" in tokenizer.specials:
        ids.append(tokenizer.specials[f"{prefix}{len(ids)}>"])
    return tuple(ids)
