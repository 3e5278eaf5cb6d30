#!/usr/bin/env bash
# Surprise: jieba cuts a text at every character outside U+4E00 to U+9FD5, Latin letters, digits and a few signs, before it
#   looks at its dictionary. The round zero 〇 (U+3007) and all characters of the CJK extensions lie outside. So the year
#   二〇二六年 becomes four words, and add_word("二〇二六年") changes nothing, whatever frequency it is given. A name
#   with a rare character such as 䶮 stays in pieces as well. The same words with 零 or with a common character work.
#   rjieba, the port to Rust, cuts in the same way.
# Versions: jieba 0.42.1 and rjieba 0.2.2 (the newest releases). Date: 2026-11-28.
# Belief: a word of the user's dictionary with a large frequency is always found, and HMM joins unknown numerals.
# Source: jieba's README on add_word and suggest_freq (a user's words take effect) and on HMM (finds new words); Unicode
#   gives 〇 and the extensions the script Han.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet jieba==0.42.1 rjieba==0.2.2 setuptools==80.9.0
cat > "$work/program.py" <<'PY'
import sys
import warnings
from importlib.metadata import version

warnings.filterwarnings("ignore")
import jieba
import rjieba

jieba.setLogLevel(60)
jieba.dt.tmp_dir = sys.path[0]
# Each pair has a word with a character outside jieba's range, and the same word with a character inside it.
PAIRS = (("二〇二六年", "二零二六年"), ("三〇一医院", "三零一医院"), ("䶮城", "龙城"), ("𠮷野家", "吉野家"))

print("jieba", version("jieba"), "rjieba", version("rjieba"))
print("before add_word, with HMM:   ", jieba.lcut("二〇二六年"), jieba.lcut("二零二六年"))
print("before add_word, without HMM:", jieba.lcut("二〇二六年", HMM=False), jieba.lcut("二零二六年", HMM=False))
print("rjieba:                      ", list(rjieba.cut("二〇二六年")), list(rjieba.cut("二零二六年")))
holds = jieba.lcut("二〇二六年") == ["二", "〇", "二", "六年"] == list(rjieba.cut("二〇二六年"))
holds = holds and len(jieba.lcut("二零二六年")) == 2
for outside, inside in PAIRS:
    for word in (outside, inside):
        jieba.add_word(word, freq=10_000_000)
        in_text = jieba.lcut(f"他在{word}等你")
        print(f"after add_word({word!r}): {in_text}")
        found = word in in_text
        holds = holds and found == (word == inside)
print("belief: every word that was added is one word; seen: only those without 〇 and rare characters are")
print("HOLDS: add_word has no effect on words with 〇, 䶮 or 𠮷" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
PYTHONUTF8=1 "$work/venv/bin/python" program.py
