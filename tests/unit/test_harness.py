"""The adapter for lm-eval returns sums of log probabilities and runs a custom task, tested with a bigram model."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.training.harness import evaluate_tasks
from megatron_tools.write.lm_eval import Harness
from tests.sentences import SENTENCES

LETTERS = "$abcdefghi "


class Letters:
    """A character tokenizer for the eleven characters of LETTERS."""

    eod, before = 0, (0,)

    @staticmethod
    def encode(text: str) -> list[int]:
        return [LETTERS.index(c) for c in text]

    @staticmethod
    def decode(ids: list[int]) -> str:
        return "".join(LETTERS[i] for i in ids)


TABLE = torch.randn(11, 11, generator=torch.Generator().manual_seed(1))


def logits_of(tokens: Tensor) -> Tensor:
    return TABLE[tokens]


def harness(longest: int = 6) -> Harness:
    return Harness(logits_of, Letters(), longest, torch.device("cpu"))  # type: ignore[arg-type]


def ask(*args: Any) -> Any:
    return SimpleNamespace(args=args)


def log_probability(text: str, first: int = 1) -> float:
    """Return the bigram model's log probability of the characters of `"$" + text` from index `first` to the end."""
    ids = Letters.encode("$" + text)
    logs = TABLE.log_softmax(-1)
    return sum(float(logs[a, b]) for a, b in list(zip(ids, ids[1:], strict=False))[first - 1 :])


def test_loglikelihood() -> None:
    found = harness().loglikelihood([ask("abc", "def"), ask("", "a"), ask("ab ", "cd"), ask("abcabcabcabc", "a")])
    wanted = [log_probability("abcdef", 4), log_probability("a"), log_probability("ab cd", 3)]
    assert [total for total, _ in found[:3]] == pytest.approx(wanted, rel=1e-5)
    assert found[3][0] == pytest.approx(log_probability("ca", 2), rel=1e-5), "what lies before the window is forgotten"


class Pairs(Letters):
    """A tokenizer that merges `ab` into one token, with the id of `i`, and strips trailing spaces."""

    @staticmethod
    def encode(text: str) -> list[int]:
        return Letters.encode(text.rstrip().replace("ab", "i"))


def test_a_token_over_the_border_belongs_to_the_continuation() -> None:
    pairs = Harness(logits_of, Pairs(), 6, torch.device("cpu"))  # type: ignore[arg-type]
    found = pairs.loglikelihood([ask("ca", "b"), ask("ca", "bd"), ask("ca", " "), ask("ca", "")])
    wanted = [log_probability("ci", 2), log_probability("cid", 2), log_probability("ca", 2), 0]
    assert [total for total, _ in found] == pytest.approx(wanted, rel=1e-5)
    assert [greedy for _, greedy in found[:2]] == [False, False]


def test_greedy_is_said_of_greedy_continuations_alone() -> None:
    best = LETTERS[int(TABLE[LETTERS.index("c")].argmax())]
    other = LETTERS[int(TABLE[LETTERS.index("c")].argmin())]
    assert [greedy for _, greedy in harness().loglikelihood([ask("c", best), ask("c", other)])] == [True, False]


def test_rolling_counts_every_token_once() -> None:
    (found,) = harness().loglikelihood_rolling([ask("abcdefghiabcdefghi")])
    assert found == pytest.approx(log_probability("abcdefghiabcdefghi"), rel=1e-5)


def test_generation_stops_at_the_first_stop_word() -> None:
    free, *_ = harness().generate_until([ask("a", {"until": [], "max_gen_toks": 9})])
    assert 0 < len(free) <= 9
    stop = free[2:4]
    cut, *_ = harness().generate_until([ask("a", {"until": stop, "max_gen_toks": 9})])
    assert cut == free[: free.find(stop)]
    with pytest.raises(ValueError, match="needs sampling"):
        harness().generate_until([ask("a", {"do_sample": True})])


def test_a_task_of_our_own(tmp_path: Path) -> None:
    """lm-eval scores a user's multiple-choice task: the bigram model answers 3 of 4 questions correctly."""
    pytest.importorskip("lm_eval")
    rows = [{"q": q, "a": [a, b], "label": int(log_probability(q + b) > log_probability(q + a))} for q, a, b in
            (("ab", "c", "d"), ("fg", "h", "i"), ("e", "a", "b"), ("hi", "d", "e"))]  # fmt: skip
    rows[3]["label"] = 1 - int(rows[3]["label"])  # a wrong label, so that the model's answer counts as wrong
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "letters.yaml").write_text(
        "task: letters\ndataset_path: json\noutput_type: multiple_choice\ntest_split: train\n"
        f"dataset_kwargs:\n  data_files: {tmp_path}/data.jsonl\n"
        "doc_to_text: '{{q}}'\ndoc_to_choice: '{{a}}'\ndoc_to_target: '{{label}}'\ntarget_delimiter: ''\n"
        "metric_list:\n  - metric: acc\n"
    )
    found = evaluate_tasks(harness(), ["letters"], None, [str(tmp_path)])
    assert found["letters"]["acc,none"] == 0.75
    with pytest.raises(ValueError, match=SENTENCES["no_task_nothing"]):
        evaluate_tasks(harness(), ["nothing"], None, [str(tmp_path)])
