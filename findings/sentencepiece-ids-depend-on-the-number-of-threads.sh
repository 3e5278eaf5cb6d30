#!/usr/bin/env bash
# Surprise: a sentencepiece unigram model that is trained on the same text with the same options gets other ids if
#   num_threads differs. Nearly all pieces stay, and more than 90 % of the texts are cut in the same way, so the two models look
#   equal. But more than half of the ids stand for another piece, and hardly any text has the same ids. The default is
#   16 threads, whatever the machine has. A BPE model does not depend on num_threads.
# Versions: sentencepiece 0.2.3 (the newest release). Date: 2026-11-28.
# Belief: num_threads changes the speed of the training and not the model; pieces are ordered by their scores.
# Source: the option's description in sentencepiece ("number of threads for training").
# Probable cause: each thread sums its share of the expected counts, so the rounding of the scores differs. Many rare pieces
#   have nearly the same score, and the ids follow the order of the scores.
# Depends on: the text. It needs many rare pieces, as Chinese text has; a text of 60 syllables with 1500 pieces showed no
#   difference. The same num_threads gives the same file each time.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet sentencepiece==0.2.3
cat > "$work/program.py" <<'PY'
import io
import random
import sys

import sentencepiece

draw = random.Random(51)
CHARACTERS = [chr(0x4E00 + number) for number in range(2500)]
WORDS = ["".join(draw.choices(CHARACTERS, k=draw.randint(1, 3))) for _ in range(20_000)]
WEIGHTS = [1 / (rank + 5) for rank in range(len(WORDS))]
TEXTS = ["".join(draw.choices(WORDS, weights=WEIGHTS, k=15)) for _ in range(4000)]


def train(kind, threads):
    """Return a model of 4500 pieces and its bytes."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=out, model_type=kind, vocab_size=4500, num_threads=threads,
        minloglevel=3,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue()), out.getvalue()


print("sentencepiece", sentencepiece.__version__)
same_ids = {}
same_text = {}
moved = {}
for kind in ("unigram", "bpe"):
    base, base_bytes = train(kind, 1)
    print(f"{kind}: two trainings with 1 thread give the same file: {train(kind, 1)[1] == base_bytes}")
    pieces = [base.id_to_piece(number) for number in range(len(base))]
    for threads in (2, 4, 16):
        other, _ = train(kind, threads)
        other_pieces = [other.id_to_piece(number) for number in range(len(other))]
        moved[kind, threads] = sum(a != b for a, b in zip(pieces, other_pieces))
        same_ids[kind, threads] = 0
        same_text[kind, threads] = 0
        for text in TEXTS[:1000]:
            same_ids[kind, threads] += base.encode(text) == other.encode(text)
            same_text[kind, threads] += base.encode(text, out_type=str) == other.encode(text, out_type=str)
        print(f"{kind}, 1 and {threads:2d} threads: {len(set(pieces) & set(other_pieces))} of {len(pieces)} pieces in both; "
              f"{moved[kind, threads]} ids stand for another piece; of 1000 texts, {same_text[kind, threads]} have the same pieces "
              f"and {same_ids[kind, threads]} the same ids")
print("belief: 0 ids stand for another piece in every row")
holds = True
for threads in (2, 4, 16):
    holds = holds and moved["bpe", threads] == 0 and same_ids["bpe", threads] == 1000
    holds = holds and moved["unigram", threads] > 100
    holds = holds and same_text["unigram", threads] > 900 and same_ids["unigram", threads] < 500
print("HOLDS: another number of threads permutes the ids of a unigram model" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
"$work/venv/bin/python" program.py
