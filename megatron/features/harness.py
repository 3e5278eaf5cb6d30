"""Tasks of EleutherAI's lm-eval harness (Gao et al.) for left-to-right models. The package lm-eval is optional.

Texts are encoded and cut by the rules of lm-eval's `hf` model, so its numbers can be compared with those of other
programs. The rules differ from those of `scoring.py`, which tools/evaluate.py uses for --input and --cloze.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..packages import pip_install
from ..ranks.device import current_device
from ..seeds import keep_random_state
from ..tokenizer import Tokenizer
from .scoring import Request, Scored


def prefix_id(tokenizer: Tokenizer) -> int:
    """Return the id before a text without context: that of bos_token, else of eos_token."""
    return tokenizer.before[0] if tokenizer.bos is None else tokenizer.bos


def encode_with_start(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text, which begin with `tokenizer.start` unless the text begins with the name of bos_token.

    The names of special tokens become these tokens, as in transformers.
    """
    ids = tokenizer.encode_names(text)
    prefix = prefix_id(tokenizer)
    # `marks` maps the name of each special token to its id.
    if any(i == prefix and text.startswith(name) for name, i in tokenizer.marks.items()):
        return ids
    return [*tokenizer.start, *ids]


def continuation_request(tokenizer: Tokenizer, context: str, text: str, max_length: int) -> Request | None:
    """Return the request that scores `text` after `context`, or None if there are no tokens to score.

    Context and text are encoded together, and as many ids as the context alone has are its ids. A token that spans
    both is therefore not scored. max_length: context window in tokens. Ids before the window are left out.
    """
    if context:
        # As in lm-eval, the context's trailing spaces belong to the text, because most tokenizers begin a word with its
        # space. Of "sky is " and "blue", the ids of "sky is" are context, and that of " blue" is a target.
        stripped = context.rstrip()
        all_ids = encode_with_start(tokenizer, context + text)
        context_ids = encode_with_start(tokenizer, stripped)
    else:
        all_ids = tokenizer.encode_names(text)
        # A start token that the text itself begins with is its context.
        context_ids = all_ids[:1] if all_ids[:1] == [prefix_id(tokenizer)] else []
    if not text or not all_ids:
        return None
    # lm-eval fails if no token is left for the text. Here, the last token is scored.
    if len(context_ids) >= len(all_ids):
        context_ids = all_ids[:-1]
    targets = all_ids[len(context_ids) :]
    if not context_ids:  # the first target needs an id before it
        context_ids = [prefix_id(tokenizer)]
    # One id more than the window, as the last target is no input. With a window of 3, context 1 2 3 and targets 4 5
    # give ids 2 3 4 5.
    ids = [*context_ids, *targets][-max_length - 1 :]
    # The first id is only context, so it is no target, even if the text is longer than the window.
    return Request(ids, min(len(targets), len(ids) - 1))


def rolling_requests(tokenizer: Tokenizer, text: str, max_length: int) -> Iterator[Request]:
    """Yield requests that together score each token of a text once, in windows that do not overlap.

    The first token of each window has one token of context. The last window is filled with earlier tokens.
    """
    # With 5 ids after the start and a window of 3, ids 0-3 score 1-3, and then ids 2-5 score 4-5.
    ids = [prefix_id(tokenizer), *encode_with_start(tokenizer, text)]
    for first in range(1, len(ids), max_length):
        end = min(first + max_length, len(ids))
        begin = max(end - max_length - 1, 0)
        yield Request(ids[begin:end], end - first)


class LogLikelihoods:
    """Base class of the model interface that lm-eval requires; each method takes a list of lm-eval's requests.

    max_length: context window in tokens.
    """

    tokenizer: Tokenizer
    max_length: int

    def score(self, requests: Sequence[Request]) -> list[Scored]:
        """Return the score of each request."""
        raise NotImplementedError

    def loglikelihood(self, requests: Sequence[Any]) -> list[Scored]:
        """Return (log-probability, whether greedy decoding yields it) of each request's continuation."""
        to_score = []  # None for a request without tokens to score, which gets the log-probability 0
        for request in requests:
            context, text = request.args
            to_score.append(continuation_request(self.tokenizer, context, text, self.max_length))
        # The scores are in the order of the requests with tokens, so each of these takes the next one.
        scores = iter(self.score(list(filter(None, to_score))))
        return [next(scores) if scorable else Scored(0.0, greedy=True) for scorable in to_score]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-probability of each whole text; see `rolling_requests`."""
        windows_of_texts = []
        for request in requests:
            windows_of_texts.append(list(rolling_requests(self.tokenizer, request.args[0], self.max_length)))
        scores = iter(self.score(list(itertools.chain(*windows_of_texts))))
        log_probabilities = []
        for windows in windows_of_texts:  # each text takes as many scores as it has windows
            log_probabilities.append(sum(next(scores).log_probability for _ in windows))
        return log_probabilities

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return greedy continuations. Raises ValueError if this interface only scores text."""
        raise ValueError("the task generates text, but evaluations while training only score text")


def task_manager(tasks: Iterable[str], folders: Sequence[str], flag: str) -> Any:
    """Return lm-eval's index of tasks. Raises ValueError without lm-eval and for a task that it does not know.

    folders: folders with custom tasks. flag: how messages name the flag of the tasks.
    """
    try:
        from lm_eval.tasks import TaskManager
    except (ImportError, AttributeError) as error:  # a package that lm-eval needs may be missing or too new
        raise ValueError(f"{flag} needs the package lm-eval: {pip_install('lm-eval>=0.4.10')} ({error})") from None
    manager = TaskManager(include_path=list(folders) or None)
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        raise ValueError(
            f"{flag}: lm-eval has no task {', '.join(unknown)}; check the spelling, or give the folder of a custom task"
        )
    return manager


def local_tasks(path: Path) -> list[str]:
    """Return the names of the tasks in a YAML file, or in the YAML files of a folder.

    Raises ValueError if there is none, and OSError.
    """
    files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    names = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        # The name after `task:`, without quotes and without a comment that follows it. A group has a list there.
        match = re.search(r"^task:[ \t]*[\"']?([^\s\"'#\[]+)", text, re.M)
        if match:
            names.append(match[1])
    if not names:
        raise ValueError(
            f"{path} has no lm-eval task: a YAML file of a task has a line `task: NAME`; groups are not supported"
        )
    return names


def evaluate_tasks(
    model: LogLikelihoods, tasks: Sequence[str], limit: int | None, folders: Sequence[str], flag: str = "--tasks"
) -> dict[str, Any]:
    """Return lm-eval's results by task. folders, flag, errors: see `task_manager`.

    limit: maximum number of questions in each task.
    """
    manager = task_manager(tasks, folders, flag)
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM

    # The optional package requires a subclass of its own class, which can therefore be defined only here.
    class Adapter(LM):  # type: ignore[misc]
        loglikelihood = staticmethod(model.loglikelihood)
        loglikelihood_rolling = staticmethod(model.loglikelihood_rolling)
        generate_until = staticmethod(model.generate_until)

    with keep_random_state(current_device()):  # lm-eval seeds the generators
        output = simple_evaluate(
            model=Adapter(), tasks=list(tasks), limit=limit, task_manager=manager, bootstrap_iters=0
        )
    results: dict[str, Any] = output["results"]
    for row in results.values():
        row.pop("sample_len", None)  # the number of questions, which newer releases list among the results
    return results
