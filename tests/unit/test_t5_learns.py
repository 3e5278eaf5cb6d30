"""Both variants learn to fill gaps where the text says what was in them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.arguments import parse
from megatron.data.indexed_dataset import IndexedDatasetBuilder
from megatron.data.t5_dataset import Objective, Specials, build_train_valid_test_datasets
from megatron.generation import Sampling, T5Stepper, sample
from megatron.model import T5Model

EOD, TEXT, COUNT = 0, 41, 10
SIZES = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --enc-seq-length 48 --seq-length 48 --hidden-dropout 0 "
    f"--attention-dropout 0 --init-method-std 0.1 --vocab-size {TEXT + 1 + COUNT} --make-vocab-size-divisible-by 1"
)
VARIANTS = {
    "cpm": "",
    "t5": "--normalization rmsnorm --position-embedding relative --no-scale-attention --no-hidden-bias "
    "--activation gated-gelu --no-tie-embeddings",
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_counting_with_gaps(variant: str, tmp_path: Path) -> None:
    """Documents count from anywhere, 1 to 40 and again from 1: every gap can be filled from what stands around it."""
    rng = np.random.default_rng(0)
    with IndexedDatasetBuilder(tmp_path / "count", np.uint16) as builder:
        for _ in range(4):
            builder.add_document(np.append((rng.integers(40) + np.arange(4000)) % 40 + 1, EOD))
    sentinels = tuple(range(TEXT + 1, TEXT + 1 + COUNT))
    specials = Specials(EOD, TEXT, sentinels[::-1] if variant == "t5" else sentinels)
    (data, _, _), _ = build_train_valid_test_datasets(
        str(tmp_path / "count"), "1", Objective(convention=variant), 48, None, specials, 1
    )
    assert data is not None
    model = T5Model(parse([*SIZES.split(), *VARIANTS[variant].split()]), parallel_output=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    losses = []
    for step in range(400):
        samples = [data[n] for n in range(step * 16, step * 16 + 16)]
        batch = {key: torch.stack([each[key] for each in samples]) for key in samples[0]}
        # Nothing tells how long the last span is, which may end the window, so what follows its sentinel does not count.
        seen = torch.isin(batch["decoder"], torch.tensor(sentinels)).cumsum(1)
        mask = batch["loss_mask"] * (seen < seen.max(1, keepdim=True).values)
        loss = (model(batch["encoder"], batch["decoder"], labels=batch["labels"]) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 40, (400 - step) / 200)
    print(np.array(losses)[::20].round(3))
    assert losses[0] > 3
    assert np.mean(losses[-10:]) < 0.05
    first, second = specials.sentinels[:2]
    source = [*range(5, 14), first, *range(17, 25), second, *range(27, 36)]
    ended = [*source, EOD] if variant == "t5" else source
    stepper = T5Stepper(model.eval(), ended, TEXT if variant == "t5" else first)
    written = sample(stepper, 1, 9, EOD if variant == "t5" else specials.sentinels[2], Sampling(temperature=0), 0)[0]
    assert [t for t in written if t < TEXT and t != EOD] == [14, 15, 16, 25, 26]
