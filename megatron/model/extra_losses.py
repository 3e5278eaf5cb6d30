"""Additional values that some losses report or add: of routers, of each corpus, of text, and torch's reference loss.

Shapes: s sequence, b batch, v vocabulary, t model-parallel ranks.
"""

from collections import defaultdict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import mpu

from .loss import CORPUS_LOSS, CORPUS_TARGETS


def by_corpus(losses: Tensor, loss_mask: Tensor, corpora: Tensor) -> dict[str, Tensor]:
    """Return the sums of losses [b, s] and the numbers of targets by corpus: name -> scalar in fp64.

    corpora: [b, c], 1 at the corpus of each sample.
    """
    by_sample = torch.stack([losses.sum(1, dtype=torch.float64), loss_mask.sum(1, dtype=torch.float64)])  # [2, b]
    sums = by_sample @ corpora.double()  # [2, c]
    found = {}
    for name, row in zip((CORPUS_LOSS, CORPUS_TARGETS), sums, strict=True):
        for i, value in enumerate(row):
            found[f"{name}/{i}"] = value
    return found


def in_chunks(
    see: Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]], logits: mpu.DeferredLogits, labels: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return `see(logits, labels)` for deferred logits, of which one chunk of tokens exists at a time.

    see: `TokenLoss._seen`. labels: [b, s].
    """
    across = labels.t()  # [s, b]
    tokens = across.reshape(1, -1)
    found = []
    sums: dict[str, list[Tensor]] = defaultdict(list)
    for rows, chunk in logits.chunks():
        values, aux = see(chunk.unsqueeze(1), tokens[:, rows])
        found.append(values)
        for name, value in aux.items():
            sums[name].append(value)
    whole = torch.cat(found, dim=2).view(-1, *across.shape).transpose(1, 2)
    return whole, {name: torch.stack(each).sum() for name, each in sums.items()}


def of_text(
    logits: Tensor, labels: Tensor, losses: Tensor, text: Tensor, vocab_size: int, axis: mpu.Axis
) -> dict[str, Tensor]:
    """Return sums over text tokens: of the losses, of correct predictions, and of the tokens, scalars in fp64.

    logits: [s, b, v/t]. labels, losses, text: [b, s] each.
    """
    right = mpu.vocab_parallel_right(logits, labels.t(), vocab_size, axis=axis).t()
    found = {"text_loss": losses * text, "text_right": right & text, "text_tokens": text}
    return {name: each.sum(dtype=torch.float64) for name, each in found.items()}


def reference_losses(
    logits: Tensor, labels: Tensor, vocab_size: int, axis: mpu.Axis, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Compute cross entropy and z-loss [b, s] by torch's functions, from all logits on every rank.

    logits: [s, b, v/t].
    """
    whole = mpu.gather_from_model_parallel_region(logits, axis)[..., :vocab_size]
    wide = whole.to(torch.promote_types(whole.dtype, torch.float32))
    losses = F.cross_entropy(wide.permute(1, 2, 0), labels, reduction="none")
    if not z_loss:
        return losses, torch.zeros_like(losses)
    z = z_loss * wide.logsumexp(-1).t() ** 2
    return losses + (z - z.detach()), z.detach()


def of_routers(losses: Tensor, own: Tensor, means: Tensor | Callable[[], Tensor] | None) -> Tensor:
    """Return the routers' loss, a scalar, in the units of the sum over targets, by which the engine divides it.

    losses: [n], for each stack of layers the mean over the text tokens of this micro-batch. A micro-batch with more
    text than others counts more, so that the loss of a step is the mean over all of its text tokens.
    own: `count_targets` of the micro-batch. means: its mean over the micro-batches of the step, or a function that
    waits for it; None for `own`.
    """
    if callable(means):
        means = means()
    if means is None:
        means = own
    if own.dim():
        losses = losses * (own[1:] / means[1:].clamp(min=1.0)).to(losses)
        means = means[0]
    return means.to(losses) * losses.sum()
