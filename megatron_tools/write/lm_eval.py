"""Tasks of EleutherAI's lm-eval harness (Gao et al.) for left-to-right models of this project or Hugging Face."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.features.harness import LogLikelihoods, encode, prefix_of
from megatron.features.scoring import Logits, Request, Scored, score_one
from megatron.tokenizer import Tokenizer


@dataclass
class Subject:
    """A model to evaluate. logits_of: tokens [b, s] -> logits [b, s, v]. longest: context window in tokens."""

    logits_of: Logits
    tokenizer: Tokenizer
    longest: int
    device: torch.device


class Harness(Subject, LogLikelihoods):
    """The model interface that lm-eval requires, for a model that one process holds."""

    def score(self, requests: Sequence[Request]) -> list[Scored]:
        """Return the score of each request, by this model."""
        return [score_one(request, self.logits_of, self.device) for request in requests]

    @torch.no_grad()
    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return greedy continuations of each (context, {"until": [...], "max_gen_toks": n}), cut at a stop word."""
        found = []
        for request in requests:
            context, options = request.args
            stops = options.get("until") or []
            if isinstance(stops, str):
                stops = [stops]
            if options.get("do_sample"):
                raise ValueError("this lm-eval task needs sampling, but only greedy decoding is supported")
            most = options.get("max_gen_toks", 256)
            ids = encode(self.tokenizer, context) or [prefix_of(self.tokenizer)]
            # lm-eval leaves room for the longest answer. Where there is none, which it refuses, the window slides.
            if most < self.longest:
                ids = ids[most - self.longest :]
            found.append(self._continue(ids, stops, most))
        return found

    def _continue(self, ids: list[int], stops: Sequence[str], most: int) -> str:
        """Return the greedy continuation of `ids`, of at most `most` tokens, cut before the first stop word."""
        written: list[int] = []
        text = ""
        while len(written) < most:
            tokens = torch.tensor([[*ids, *written][-self.longest :]], dtype=torch.int64, device=self.device)
            best = int(self.logits_of(tokens)[0, -1].argmax())
            if best == self.tokenizer.eod:
                break
            written.append(best)
            text = self.tokenizer.decode(written)
            ends = [text.find(stop) for stop in stops if stop in text]
            if ends:
                return text[: min(ends)]
        return text
