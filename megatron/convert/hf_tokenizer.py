"""Our tokenizers as Hugging Face's `tokenizers` library has them: the same ids, in a tokenizer.json."""

import random
from typing import Any

from ..tokenizer import Tokenizer
from ..tokenizer.hf import library
from ..tokenizer.sentencepiece import MARK, SentencePieceTokenizer
from ..tokenizer.train import BYTES

_PROBES = (" a  b ", "Ａﬁ①\tx", "\n\n 1234 ", "  ", "é\u0301 文字，。")


def as_theirs(tokenizer: Tokenizer) -> Any | None:
    """A `tokenizers.Tokenizer` with the same ids, or None for one that cannot be expressed so.

    Those that cut words by jieba cannot, nor sentencepiece models that change the text first. A
    text with a literal U+2581 is the one difference that is left: theirs reads it as a space.
    """
    inner = getattr(tokenizer, "_tokenizer", None)
    if inner is not None:
        return library().Tokenizer.from_str(inner.to_str())
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return None
    found = _of_sentencepiece(tokenizer._sp, tokenizer.specials)
    if found is None or not _agree(tokenizer, found):
        return None
    for first in tokenizer.start:
        name = tokenizer._sp.id_to_piece(first)
        found.post_processor = library().processors.TemplateProcessing(
            single=f"{name} $A", special_tokens=[(name, first)]
        )
    return found


def _of_sentencepiece(sp: Any, specials: dict[str, int]) -> Any | None:
    if any(sp.normalize(text) != text.replace(" ", MARK) for text in _PROBES):
        return None
    tokenizers = library()
    pieces = [sp.id_to_piece(i) for i in range(sp.vocab_size())]
    scores = [sp.get_score(i) for i in range(sp.vocab_size())]
    bytes_ = sp.is_byte(sp.piece_to_id(BYTES[0]))
    unknown = sp.id_to_piece(sp.unk_id())
    learned = [i for i, piece in enumerate(pieces) if piece not in specials and not sp.is_byte(i)]
    # User-defined symbols are found before anything else and have the score 0 of no learned piece.
    defined = [i for i in learned if scores[i] == 0 and MARK not in pieces[i] and not pieces[i].isalnum()]
    if all(float(scores[i]).is_integer() for i in learned):
        model = _bpe(tokenizers, pieces, scores, unknown, bytes_)
    else:
        vocab = list(zip(pieces, scores, strict=True))
        model = tokenizers.models.Unigram(vocab, unk_id=sp.unk_id(), byte_fallback=bytes_)
    theirs = tokenizers.Tokenizer(model)
    theirs.normalizer = tokenizers.normalizers.Replace(" ", MARK)
    decoders = tokenizers.decoders
    theirs.decoder = decoders.Sequence([decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    theirs.add_tokens([tokenizers.AddedToken(pieces[i], normalized=False) for i in defined])
    ends = [name for name in specials if name != unknown]
    theirs.add_special_tokens([tokenizers.AddedToken(name, normalized=False, special=True) for name in ends])
    return theirs


def _bpe(tokenizers: Any, pieces: list[str], scores: list[float], unknown: str, bytes_: bool) -> Any:
    """Sentencepiece merges the neighbours whose joint piece has the best score: every way to halve a piece is a merge."""
    ids = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for piece, i in ids.items():
        halves = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        merges += [(-scores[i], pair) for pair in halves if pair[0] in ids and pair[1] in ids and piece not in BYTES]
    merges.sort(key=lambda merge: merge[0])
    return tokenizers.models.BPE(
        ids, [pair for _, pair in merges], unk_token=unknown, byte_fallback=bytes_, fuse_unk=False
    )


def _agree(ours: SentencePieceTokenizer, theirs: Any) -> bool:
    """Whether both split a few hundred texts alike, which are made of the vocabulary itself."""
    dice = random.Random(0)
    usable = [i for i in range(ours.vocab_size) if i not in ours.specials.values()]
    texts = [ours.decode(dice.choices(usable, k=30)) for _ in range(300)]
    texts = [text for text in (*texts, *_PROBES) if MARK not in text]
    return all(theirs.encode(text, add_special_tokens=False).ids == ours.encode(text) for text in texts)
