"""Conversion of our tokenizers to the format of Hugging Face's `tokenizers` library, with the same ids."""

import random
from collections.abc import Iterator
from typing import Any

from data_utils.tokenizer_training import BYTES
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.base import any_of
from megatron.tokenizer.hf import library
from megatron.tokenizer.model_proto import BYTE, UNUSED, USER_DEFINED
from megatron.tokenizer.sentencepiece import MARK, SentencePieceTokenizer
from megatron.tokenizer.sentinels import own_sentinels

_PROBES = (" a  b ", "<0x41><unk>", "Ａﬁ①\tx", "\n\n 1234 ", "  ", "é\u0301 文字，。", "cafe\u0301 \u1112\u1161\u11ab")


def to_hf_tokenizer(tokenizer: Tokenizer) -> Any | None:
    """Return a `tokenizers.Tokenizer` that encodes text to the same ids as `tokenizer`, or None if there is none.

    Tokenizers that segment words with jieba cannot be converted, nor can sentencepiece models that normalise text,
    except those of mT5. One difference remains: the converted tokenizer treats the character U+2581 as a space.
    """
    inner = getattr(tokenizer, "_tokenizer", None)
    if inner is not None:
        return library().Tokenizer.from_str(inner.to_str())
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return None
    if _is_mt5_model(tokenizer):
        return _from_mt5(tokenizer)
    found = _from_sentencepiece(tokenizer)
    if found is None or not _encode_alike(tokenizer, found):
        return None
    for first in tokenizer.start:
        name = tokenizer._sp.id_to_piece(first)
        found.post_processor = library().processors.TemplateProcessing(
            single=f"{name} $A", special_tokens=[(name, first)]
        )
    return found


def _from_sentencepiece(tokenizer: SentencePieceTokenizer) -> Any | None:
    """Return the same model for `tokenizers`, or None for a kind of model that it lacks."""
    sp = tokenizer._sp
    facts = tokenizer.facts
    if facts.algorithm not in ("bpe", "unigram") or facts.of_type(UNUSED):
        return None
    for text in _PROBES:
        if sp.normalize(text) != text.replace(" ", MARK):
            return None
    tokenizers = library()
    pieces = []
    scores = []
    for i in range(sp.vocab_size()):
        pieces.append(sp.id_to_piece(i))
        scores.append(sp.get_score(i))
    bytes_ = sp.is_byte(sp.piece_to_id(BYTES[0]))
    if facts.algorithm == "bpe":
        theirs = tokenizers.Tokenizer(_bpe(tokenizers, pieces, scores, pieces[sp.unk_id()], bytes_))
    else:
        vocab = list(zip(pieces, scores, strict=True))
        theirs = tokenizers.Tokenizer(tokenizers.models.Unigram(vocab, unk_id=sp.unk_id(), byte_fallback=bytes_))
        # If a text contains the characters <0x0A> or <unk>, split off "<", so that they do not become that token.
        names = tokenizers.Regex("<(?=(?:0x[0-9A-F]{2}|unk)>)")
        theirs.pre_tokenizer = tokenizers.pre_tokenizers.Split(names, "isolated")
    theirs.normalizer = tokenizers.normalizers.Replace(" ", MARK)
    decoders = tokenizers.decoders
    theirs.decoder = decoders.Sequence([decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    # Both libraries match user-defined symbols before all other pieces. A symbol with a space is found only after
    # normalisation, which replaces each space by U+2581.
    defined = [pieces[i] for i in facts.of_type(USER_DEFINED)]
    spaced = MARK in "".join(defined)
    theirs.add_tokens([tokenizers.AddedToken(piece, normalized=spaced) for piece in defined])
    _add_specials(theirs, tokenizer)
    return theirs


def _add_specials(theirs: Any, tokenizer: SentencePieceTokenizer) -> None:
    """Add the special tokens of `tokenizer`, except the unknown token, to a tokenizer of the `tokenizers` library."""
    unknown = tokenizer._sp.id_to_piece(tokenizer._sp.unk_id())
    names = [name for name in tokenizer.specials if name != unknown]
    theirs.add_special_tokens([library().AddedToken(name, normalized=False, special=True) for name in names])


def _is_mt5_model(tokenizer: SentencePieceTokenizer) -> bool:
    """Return whether this is a T5 model with sentinels or bytes among its pieces, which T5Tokenizer cannot handle."""
    facts = tokenizer.facts
    sentinels = set(own_sentinels(tokenizer, "t5"))
    others = set(facts.of_type(USER_DEFINED)) - sentinels
    return bool(sentinels or facts.of_type(BYTE)) and not others and _is_like_t5(tokenizer)


def _from_mt5(tokenizer: SentencePieceTokenizer) -> Any | None:
    """Return the tokenizer of an mT5, whose sentinels become special tokens; None if it gives other ids."""
    sp = tokenizer._sp
    facts = tokenizer.facts
    tokenizers = library()
    vocab = [(sp.id_to_piece(i), sp.get_score(i)) for i in range(sp.vocab_size())]
    for name, i in tokenizer.specials.items():
        vocab[i] = (name, sp.get_score(i))
    unigram = tokenizers.models.Unigram(vocab, unk_id=sp.unk_id(), byte_fallback=bool(facts.of_type(BYTE)))
    theirs = tokenizers.Tokenizer(unigram)
    forms = tokenizers.normalizers
    decoders = tokenizers.decoders
    # Precompiled does not compose long clusters, such as decomposed Hangul, so NFC comes before it.
    one_space = forms.Replace(tokenizers.Regex(" {2,}"), " ")
    theirs.normalizer = forms.Sequence([forms.NFC(), forms.Precompiled(facts.charsmap), forms.Strip(), one_space])
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(MARK, prepend_scheme="always", split=False)
    spaces = decoders.Replace(MARK, " ")
    theirs.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    _add_specials(theirs, tokenizer)
    end = sp.id_to_piece(sp.eos_id())
    theirs.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, sp.eos_id())]
    )
    for text in texts_of(tokenizer):
        if theirs.encode(text, add_special_tokens=False).ids != tokenizer.encode(text):
            return None
    return theirs


def is_t5_model(tokenizer: SentencePieceTokenizer) -> bool:
    """Return whether transformers' T5Tokenizer would produce the same ids as this sentencepiece model."""
    return _is_like_t5(tokenizer) and not any(tokenizer.facts.of_type(kind) for kind in (USER_DEFINED, BYTE))


def _is_like_t5(tokenizer: SentencePieceTokenizer) -> bool:
    """Return whether a model normalises, segments and numbers text as a T5's does."""
    sp = tokenizer._sp
    facts = tokenizer.facts
    return (
        (facts.algorithm, facts.normalization, facts.prefixes, facts.squeezes) == ("unigram", "nmt_nfkc", True, True)
        and (sp.pad_id(), sp.eos_id(), sp.unk_id()) == (0, 1, 2)
        and not facts.of_type(UNUSED)
        # The two libraries may segment runs of one character differently (see `_runs`). If the source folder names
        # T5Tokenizer, this is accepted: the export then tokenizes like the source folder does in transformers.
        and (str(tokenizer.settings.get("tokenizer_class")).startswith("T5Tokenizer") or not _repeated(tokenizer))
    )


def _repeated(tokenizer: SentencePieceTokenizer) -> dict[str, int]:
    """Return {character: length of the longest piece that consists only of this character, such as `===`}."""
    pieces = (tokenizer._sp.id_to_piece(i) for i in range(tokenizer.vocab_size))
    runs = [piece for piece in pieces if len(piece) > 1 and len(set(piece)) == 1]
    return {run[0]: len(run) for run in sorted(runs, key=len)}


def _runs(tokenizer: SentencePieceTokenizer) -> Iterator[str]:
    """Yield test texts in which one character is repeated many times, such as `=====`.

    Many segmentations of such a run have equal scores, and rounding errors decide differently in each library.
    """
    for char, longest in _repeated(tokenizer).items():
        run = char.replace(MARK, " ")
        for length in range(2, 2 * longest + 2):
            yield from (run * length, f"a {run * length} b", f"1, 2 and 3: {run * length}\n" * 3)


def _bpe(tokenizers: Any, pieces: list[str], scores: list[float], unknown: str, bytes_: bool) -> Any:
    """Return a BPE model of the `tokenizers` library that merges pieces in the same order as sentencepiece.

    Sentencepiece always merges the two neighbours that together form the piece with the best score. The merges are
    therefore all splits of a piece into two pieces, sorted by the score of the whole piece.
    """
    ids = {piece: i for i, piece in enumerate(pieces)}
    by_score: dict[float, list[tuple[str, str]]] = {}
    for piece, i in ids.items():
        if piece in BYTES:
            continue
        for at in range(1, len(piece)):
            left = piece[:at]
            right = piece[at:]
            if left in ids and right in ids:
                by_score.setdefault(scores[i], []).append((left, right))
    merges = []
    for score in sorted(by_score, reverse=True):
        merges += by_score[score]
    return tokenizers.models.BPE(ids, merges, unk_token=unknown, byte_fallback=bytes_, fuse_unk=True)


def texts_of(tokenizer: Tokenizer, count: int = 300) -> list[str]:
    """Return test texts: `count` decoded from random tokens, and a few difficult ones.

    Texts that contain U+2581 (sentencepiece's mark for a space) or the name of a special token are left out.
    """
    dice = random.Random(0)
    usable = sorted(set(range(tokenizer.vocab_size)) - set(tokenizer.marks.values()))
    texts = []
    for _ in range(count):
        ids = dice.choices(usable, k=30)
        texts.append(tokenizer.decode(ids))
    texts += _PROBES
    names = any_of(tokenizer.marks)
    return [text for text in texts if MARK not in text and not names.search(text)]


def _encode_alike(ours: SentencePieceTokenizer, theirs: Any) -> bool:
    """Return whether both tokenizers give the same ids for all texts of `texts_of` and `_runs`."""
    texts = (text for text in (*texts_of(ours), *_runs(ours)) if MARK not in text)
    return all(theirs.encode(text, add_special_tokens=False).ids == ours.encode(text) for text in texts)
