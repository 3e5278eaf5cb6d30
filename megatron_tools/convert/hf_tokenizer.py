"""Conversion of our tokenizers to the format of Hugging Face's `tokenizers` library, with the same ids."""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from data_utils.tokenizer_training import BYTES
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.base import any_name_pattern
from megatron.tokenizer.hf import import_tokenizers
from megatron.tokenizer.model_proto import BYTE, UNUSED, USER_DEFINED
from megatron.tokenizer.sentencepiece import MARK, SentencePieceTokenizer
from megatron.tokenizer.sentinels import own_sentinels

_PROBE_TEXTS = (
    " a  b ",
    "<0x41><unk>",
    "Ａﬁ①\tx",
    "\n\n 1234 ",
    "  ",
    "é\u0301 文字，。",
    "cafe\u0301 \u1112\u1161\u11ab",
)


def to_hf_tokenizer(tokenizer: Tokenizer) -> Any | None:
    """Return a `tokenizers.Tokenizer` that encodes text to the same ids as `tokenizer`, or None if there is none.

    Tokenizers that segment words with jieba cannot be converted, nor can sentencepiece models that normalise text,
    except those of mT5. One difference remains: the converted tokenizer treats the character U+2581 as a space.
    """
    # A tokenizer that we read from a tokenizer.json already wraps one of this library.
    hf_inner = getattr(tokenizer, "_tokenizer", None)
    if hf_inner is not None:
        # A copy, because an export adds tokens to it.
        return import_tokenizers().Tokenizer.from_str(hf_inner.to_str())
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return None
    if _is_mt5_model(tokenizer):
        return _from_mt5(tokenizer)
    hf_tokenizer = _from_sentencepiece(tokenizer)
    if hf_tokenizer is None:
        return None
    texts = [*sample_texts(tokenizer), *_run_texts(tokenizer)]
    if not _encodes_equally(tokenizer, hf_tokenizer, texts):
        return None
    if tokenizer.start:
        frame_texts(hf_tokenizer, tokenizer.start, [])
    return hf_tokenizer


def _from_sentencepiece(tokenizer: SentencePieceTokenizer) -> Any | None:
    """Return the same model for `tokenizers`, or None for a kind of model that it lacks."""
    sp = tokenizer._sp
    facts = tokenizer.facts
    if facts.algorithm not in ("bpe", "unigram") or facts.ids_of_type(UNUSED):
        return None
    # A model that normalises text changes at least one of these texts beyond its spaces.
    for text in _PROBE_TEXTS:
        if sp.normalize(text) != text.replace(" ", MARK):
            return None
    tokenizers = import_tokenizers()
    vocab = _scored_pieces(tokenizer)
    # Whether the model encodes unknown characters as bytes such as <0x0A>.
    byte_fallback = sp.is_byte(sp.piece_to_id(BYTES[0]))
    if facts.algorithm == "bpe":
        bpe = _bpe_model(tokenizers, vocab, sp.unk_id(), byte_fallback)
        hf_tokenizer = tokenizers.Tokenizer(bpe)
    else:
        unigram = tokenizers.models.Unigram(vocab, unk_id=sp.unk_id(), byte_fallback=byte_fallback)
        hf_tokenizer = tokenizers.Tokenizer(unigram)
        # If a text contains the characters <0x0A> or <unk>, split off "<", so that they do not become that token.
        token_like = tokenizers.Regex("<(?=(?:0x[0-9A-F]{2}|unk)>)")
        hf_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(token_like, "isolated")
    hf_tokenizer.normalizer = tokenizers.normalizers.Replace(" ", MARK)
    decoders = tokenizers.decoders
    hf_tokenizer.decoder = decoders.Sequence([decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    # Both libraries match user-defined symbols before all other pieces. A symbol with a space is found only after
    # normalisation, which replaces each space by U+2581.
    user_defined = list(map(sp.id_to_piece, facts.ids_of_type(USER_DEFINED)))
    has_space = MARK in "".join(user_defined)
    symbols = [tokenizers.AddedToken(piece, normalized=has_space) for piece in user_defined]
    hf_tokenizer.add_tokens(symbols)
    _add_specials(hf_tokenizer, tokenizer)
    return hf_tokenizer


def _scored_pieces(tokenizer: SentencePieceTokenizer) -> list[tuple[str, float]]:
    """Return (piece, score) of each id."""
    sp = tokenizer._sp
    return [(sp.id_to_piece(i), sp.get_score(i)) for i in range(sp.vocab_size())]


def _add_specials(hf_tokenizer: Any, tokenizer: SentencePieceTokenizer) -> None:
    """Add the special tokens of `tokenizer`, except the unknown token, to a tokenizer of the `tokenizers` library."""
    unknown_name = tokenizer._sp.id_to_piece(tokenizer._sp.unk_id())
    for name in tokenizer.specials:
        if name != unknown_name:
            hf_tokenizer.add_special_tokens([import_tokenizers().AddedToken(name, normalized=False, special=True)])


def _is_mt5_model(tokenizer: SentencePieceTokenizer) -> bool:
    """Return whether this is a T5 model with sentinels or bytes among its pieces, which T5Tokenizer cannot handle."""
    facts = tokenizer.facts
    sentinels = set(own_sentinels(tokenizer, "t5"))
    other_symbols = set(facts.ids_of_type(USER_DEFINED)) - sentinels
    has_special_pieces = bool(sentinels or facts.ids_of_type(BYTE))
    return has_special_pieces and not other_symbols and _is_like_t5(tokenizer)


def _from_mt5(tokenizer: SentencePieceTokenizer) -> Any | None:
    """Return the tokenizer of an mT5, whose sentinels become special tokens; None if it gives other ids."""
    sp = tokenizer._sp
    facts = tokenizer.facts
    tokenizers = import_tokenizers()
    vocab = _scored_pieces(tokenizer)
    # The library finds special tokens by name, and the piece of a sentinel may have another name than the sentinel.
    for name, i in tokenizer.specials.items():
        vocab[i] = (name, sp.get_score(i))
    unigram = tokenizers.models.Unigram(vocab, unk_id=sp.unk_id(), byte_fallback=bool(facts.ids_of_type(BYTE)))
    hf_tokenizer = tokenizers.Tokenizer(unigram)
    normalizers = tokenizers.normalizers
    decoders = tokenizers.decoders
    # Precompiled does not compose long clusters, such as decomposed Hangul, so NFC comes before it.
    one_space = normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    precompiled = normalizers.Precompiled(facts.charsmap)
    hf_tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), precompiled, normalizers.Strip(), one_space])
    hf_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(MARK, prepend_scheme="always", split=False)
    spaces = decoders.Replace(MARK, " ")
    # The last decoder strips one space at the left, that of Metaspace, and none at the right.
    strip = decoders.Strip(" ", 1, 0)
    hf_tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), strip])
    _add_specials(hf_tokenizer, tokenizer)
    frame_texts(hf_tokenizer, [], [sp.eos_id()])
    return hf_tokenizer if _encodes_equally(tokenizer, hf_tokenizer, sample_texts(tokenizer)) else None


def frame_texts(hf_tokenizer: Any, start_ids: Sequence[int], end_ids: Sequence[int]) -> None:
    """Make a tokenizer put `start_ids` before and `end_ids` after each text, as a T5's puts `</s>` after it."""
    # $A stands for the text, and $B for the second text of a pair, in the library's notation.
    name_of = hf_tokenizer.id_to_token
    end_names = [*map(name_of, end_ids)]
    single = [*map(name_of, start_ids), "$A", *end_names]
    hf_tokenizer.post_processor = import_tokenizers().processors.TemplateProcessing(
        single=single,
        pair=[*single, "$B", *end_names],
        special_tokens=[(name_of(i), i) for i in (*start_ids, *end_ids)],
    )


def is_t5_model(tokenizer: SentencePieceTokenizer) -> bool:
    """Return whether transformers' T5Tokenizer would produce the same ids as this sentencepiece model."""
    return _is_like_t5(tokenizer) and not any(tokenizer.facts.ids_of_type(kind) for kind in (USER_DEFINED, BYTE))


def _is_like_t5(tokenizer: SentencePieceTokenizer) -> bool:
    """Return whether a model normalises, segments and numbers text as a T5's does."""
    sp = tokenizer._sp
    facts = tokenizer.facts
    rules = (facts.algorithm, facts.normalization, facts.adds_prefix_space, facts.merges_spaces)
    special_ids = (sp.pad_id(), sp.eos_id(), sp.unk_id())
    if rules != ("unigram", "nmt_nfkc", True, True) or special_ids != (0, 1, 2):
        return False
    if facts.ids_of_type(UNUSED):
        return False
    # The two libraries may segment runs of one character differently (see `_run_texts`). If the source folder names
    # T5Tokenizer, this is accepted: the export then tokenizes like the source folder does in transformers.
    class_name = str(tokenizer.settings.get("tokenizer_class"))
    return class_name.startswith("T5Tokenizer") or not _longest_runs(tokenizer)


def _longest_runs(tokenizer: SentencePieceTokenizer) -> dict[str, int]:
    """Return {character: length of the longest piece that consists only of this character, such as `===`}."""
    pieces = map(tokenizer._sp.id_to_piece, range(tokenizer.vocab_size))
    runs = [piece for piece in pieces if len(piece) > 1 and len(set(piece)) == 1]
    # Longer runs come later, and replace the shorter ones of their character.
    return {run[0]: len(run) for run in sorted(runs, key=len)}


def _run_texts(tokenizer: SentencePieceTokenizer) -> Iterator[str]:
    """Yield test texts in which one character is repeated many times, such as `=====`.

    Many segmentations of such a run have equal scores, and rounding errors decide differently in each library.
    """
    for character, longest in _longest_runs(tokenizer).items():
        run = character.replace(MARK, " ")
        # Up to two longest pieces and one character more.
        for length in range(2, 2 * longest + 2):
            repeated = run * length
            yield repeated
            yield f"a {repeated} b"
            yield f"1, 2 and 3: {repeated}\n" * 3


def _bpe_model(tokenizers: Any, vocab: list[tuple[str, float]], unknown: int, byte_fallback: bool) -> Any:
    """Return a BPE model of the `tokenizers` library that merges pieces in the same order as sentencepiece.

    Sentencepiece always merges the two neighbours that together form the piece with the best score. The merges are
    therefore all splits of a piece into two pieces, sorted by the score of the whole piece.
    vocab: (piece, score) of each id. unknown: id of the unknown piece.
    """
    ids = {piece: i for i, (piece, _) in enumerate(vocab)}
    merges = []
    # The sort is stable, so pieces of equal score keep the order of their ids.
    for piece in sorted(ids, key=lambda piece: vocab[ids[piece]][1], reverse=True):
        # Sentencepiece uses the pieces of bytes only for unknown characters and never merges to them.
        if piece in BYTES:
            continue
        for cut in range(1, len(piece)):
            left = piece[:cut]
            right = piece[cut:]
            if left in ids and right in ids:
                merges.append((left, right))
    unknown_piece, _ = vocab[unknown]
    return tokenizers.models.BPE(ids, merges, unk_token=unknown_piece, byte_fallback=byte_fallback, fuse_unk=True)


def sample_texts(tokenizer: Tokenizer) -> list[str]:
    """Return test texts: 300 decoded from random tokens, and a few difficult ones.

    Texts that contain U+2581 (sentencepiece's mark for a space) or the name of a special token are left out.
    """
    rng = random.Random(0)
    plain_ids = sorted(set(range(tokenizer.vocab_size)) - set(tokenizer.marks.values()))
    texts = []
    for _ in range(300):
        ids = rng.choices(plain_ids, k=30)
        texts.append(tokenizer.decode(ids))
    texts += _PROBE_TEXTS
    special_names = any_name_pattern(tokenizer.marks)
    return [text for text in texts if MARK not in text and not special_names.search(text)]


def _encodes_equally(ours: SentencePieceTokenizer, hf_tokenizer: Any, texts: Iterable[str]) -> bool:
    """Return whether both tokenizers give the same ids for all texts."""
    return all(hf_tokenizer.encode(text, add_special_tokens=False).ids == ours.encode(text) for text in texts)
