"""The layers of a stage share one attention mask, which is freed with the document ids that it was computed from."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from megatron.config.command_line import parse
from megatron.model import GPT2Model
from megatron.model.masks import Documents, document_mask, to_additive_mask
from megatron.model.window_masks import window_mask

LAYERS, SEQ = 4, 32
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size 16 --num-attention-heads 2 --seq-length {SEQ} --vocab-size 50 "
    "--hidden-dropout 0 "
    f"--attention-dropout 0"
)


def _ids() -> Tensor:
    return torch.tensor([[1, 1, 2, 2, 2, 3], [1, 2, 3, 3, 0, 0]])


def test_it_is_made_once_for_the_same_ids() -> None:
    ids, others = _ids(), _ids()[:, :4].contiguous()
    first = document_mask(ids, causal=True)
    assert first is not None and document_mask(ids, causal=True) is first
    assert document_mask(ids) is not first and document_mask(ids.clone(), causal=True) is not first
    cross = document_mask(ids, others)
    assert cross is not None and document_mask(ids, others) is cross and document_mask(ids, others.clone()) is not cross
    assert to_additive_mask(first, torch.float32) is to_additive_mask(first, torch.float32)
    assert to_additive_mask(first, torch.bfloat16).dtype == torch.bfloat16
    added = to_additive_mask(cross, torch.float64)
    assert torch.equal(added == 0, cross) and (added[~cross] == -torch.inf).all()


def test_windows_of_the_same_ids_are_as_wide_and_as_causal_as_is_asked() -> None:
    ids, place = _ids(), torch.arange(6)
    same, distance = ids[:, :, None] == ids[:, None, :], place[:, None] - place
    for window, causal in ((2, True), (3, True), (3, False), (2, False)):
        found = window_mask(ids, 6, 0, window, Documents(ids, causal=causal))
        assert isinstance(found, Tensor)
        assert torch.equal(found[:, 0], same & (distance >= 0) & (distance < window))
    # With causal=True, the id -1 means the bidirectional prefix of document 1. Otherwise, -1 and 1 are two documents.
    begun = torch.tensor([[-1, -1, 1, 1, 2, 2]])
    for causal, documents in ((True, begun.abs()), (False, begun)):
        found = window_mask(begun, 6, 0, 2, Documents(begun, causal=causal))
        assert isinstance(found, Tensor)
        seen = documents[:, :, None] == documents[:, None, :]
        assert torch.equal(found[:, 0], seen & (distance >= 0) & (distance < 2))


@pytest.mark.parametrize("which", ["queries", "keys"])
def test_ids_that_change_get_another(which: str) -> None:
    queries, keys = _ids(), _ids()
    before = document_mask(queries, keys)
    (queries if which == "queries" else keys).add_(torch.tensor([[0, 0, 0, 0, 5, 5], [0] * 6]))
    after = document_mask(queries, keys)
    assert before is not None and after is not None and not torch.equal(before, after)
    assert torch.equal(after, document_mask(queries.clone(), keys.clone()))  # type: ignore[arg-type]


def test_it_goes_with_its_ids() -> None:
    gc.disable()
    try:
        queries, keys = _ids(), _ids()
        masks = [document_mask(queries), document_mask(queries, keys), document_mask(queries, causal=True)]
        gone = [weakref.ref(mask) for mask in masks if mask is not None]
        for mask in masks:
            to_additive_mask(mask, torch.float32)  # type: ignore[arg-type]
        del masks, mask, queries, keys
        assert [each() for each in gone] == [None] * 3, "without the collector of garbage"
    finally:
        gc.enable()


def test_the_backward_pass_keeps_one_for_all_layers() -> None:
    torch.manual_seed(1)
    model, tokens, kept = GPT2Model(parse(FLAGS.split())), torch.randint(50, (2, SEQ)), {}
    ids = torch.arange(SEQ).div(5, rounding_mode="floor").add(1).repeat(2, 1)

    def pack(x: Tensor) -> Tensor:
        if x.dim() == 4 and x.shape[2:] == (SEQ, SEQ):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(tokens, None, ids, labels=tokens).sum().backward()
    assert sum(kept.values()) <= 2 * SEQ * SEQ * 4
