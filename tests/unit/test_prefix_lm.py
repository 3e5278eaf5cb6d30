"""A prefix LM has the right attention masks, targets and prefix lengths, and attends in both directions in prompts."""

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron.data.prefixes import Prefixes
from megatron.model import GPT2Model
from megatron.model.layers import global_parameters
from megatron.model.masks import Documents, document_mask
from megatron.model.packed_attention import compute_cu_seqlens
from megatron.model.pieces import pieces_of
from megatron.tasks.prefix import mark_prefixes
from megatron_tools.write.generation import GPT2Stepper
from tests.parity import reference

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --family gpt2 --seq-length 12 --vocab-size 50 "
    "--hidden-dropout 0 "
    "--attention-dropout 0 --objective prefix-lm"
)


def _seen(documents: list[int], inside: list[int]) -> list[list[bool]]:
    """Return mask[query][key]: whether the token `query` attends to the token `key`.

    A token attends to itself and to earlier tokens of its document; a token of a prefix also to later tokens of the
    prefix. inside: 1 for tokens of a prefix.
    """
    places = range(len(documents))
    return [
        [documents[q] == documents[k] and (k <= q or bool(inside[q] and inside[k])) for k in places] for q in places
    ]


def test_who_sees_whom_and_what_counts() -> None:
    documents, inside = [1, 1, 1, 1, 2, 2, 3, 3, 3], [1, 1, 1, 0, 0, 0, 1, 1, 0]
    ids, counts = mark_prefixes(torch.tensor([inside]), torch.tensor([documents]), torch.ones(1, 9))
    mask = document_mask(ids, causal=True)
    assert mask is not None and mask[0, 0].tolist() == _seen(documents, inside)
    # A token whose target lies within its bidirectional prefix has no loss.
    assert counts.tolist() == [[0, 0, 1, 1, 1, 1, 0, 1, 1]]
    whole, _ = mark_prefixes(torch.tensor([inside]), torch.empty(0), torch.ones(1, 9))
    mask = document_mask(whole, causal=True)
    assert mask is not None and mask[0, 0].tolist() == _seen([0] * 9, inside)
    plain = document_mask(torch.tensor([documents]) + 1, causal=True)
    assert plain is not None and plain[0, 0].tolist() == _seen(documents, [0] * 9)
    for shortcut in (pieces_of, compute_cu_seqlens):  # neither supports prefixes, so both return None
        assert shortcut(Documents(ids, None, True)) is None


def test_prefixes_have_every_length_with_the_same_chance() -> None:
    tokens = np.array([5, 6, 7, 0, 8, 9, 0, 4, 4, 4])
    found = np.stack([Prefixes(0, True).draw_mask(tokens, [1, n]) for n in range(4000)])
    assert (found[:1000] == np.stack([Prefixes(0, True).draw_mask(tokens, [1, n]) for n in range(1000)])).all()
    for begin, size in ((0, 4), (4, 3), (7, 3)):
        part = found[:, begin : begin + size]
        lengths = part.sum(1)
        assert (part == (np.arange(size) < lengths[:, None])).all()
        shares = np.bincount(lengths, minlength=size) / 4000
        assert len(shares) == size and np.abs(shares - 1 / size).max() < 4 * (0.25 / 4000) ** 0.5
    whole = np.stack([Prefixes(0, False).draw_mask(tokens, [1, n]) for n in range(500)])
    assert set(whole.sum(1).tolist()) == set(range(10))
    assert (whole == (np.arange(10) < whole.sum(1)[:, None])).all()


def _model() -> tuple[GPT2Model, dict[str, Tensor]]:
    model = GPT2Model(parse(FLAGS.split()), parallel_output=False).double().eval()
    return model, {name: p.detach() for name, p in global_parameters(model)}


def test_a_prompt_is_read_both_ways() -> None:
    """Tokens of a prompt attend in both directions, even after the prompt's beginning has left the context window."""
    model, weights = _model()
    prompt = [3, 14, 15, 9, 26, 5, 35]
    stepper = GPT2Stepper(model, prompt, 12, bidirectional_prompt=True)
    logits = stepper.first(1)
    text = list(prompt)
    for token in [8, 9, 7, 9, 3, 2, 3, 8]:
        shown = text[-12:]
        inside = [1] * max(len(prompt) - (len(text) - len(shown)), 0)
        allowed = torch.tensor([_seen([0] * len(shown), [*inside, *[0] * (len(shown) - len(inside))])])
        places = torch.arange(len(shown))[None]
        expected = reference.logits(weights, torch.tensor([shown]), places, allowed, 2, 2)[:, -1, :50]
        torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)
        logits = stepper.next(torch.tensor([token]))
        text.append(token)
    causal = GPT2Stepper(model, prompt, 12).first(1)
    assert (causal - GPT2Stepper(model, prompt, 12, bidirectional_prompt=True).first(1)).abs().max() > 1e-6


@pytest.mark.parametrize(
    ("flags", "knob"),
    [
        ("--family gpt2 --context-parallel-size 2 --seq-length 16", "--context-parallel-size"),
        ("--family llama --position-embedding rope --sliding-window 4", "--sliding-window"),
        ("--family llama --position-embedding rope --reset-position-ids", "--reset-attention-mask"),
    ],
)
def test_what_forbids_a_look_ahead_is_refused(flags: str, knob: str) -> None:
    with pytest.raises(ConfigError, match=knob):
        parse(f"--objective prefix-lm {flags}".split())
