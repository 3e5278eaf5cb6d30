"""T5 learns to fill masked spans that the surrounding text determines, in the formats of T5 and of CPM."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from data_utils.indexed_writer import IndexedDatasetBuilder
from megatron.config.command_line import parse
from megatron.data.t5_dataset import Objective, Specials, build_train_valid_test_datasets
from megatron.model import T5Model
from megatron_tools.write.generation import Sampling, T5Stepper, sample
from tests.support import covering

EOD, TEXT, COUNT = 0, 13, 10
SIZES = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --family t5 --enc-seq-length 32 --seq-length 32 "
    "--hidden-dropout 0 "
    f"--attention-dropout 0 --init-method-std 0.1 --vocab-size {TEXT + 1 + COUNT} --make-vocab-size-divisible-by 1"
)
VARIANTS = {
    "cpm": "",
    "t5": "--normalization rmsnorm --position-embedding relative --no-scale-attention --no-hidden-bias "
    "--activation gated-gelu --no-tie-embeddings",
}
STEPS, BATCH, LR = 600, 16, 3e-3


@pytest.mark.slow
@pytest.mark.parametrize("variant", covering(list(VARIANTS), [].__contains__))
def test_counting_with_gaps(variant: str, tmp_path: Path) -> None:
    """A T5 that was trained on documents that count from 1 to 12 again and again fills masked spans correctly."""
    rng = np.random.default_rng(0)
    with IndexedDatasetBuilder(tmp_path / "count", np.uint16) as builder:
        for _ in range(16):
            builder.add_document(np.append((rng.integers(12) + np.arange(4000)) % 12 + 1, EOD))
    sentinels = tuple(range(TEXT + 1, TEXT + 1 + COUNT))
    specials = Specials(EOD, TEXT, sentinels[::-1] if variant == "t5" else sentinels)
    objective = Objective("span-corruption", variant, 0.15, 1.0)
    parts, _ = build_train_valid_test_datasets(str(tmp_path / "count"), "15,1", objective, 32, None, specials, 1)
    data, valid, _ = parts
    assert data is not None
    assert valid is not None
    model = T5Model(parse([*SIZES.split(), *VARIANTS[variant].split()]), parallel_output=False, is_text=_is_text)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    for step in range(STEPS):
        batch = default_collate([data[n] for n in range(step * BATCH, step * BATCH + BATCH)])
        mask = batch["loss_mask"] * (batch["labels"] != EOD)  # document ends cannot be predicted from the text
        loss = (model(batch["encoder"], batch["decoder"], labels=batch["labels"]) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 40, (STEPS - step) / 200)
    # Measure only masked text: sentinels are easy and EOD is unpredictable. A unigram model has a loss of log 12.
    batch = default_collate([valid[n] for n in range(100)])
    with torch.no_grad():
        model.eval()(batch["encoder"], batch["decoder"], labels=batch["labels"])
    found = {name: float(value) for name, value in model.get_additional_losses().items()}
    assert found["text_tokens"] > 300
    assert found["text_loss"] / found["text_tokens"] < np.log(12) - 2
    assert found["text_right"] / found["text_tokens"] > 0.8
    assert np.mean([_filled(model, valid[n]) for n in range(10)]) > 0.8


def _is_text(labels: torch.Tensor) -> torch.Tensor:
    return (labels < TEXT) & (labels != EOD)


def _filled(model: T5Model, sample_: dict[str, torch.Tensor]) -> float:
    """Return the share of a sample's labels that greedy decoding generates correctly."""
    labels = sample_["labels"].tolist()
    stepper = T5Stepper(model, sample_["encoder"].tolist(), int(sample_["decoder"][0]))
    written = sample(stepper, 1, len(labels), -1, Sampling(temperature=0), 0)[0]
    return float(np.mean(np.array(written) == np.array(labels)))
