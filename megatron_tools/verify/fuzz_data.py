"""Small random corpora and a tokenizer for the parity fuzzer."""

import json
import random
from pathlib import Path

import numpy as np

from data_utils.indexed_writer import IndexedDatasetBuilder
from data_utils.tokenizer_training import train_sentencepiece
from megatron.data.indexed_dataset import LOSS_SUFFIX
from megatron.tokenizer import load_tokenizer

from .fuzz_table import GROUPS_FILE

VOCAB_SIZE = 283  # odd, so that tensor-parallel ranks pad the vocabulary
FIM_TOKENS = ("<prefix>", "<middle>", "<suffix>")
# Half of the learning rate for MLPs, no weight decay for one matrix of attention, and a frozen norm.
PARAM_GROUPS = [
    {"pattern": "*.mlp.*", "lr_factor": 0.5},
    {"pattern": "*attention*weight", "weight_decay": 0},
    {"pattern": "*final_norm*", "frozen": True},
]


def write_data(folder: Path, seed: int) -> None:
    """Write tokenizer.model, the corpora a, b and c with loss masks, and groups.json into `folder`.

    Documents have 2 to 40 random tokens; in c, all documents have 2 to 6 tokens. The share of targets in the loss masks
    differs between corpora, and some documents have no target.
    """
    text_rng = random.Random(seed)
    lines = ["".join(text_rng.choices("abcdefgh ", k=200)) for _ in range(20)]
    tokenizer_path = str(folder / "tokenizer.model")
    train_sentencepiece(lines, tokenizer_path, VOCAB_SIZE, specials=FIM_TOKENS)
    eod = load_tokenizer(tokenizer_path).eod
    rng = np.random.default_rng(seed)
    for number, name in enumerate("abc"):
        max_length = 6 if name == "c" else 40
        with (
            IndexedDatasetBuilder(folder / name, np.uint16) as tokens,
            IndexedDatasetBuilder(f"{folder / name}{LOSS_SUFFIX}", np.uint8) as masks,
        ):
            # 75 documents with up to 40 tokens, or 160 with up to 6.
            for _ in range(600 // max_length + 60):
                # The corpora overlap: their ids are 10 to 222, 50 to 242 and 90 to 262. 1 to max_length - 1 tokens
                # precede eod.
                length = int(rng.integers(1, max_length))
                ids = rng.integers(10 + 40 * number, VOCAB_SIZE - 60 + 20 * number, length)
                tokens.add_document(np.append(ids, eod))
                draws = rng.random(length + 1)
                # A document draws its own share of targets: up to a third in a, two thirds in b, and all in c.
                share = rng.random() * (number + 1) / 3
                masks.add_document((draws < share).astype(np.uint8))
    (folder / GROUPS_FILE).write_text(json.dumps(PARAM_GROUPS), encoding="utf-8")
