#!/usr/bin/env bash
# Surprise: in transformers 5, BertTokenizer(vocab_file=...), GPT2Tokenizer(vocab_file=..., merges_file=...) and
#   T5Tokenizer(vocab_file=...) do not read the files. The arguments vanish among the keyword arguments, and the tokenizer
#   has only special tokens. There is no error and no warning, also for a path that does not exist. BERT and T5 then turn
#   every word into the unknown token, and GPT-2 turns every text into an empty list. RoBERTa, XLM-R, ALBERT and Llama do
#   the same. from_pretrained on a folder with the same files is right.
# Versions: transformers 5.24.0 (the newest release), tokenizers 0.23.3, sentencepiece 0.2.3. Date: 2026-11-28.
# Belief: the constructor loads the vocabulary, as in transformers 2 to 4, or refuses the argument.
# Source: the docstrings of the three classes in this release, which describe vocab_file and merges_file as arguments. The
#   program checks that they do.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet transformers==5.24.0 tokenizers==0.23.3 sentencepiece==0.2.3 protobuf==7.36.2
cat > "$work/program.py" <<'PY'
import json
import os
import sys

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import sentencepiece
import transformers
from transformers import BertTokenizer, GPT2Tokenizer, T5Tokenizer

TEXT = "the cat"
for folder in ("bert", "gpt2", "t5"):
    os.mkdir(folder)
with open("bert/vocab.txt", "w") as file:
    file.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat"]))
pieces = ["<|endoftext|>", "t", "h", "e", "c", "a", "Ġ", "th", "the", "at", "Ġc", "Ġcat"]
with open("gpt2/vocab.json", "w") as file:
    json.dump({piece: number for number, piece in enumerate(pieces)}, file)
with open("gpt2/merges.txt", "w") as file:
    file.write("#version: 0.2\nt h\nth e\na t\nĠ c\nĠc at\n")
sentences = [f"the cat saw {number} birds near the old house" for number in range(100)]
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(sentences), model_prefix="t5/spiece", vocab_size=60, hard_vocab_limit=False, pad_id=0,
    eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
)
cases = (
    (BertTokenizer, "bert", {"vocab_file": "vocab.txt"}),
    (GPT2Tokenizer, "gpt2", {"vocab_file": "vocab.json", "merges_file": "merges.txt"}),
    (T5Tokenizer, "t5", {"vocab_file": "spiece.model"}),
)
print("transformers", transformers.__version__, "sentencepiece", sentencepiece.__version__)
print("belief: the second row of each class is like the first, and the third row is an error")
holds = True
for kind, folder, names in cases:
    for name in names:
        holds = holds and name in kind.__doc__
    right = kind.from_pretrained(folder)
    given = kind(**{name: f"{folder}/{file}" for name, file in names.items()})
    absent = kind(**{name: f"absent/{file}" for name, file in names.items()})
    rows = {"from_pretrained": right, "constructor": given, "constructor, no such file": absent}
    for label, tokenizer in rows.items():
        tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(TEXT))
        print(f"{kind.__name__} by {label}: {len(tokenizer)} tokens in all, '{TEXT}' becomes {tokens}")
    holds = holds and len(given) == len(absent) < len(right)
    holds = holds and given.encode(TEXT) != right.encode(TEXT)
print("HOLDS: the constructors ignore their vocabulary files without a message" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
"$work/venv/bin/python" program.py
