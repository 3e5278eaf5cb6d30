"""Tasks of EleutherAI's lm-eval harness (Gao et al.) for left-to-right models of this project or Hugging Face."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.tokenizer import Tokenizer

from .scoring import Logits, boundary, nats_of


@dataclass
class Subject:
    """A model to evaluate. logits_of: tokens [b, s] -> logits [b, s, v]. longest: context window in tokens."""

    logits_of: Logits
    tokenizer: Tokenizer
    longest: int
    device: torch.device


class Harness(Subject):
    """The model interface that lm-eval requires; each method takes a list of lm-eval's requests."""

    @torch.no_grad()
    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return (log-probability, whether greedy decoding yields it) of each request's continuation."""
        return [self._one(*request.args) for request in requests]

    def _one(self, context: str, continuation: str) -> tuple[float, bool]:
        # Move the context's trailing spaces to the continuation, because tokenizers join a space with the next word.
        stem = context.rstrip()
        context, continuation = stem, context[len(stem) :] + continuation
        known, whole = self.tokenizer.encode(context), self.tokenizer.encode(context + continuation)
        if not continuation or not whole:
            return 0.0, True
        # A token that contains the end of the context and the start of the continuation counts as part of the
        # continuation. The continuation always gets at least one token.
        wanted = len(whole) - min(boundary(known, whole), len(whole) - 1)
        ids = [*self.tokenizer.before, *whole][-self.longest - 1 :]
        wanted = min(wanted, len(ids) - 1)
        tokens = torch.tensor([ids], dtype=torch.int64, device=self.device)
        scores = torch.log_softmax(self.logits_of(tokens[:, :-1])[0, -wanted:].float(), dim=-1)
        targets = tokens[0, -wanted:]
        total = scores.gather(1, targets[:, None]).sum().item()
        return total, bool((scores.argmax(-1) == targets).all())

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-probability of whole texts.

        Each token is scored with at least half a window of context, or with all earlier tokens if there are fewer.
        """
        found = []
        for request in requests:
            ids = [*self.tokenizer.before, *self.tokenizer.encode(request.args[0])]
            stride = max(self.longest // 2, 1)
            found.append(-sum(nats_of(ids, self.logits_of, self.longest + 1, stride, self.device)))
        return found

    @torch.no_grad()
    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return greedy continuations of each (context, {"until": [...], "max_gen_toks": n}), cut at a stop word."""
        found = []
        for request in requests:
            context, options = request.args
            stops = options.get("until") or []
            stops = [stops] if isinstance(stops, str) else stops
            if options.get("do_sample"):
                raise ValueError("this lm-eval task needs sampling, but only greedy decoding is supported")
            ids = [*self.tokenizer.before, *self.tokenizer.encode(context)]
            written: list[int] = []
            text = ""
            while len(written) < options.get("max_gen_toks", 256) and not any(stop in text for stop in stops):
                tokens = torch.tensor([[*ids, *written][-self.longest :]], dtype=torch.int64, device=self.device)
                best = int(self.logits_of(tokens)[0, -1].argmax())
                if best == self.tokenizer.eod:
                    break
                written.append(best)
                text = self.tokenizer.decode(written)
            found.append(text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))])
        return found


def evaluate_tasks(harness: Harness, tasks: Sequence[str], limit: int | None, include: str | None) -> dict[str, Any]:
    """Return the harness's results by task. Raises ValueError without lm-eval and for unknown tasks."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.api.model import LM
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ValueError("--tasks needs the package lm-eval: pip install lm-eval") from None

    class Adapter(LM):  # type: ignore[misc]
        loglikelihood = staticmethod(harness.loglikelihood)
        loglikelihood_rolling = staticmethod(harness.loglikelihood_rolling)
        generate_until = staticmethod(harness.generate_until)

    manager = TaskManager(include_path=include)
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        raise ValueError(f"lm-eval has no task {', '.join(unknown)}; give custom tasks with --task-folder")
    found = simple_evaluate(model=Adapter(), tasks=list(tasks), limit=limit, task_manager=manager, bootstrap_iters=0)
    results: dict[str, Any] = found["results"]
    return results
