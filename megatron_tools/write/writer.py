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

from ..report.unigram import counted
from .generation import GPT2Stepper, Stages, Step, Stepper, T5Stepper, beam_searches, collect, sample_steps
from .questions import Infill, Prompt, Question, Reader, answer

Ids = list[int]
OnTokens = Callable[[Ids], None]
WINDOW = 16  # Number of batches of prompts that are read at once, to find prompts of equal length.


@dataclass
class Writer:
    """A model with its tokenizer, ready to generate text.

    stages: split of the model over pipeline stages, None without a pipeline. reader: encoder of prompts.
    """

    model: GPT2Model | T5Model
    tokenizer: Tokenizer
    config: Config
    stages: Stages | None
    reader: Reader

    def question(self, asked: Prompt) -> Question:
        """Encode a prompt. Raises ValueError if it needs fill-in-the-middle tokens but none are known."""
        if isinstance(asked, Infill) and self.reader.marks is None:
            raise ValueError("the model was not trained with --fim-rate; give --fim-tokens PREFIX MIDDLE SUFFIX")
        return self.reader.question(asked)

    def stepper(self, sources: list[Ids]) -> Stepper:
        """Return a stepper that continues `sources`, which are encoded prompts of equal length."""
        model = self.model
        tokenizer = self.tokenizer
        if isinstance(model, GPT2Model):
            prefix = self.config.objective == "prefix-lm"
            return GPT2Stepper(model, sources, self.config.positions, stages=self.stages, prefix=prefix)
        assert isinstance(tokenizer, SentinelTokenizer)
        start = tokenizer.pad if tokenizer.convention == "t5" else tokenizer.sentinels[0]
        return T5Stepper(model, sources, start, stages=self.stages)

    def longest(self, max_new_tokens: int) -> int:
        """Return the number of tokens to generate at most: `max_new_tokens`, or the positions of a T5's decoder."""
        if self.config.is_t5 and self.config.model.position_embedding == "learned":
            return min(max_new_tokens, self.config.positions)
        return max_new_tokens

    def steps(self, asked: Sequence[Question], args: argparse.Namespace, stepper: Stepper) -> Iterator[Step]:
        """Yield the steps of args.num_samples texts per prompt. `stepper` has read the prompts."""
        sampling = Sampling(args.temperature, args.top_k, args.top_p)
        # Equal seeds would draw equal random numbers for all prompts, so similar prompts would get equal texts.
        seeds = [mpu.derive_seed(args.seed, "prompt", *question.tokens) for question in asked]
        return sample_steps(stepper, args.num_samples, self.longest(args.max_new_tokens), asked[0].end, sampling, seeds)

    def write(self, asked: Sequence[Question], args: argparse.Namespace, on_tokens: OnTokens | None) -> list[list[str]]:
        """Return the generated texts of each prompt. The prompts must have equal length and the same end token."""
        stepper = self.stepper([question.tokens for question in asked])
        end = asked[0].end
        each = args.num_samples
        found = []
        if args.num_beams:
            for best in beam_searches(stepper, args.num_beams, self.longest(args.max_new_tokens), end):
                found.append([ids for _, ids in best[:each]])
        else:
            rows = collect(self.steps(asked, args, stepper), end, on_tokens)
            for i in range(0, len(rows), each):
                found.append(rows[i : i + each])
        texts = []
        for question, own in zip(asked, found, strict=True):
            texts.append([self.text(question, ids) for ids in own])
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
        if isinstance(tokenizer, SentinelTokenizer) and tokenizer.convention == "t5" and not self.reader.continues_text:
            logits = stepper.next(torch.tensor([tokenizer.sentinels[0]], device=logits.device))
        p = logits[0].double().softmax(-1).cpu()[: tokenizer.vocab_size]
        p[[*tokenizer.specials.values(), *getattr(tokenizer, "sentinels", [])]] = 0  # special tokens are no candidates
        shares = None
        ranking = p
        counts = counted(list(self.config.data.data_path or []), self.config.data.split, logits.shape[-1])
        if counts is not None:
            train = counts[0]
            shares = torch.from_numpy(train[: len(p)] + 1) / (train.sum() + len(p))
            ranking = torch.special.xlogy(p, p / shares)
        words = []
        for i in ranking.topk(count).indices.tolist():
            word = f"{tokenizer.decode([i])!r} {p[i]:.1%}"
            if shares is not None:
                word += f" ({p[i] / shares[i]:.1f} times its share)"
            words.append(word)
        return "top lift: " + ", ".join(words)

    def text(self, question: Question, ids: Ids) -> str:
        """Return the text to print for the generated `ids`: an answer in a chat, else the prompt and its completion."""
        if not isinstance(self.tokenizer, SentinelTokenizer):
            return question.before + answer(self.tokenizer, question, ids) + question.after
        if ids[-1:] == [question.end]:
            ids = ids[:-1]
        if self.reader.continues_text:
            return question.before + answer(self.tokenizer, question, ids)
        return fill(str(question.prompt), self.tokenizer, ids)


def batches(asked: Sequence[Question], size: int) -> Iterator[Ids]:
    """Yield batches of at most `size` questions with equal length and the same end token, as lists of their indices."""
    alike: dict[tuple[int, int], Ids] = {}
    for i, question in enumerate(asked):
        alike.setdefault((len(question.tokens), question.end), []).append(i)
    for numbers in alike.values():
        for at in range(0, len(numbers), size):
            yield numbers[at : at + size]


def answers(
    writer: Writer, prompts: Iterable[Prompt], args: argparse.Namespace, size: int
) -> Iterator[tuple[Prompt, list[str]]]:
    """Yield each prompt with its generated texts, in the order of the prompts."""
    stream = iter(prompts)
    window = size * WINDOW if size > 1 else 1
    while asked := [writer.question(prompt) for prompt in itertools.islice(stream, window)]:
        texts: dict[int, list[str]] = {}
        for numbers in batches(asked, size):
            written = writer.write([asked[i] for i in numbers], args, None)
            texts.update(zip(numbers, written, strict=True))
        for i, question in enumerate(asked):
            yield question.prompt, texts[i]


def fill(prompt: str, tokenizer: SentinelTokenizer, ids: Ids) -> str:
    """Return the prompt with each sentinel replaced by the T5's output for it. Sentinels without output stay."""
    if tokenizer.convention == "cpm":
        ids = [tokenizer.sentinels[0], *ids]
    spans: dict[int, Ids] = {}
    last = None
    for token in ids:
        if token in tokenizer.sentinels:
            last = token
            spans.setdefault(token, [])
        elif last is not None:
            spans[last].append(token)
    filled: Ids = []
    for token in tokenizer.encode(prompt):
        filled += spans.get(token) or [token]
    return tokenizer.decode(filled)
