"""Continuations of prompts by the model of a run, in its layout."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import mpu
from ..model.loss import Targets, TokenLoss, split_loss
from ..ranks.objects import from_rank_0, gather_objects
from ..ranks.rank_0 import is_rank_0
from ..training.run_state import Run
from .eval_tasks import RankScorer
from .sampling import Sampling, choose
from .scoring import Request


class _MarkedLogits(TokenLoss):
    """Loss that keeps the logits of the targets, in place of computing anything.

    found: for each micro-batch (rows [k], logits [k, v]) of its k targets on this context-parallel rank.
    """

    def __init__(self, loss: TokenLoss) -> None:
        super().__init__(loss.vocab_size)
        self.axis = loss.axis
        self.found: list[tuple[Tensor, Tensor]] = []

    def __call__(self, logits: Any, targets: Targets) -> Tensor:
        logits, _ = split_loss(logits)
        whole = mpu.whole_logits(logits)
        rows, places = (targets[1] > 0).nonzero(as_tuple=True)
        own = whole[places, rows]
        marked = mpu.gather_from_model_parallel_region(own, self.axis)[:, : self.vocab_size]
        self.found.append((rows.cpu(), marked.float().cpu()))
        return whole.new_zeros(())


class _NextLogits:
    """The logits of the next token of texts, computed by all ranks."""

    def __init__(self, run: Run) -> None:
        self._scorer = RankScorer(run)
        self._engine = run.engine
        self._rows = run.config.train.batch_size
        self._longest = run.config.data.seq_length

    def of(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits [n, v] of n texts on all ranks. A text longer than the window loses its beginning."""
        made = []
        for at in range(0, len(texts), self._rows):
            requests = [Request([*text[-self._longest :], 0], 1) for text in texts[at : at + self._rows]]
            made.append(self._scorer.micro_batch(requests))
        module = self._engine.deepspeed.module
        loss = module.loss_fn
        marked = _MarkedLogits(loss)
        module.loss_fn = marked
        try:
            self._engine.forward(made)
        finally:
            module.loss_fn = loss
        mesh = mpu.get_mesh()
        reports = mesh.model.rank == 0 and mesh.share.number == 0
        logits: dict[int, Tensor] = {}
        for own in gather_objects(marked.found if reports else []):
            for number, (rows, values) in enumerate(own):
                for row, value in zip(rows.tolist(), values, strict=True):
                    logits[number * self._rows + row] = value
        return torch.stack([logits[i] for i in range(len(texts))])


def continuations(run: Run, prompts: Sequence[str], longest: int, temperature: float) -> list[str]:
    """Return each prompt with its continuation of at most `longest` tokens. All ranks must call this.

    A prompt is the beginning of a document. The random numbers depend on --seed and the prompt, so that the texts of
    different iterations differ only by what the model has learned.
    """
    tokenizer = run.tokenizer
    assert tokenizer is not None
    given = [[*tokenizer.before, *tokenizer.encode(prompt)] for prompt in prompts]
    texts = [list(ids) for ids in given]
    seeds = [mpu.derive_seed(run.config.train.seed, "prompt", *ids) for ids in given]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    sampling = Sampling(temperature, 0, 1.0)
    next_logits = _NextLogits(run)
    running = list(range(len(texts)))
    for _ in range(longest):
        logits = next_logits.of([texts[i] for i in running])
        new = []
        if is_rank_0():
            for i, own in zip(running, logits, strict=True):
                new.append(int(choose(own.unsqueeze(0), sampling, generators[i])))
        new = from_rank_0(new)
        for i, token in zip(running, new, strict=True):
            texts[i].append(token)
        running = [i for i in running if texts[i][-1] != tokenizer.eod]
        if not running:
            break
    found = []
    for ids in texts:
        shown = ids[len(tokenizer.before) :]
        found.append(tokenizer.decode(shown))
    return found
