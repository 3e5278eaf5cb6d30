"""Continuations of prompts by the model of a run, in its layout."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import mpu
from ..model.loss import Targets, TokenLoss, split_router_loss
from ..ranks.objects import broadcast_from_rank_0, gather_objects
from ..ranks.rank_0 import is_rank_0, print_rank_0
from ..training.run_state import Run
from .eval_tasks import RankScorer
from .sampling import Sampling, sample_next_tokens
from .scoring import Request


class _LogitsRecorder(TokenLoss):
    """Loss that keeps the logits of the targets, in place of computing anything.

    target_logits: for each micro-batch (rows [k], logits [k, v]) of its k targets on this context-parallel rank.
    """

    def __init__(self, loss: TokenLoss) -> None:
        super().__init__(loss.vocab_size)
        self.axis = loss.axis
        self.target_logits: list[tuple[Tensor, Tensor]] = []

    def __call__(self, logits: Any, targets: Targets) -> Tensor:
        logits, _ = split_router_loss(logits)
        full_logits = mpu.whole_logits(logits)  # [s, b, v/t] on t model-parallel ranks
        loss_mask = targets[1]  # [b, s], 1 at the k targets
        rows, positions = loss_mask.nonzero(as_tuple=True)  # [k] each
        target_logits = full_logits[positions, rows]
        # The columns after vocab_size only pad the vocabulary to a size that the ranks can share.
        gathered = mpu.gather_from_model_parallel_region(target_logits, self.axis)[:, : self.vocab_size]
        self.target_logits.append((rows.cpu(), gathered.float().cpu()))
        return full_logits.new_zeros(())  # the engine needs a loss, but nobody reads it


class _NextLogits(RankScorer):
    """The logits of the next token of texts, computed by all ranks."""

    def compute(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits [n, v] of n texts on all ranks. A text longer than the window loses its beginning."""
        micro_batches = []
        for start in range(0, len(texts), self._batch_size):
            requests = []
            for text in texts[start : start + self._batch_size]:
                context = text[-self.max_length :]
                # The 0 is a placeholder for the next token: the logits of this target are those of the next token.
                requests.append(Request([*context, 0], num_targets=1))
            micro_batches.append(self.micro_batch(requests))

        # The forward pass gives the logits only to the loss of the model, so a recorder takes the place of the loss.
        module = self._engine.deepspeed.module
        loss = module.loss_fn
        recorder = _LogitsRecorder(loss)
        module.loss_fn = recorder
        try:
            self._engine.forward(micro_batches)
        finally:
            module.loss_fn = loss

        # The recorder of the last stage now has (rows, logits) of each micro-batch. All replicas and model-parallel
        # ranks have the same, so the first of each reports. With context parallelism, all ranks of this replica report,
        # each the texts whose last token is on this rank.
        mesh = mpu.get_mesh()
        is_reporter = mesh.model.rank == 0 and mesh.share.rank == 0
        reported = recorder.target_logits if is_reporter else []
        logits_of_text: dict[int, Tensor] = {}
        for micro_batches_of_rank in gather_objects(reported):
            for number, (rows, row_logits) in enumerate(micro_batches_of_rank):
                for row, text_logits in zip(rows.tolist(), row_logits, strict=True):
                    # Texts fill the micro-batches in order: with 4 texts each, row 1 of micro-batch 2 is text 9.
                    logits_of_text[number * self._batch_size + row] = text_logits
        return torch.stack([logits_of_text[i] for i in range(len(texts))])


def continue_prompts(run: Run, prompts: Sequence[str], max_new_tokens: int, temperature: float) -> list[str]:
    """Return each prompt with its continuation of at most `max_new_tokens` tokens. All ranks must call this.

    A prompt is the beginning of a document. The random numbers depend on --seed and the prompt, so that the texts of
    different iterations differ only by what the model has learned. Returns [], after a note, if logits are not finite.
    """
    tokenizer = run.tokenizer
    texts = []
    generators = []
    for prompt in prompts:
        ids = [*tokenizer.before, *tokenizer.encode(prompt)]
        texts.append(ids)
        seed = mpu.derive_seed(run.config.train.seed, "prompt", *ids)
        generators.append(torch.Generator().manual_seed(seed))
    sampling = Sampling(temperature)  # among all tokens: without top_k and top_p
    next_logits = _NextLogits(run)
    unfinished = list(range(len(texts)))  # indices of the texts that have not ended
    for _ in range(max_new_tokens):
        logits = next_logits.compute([texts[i] for i in unfinished])
        if not logits.amax(-1).isfinite().all():  # a single token may have minus infinity
            print_rank_0(f"note: no samples at iteration {run.state.iteration}, as the model's logits are not finite")
            return []
        new_tokens = []
        # Only rank 0 draws, so that all ranks continue with the same tokens.
        if is_rank_0():
            for i, text_logits in zip(unfinished, logits, strict=True):
                sampled = sample_next_tokens(text_logits.unsqueeze(0), sampling, generators[i])
                new_tokens.append(int(sampled))
        new_tokens = broadcast_from_rank_0(new_tokens)
        for i, token in zip(unfinished, new_tokens, strict=True):
            texts[i].append(token)
        # A text ends with its first end-of-document token.
        unfinished = [i for i in unfinished if texts[i][-1] != tokenizer.eod]
        if not unfinished:
            break
    decoded = []
    for ids in texts:
        text_ids = ids[len(tokenizer.before) :]  # without the tokens that begin a document
        decoded.append(tokenizer.decode(text_ids))
    return decoded
