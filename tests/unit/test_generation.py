"""Incremental decoding gives what recomputing gives; greedy and beam search give what Hugging Face gives."""

from typing import Any

import pytest
import torch

from megatron.arguments import parse
from megatron.generation import GPT2Stepper, Sampling, Stepper, T5Stepper, beam_search, choose, sample
from megatron.model import GPT2Model, T5Model

from .test_t5_model import T5_FLAGS, copy_weights, hugging_face

GPT2_FLAGS = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --vocab-size 50 --init-method-std 0.2"
)
CPM_FLAGS = f"{GPT2_FLAGS} --num-decoder-layers 2"
PROMPT = [4, 9, 2, 33, 8]


def build(kind: str, cached: bool) -> Stepper:
    if kind == "gpt2":
        return GPT2Stepper(GPT2Model(parse(GPT2_FLAGS.split()), parallel_output=False).eval(), PROMPT, 24, cached)
    flags = (
        CPM_FLAGS if kind == "cpm" else f"{T5_FLAGS} --init-method-std 0.2 --activation gated-gelu --no-tie-embeddings"
    )
    return T5Stepper(T5Model(parse(flags.split()), parallel_output=False).eval(), PROMPT * 3, 1, cached)


@pytest.mark.parametrize("kind", ["gpt2", "cpm", "t5"])
@torch.no_grad()
def test_logits_equal_those_computed_anew(kind: str) -> None:
    ours, anew = build(kind, True), build(kind, False)
    generator = torch.Generator().manual_seed(0)
    torch.testing.assert_close(ours.first(3), anew.first(3), rtol=1e-5, atol=1e-5)
    for _ in range(12):
        tokens = torch.randint(50, (3,), generator=generator)
        torch.testing.assert_close(ours.next(tokens), anew.next(tokens), rtol=1e-5, atol=1e-5)
        rows = torch.randint(3, (3,), generator=generator)
        ours.reorder(rows)
        anew.reorder(rows)


@torch.no_grad()
def test_gpt2_goes_on_behind_its_last_position() -> None:
    found = sample(build("gpt2", True), 2, 40, end=49, sampling=Sampling(temperature=0), seed=1)
    assert found == sample(build("gpt2", False), 2, 40, end=49, sampling=Sampling(temperature=0), seed=1)
    assert max(map(len, found)) == 40 or all(row[-1] == 49 for row in found)


def pair() -> tuple[Any, T5Stepper]:
    theirs = hugging_face("gated-gelu", False, False)
    flags = f"{T5_FLAGS} --activation gated-gelu --no-tie-embeddings"
    ours = T5Model(parse(flags.split()), parallel_output=False).eval()
    copy_weights(theirs, ours, True)
    return theirs, T5Stepper(ours, PROMPT * 2, 0)


def test_greedy_is_hugging_faces() -> None:
    theirs, ours = pair()
    expected = theirs.generate(
        torch.tensor([PROMPT * 2]), max_new_tokens=15, do_sample=False, num_beams=1, eos_token_id=1, use_cache=False
    )
    assert sample(ours, 1, 15, 1, Sampling(temperature=0), 0)[0] == expected[0, 1:].tolist()


@pytest.mark.parametrize("beams", [2, 4])
@pytest.mark.parametrize("end", [1, 40, 59])
def test_beam_search_is_hugging_faces(beams: int, end: int) -> None:
    theirs, ours = pair()
    expected = theirs.generate(
        torch.tensor([PROMPT * 2]), max_new_tokens=10, do_sample=False, num_beams=beams, eos_token_id=end, pad_token_id=0,
        length_penalty=1.0, early_stopping=False, num_return_sequences=beams, output_scores=True, return_dict_in_generate=True, use_cache=False,
    )  # fmt: skip
    found = beam_search(ours, beams, 10, end)
    wanted = [row[row != 0].tolist() for row in expected.sequences[:, 1:]]
    assert [tokens for _, tokens in found] == wanted
    assert [score for score, _ in found] == pytest.approx(expected.sequences_scores.tolist(), rel=1e-4)


def test_sampling_keeps_to_the_likely() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(4000, 4)
    generator = torch.Generator().manual_seed(0)

    def share(sampling: Sampling) -> list[float]:
        return (torch.bincount(choose(logits, sampling, generator), minlength=4) / 4000).tolist()

    assert share(Sampling()) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert share(Sampling(top_k=2)) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert share(Sampling(top_p=0.9)) == pytest.approx([0.526, 0.316, 0.158, 0], abs=0.03)
    assert share(Sampling(temperature=0)) == [1, 0, 0, 0]
