#!/usr/bin/env bash
# Surprise: datasketch 2.0 changed the permutations of MinHash. MinHash objects, bare hash values and LeanMinHash of an earlier
#   release raise an error that names the remedy, scheme="legacy". A pickled MinHashLSH index does not: it loads,
#   and every query with a new MinHash returns an empty list. A deduplication that adds new documents to a stored index
#   then finds no duplicate at all, without a message.
# Versions: datasketch 1.10.0 and 2.0.0 (the newest release), numpy 2.4.6, scipy 1.17.1. Date: 2026-11-28.
# Belief: an index of an earlier release either works or raises the same error as a MinHash of that release.
# Source: release 2.0.0 guards against such mixtures. MinHash.jaccard, MinHash(hashvalues=...) and MinHashLSH.insert compare
#   the schemes and raise ValueError; an index of release 1 has no scheme, and the guard lets it pass.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
for version in 1.10.0 2.0.0; do
    python3 -m venv "$version"
    "$version/bin/pip" install --quiet "datasketch==$version" numpy==2.4.6 scipy==1.17.1
done
cat > common.py <<'PY'
from datasketch import MinHash

DOCUMENTS = 300


def sketch(document, **options):
    """Return the MinHash of a document with 50 words."""
    minhash = MinHash(num_perm=128, **options)
    for word in range(50):
        minhash.update(f"{document}-{word}".encode())
    return minhash
PY
cat > store.py <<'PY'
import pickle

from common import DOCUMENTS, sketch
from datasketch import MinHashLSH

index = MinHashLSH(threshold=0.8, num_perm=128)
for document in range(DOCUMENTS):
    index.insert(document, sketch(document))
found = sum(index.query(sketch(document)) == [document] for document in range(DOCUMENTS))
print(f"datasketch 1.10.0: the index finds {found} of {DOCUMENTS} exact duplicates")
with open("index.pickle", "wb") as file:
    pickle.dump(index, file)
with open("minhash.pickle", "wb") as file:
    pickle.dump(sketch(0), file)
PY
cat > program.py <<'PY'
import pickle
import sys
from importlib.metadata import version

from common import DOCUMENTS, sketch

print("datasketch", version("datasketch"), "reads what 1.10.0 wrote")
with open("minhash.pickle", "rb") as file:
    minhash = pickle.load(file)
try:
    print("MinHash: Jaccard similarity to itself", minhash.jaccard(sketch(0)))
    guarded = False
except ValueError as error:
    print("MinHash: ValueError:", error)
    guarded = True
with open("index.pickle", "rb") as file:
    index = pickle.load(file)
found = {}
for scheme in (None, "legacy"):
    found[scheme] = sum(index.query(sketch(document, scheme=scheme)) == [document] for document in range(DOCUMENTS))
    print(f"MinHashLSH, query with scheme={scheme}: finds {found[scheme]} of {DOCUMENTS} exact duplicates")
index.insert("new", sketch("new"))
print("MinHashLSH: an insert into the old index raises nothing")
print(f"belief: {DOCUMENTS} found, or the error of MinHash")
holds = guarded and found[None] == 0 and found["legacy"] == DOCUMENTS
print("HOLDS: the old index finds none of its own documents, without an error" if holds else "no longer so")
sys.exit(not holds)
PY
1.10.0/bin/python store.py
2.0.0/bin/python program.py
