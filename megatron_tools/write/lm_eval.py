"""Tasks of EleutherAI's lm-eval harness (Gao et al.) for left-to-right models of this project or Hugging Face."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.features.harness import LogLikelihoods, encode_with_start, prefix_id
from megatron.features.scoring import Logits, Request, Scored, score_one
from megatron.tokenizer import Tokenizer


@dataclass
class Subject:
    """A model to evaluate. logits_of: tokens [b, s] -> logits [b, s, v]. max_length: context window in tokens."""

    logits_of: Logits
    tokenizer: Tokenizer
    max_length: int
    device: torch.device


class Harness(Subject, LogLikelihoods):
    """The model interface that lm-eval requires, for a model that one process holds."""

    def score(self, requests: Sequence[Request]) -> list[Scored]:
        """Return the score of each request, by this model."""
        return [score_one(request, self.logits_of, self.device) for request in requests]

    @torch.no_grad()
    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return greedy continuations of each (context, {"until": [...], "max_gen_toks": n}), cut at a stop word."""
        texts = []
        for request in requests:
            context, options = request.args
            stop_words = options.get("until") or []
            if isinstance(stop_words, str):
                stop_words = [stop_words]
            if options.get("do_sample"):
                raise ValueError("this lm-eval task needs sampling, but only greedy decoding is supported")
            max_new_tokens = options.get("max_gen_toks", 256)
            ids = encode_with_start(self.tokenizer, context) or [prefix_id(self.tokenizer)]
            # Like lm-eval's own models, keep the last tokens that leave room for the longest answer. If an answer may
            # fill the whole window, which those models refuse, all tokens stay and the window slides.
            kept_length = self.max_length - max_new_tokens
            if kept_length > 0:
                ids = ids[-kept_length:]
            texts.append(self._continue(ids, stop_words, max_new_tokens))
        return texts

    def _continue(self, ids: list[int], stop_words: Sequence[str], max_new_tokens: int) -> str:
        """Return the greedy continuation of `ids`, at most `max_new_tokens` tokens, cut before the first stop word."""
        new_ids: list[int] = []
        text = ""
        while len(new_ids) < max_new_tokens:
            tokens = torch.tensor([[*ids, *new_ids][-self.max_length :]], dtype=torch.int64, device=self.device)
            best_id = int(self.logits_of(tokens)[0, -1].argmax())
            if best_id == self.tokenizer.eod:
                break
            new_ids.append(best_id)
            text = self.tokenizer.decode(new_ids)
            stop_positions = [text.find(stop) for stop in stop_words if stop in text]
            if stop_positions:
                return text[: min(stop_positions)]
        return text
