#!/usr/bin/env bash
# Surprise: with the same dropout rate, tokenizers' BPE model drops fewer merges than the paper of BPE-dropout. With dropout=0.1, the rate
#   of the paper, 200 frequent words that are single tokens without dropout are cut into 1.23 to 1.24 pieces on average. The paper's
#   algorithm gives 1.54, and so does subword-nmt with the same merges. 88 % of the words stay whole instead of 72 %. A dropout of
#   0.1 acts like one of about 0.045, so published rates have less effect here. A word of three characters has the right
#   distribution, so a small test does not show the difference. There is no message.
# Versions: tokenizers 0.23.3 (the newest release), subword-nmt 0.3.8, numpy 2.4.6 (its source files are the text). Date: 2026-11-30.
# Belief: each segmentation has the probability that algorithm 1 of the paper gives it.
# Source: the documentation of tokenizers.models.BPE (dropout: the BPE dropout to use) and Provilkov et al. 2020, algorithm 1 (in each step,
#   every possible merge is dropped with probability p, and the best of the others is done; it ends when none is left).
# Cause: Word::merge_all in tokenizers/src/models/bpe/word.rs takes merges from a queue and puts the dropped ones back as soon as one is
#   not dropped. The queue still holds merges whose parts no longer exist. Such a merge does nothing, but if it is not dropped, it
#   also puts the dropped ones back, and these get another chance in the same step.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet tokenizers==0.23.3 subword-nmt==0.3.8 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import json
import random
import re
import sys
from collections import Counter
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import numpy
from subword_nmt.apply_bpe import encode
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SAMPLES = 500
END = "</w>"
random.seed(0)

files = sorted(Path(numpy.__file__).parent.glob("lib/*.py")) + sorted(Path(numpy.__file__).parent.glob("ma/*.py"))
corpus = re.findall("[a-z]{3,10}", " ".join(file.read_text(encoding="utf-8") for file in files))
trained = Tokenizer(models.BPE(end_of_word_suffix=END))
trained.pre_tokenizer = pre_tokenizers.Whitespace()
trained.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=3000, show_progress=False, end_of_word_suffix=END))
data = json.loads(trained.to_str())["model"]
merges = [tuple(pair) for pair in data["merges"]]
ranks = {pair: rank for rank, pair in enumerate(merges)}
WORDS = [word for word, _ in Counter(corpus).most_common(1000) if len(word) > 4 and len(trained.encode(word).ids) == 1][:200]


def start(word):
    return (*word[:-1], word[-1] + END)


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


def of_tokenizers(dropout):
    model = Tokenizer(models.BPE(vocab=data["vocab"], merges=merges, dropout=dropout, end_of_word_suffix=END))

    def sample(word):
        lengths = [len(model.encode(word).ids) for _ in range(SAMPLES)]
        return sum(lengths) / SAMPLES, lengths.count(1) / SAMPLES

    return of_words(sample)


def of_subword_nmt(dropout):
    def sample(word):
        lengths = [len(encode(word, ranks, {}, None, "", (0, 2), {}, None, dropout)) for _ in range(SAMPLES)]
        return sum(lengths) / SAMPLES, lengths.count(1) / SAMPLES

    return of_words(sample)


def acts_like(number):
    """Return the dropout with which the paper's algorithm gives this mean number of pieces, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if of_words(lambda word: expected(word, middle))[0] < number else (low, middle)
    return middle


print("tokenizers", version("tokenizers"), "subword-nmt", version("subword-nmt"), "-", len(WORDS), "words,", SAMPLES, "samples of each")
holds = True
for dropout in (0.1, 0.2, 0.3):
    right, right_whole = of_words(lambda word: expected(word, dropout))
    other, other_whole = of_subword_nmt(dropout)
    seen, seen_whole = of_tokenizers(dropout)
    effective = acts_like(seen)
    print(f"dropout {dropout}: pieces of a word: paper {right:.3f}, subword-nmt {other:.3f}, tokenizers {seen:.3f}; words that stay whole: "
          f"{right_whole:.3f}, {other_whole:.3f}, {seen_whole:.3f}; tokenizers acts like a dropout of {effective:.3f}")
    holds = holds and abs(other - right) < 0.03 * right and effective < 0.8 * dropout and seen_whole > right_whole + 0.05
none = of_tokenizers(None)
print("without dropout:", none)
holds = holds and none[0] == 1
small = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}, merges=[("a", "b"), ("ab", "c")], dropout=0.3))
counts = Counter(tuple(small.encode("abc").tokens) for _ in range(20000))
shares = [counts[pieces] / 20000 for pieces in (("abc",), ("ab", "c"), ("a", "b", "c"))]
print("a word of three characters, dropout 0.3:", shares, "the paper: 0.49, 0.21, 0.3")
holds = holds and all(abs(share - right) < 0.02 for share, right in zip(shares, (0.49, 0.21, 0.3)))
print("belief: tokenizers has the numbers of the paper")
print("HOLDS: the dropout of tokenizers is weaker than the paper's" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
"$work/venv/bin/python" program.py
