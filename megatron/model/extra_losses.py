"""Evaluation of losses, and what some losses add or report: of routers, of each corpus, of text, torch's reference.

Shapes: s sequence, b batch, v vocabulary, t model-parallel ranks.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import mpu

if TYPE_CHECKING:
    from .loss import Logits, TokenLoss

# Names of additional values, followed by "/" and the number of a corpus.
CORPUS_LOSS = "corpus_loss"
CORPUS_TARGETS = "corpus_targets"


def sum_by_corpus(losses: Tensor, loss_mask: Tensor, corpora: Tensor) -> dict[str, Tensor]:
    """Return the sums of losses [b, s] and the numbers of targets by corpus: name -> scalar in fp64.

    corpora: [b, c], 1 at the corpus of each sample.
    """
    by_sample = torch.stack([losses.sum(1, dtype=torch.float64), loss_mask.sum(1, dtype=torch.float64)])  # [2, b]
    sums = by_sample @ corpora.double()  # [2, c]
    sums_by_name = {}
    for name, row in zip((CORPUS_LOSS, CORPUS_TARGETS), sums, strict=True):
        for i, value in enumerate(row):
            sums_by_name[f"{name}/{i}"] = value
    return sums_by_name


def evaluate(loss: "TokenLoss", logits: "Logits", labels: Tensor) -> Tensor:
    """Return [1, b, s], the loss of every token; if `loss.sample_sums` is a list, [2, b, s], with 1 for a wrong token.

    logits: [s, b, v/t]. labels: [b, s]. Without gradients, sets `loss.aux` to further values of the micro-batch.
    sample_sums is a list only while features/eval_tasks.py scores texts.
    """
    if isinstance(logits, Tensor):
        values, loss.aux = _evaluate(loss, logits, labels)
    elif torch.is_grad_enabled():  # the logits of `chunks` have no gradient
        values, loss.aux = _evaluate(loss, logits.in_full(), labels)
    else:
        values, loss.aux = _evaluate_chunks(loss, logits, labels)
    return values


def loss_per_token(loss: "TokenLoss", logits: Any, labels: Tensor) -> Tensor:
    """Return the loss [b, s] of logits [s, b, v/t] and labels [b, s], in nats, fp32 (fp64 for fp64 logits).

    Without gradients, deferred logits are computed in chunks. With gradients, all logits are computed at once,
    because each token's loss may be weighted differently.
    """
    values = evaluate(loss, logits, labels)
    return values[0]  # the losses; with `sample_sums`, values[1] marks wrong tokens


def evaluate_targets(loss: "TokenLoss", logits: "Logits", labels: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed loss, a scalar, and the loss of each target, [b, s], 0 for other tokens.

    Appends the sums of each sample to `loss.sample_sums`, if it is a list.
    """
    values = evaluate(loss, logits, labels) * loss_mask
    if loss.sample_sums is not None:
        loss.sample_sums.append(values.sum(2, dtype=torch.float64))
    losses = values[0]
    return losses.sum(), losses


def _evaluate(loss: "TokenLoss", logits: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the values of `evaluate`, and in evaluation {name: value} of the additional values to report."""
    losses, _ = loss.token_losses(logits, labels)
    values = losses.unsqueeze(0)
    if loss.sample_sums is not None:
        is_correct = mpu.vocab_parallel_right(logits, labels.t(), loss.vocab_size, axis=loss.axis).t()
        wrong = (~is_correct).to(losses.dtype)
        values = torch.stack([losses, wrong])  # see `evaluate`
    if loss.is_text is None or torch.is_grad_enabled():
        return values, {}
    is_text = loss.is_text(labels)
    is_correct = mpu.vocab_parallel_right(logits, labels.t(), loss.vocab_size, axis=loss.axis).t()
    # Sums over text tokens: of the losses, of correct predictions, and of the tokens, scalars in fp64.
    text_values = {
        "text_loss": losses * is_text,
        "text_right": is_correct & is_text,
        "text_tokens": is_text,
    }
    return values, {name: each.sum(dtype=torch.float64) for name, each in text_values.items()}


def _evaluate_chunks(loss: "TokenLoss", logits: mpu.DeferredLogits, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return `_evaluate` for deferred logits, of which one chunk of tokens exists at a time."""
    labels_sb = labels.t()  # [s, b]
    tokens = labels_sb.reshape(1, -1)  # chunks number all tokens as if they were one sample of s b tokens
    values_by_chunk = []
    sums: dict[str, list[Tensor]] = defaultdict(list)
    for rows, chunk in logits.chunks():
        values, aux = _evaluate(loss, chunk.unsqueeze(1), tokens[:, rows])
        values_by_chunk.append(values)  # [1 or 2, 1, tokens of the chunk]
        for name, value in aux.items():
            sums[name].append(value)
    # From [1 or 2, 1, s b] to [1 or 2, s, b] to [1 or 2, b, s].
    all_values = torch.cat(values_by_chunk, dim=2).view(-1, *labels_sb.shape).transpose(1, 2)
    return all_values, {name: torch.stack(chunk_sums).sum() for name, chunk_sums in sums.items()}


def reference_losses(
    logits: Tensor, labels: Tensor, vocab_size: int, axis: mpu.Axis, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Compute cross entropy and z-loss [b, s] by torch's functions, from all logits on every rank.

    logits: [s, b, v/t].
    """
    full_logits = mpu.gather_from_model_parallel_region(logits, axis)[..., :vocab_size]
    wide_logits = full_logits.to(mpu.wide_dtype(full_logits))
    losses = F.cross_entropy(wide_logits.permute(1, 2, 0), labels, reduction="none")
    if not z_loss:
        return losses, torch.zeros_like(losses)
    z = z_loss * wide_logits.logsumexp(-1).t() ** 2
    z_value = z.detach()
    return losses + (z - z_value), z_value  # the losses get the gradient of z, but not its value


def scale_router_loss(losses: Tensor, targets: Tensor, mean_targets: Tensor | Callable[[], Tensor] | None) -> Tensor:
    """Return the routers' loss, a scalar, in the units of the sum over targets, by which the engine divides it.

    losses: [n], for each stack of layers the mean over the text tokens of this micro-batch. A micro-batch with more
    text than others counts more, so that the loss of a step is the mean over all of its text tokens.
    targets: `count_targets` of the micro-batch. mean_targets: its mean over the micro-batches of the step, or a
    function that waits for it; None for `targets`.
    """
    if callable(mean_targets):
        mean_targets = mean_targets()
    if mean_targets is None:
        mean_targets = targets
    if targets.dim():  # a vector: the number of targets, then the number of text tokens of each stack
        # A micro-batch with twice the mean number of text tokens counts twice. Without any text, its loss is 0.
        mean_text = torch.where(mean_targets[1:] == 0, 1.0, mean_targets[1:])
        losses = losses * (targets[1:] / mean_text).to(losses)
        mean_targets = mean_targets[0]
    return mean_targets.to(losses) * losses.sum()
