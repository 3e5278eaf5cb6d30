"""Incremental decoding equals recomputation, and greedy and beam search equal Hugging Face's."""

import math
from typing import Any

import pytest
import torch

from megatron.config.command_line import parse
from megatron.model import GPT2Model, T5Model
from megatron_tools.write.beams import Beam
from megatron_tools.write.generation import (
    GPT2Stepper,
    ModelStepper,
    Sampling,
    Stepper,
    T5Stepper,
    beam_searches,
    sample,
    sample_next_tokens,
)
from tests import llama_twins as twins
from tests.sentences import SENTENCES
from tests.support import covering

from .test_t5_model import T5_FLAGS, copy_weights, hugging_face

GPT2_FLAGS = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --vocab-size 50 --init-method-std 0.2"
)
LLAMA_FLAGS = (
    f"{GPT2_FLAGS} --family llama --position-embedding rope --normalization rmsnorm --activation swiglu "
    "--no-hidden-bias "
    "--num-key-value-heads 2 --no-tie-embeddings"
)
DECODERS = {
    "gpt2": GPT2_FLAGS,
    "llama": f"{LLAMA_FLAGS} --reset-position-ids --reset-attention-mask",
    "mistral": f"{LLAMA_FLAGS} --qk-norm --sliding-window 4 --reset-position-ids",
}
CPM_FLAGS = f"{GPT2_FLAGS} --family t5 --num-decoder-layers 2"
PROMPT = [4, 9, 2, 33, 8]


def build(kind: str, cached: bool) -> Stepper:
    """Return a stepper of a small model; without a cache, one that computes all logits of the text anew."""
    if kind in DECODERS:
        decoder = GPT2Model(parse(DECODERS[kind].split()), parallel_output=False).eval()
        return GPT2Stepper(decoder, PROMPT, 24) if cached else ModelStepper(decoder, PROMPT, 24)
    flags = (
        CPM_FLAGS if kind == "cpm" else f"{T5_FLAGS} --init-method-std 0.2 --activation gated-gelu --no-tie-embeddings"
    )
    t5 = T5Model(parse(flags.split()), parallel_output=False).eval()
    if cached:
        return T5Stepper(t5, PROMPT * 3, 1)
    source = torch.tensor([PROMPT * 3])
    return ModelStepper(lambda tokens: t5(source.expand(len(tokens), -1), tokens), [1], 24)


@pytest.mark.parametrize("kind", [*DECODERS, "cpm", "t5"])
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


@pytest.mark.parametrize("kind", DECODERS)
@torch.no_grad()
def test_a_decoder_goes_on_behind_its_last_position(kind: str) -> None:
    found = sample(build(kind, True), 2, 40, end_id=49, sampling=Sampling(temperature=0), seed=1)
    assert found == sample(build(kind, False), 2, 40, end_id=49, sampling=Sampling(temperature=0), seed=1)
    assert max(map(len, found)) == 40 or all(row[-1] == 49 for row in found)


@pytest.mark.parametrize("kind", covering(["gpt2", "mistral", "cpm", "t5"], lambda kind: kind != "cpm"))
def test_prompts_read_together_are_continued_as_each_is_by_itself(kind: str) -> None:
    """A prompt has the same continuation in a batch as alone: with greedy decoding, sampling and beam search."""
    dice = torch.Generator().manual_seed(5)
    prompts = torch.randint(48, (4, 7), generator=dice).tolist()
    single = build(kind, True)
    model: Any = single.model  # type: ignore[attr-defined]

    def reads(given: list[list[int]]) -> Stepper:
        return GPT2Stepper(model, given, 24) if kind in DECODERS else T5Stepper(model, given, 1)

    lengths = set()
    # The end token occurs in the middle of the second prompt's continuation, so this prompt ends early.
    end = sample(reads(prompts[1:2]), 1, 12, -1, Sampling(temperature=0), 0)[0][3]
    for sampling in (Sampling(temperature=0), Sampling(0.8, 20, 0.9)):
        alone = [row for prompt in prompts for row in sample(reads([prompt]), 2, 14, end, sampling, seed=7)]
        assert sample(reads(prompts), 2, 14, end, sampling, seed=7) == alone
        lengths |= {len(row) for row in alone}
    assert len(lengths) > 1
    for beams, longest in ((1, 9), (3, 9), (3, 20)):
        by_itself = [beam_searches(reads([prompt]), beams, longest, end)[0] for prompt in prompts]
        together = beam_searches(reads(prompts), beams, longest, end)
        assert [[ids for _, ids in best] for best in together] == [[ids for _, ids in best] for best in by_itself]
        found = [score for best in together for score, _ in best]
        assert found == pytest.approx([score for best in by_itself for score, _ in best], rel=1e-5)


def test_prompts_of_different_lengths_are_not_read_together() -> None:
    model: Any = build("gpt2", True).model  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=SENTENCES["must_have_equal_length_not_2"]):
        GPT2Stepper(model, [[1, 2], [3]], 24)


class Elsewhere:
    """A stepper that simulates a model on a GPU: its logits are on the meta device; only `cpu()` gives their values.

    At step s, token r + s has the largest logit in row r. `next` fails if its tokens are on the CPU.
    """

    def __init__(self, rows: int) -> None:
        self.rows, self.steps = rows, 0

    def first(self, batch: int) -> Any:
        return _Logits(torch.eye(50)[torch.arange(self.rows * batch) + self.steps] * 5)

    def next(self, tokens: torch.Tensor) -> Any:
        assert tokens.device.type == "meta"
        self.steps += 1
        return self.first(len(tokens) // self.rows)

    def reorder(self, rows: torch.Tensor) -> None:
        assert rows.device.type == "meta"


class _Logits:
    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.shape, self.device = values, values.shape, torch.device("meta")

    def float(self) -> "_Logits":
        return self

    def cpu(self) -> torch.Tensor:
        return self.values


def test_what_goes_to_the_model_goes_to_its_device() -> None:
    found = sample(Elsewhere(2), 2, 5, 49, Sampling(temperature=0), 0)
    assert found == [[row + step for step in range(5)] for row in range(4)]
    assert [len(best) for best in beam_searches(Elsewhere(2), 3, 5, 49)] == [3, 3]


@pytest.mark.parametrize("kind", [*DECODERS, "cpm", "t5"])
def test_a_model_on_another_device_meets_no_tensor_of_the_cpu(kind: str) -> None:
    """Decoding uses only tensors on the model's device: fake tensors of torch refuse mixed devices, as a GPU does."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    stepper: Any = build(kind, True)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        there = torch.device("meta")
        stepper.model.to(there)
        for step in range(3):
            logits = stepper.first(3) if step == 0 else stepper.next(torch.zeros(3, dtype=torch.int64, device=there))
            assert logits.device.type == "meta" and logits.shape == (3, stepper.model.vocab_size)
            stepper.reorder(torch.zeros(3, dtype=torch.int64, device=there))
        with pytest.raises(RuntimeError, match=SENTENCES["at_least_two_devices"]):
            stepper.next(torch.zeros(3, dtype=torch.int64))


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


@pytest.mark.parametrize(("kind", "window"), [("Llama", None), ("Qwen3", None), ("Mistral", 7)])
def test_greedy_decoders_are_hugging_faces(kind: str, window: int | None) -> None:
    """Greedy decoding with cached keys and values, also beyond the sliding window, equals Hugging Face's."""
    other = twins.theirs(kind, window=window)
    ours = GPT2Model(parse(twins.flags_of(kind, window=window).split()), parallel_output=False).eval()
    twins.copy_weights(other, ours, twins.USUAL)
    expected = other.generate(
        torch.tensor([PROMPT]), max_new_tokens=25, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    assert (
        sample(GPT2Stepper(ours, PROMPT, 64), 1, 25, -1, Sampling(temperature=0), 0)[0]
        == expected[0, len(PROMPT) :].tolist()
    )


@pytest.mark.parametrize("beams", [2, 4])
@pytest.mark.parametrize("end", [1, 40, 59])
def test_beam_search_is_hugging_faces(beams: int, end: int) -> None:
    theirs, ours = pair()
    expected = theirs.generate(
        torch.tensor([PROMPT * 2]),
        max_new_tokens=10,
        do_sample=False,
        num_beams=beams,
        eos_token_id=end,
        pad_token_id=0,
        length_penalty=1.0,
        early_stopping=False,
        num_return_sequences=beams,
        output_scores=True,
        return_dict_in_generate=True,
        use_cache=False,
    )
    (found,) = beam_searches(ours, beams, 10, end)
    wanted = [row[row != 0].tolist() for row in expected.sequences[:, 1:]]
    assert [tokens for _, tokens in found] == wanted
    assert [score for score, _ in found] == pytest.approx(expected.sequences_scores.tolist(), rel=1e-4)


@pytest.mark.parametrize(("kind", "window"), [("Llama", None), ("Qwen3", None), ("Mistral", 7)])
@pytest.mark.parametrize("end", [1, 40])
def test_beams_of_decoders_are_hugging_faces(kind: str, window: int | None, end: int) -> None:
    """Beam search with cached keys and values, also beyond the sliding window, equals Hugging Face's."""
    other = twins.theirs(kind, window=window)
    ours = GPT2Model(parse(twins.flags_of(kind, window=window).split()), parallel_output=False).eval()
    twins.copy_weights(other, ours, twins.USUAL)
    expected = other.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=12,
        do_sample=False,
        num_beams=3,
        eos_token_id=end,
        pad_token_id=end,
        length_penalty=1.0,
        early_stopping=False,
        num_return_sequences=3,
        output_scores=True,
        return_dict_in_generate=True,
        use_cache=False,
    )
    (found,) = beam_searches(GPT2Stepper(ours, PROMPT, 64), 3, 12, end)
    rows = expected.sequences[:, len(PROMPT) :].tolist()
    assert [ids for _, ids in found] == [row[: row.index(end) + 1] if end in row else row for row in rows]
    assert [score for score, _ in found] == pytest.approx(expected.sequences_scores.tolist(), rel=1e-4)


EOD, TURN_END, ANSWER, QUESTION = range(4)


def chat_logits(tokens: torch.Tensor) -> torch.Tensor:
    """Return logits [b, s, 4]: after the question 0.7 for EOD and 0.2 for an answer, which TURN_END always follows."""
    probabilities = torch.tensor([0.25, 0.25, 0.25, 0.25]).repeat(*tokens.shape, 1)
    probabilities[tokens == QUESTION] = torch.tensor([0.7, 0.1, 0.2, 1e-9])
    probabilities[tokens == ANSWER] = torch.tensor([1e-9, 1.0, 1e-9, 1e-9])
    return probabilities.log()


def test_each_of_several_end_tokens_ends_a_text() -> None:
    ends = (TURN_END, EOD)
    assert sample(ModelStepper(chat_logits, [QUESTION], 64), 1, 9, ends, Sampling(temperature=0), 0) == [[EOD]]
    rows = sample(ModelStepper(chat_logits, [QUESTION], 64), 200, 9, ends, Sampling(), 0)
    assert {tuple(row) for row in rows} == {(EOD,), (TURN_END,), (ANSWER, TURN_END)}
    (found,) = beam_searches(ModelStepper(chat_logits, [QUESTION], 64), 3, 9, ends)
    assert [tokens for _, tokens in found] == [[EOD], [ANSWER, TURN_END], [TURN_END]]
    expected = [math.log(0.7), math.log(0.2) / 2, math.log(0.1)]
    assert [score for score, _ in found] == pytest.approx(expected, rel=1e-5)


def test_sampling_keeps_to_the_likely() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(4000, 4)
    generator = torch.Generator().manual_seed(0)

    def share(sampling: Sampling) -> list[float]:
        return (torch.bincount(sample_next_tokens(logits, sampling, generator), minlength=4) / 4000).tolist()

    assert share(Sampling()) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert share(Sampling(top_k=2)) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert share(Sampling(top_p=0.9)) == pytest.approx([0.526, 0.316, 0.158, 0], abs=0.03)
    assert share(Sampling(temperature=0)) == [1, 0, 0, 0]


def test_beams_beyond_the_possible_continuations_give_none() -> None:
    """With 3 tokens and 1 new token, there are 3 continuations, however many beams are asked for."""
    search = Beam(5, 1, 2)
    search.step(torch.log_softmax(torch.randn(5, 3), -1))
    assert sorted(tokens for _, tokens in search.best()) == [[0], [1], [2]]
