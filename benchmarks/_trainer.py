"""Hugging Face's Trainer as a contender of poet.py: a GPT-2 that trains on random windows for some minutes."""

import tempfile
import time
from typing import Any

import torch
from _hugging_face import gpt2
from torch import Tensor
from torch.utils.data import Dataset

WARMUP = 100
PER_POINT = 10  # steps of a row of the log
TRIED = 20  # steps whose time decides the number of steps

Curve = list[tuple[float, float]]


class _Windows(Dataset[dict[str, Tensor]]):
    """Random windows of `length` tokens of a text; window i is the same in each run with the same seed."""

    def __init__(self, tokens: Tensor, length: int, windows: int, seed: int) -> None:
        dice = torch.Generator().manual_seed(seed)
        self.begins = torch.randint(len(tokens) - length, (windows,), generator=dice).tolist()
        self.tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return len(self.begins)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        begin = self.begins[index]
        window = self.tokens[begin : begin + self.length]
        return {"input_ids": window, "labels": window}


def train(
    tokens: Tensor, vocab: int, sizes: tuple[int, int, int, int], batch: int, lr: float, minutes: float, seed: int
) -> tuple[Any, dict[str, Any]]:
    """Train a GPT-2 with transformers' Trainer for about `minutes`; return it with its steps, minutes and curve.

    sizes: (layers, hidden size, attention heads, tokens of a window).
    """
    layers, hidden, heads, length = sizes
    torch.manual_seed(seed)
    model = gpt2(vocab, length, hidden, layers, heads)
    # Both have the same seed, so a trial run does not change the windows of the real one.
    tried = _fit(gpt2(vocab, length, hidden, layers, heads), _Windows(tokens, length, TRIED * batch, seed), lr, batch)
    steps = int(60 * minutes / tried[0] * TRIED)
    seconds, log = _fit(model, _Windows(tokens, length, steps * batch, seed), lr, batch)
    curve = [(seconds / 60 * row["step"] / steps, row["loss"]) for row in log if "loss" in row]
    return model, {"steps": steps, "minutes": seconds / 60, "curve": curve}


def _fit(model: Any, windows: _Windows, lr: float, batch: int) -> tuple[float, list[dict[str, Any]]]:
    """Train a model on each window once; return the seconds and the log."""
    from transformers import Trainer, TrainingArguments

    steps = len(windows) // batch
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=batch, learning_rate=lr, adam_beta2=0.95,
            weight_decay=0.1, warmup_steps=min(WARMUP, steps // 2), lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.1}, optim="adamw_torch_fused", use_cpu=True, logging_steps=PER_POINT,
            save_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(model=model, args=settings, train_dataset=windows)
        begin = time.perf_counter()
        trainer.train()
        return time.perf_counter() - begin, trainer.state.log_history
