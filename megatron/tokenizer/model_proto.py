"""Parser for facts about a sentencepiece `.model` that the sentencepiece library does not expose, such as piece types.

The file is a protobuf message (sentencepiece_model.proto). The parser reads only the fields that this project needs,
and does not use the protobuf package.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from .base import TokenizerError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # SentencePiece.Type
ALGORITHMS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}  # TrainerSpec.ModelType
PIECES, TRAINER, NORMALIZER = 1, 2, 3  # fields of ModelProto
SCORE = 2  # field of SentencePiece
TYPE = 3  # field of SentencePiece
MODEL_TYPE = 3  # field of TrainerSpec
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types


@dataclass
class ModelFacts:
    """Facts about a sentencepiece model.

    types: the type of each piece, in the order of ids. algorithm: a value of ALGORITHMS. normalization: name of the
    normalization rule, such as `nmt_nfkc`. adds_prefix_space: True if the model prepends a space to a text.
    merges_spaces: True if the model replaces several spaces by one. charsmap: compiled table of the normalization rule.
    """

    types: list[int] = field(default_factory=list)
    algorithm: str = "unigram"
    normalization: str = ""
    adds_prefix_space: bool = True
    merges_spaces: bool = True
    charsmap: bytes = b""

    def ids_of_type(self, kind: int) -> list[int]:
        """Return the ids of all pieces of type `kind`."""
        return [i for i, piece_type in enumerate(self.types) if piece_type == kind]


def read_facts(content: bytes, name: str) -> ModelFacts:
    """Return the facts about a sentencepiece model. Raises TokenizerError if `content` is not a sentencepiece model.

    content: content of the `.model` file. name: file name, for the error message.
    """
    facts = ModelFacts()
    try:
        # A message may lack the fields that have their default value, such as the type of a normal piece.
        for number, value in _fields(content):
            if number == PIECES:
                facts.types.append(int(_fields_of(value).get(TYPE, NORMAL)))
            elif number == TRAINER:
                algorithm = _fields_of(value).get(MODEL_TYPE, 1)  # by default unigram
                facts.algorithm = ALGORITHMS.get(int(algorithm), f"type {algorithm!r}")
            elif number == NORMALIZER:
                # Fields of NormalizerSpec: 1 name, 2 precompiled_charsmap, 3 add_dummy_prefix, 4
                # remove_extra_whitespaces.
                spec = _fields_of(value)
                if 1 in spec:
                    facts.normalization = _require_message(spec[1]).decode()
                facts.charsmap = _require_message(spec.get(2, b""))
                facts.adds_prefix_space = bool(spec.get(3, facts.adds_prefix_space))
                facts.merges_spaces = bool(spec.get(4, facts.merges_spaces))
    except (IndexError, TypeError, ValueError):
        raise TokenizerError(f"{name} is not a sentencepiece model") from None
    return facts


def with_rounded_scores(content: bytes, step: float) -> bytes:
    """Return the content of a `.model` file with the scores of its pieces rounded to multiples of `step`.

    step: a power of two.
    """
    rounded = bytearray(content)
    for number, _, begin, end in _field_spans(content):
        if number != PIECES:
            continue
        # A piece is a message of its own. Its score is a float of 4 bytes, which is overwritten in place.
        for field_number, wire, offset, _ in _field_spans(content[begin:end]):
            if field_number == SCORE and wire == FIXED32:
                at = begin + offset  # the offset counts from the begin of the piece
                (score,) = struct.unpack_from("<f", rounded, at)
                struct.pack_into("<f", rounded, at, round(score / step) * step)
    return bytes(rounded)


def _require_message(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("not a message, but a number")
    return value


def _fields_of(value: int | bytes) -> dict[int, int | bytes]:
    """Return {field number: value} of the message that a field contains; of a repeated field, the last value."""
    return dict(_fields(_require_message(value)))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of each field of a protobuf message.

    Raises IndexError or ValueError for malformed bytes.
    """
    for number, wire, begin, end in _field_spans(message):
        if wire == VARINT:
            value, _ = _read_varint(message, begin)
            yield number, value
        else:
            yield number, message[begin:end]


def _field_spans(message: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield (field number, wire type, start of the value, end of the value) of each field."""
    end = 0
    while end < len(message):
        key, begin = _read_varint(message, end)
        wire = key & 7  # the lowest three bits; the others are the field number
        if wire == VARINT:
            _, end = _read_varint(message, begin)
        elif wire == BYTES:
            size, begin = _read_varint(message, begin)
            end = begin + size
        elif wire == FIXED64:
            end = begin + 8
        elif wire == FIXED32:
            end = begin + 4
        else:
            raise ValueError("unknown wire type")
        if end > len(message):
            raise ValueError("truncated")
        yield key >> 3, wire, begin, end


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the integer at `at` and the place after it.

    A byte holds 7 bits of the integer, the lowest first. Its highest bit is set if another byte follows.
    """
    value = 0
    shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at += 1
        shift += 7
        if byte < 128:
            return value, at
