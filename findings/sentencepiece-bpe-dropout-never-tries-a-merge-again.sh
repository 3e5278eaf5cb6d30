#!/usr/bin/env bash
# Surprise: with the same rate, sampling from a BPE model of sentencepiece drops more merges than the paper of BPE-dropout. With alpha=0.1,
#   the rate of the paper, 200 frequent words that are single pieces without sampling are cut into 1.92 pieces on average. The
#   paper's algorithm gives 1.46, and so does subword-nmt with the same pieces. 62 % of the words stay whole instead of 76 %. An alpha
#   of 0.1 acts like a dropout of 0.19, so published rates have more effect here. A comment in the source says that this
#   implementation is theoretically equivalent to the one of the paper. (tokenizers differs in the other direction.)
# Versions: sentencepiece 0.2.3 (the newest release), subword-nmt 0.3.8, numpy 2.4.6 (its source files are the text). Date: 2026-11-30.
# Belief: each segmentation has the probability that algorithm 1 of the paper gives it, with p = alpha.
# Source: README and sentencepiece_processor.h of sentencepiece (alpha: the dropout probability p of the paper) and Provilkov et al.
#   2020, algorithm 1 (in each step, every possible merge is dropped with probability p, and the best of the others is done; it ends
#   when none is left, so a merge that was dropped in one step may be done in the next).
# Cause: Model::SampleEncode in src/bpe_model.cc takes each possible merge from a queue once. A dropped merge is never put back, so it
#   cannot be done after the next merge, as the paper allows.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet sentencepiece==0.2.3 subword-nmt==0.3.8 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import io
import random
import re
import sys
from collections import Counter
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import numpy
import sentencepiece
from subword_nmt.apply_bpe import encode

SAMPLES = 500
sentencepiece.set_random_generator_seed(1)
random.seed(0)

files = sorted(Path(numpy.__file__).parent.glob("lib/*.py")) + sorted(Path(numpy.__file__).parent.glob("ma/*.py"))
corpus = re.findall("[a-z]{3,10}", " ".join(file.read_text(encoding="utf-8") for file in files))
lines = [" ".join(corpus[start : start + 50]) for start in range(0, len(corpus), 50)]
stream = io.BytesIO()
sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=stream, vocab_size=3000, model_type="bpe",
                                         minloglevel=2, num_threads=1)
model = sentencepiece.SentencePieceProcessor(model_proto=stream.getvalue())
scores = {model.id_to_piece(number): -model.get_score(number) for number in range(3, model.vocab_size())}
WORDS = [word for word, _ in Counter(corpus).most_common(1000) if len(word) > 4 and len(model.encode(word)) == 1][:200]


class Ranks(dict):
    """The rank of a pair is that of the piece that it makes."""

    def __contains__(self, pair):
        return "".join(pair) in scores

    def __getitem__(self, pair):
        return scores["".join(pair)]


ranks = Ranks()


def start(word):
    return ("\u2581", *word)


def possible(pieces):
    """Return the places where two neighbours can be merged, the best first."""
    places = [(ranks[pair], place) for place, pair in enumerate(zip(pieces, pieces[1:])) if pair in ranks]
    return [place for _, place in sorted(places)]


def expected(word, dropout):
    """Return the exact mean number of pieces of the paper's algorithm, and the probability that the word stays whole."""

    @lru_cache(maxsize=None)
    def visit(pieces):
        number = whole = 0.0
        weight = 1.0
        for place in possible(pieces):
            joined = (*pieces[:place], pieces[place] + pieces[place + 1], *pieces[place + 2:])
            below = visit(joined)
            number += weight * (1 - dropout) * below[0]
            whole += weight * (1 - dropout) * below[1]
            weight *= dropout
        return number + weight * len(pieces), whole + weight * (len(pieces) == 1)

    return visit(start(word))


def of_words(function):
    """Return the means over the words of a function that gives two numbers."""
    values = [function(word) for word in WORDS]
    return [sum(column) / len(WORDS) for column in zip(*values)]


def of_sentencepiece(dropout):
    def sample(word):
        options = {"enable_sampling": True, "alpha": dropout, "nbest_size": -1} if dropout else {}
        lengths = [len(model.encode(word, **options)) for _ in range(SAMPLES)]
        return sum(lengths) / SAMPLES, lengths.count(1) / SAMPLES

    return of_words(sample)


def of_subword_nmt(dropout):
    def sample(word):
        # version (0, 1) adds an end of the word as a piece of its own, which is cut off again
        lengths = [len(encode("\u2581" + word, ranks, {}, None, "", (0, 1), {}, None, dropout)) for _ in range(SAMPLES)]
        return sum(lengths) / SAMPLES, lengths.count(1) / SAMPLES

    return of_words(sample)


def acts_like(number):
    """Return the dropout with which the paper's algorithm gives this mean number of pieces, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if of_words(lambda word: expected(word, middle))[0] < number else (low, middle)
    return middle


print("sentencepiece", version("sentencepiece"), "subword-nmt", version("subword-nmt"), "-", len(WORDS), "words,", SAMPLES, "samples")
holds = True
for dropout in (0.1, 0.2, 0.3):
    right, right_whole = of_words(lambda word: expected(word, dropout))
    other, other_whole = of_subword_nmt(dropout)
    seen, seen_whole = of_sentencepiece(dropout)
    effective = acts_like(seen)
    print(f"alpha {dropout}: pieces of a word: paper {right:.3f}, subword-nmt {other:.3f}, sentencepiece {seen:.3f}; words that stay whole: "
          f"{right_whole:.3f}, {other_whole:.3f}, {seen_whole:.3f}; sentencepiece acts like a dropout of {effective:.3f}")
    holds = holds and abs(other - right) < 0.03 * right and effective > 1.3 * dropout and seen_whole < right_whole - 0.05
none = of_sentencepiece(None)
print("without sampling:", none)
holds = holds and none[0] == 1
print("belief: sentencepiece has the numbers of the paper")
print("HOLDS: a dropped merge never comes back in sentencepiece" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
"$work/venv/bin/python" program.py
