"""Tasks of EleutherAI's lm-eval harness (Gao et al.) for left-to-right models. The package lm-eval is optional.

Texts are encoded and cut by the rules of lm-eval's `hf` model, so its numbers can be compared with those of other
programs. The rules differ from those of `scoring.py`, which tools/evaluate.py uses for --input and --cloze.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..tokenizer import Tokenizer
from .random_state import same_random_state
from .scoring import Request, Scored


def prefix_of(tokenizer: Tokenizer) -> int:
    """Return the id before a text without context: that of bos_token, else of eos_token."""
    return tokenizer.before[0] if tokenizer.bos is None else tokenizer.bos


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text, which begin with `tokenizer.start` unless the text begins with the name of bos_token.

    The names of special tokens become these tokens, as in transformers.
    """
    ids = tokenizer.encode_names(text)
    prefix = prefix_of(tokenizer)
    if any(i == prefix and text.startswith(name) for name, i in tokenizer.marks.items()):
        return ids
    return [*tokenizer.start, *ids]


def continuation(tokenizer: Tokenizer, context: str, text: str, longest: int) -> Request | None:
    """Return the request that scores `text` after `context`, or None if there are no tokens to score.

    Context and text are encoded together, and as many ids as the context alone has are its ids. A token that spans
    both is therefore not scored. longest: context window in tokens. Ids before the window are left out.
    """
    if context:
        stem = context.rstrip()  # the trailing spaces belong to the text
        whole = encode(tokenizer, context + text)
        known = encode(tokenizer, stem)
    else:
        whole = tokenizer.encode_names(text)
        known = whole[:1] if whole[:1] == [prefix_of(tokenizer)] else []
    if not text or not whole:
        return None
    # lm-eval fails if no token is left for the text. Here, the last token is scored.
    targets = whole[len(known) :] or whole[-1:]
    known = known if len(known) < len(whole) else whole[:-1]
    ids = [*(known or [prefix_of(tokenizer)]), *targets][-longest - 1 :]
    return Request(ids, min(len(targets), len(ids) - 1))


def rolling(tokenizer: Tokenizer, text: str, longest: int) -> list[Request]:
    """Return requests that together score each token of a text once, in windows that do not overlap.

    The first token of each window has one token of context. The last window is filled with earlier tokens.
    """
    ids = [prefix_of(tokenizer), *encode(tokenizer, text)]
    found = []
    for first in range(1, len(ids), longest):
        end = min(first + longest, len(ids))
        found.append(Request(ids[max(end - longest - 1, 0) : end], end - first))
    return found


class LogLikelihoods:
    """Base class of the model interface that lm-eval requires; each method takes a list of lm-eval's requests.

    longest: context window in tokens.
    """

    tokenizer: Tokenizer
    longest: int

    def score(self, requests: Sequence[Request]) -> list[Scored]:
        """Return the score of each request."""
        raise NotImplementedError

    def loglikelihood(self, requests: Sequence[Any]) -> list[Scored]:
        """Return (log-probability, whether greedy decoding yields it) of each request's continuation."""
        texts = [request.args for request in requests]
        made = [continuation(self.tokenizer, context, text, self.longest) for context, text in texts]
        found = iter(self.score([each for each in made if each]))
        return [next(found) if each else Scored(0.0, True) for each in made]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-probability of each whole text; see `rolling`."""
        made = [rolling(self.tokenizer, request.args[0], self.longest) for request in requests]
        found = iter(self.score([each for pieces in made for each in pieces]))
        return [sum(next(found).log_probability for _ in pieces) for pieces in made]

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
        raise ValueError(f"{flag} needs the package lm-eval: pip install 'lm-eval>=0.4.10' ({error})") from None
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
    lines = [re.search(r"^task:\s*[\"']?([^\s\"'#]+)", file.read_text(encoding="utf-8"), re.M) for file in files]
    found = [line.group(1) for line in lines if line]
    if not found:
        raise ValueError(f"{path} has no lm-eval task: a YAML file of a task has a line `task: NAME`")
    return found


def evaluate_tasks(
    model: LogLikelihoods, tasks: Sequence[str], limit: int | None, folders: Sequence[str], flag: str = "--tasks"
) -> dict[str, Any]:
    """Return lm-eval's results by task. folders, flag, errors: see `task_manager`.

    limit: maximum number of questions in each task.
    """
    manager = task_manager(tasks, folders, flag)
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM

    class Adapter(LM):  # type: ignore[misc]
        loglikelihood = staticmethod(model.loglikelihood)
        loglikelihood_rolling = staticmethod(model.loglikelihood_rolling)
        generate_until = staticmethod(model.generate_until)

    with same_random_state():  # lm-eval seeds the generators
        found = simple_evaluate(
            model=Adapter(), tasks=list(tasks), limit=limit, task_manager=manager, bootstrap_iters=0
        )
    results: dict[str, Any] = found["results"]
    return results
