"""Checks of sentencepiece: its ids against searches in plain Python over the pieces and scores of the same model."""

import hashlib
import tempfile
from itertools import pairwise
from typing import Any

from data_utils.documents import read_texts
from data_utils.tokenizer_training import train_sentencepiece
from megatron.tokenizer.base import byte_piece
from megatron.tokenizer.sentencepiece import SentencePieceTokenizer, open_model
from tests.materials import SAMPLE

SPACE = "\u2581"
# SHA-256 of the pieces that release 0.2.3 learns from the first documents of the bundled corpus
PIECES = "1ce9f64a1184254542e24e10431335baa48167f1599ea28a847c7bcd7855caf1"


def documents() -> list[str]:
    """Return the first 60 documents of the bundled corpus."""
    return [text for text, _ in zip(read_texts([str(SAMPLE)]), range(60), strict=False)]


def model(kind: str) -> SentencePieceTokenizer:
    """Train a model of 1,600 pieces. kind: bpe or unigram."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/tokenizer.model"
        train_sentencepiece(documents(), path, 1600, kind)
        return SentencePieceTokenizer(path)


def lines() -> list[str]:
    """Return lines of text for both kinds of models; newlines would be tokens of their own."""
    found = [line for text in documents() for line in text.split("\n") if line]
    return [*found[:200], "  two spaces ", "a rare 𠮷 and 😀", "===" * 9, "x" * 300]


def _scores(processor: Any) -> dict[str, float]:
    """Return piece -> score of the pieces that are text."""
    ids = range(processor.vocab_size())
    plain = (i for i in ids if not (processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i)))
    return {processor.id_to_piece(i): processor.get_score(i) for i in plain}


def _as_bytes(pieces: list[str], scores: dict[str, float]) -> list[str]:
    """Replace each character without a piece by the pieces of its bytes."""
    found: list[str] = []
    for piece in pieces:
        found += [piece] if piece in scores else [byte_piece(b) for b in piece.encode()]
    return found


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """Return the pieces of BPE: merge the pair with the highest score, the first of several, until none is left."""
    pieces = list(text.replace(" ", SPACE))
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not pairs:
            return _as_bytes(pieces, scores)
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def best_score(text: str, scores: dict[str, float], unknown: float) -> float:
    """Return the largest sum of scores of a segmentation (Viterbi). unknown: score of a character without a piece."""
    given = text.replace(" ", SPACE)
    longest = max(map(len, scores))
    best = [0.0]
    for end in range(1, len(given) + 1):
        candidates = [best[end - 1] + scores.get(given[end - 1], unknown)]
        for begin in range(max(end - longest, 0), end - 1):
            if given[begin:end] in scores:
                candidates.append(best[begin] + scores[given[begin:end]])
        best.append(max(candidates))
    return best[-1]


def check_bpe() -> None:
    """Compare ids of BPE with `merged`."""
    tokenizer = model("bpe")
    scores = _scores(tokenizer._sp)
    for line in lines():
        expected = [tokenizer._sp.piece_to_id(piece) for piece in merged(line, scores)]
        if tokenizer.encode(line) != expected:
            raise AssertionError(f"other ids for {line[:40]!r}")


def check_unigram() -> None:
    """Compare the score of unigram's segmentation with `best_score`; several segmentations may have this score."""
    tokenizer = model("unigram")
    scores = _scores(tokenizer._sp)
    unknown = min(scores.values()) - 10  # kUnkPenalty of sentencepiece
    for line in lines():
        ids = tokenizer.encode(line)
        pieces = [tokenizer._sp.id_to_piece(i) for i in ids if not tokenizer._sp.is_byte(i)]
        rare = sum(char not in scores for char in line.replace(" ", SPACE))
        found = sum(scores[piece] for piece in pieces) + rare * unknown
        if tokenizer.decode(ids) != line or abs(found - best_score(line, scores, unknown)) > 1e-3:
            raise AssertionError(f"not the best segmentation of {line[:40]!r}")


def check_threads() -> None:
    """Compare ids of batches with several threads and of each line alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/tokenizer.model"
        train_sentencepiece(documents(), path, 1600)
        processor = open_model(path)
    given = lines() * 5
    alone = [processor.encode(line) for line in given]
    for threads in (1, 4):
        together = processor.encode(given, num_threads=threads, return_type="numpy")
        if [ids.tolist() for ids in together] != alone:
            raise AssertionError(f"other ids with num_threads={threads}")


def check_vocabulary() -> None:
    """Compare the pieces that are learnt from a fixed text with those of release 0.2.3."""
    processor = model("bpe")._sp
    pieces = "\n".join(processor.id_to_piece(i) for i in range(processor.vocab_size()))
    digest = hashlib.sha256(pieces.encode()).hexdigest()
    if digest != PIECES:
        raise AssertionError(f"the pieces differ from those of 0.2.3 (SHA-256 {digest[:12]})")


CHECKS = {
    "sentencepiece": {
        "ids of BPE": check_bpe,
        "ids of unigram": check_unigram,
        "ids with several threads": check_threads,
        "vocabulary from a text": check_vocabulary,
    }
}
