"""Tasks of EleutherAI's lm-eval harness (Gao et al.) for left-to-right models of this project or Hugging Face."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.features.harness import LogLikelihoods, encode_with_start, prefix_id
from megatron.features.scoring import Logits, Request, Scored, score_one
from megatron.tokenizer import Tokenizer

# Names of the maximum number of new tokens, of which lm-eval reads the first that a task sets
LENGTH_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# Settings that `_max_new_tokens` reads, or that have no effect without sampling
KNOWN_KEYS = (*LENGTH_KEYS, "until", "do_sample", "temperature", "top_k", "top_p")


@dataclass
class Harness(LogLikelihoods):
    """A model to evaluate, which one process holds, with the interface that lm-eval requires.

    logits_of: tokens [b, s] -> logits [b, s, v]. max_length: context window in tokens.
    eos_token_id: as in generation_config.json, an id or ids that end a generated text besides the tokenizer's `eod`.
    """

    logits_of: Logits
    tokenizer: Tokenizer
    max_length: int
    device: torch.device
    eos_token_id: Any = None

    def score(self, requests: Sequence[Request]) -> list[Scored]:
        """Return the score of each request, by this model."""
        return [score_one(request, self.logits_of, self.device) for request in requests]

    @torch.no_grad()
    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return greedy continuations of each (context, {"until": [...], "max_gen_toks": n}), cut at a stop word.

        Raises ValueError if a task needs other decoding.
        """
        texts = []
        for request in requests:
            context, options = request.args
            stop_words = options.get("until") or []
            if isinstance(stop_words, str):
                stop_words = [stop_words]
            stop_words = list(filter(None, stop_words))  # lm-eval ignores an empty stop word
            max_new_tokens = _max_new_tokens(options)
            # A model needs at least one token to continue, also if the context is empty.
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
        shown_ids: list[int] = []
        special_ids = self.tokenizer.specials.values()
        # `ravel` makes a list of eos_token_id, which is an id, a list of ids, or None; no token equals None.
        end_ids = {self.tokenizer.eod, *np.ravel(self.eos_token_id)}
        while len(new_ids) < max_new_tokens:
            tokens = torch.tensor([[*ids, *new_ids][-self.max_length :]], dtype=torch.int64, device=self.device)
            best_id = int(self.logits_of(tokens)[0, -1].argmax())
            if best_id in end_ids:
                break
            new_ids.append(best_id)
            # A stop word may be the name of a special token, but the result has no such names.
            if best_id not in special_ids:
                shown_ids.append(best_id)
            text = self.tokenizer.decode(new_ids)
            if any(stop in text for stop in stop_words):
                break
        text = self.tokenizer.decode(shown_ids)
        for stop in stop_words:
            text = text.split(stop)[0]  # the part before the first `stop`
        return text


def _max_new_tokens(options: Mapping[str, Any]) -> int:
    """Return the maximum number of new tokens. Raises ValueError for settings of other than greedy decoding."""
    # If a task does not set do_sample, lm-eval samples at any temperature other than 0.
    if options.get("do_sample", options.get("temperature")):
        raise ValueError("this lm-eval task needs sampling, but only greedy decoding is supported")
    for key, value in options.items():
        # 0, 1, false and null turn other settings off, such as num_beams and repetition_penalty.
        if key not in KNOWN_KEYS and value not in (None, 0, 1):
            raise ValueError(f"this lm-eval task needs {key} {value}, but only greedy decoding is supported")
    for key in LENGTH_KEYS:
        if key in options:
            return int(options[key])
    return 256  # lm-eval's default
