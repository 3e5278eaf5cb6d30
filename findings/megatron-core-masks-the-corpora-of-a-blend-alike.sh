#!/usr/bin/env bash
# Surprise: in a blend, megatron-core's T5 data set masks sample n of each corpus at the same positions. Blends of equal weights read
#   sample n of all corpora one after another, so with 16 corpora all 16 samples of a batch share one mask, in every batch, where
#   samples of one corpus have 16 masks. The noise of the gradient grows with the number of corpora, though the mean is right.
#   With other weights, a part of each batch is shared. The BERT data set has the same seeds. There is no message.
# Versions: megatron-core 0.16.1, numpy 2.4.6, torch 2.13.0. Date: 2026-11-29.
# Belief: each sample of a batch draws a mask of its own, whether its corpus is alone or in a blend.
# Source: the T5 and BERT papers (masks are drawn at random), and Megatron Core's page on its data sets (a BlendedDataset takes
#   samples of data sets by weights).
# Cause: __getitem__ in megatron/core/datasets/t5_dataset.py and bert_dataset.py seeds its generator by (random_seed + idx), where
#   idx is the number of the sample in its own corpus; nothing of the corpus enters.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 megatron-core==0.16.1 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import sys
import warnings

warnings.filterwarnings("ignore")
import megatron.core
import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
from megatron.core.datasets.utils import Split

CORPORA = 16
BATCHES = 20
SENTENCES, TOKENS = 4, 15  # of a document, which is one sample
SENTINELS = list(range(5000, 5100))


class Tokenizer:
    unique_identifiers = {"name": "numbers"}
    cls, sep, mask, pad, bos, eos = 1, 2, 3, 0, 4, 5
    additional_special_tokens_ids = SENTINELS
    inv_vocab = {number: str(number) for number in range(5100)}
    vocab_size = 5100


def write(name, documents, seed):
    """Write a corpus of random tokens."""
    builder = IndexedDatasetBuilder(f"{name}.bin", dtype=np.int32)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(documents):
        tokens = torch.randint(10, 5000, (SENTENCES * TOKENS,), dtype=torch.int32, generator=generator)
        builder.add_document(tokens, [TOKENS] * SENTENCES)
    builder.finalize(f"{name}.idx")
    return documents


CONFIG = T5MaskedWordPieceDatasetConfig(
    random_seed=1, sequence_length=SENTENCES * TOKENS + 2, sequence_length_decoder=40, split="1", path_to_cache="cache",
    tokenizer=Tokenizer(), masking_probability=0.15, short_sequence_probability=0.0, masking_max_ngram=10,
    masking_do_full_word=True, masking_do_permutation=False, masking_use_longer_ngrams=False,
    masking_use_geometric_distribution=True,
)


def open_corpus(name, documents, samples):
    return T5MaskedWordPieceDataset(
        IndexedDataset(name), name, np.arange(documents, dtype=np.int32), samples, Split.train, CONFIG
    )


def masks(data, numbers):
    """Return the number of different masks among these samples: positions of the sentinels in the encoder's input."""
    return len({tuple(np.flatnonzero(data[number]["text_enc"] >= SENTINELS[0])) for number in numbers})


print("megatron-core", megatron.core.__version__, "numpy", np.__version__, "torch", torch.__version__)
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
samples = CORPORA * BATCHES
corpora = []
for number in range(CORPORA):
    documents = write(f"corpus{number}", 60 + 3 * number, number)  # other texts, other sizes
    corpora.append(open_corpus(f"corpus{number}", documents, samples))
documents = write("alone", 600, 99)
alone = open_corpus("alone", documents, samples)
found = {"one corpus": [], "16 corpora of equal weights": [], "16 corpora, the first with weight 5": []}
equal = BlendedDataset(corpora, [1.0] * CORPORA, samples, CONFIG)
unequal = BlendedDataset(corpora, [5.0] + [1.0] * (CORPORA - 1), samples, CONFIG)
for name, data in zip(found, (alone, equal, unequal)):
    for batch in range(BATCHES):
        found[name].append(masks(data, range(batch * CORPORA, (batch + 1) * CORPORA)))
    print(f"{name}: different masks among the {CORPORA} samples of a batch: {found[name]}")
print(f"belief: about {CORPORA} in each row")
holds = min(found["one corpus"]) >= CORPORA - 1
holds = holds and set(found["16 corpora of equal weights"]) == {1}
holds = holds and max(found["16 corpora, the first with weight 5"]) < CORPORA - 4
torch.distributed.destroy_process_group()
print("HOLDS: all corpora of a blend draw the same masks" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
