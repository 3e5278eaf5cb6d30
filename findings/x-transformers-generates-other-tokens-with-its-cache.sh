#!/usr/bin/env bash
# Surprise: generate() of x-transformers, whose cache of keys and values is on by default, gives a Decoder with shift_tokens=1 other
#   tokens than it would choose without the cache. A model trained on sequences in which each token follows from the two before
#   it continues 100 % of them rightly with cache_kv=False, and hardly better than by chance with the default. The model and its
#   losses are right, so only the texts are bad, and there is no message. Without shift_tokens both ways agree.
# Versions: x-transformers 2.31.10 (the newest release), torch 2.13.0. Date: 2026-11-29.
# Belief: the cache saves time and changes no token under greedy decoding, or it is off for options that it does not support.
# Source: the README of x-transformers (shift_tokens, an option of Decoder; generate of AutoregressiveWrapper).
# Cause: with a cache, the layers get the newest token alone. ShiftTokens in x_transformers/x_transformers.py moves half of the
#   features from the token before, which is not in the input then, so it fills in zeros. The cache keeps no such feature, and
#   generate checks can_cache_kv of the model, which does not look at shift_tokens.
# Depends on: nothing of the machine; the shares vary by a few percent between CPUs.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 x-transformers==2.31.10 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import importlib.metadata
import sys

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

KINDS, LENGTH, PROMPT, STEPS = 11, 24, 6, 400


def sequences(count, seed):
    """Return token ids [count, LENGTH] in which each token is 3 a + 2 b modulo KINDS of the two tokens a, b before it."""
    start = torch.randint(0, KINDS, (count, 2), generator=torch.Generator().manual_seed(seed))
    columns = list(start.unbind(1))
    while len(columns) < LENGTH:
        columns.append((3 * columns[-2] + 2 * columns[-1]) % KINDS)
    return torch.stack(columns, dim=1)


def trained(options):
    torch.manual_seed(0)
    layers = Decoder(dim=64, depth=2, heads=4, attn_dim_head=16, rotary_pos_emb=True, **options)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=KINDS, max_seq_len=64, attn_layers=layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(STEPS):
        loss = model(sequences(64, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), loss.item()


print("x-transformers", importlib.metadata.version("x-transformers"), "torch", torch.__version__)
holds = True
for options in ({}, {"shift_tokens": 1}):
    model, loss = trained(options)
    right = sequences(200, 10**6)
    seen = {}
    for name, arguments in (("default", {}), ("cache_kv=False", {"cache_kv": False})):
        made = model.generate(right[:, :PROMPT], LENGTH - PROMPT, temperature=0.0, **arguments)
        seen[name] = (made == right[:, PROMPT:]).float().mean().item()
    print(f"{options or 'no option'}: loss {loss:.3f}, right tokens: default {seen['default']:.3f}, cache_kv=False {seen['cache_kv=False']:.3f}")
    holds = holds and seen["cache_kv=False"] > 0.98
    is_equal = abs(seen["default"] - seen["cache_kv=False"]) < 0.01
    holds = holds and (is_equal if not options else seen["default"] < 0.5)
print("belief: equal with and without the cache")
print("HOLDS: with shift_tokens, the default of generate() chooses other tokens" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
