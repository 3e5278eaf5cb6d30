"""In several layouts, a prefix LM has the losses of plain torch, whose masks Python loops compute."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.data.gpt2_dataset import build_train_valid_test_datasets
from megatron.data.prefixes import Prefixes
from megatron.tokenizer import load_tokenizer
from tests.parity import reference
from tests.support import covering

from .layouts import GLOBAL_BATCH, HEADS, LAYERS, LEARNS, LR, PER_DOCUMENT, SEED, SEQ, Layout, initial_weights, ours


def _loss(text: Tensor, prefixes: Tensor, eod: int, by_document: bool, w: reference.Weights) -> Tensor:
    tokens, labels = text[:, :-1], text[:, 1:]
    positions, allowed, loss_mask = reference.masks(tokens, eod, by_document)
    for row in range(len(tokens)):
        for i in range(SEQ):
            for j in range(i + 1, SEQ):
                if by_document and positions[row, j] == 0:
                    break
                allowed[row, i, j] = bool(prefixes[row, i] and prefixes[row, j])
        for i in range(SEQ - 1):
            if allowed[row, i, i + 1]:
                loss_mask[row, i] = 0
    out = reference.logits(w, tokens, positions, allowed, LAYERS, HEADS)
    each = F.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="none")
    return (each * loss_mask.flatten()).sum() / loss_mask.sum()


def _expected(data: str, vocab_file: str, by_document: bool) -> list[float]:
    tokenizer = load_tokenizer(vocab_file)
    prefixes = Prefixes(tokenizer.eod, by_document)
    (train, _, _), _ = build_train_valid_test_datasets(data, "1", SEQ, SEED, prefixes=prefixes)
    assert train is not None
    steps = []
    for step in range(LEARNS):
        samples = [train[n] for n in range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)]
        text, inside = (torch.stack([sample[key] for sample in samples]) for key in ("text", "prefixes"))
        steps.append(partial(_loss, text, inside, tokenizer.eod, by_document))
    weights = initial_weights(tokenizer.vocab_size)
    return reference.learn(weights, steps, LR["sgd"], "sgd", 1.0, torch.float64)


CASES = [
    (Layout(2, 1, 2), ""),
    (Layout(0, 2, 1), " ".join(PER_DOCUMENT)),
    (Layout(0, 1, 1), "--checkpoint-activations"),
    (Layout(2, 2, 1), f"{' '.join(PER_DOCUMENT)} --pipeline-schedule zb-h1"),
    (Layout(0, 1, 2), "--sequence-parallel"),
]


@pytest.mark.parametrize(("layout", "more"), covering(CASES, CASES[1:2].__contains__, several=True))
def test_losses_equal_one_process(layout: Layout, more: str, tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    flags = ("--objective", "prefix-lm", *more.split())
    found = ours(layout, tmp_path, tiny_data, vocab_file, *flags, precision="fp64", steps=LEARNS)
    expected = _expected(tiny_data, vocab_file, "--reset-attention-mask" in more)
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    assert expected[0] - expected[-1] > 0.3
