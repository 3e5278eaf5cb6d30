"""A trained model that continues prompts: it encodes a prompt, generates tokens with a stepper and decodes them."""

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron import mpu
from megatron.config import Config
from megatron.features.sampling import Sampling
from megatron.model.gpt2 import GPT2Model
from megatron.model.t5 import T5Model
from megatron.tokenizer import SentinelTokenizer, Tokenizer

from ..report.unigram import count_tokens
from .generation import GPT2Stepper, Stages, Step, Stepper, T5Stepper, beam_searches, collect, sample_steps
from .questions import Infill, Prompt, PromptEncoder, Question, decode_answer

Ids = list[int]
OnTokens = Callable[[Ids], None]
WINDOW_BATCHES = 16  # Number of batches of prompts that are read at once, to find prompts of equal length.


@dataclass
class Writer:
    """A model with its tokenizer, ready to generate text.

    stages: split of the model over pipeline stages, None without a pipeline. prompt_encoder: encoder of prompts.
    """

    model: GPT2Model | T5Model
    tokenizer: Tokenizer
    config: Config
    stages: Stages | None
    prompt_encoder: PromptEncoder

    def question(self, prompt: Prompt) -> Question:
        """Encode a prompt. Raises ValueError if it is too long, or if it needs unknown fill-in-the-middle tokens."""
        if isinstance(prompt, Infill) and self.prompt_encoder.fim_tokens is None:
            raise ValueError("the model was not trained with --fim-rate; give --fim-tokens PREFIX MIDDLE SUFFIX")
        question = self.prompt_encoder.question(prompt)
        size = len(question.tokens)
        if self.max_steps(size) < size:
            raise ValueError(f"a prompt of {size} tokens is longer than the model's {self.config.positions} positions")
        return question

    def stepper(self, sources: list[Ids]) -> Stepper:
        """Return a stepper that continues `sources`, which are encoded prompts of equal length."""
        model = self.model
        tokenizer = self.tokenizer
        if isinstance(model, GPT2Model):
            is_prefix_lm = self.config.objective == "prefix-lm"
            return GPT2Stepper(
                model, sources, self.config.positions, stages=self.stages, bidirectional_prompt=is_prefix_lm
            )
        assert isinstance(tokenizer, SentinelTokenizer)
        return T5Stepper(model, sources, tokenizer.decoder_start, stages=self.stages)

    def max_steps(self, max_new_tokens: int) -> int:
        """Return the number of tokens to generate at most: `max_new_tokens`, or the positions of a T5's decoder."""
        if self.config.is_t5 and self.config.model.position_embedding == "learned":
            return min(max_new_tokens, self.config.positions)
        return max_new_tokens

    def steps(self, questions: Sequence[Question], args: argparse.Namespace, stepper: Stepper) -> Iterator[Step]:
        """Yield the steps of args.num_samples texts per prompt. `stepper` has read the prompts."""
        sampling = Sampling(args.temperature, args.top_k, args.top_p)
        # Equal seeds would draw equal random numbers for all prompts, so similar prompts would get equal texts.
        seeds = [mpu.derive_seed(args.seed, "prompt", *question.tokens) for question in questions]
        max_steps = self.max_steps(args.max_new_tokens)
        end_ids = questions[0].end_ids
        return sample_steps(stepper, args.num_samples, max_steps, end_ids, sampling, seeds)

    def write(
        self, questions: Sequence[Question], args: argparse.Namespace, on_tokens: OnTokens | None
    ) -> list[list[str]]:
        """Return the generated texts of each prompt. The prompts must have equal length and the same end tokens."""
        stepper = self.stepper([question.tokens for question in questions])
        end_ids = questions[0].end_ids
        num_samples = args.num_samples
        ids_by_question = []
        if args.num_beams:
            max_steps = self.max_steps(args.max_new_tokens)
            for beams in beam_searches(stepper, args.num_beams, max_steps, end_ids):
                ids_by_question.append([ids for _, ids in beams[:num_samples]])
        else:
            rows = collect(self.steps(questions, args, stepper), end_ids, on_tokens)
            for first in range(0, len(rows), num_samples):
                ids_by_question.append(rows[first : first + num_samples])
        texts = []
        for question, ids_of_samples in zip(questions, ids_by_question, strict=True):
            texts.append([self.text(question, ids) for ids in ids_of_samples])
        return texts

    def top_lift(self, question: Question, count: int) -> str:
        """Return a line with the tokens whose probability most exceeds their frequency in the training text.

        Candidates are all next tokens, or for a T5 all first tokens of the first masked span. They are ranked by
        p log(p / share), a token's term in the KL divergence: p is its probability, share its frequency in the
        training text. If the training text is unknown, they are ranked by p.
        """
        stepper = self.stepper([question.tokens])
        tokenizer = self.tokenizer
        logits = stepper.first(1)
        # If a T5 of this convention fills spans, its output begins with the first sentinel. The candidates are the
        # tokens after it. In the CPM convention, the decoder's input already begins with this sentinel.
        if isinstance(tokenizer, SentinelTokenizer) and tokenizer.convention == "t5" and self._fills_spans(question):
            logits = stepper.next(torch.tensor([tokenizer.sentinels[0]], device=logits.device))
        probabilities = logits[0].double().softmax(-1).cpu()[: tokenizer.vocab_size]
        frequencies = None
        scores = probabilities
        counts = count_tokens(self.config, logits.shape[-1])
        if counts is not None:
            train_counts, _ = counts  # of the training and the validation text
            smoothed = train_counts[: len(probabilities)] + 1  # add-one smoothing, so that no frequency is 0
            frequencies = torch.from_numpy(smoothed) / (train_counts.sum() + len(probabilities))
            scores = torch.special.xlogy(probabilities, probabilities / frequencies)
        # All tokens are candidates, except special tokens and a T5's sentinels.
        ordinary = torch.ones_like(scores, dtype=torch.bool)
        ordinary[[*tokenizer.specials.values(), *getattr(tokenizer, "sentinels", [])]] = False
        candidates = ordinary.nonzero().flatten()
        best = scores[candidates].topk(min(count, len(candidates))).indices
        entries = []
        for token in candidates[best].tolist():
            entry = f"{tokenizer.decode([token])!r} {probabilities[token]:.1%}"
            if frequencies is not None:
                entry += f" ({probabilities[token] / frequencies[token]:.1f} times its share)"
            entries.append(entry)
        return "top lift: " + ", ".join(entries)

    def _fills_spans(self, question: Question) -> bool:
        """Return whether the model fills masked spans in this prompt; other prompts of a T5 are questions to answer."""
        sentinels = getattr(self.tokenizer, "sentinels", ())
        return not self.prompt_encoder.continues_text and not set(sentinels).isdisjoint(question.tokens)

    def text(self, question: Question, ids: Ids) -> str:
        """Return the text to print for the generated `ids`: the prompt and its completion, or only an answer.

        A chat and a T5 whose prompt has no masked spans answer.
        """
        tokenizer = self.tokenizer
        if ids and ids[-1] == question.end_id:
            ids = ids[:-1]  # the end token is not printed
        if isinstance(tokenizer, SentinelTokenizer) and self._fills_spans(question):
            return fill_spans(str(question.prompt), tokenizer, ids)
        return question.text_before + decode_answer(tokenizer, question, ids) + question.text_after


def equal_length_batches(questions: Sequence[Question], size: int) -> Iterator[Ids]:
    """Yield batches of at most `size` questions with equal length and the same end tokens, as lists of indices."""
    indices_by_length: dict[tuple[int, tuple[int, ...]], Ids] = {}
    for index, question in enumerate(questions):
        key = (len(question.tokens), question.end_ids)
        indices_by_length.setdefault(key, []).append(index)
    for indices in indices_by_length.values():
        for start in range(0, len(indices), size):
            yield indices[start : start + size]


def write_all(
    writer: Writer, prompts: Iterable[Prompt], args: argparse.Namespace, size: int
) -> Iterator[tuple[Prompt, list[str]]]:
    """Yield each prompt with its generated texts, in the order of the prompts."""
    stream = iter(prompts)
    # Without batches, a prompt is answered before the next is read, as --interactive needs.
    window_size = size * WINDOW_BATCHES if size > 1 else 1
    while True:
        questions = list(map(writer.question, itertools.islice(stream, window_size)))
        if not questions:
            return
        texts: dict[int, list[str]] = {}
        for indices in equal_length_batches(questions, size):
            batch = [questions[index] for index in indices]
            batch_texts = writer.write(batch, args, None)
            texts.update(zip(indices, batch_texts, strict=True))
        for index, question in enumerate(questions):
            yield question.prompt, texts[index]


def fill_spans(prompt: str, tokenizer: SentinelTokenizer, ids: Ids) -> str:
    """Return the prompt with each sentinel replaced by the T5's output for it. Sentinels without output stay."""
    # The output of a CPM T5 lacks the first sentinel, which the decoder got as its start.
    if tokenizer.convention == "cpm":
        ids = [tokenizer.sentinels[0], *ids]
    ids_by_sentinel: dict[int, Ids] = {}
    sentinel = None
    for token in ids:
        if token in tokenizer.sentinels:
            sentinel = token
            ids_by_sentinel.setdefault(token, [])
        elif sentinel is not None:  # output before the first sentinel belongs to no span
            ids_by_sentinel[sentinel].append(token)
    filled_ids: Ids = []
    for token in tokenizer.encode(prompt):
        # A token that is no sentinel, or a sentinel without output, stays in the text.
        filled_ids += ids_by_sentinel.get(token) or [token]
    return tokenizer.decode(filled_ids)
