"""Read megatron-core's datasets in a separate process, because its package is named `megatron` like this project's.

Run as `_core_reader.py gpt|t5 PREFIX SEQ VOCAB`. For each number n on stdin, the process reads n samples and prints
the CPU-seconds that it spent.
"""

import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() not in (ROOT, ROOT / "benchmarks")]

import os  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402

import numpy as np  # noqa: E402


def gpt(prefix: str, seq: int, vocab: int):  # type: ignore[no-untyped-def]
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=1, sequence_length=seq, split="1", path_to_cache=tempfile.mkdtemp(), reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        tokenizer=SimpleNamespace(eod=1, pad=0, vocab_size=vocab, unique_identifiers=OrderedDict(name="none")),
    )  # fmt: skip
    indexed = GPTDataset.build_low_level_dataset(prefix, config)
    documents = np.arange(indexed.document_indices.shape[0] - 1, dtype=np.int32)
    return GPTDataset(indexed, prefix, documents, None, Split.train, config)


def t5(prefix: str, seq: int, vocab: int):  # type: ignore[no-untyped-def]
    """Return megatron-core's T5 dataset; Python, not megatron-core's compiled helper, builds its sample index."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset

    dataset = object.__new__(T5MaskedWordPieceDataset)
    dataset.dataset = IndexedDataset(prefix)
    inverse = {i: f"t{i}" for i in range(vocab)}
    dataset.token_lookup = list(inverse)
    dataset._pad_token_id = 0
    dataset.config = SimpleNamespace(
        sequence_length=seq, sequence_length_encoder=seq, sequence_length_decoder=seq, random_seed=1,
        masking_probability=0.15, masking_max_ngram=10, masking_do_full_word=True, masking_do_permutation=False,
        masking_use_longer_ngrams=False, masking_use_geometric_distribution=True,
        tokenizer=SimpleNamespace(
            additional_special_tokens_ids=list(range(vocab, vocab + 200)), bos=0, eos=1, cls=0, sep=1, mask=2,
            inv_vocab=inverse, vocab_size=vocab,
        ),
    )  # fmt: skip
    sizes, begin, total, samples = dataset.dataset.sequence_lengths, 0, 0, []
    for i, size in enumerate(sizes):
        if size > seq - 2:
            begin, total = i + 1, 0
        elif total + size > seq - 2:
            samples.append((begin, i, seq - 2))
            begin, total = i, int(size)
        else:
            total += int(size)
    dataset.sample_index = samples
    dataset.__class__ = type("Sized", (T5MaskedWordPieceDataset,), {"__len__": lambda self: len(self.sample_index)})
    return dataset


if __name__ == "__main__":
    kind, prefix, seq, vocab = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    dataset = {"gpt": gpt, "t5": t5}[kind](prefix, seq, vocab)
    numbers = np.random.default_rng(0).integers(0, len(dataset), 1_000_000).tolist()
    at = 0
    print("ready", flush=True)
    for line in sys.stdin:
        count = int(line)
        begin = time.process_time()
        for n in numbers[at : at + count]:
            dataset[n]
        at = (at + count) % 500_000
        print(time.process_time() - begin, flush=True)
    os._exit(0)
