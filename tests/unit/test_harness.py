"""The adapter for lm-eval returns sums of log probabilities and runs a custom task, tested with a bigram model."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from data_utils.tokenizer_training import train_byte_bpe
from megatron.features.harness import evaluate_tasks, local_tasks
from megatron.tokenizer import load_tokenizer
from megatron_tools.write.lm_eval import Harness
from tests.sentences import SENTENCES

LETTERS = "$abcdefghi "


class Letters:
    """A character tokenizer for the eleven characters of LETTERS."""

    eod, before = 0, (0,)
    start, bos, marks = (), None, {"$": 0}
    specials: dict[str, int] = {}

    @staticmethod
    def encode(text: str) -> list[int]:
        return [LETTERS.index(c) for c in text]

    def encode_names(self, text: str) -> list[int]:
        return self.encode(text)

    @staticmethod
    def decode(ids: list[int]) -> str:
        return "".join(LETTERS[i] for i in ids)


TABLE = torch.randn(11, 11, generator=torch.Generator().manual_seed(1))


def logits_of(tokens: Tensor) -> Tensor:
    return TABLE[tokens]


def harness(longest: int = 6) -> Harness:
    return Harness(logits_of, Letters(), longest, torch.device("cpu"))  # type: ignore[arg-type]


TEXTS = ["The river runs slowly to the sea", "春天来了，河水", "unslowly  running"]


def begin_texts(path: Path) -> None:
    """Let a tokenizer.json begin each text with <s>."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    pair = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=pair)
    tokenizer.save(str(path))


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


def test_a_token_over_the_border_is_not_scored() -> None:
    """The context's ids count, not its text; if no token is left for the continuation, its last token is scored."""
    pairs = Harness(logits_of, Pairs(), 6, torch.device("cpu"))  # type: ignore[arg-type]
    found = pairs.loglikelihood([ask("ca", "b"), ask("ca", "bd"), ask("ca", " "), ask("ca", "")])
    wanted = [log_probability("ci", 2), log_probability("cad", 3), log_probability("ca", 2), 0]
    assert [total for total, _ in found] == pytest.approx(wanted, rel=1e-5)
    assert [greedy for _, greedy in found[:2]] == [False, False]


def test_greedy_is_said_of_greedy_continuations_alone() -> None:
    best = LETTERS[int(TABLE[LETTERS.index("c")].argmax())]
    other = LETTERS[int(TABLE[LETTERS.index("c")].argmin())]
    assert [greedy for _, greedy in harness().loglikelihood([ask("c", best), ask("c", other)])] == [True, False]


def sums(tokens: Tensor) -> Tensor:
    """Return logits [b, s, v] of a model whose predictions depend on the sum of all tokens read so far."""
    return TABLE[tokens.cumsum(-1) % 11]


def scored(known: str, text: str) -> float:
    """Return the log probability of `text` if the model has read `known`."""
    ids = Letters.encode(known + text)
    logs = sums(torch.tensor(ids)).log_softmax(-1)
    return sum(float(logs[i - 1, ids[i]]) for i in range(len(known), len(ids)))


def test_rolling_windows_do_not_overlap() -> None:
    """Each window but the last scores as many tokens as fit, and its first token has one token of context."""
    windows = Harness(sums, Letters(), 6, torch.device("cpu"))  # type: ignore[arg-type]
    texts = ["abcdefghiabcde", "abcdef", "a", ""]
    long = scored("$", "abcdef") + scored("f", "ghiabc") + scored("hiabc", "de")
    wanted = [long, scored("$", "abcdef"), scored("$", "a"), 0.0]
    assert windows.loglikelihood_rolling([ask(text) for text in texts]) == pytest.approx(wanted, rel=1e-5)


class Begun(Letters):
    """A tokenizer that begins each text with `i` and names `$` as the end of a text."""

    before = start = (9,)
    bos = 9


def test_the_tokenizer_decides_what_precedes_a_context() -> None:
    """A context has only the tokens that the tokenizer adds; bos_token, else eos_token, precedes an empty context."""
    plain = Harness(sums, Letters(), 8, torch.device("cpu"))  # type: ignore[arg-type]
    begun = Harness(sums, Begun(), 8, torch.device("cpu"))  # type: ignore[arg-type]
    asked = [ask("ab", "cd"), ask("", "cd"), ask(" ", "a"), ask("", "$a")]
    wanted = [scored("ab", "cd"), scored("$", "cd"), scored("$", " a"), scored("$", "a")]
    assert [total for total, _ in plain.loglikelihood(asked)] == pytest.approx(wanted, rel=1e-5)
    wanted = [scored("iab", "cd"), scored("i", "cd"), scored("i", " a"), scored("i", "$a")]
    assert [total for total, _ in begun.loglikelihood(asked)] == pytest.approx(wanted, rel=1e-5)
    assert begun.loglikelihood_rolling([ask("ab")]) == pytest.approx([scored("i", "iab")], rel=1e-5)


@pytest.mark.parametrize("begins", [False, True])
def test_scores_are_those_of_lm_evals_hf_model(begins: bool, tmp_path: Path) -> None:
    """Scores equal those of lm-eval's `hf` model, also where tokens span context and continuation."""
    models = pytest.importorskip("lm_eval.models.huggingface")
    transformers = pytest.importorskip("transformers")
    train_byte_bpe(TEXTS * 20, str(tmp_path / "tokenizer.json"), 300, "hf", ["<s>"])
    if begins:
        begin_texts(tmp_path / "tokenizer.json")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    about |= {"bos_token": "<s>"} if begins else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs = models.HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=2, logits_cache=False)
    ours = Harness(lambda ids: model(ids).logits, load_tokenizer(str(tmp_path)), 16, torch.device("cpu"))
    asked = [ask(text[:at], text[at:]) for text in TEXTS for at in range(len(text))]
    # lm-eval fails if the context has as many tokens as the whole, or if the continuation exceeds the context window.
    asked = [each for each in asked if each.args[0] and 0 < len(theirs._encode_pair(*each.args)[1]) <= 16]
    crossing = [
        each for each in asked if sum(theirs._encode_pair(*each.args), []) != theirs.tok_encode("".join(each.args))
    ]
    assert len(asked) > 40 and len(crossing) > 3
    asked += [
        ask("", "<|endoftext|>a"),
        ask("<s>a", "b"),
        ask("a <s>", "b"),
        ask(TEXTS[0] * 3, " river"),
        ask("a ", "b"),
    ]
    totals, greedy = zip(*ours.loglikelihood(asked), strict=True)
    wanted, wanted_greedy = zip(*theirs.loglikelihood(asked), strict=True)
    assert totals == pytest.approx(wanted, rel=1e-6, abs=1e-5)
    assert greedy == wanted_greedy
    texts = [ask(text * times) for text in TEXTS for times in (1, 4)]
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), rel=1e-6)
    long = [ask(TEXTS[1] * 3, {"until": ["river"], "max_gen_toks": 5, "do_sample": False})]
    assert ours.generate_until(long) == theirs.generate_until(long)


def test_rolling_counts_every_token_once() -> None:
    (found,) = harness().loglikelihood_rolling([ask("abcdefghiabcdefghi")])
    assert found == pytest.approx(log_probability("abcdefghiabcdefghi"), rel=1e-5)


def test_generation_stops_at_the_first_stop_word() -> None:
    free, *_ = harness().generate_until([ask("a", {"until": [], "max_gen_toks": 9})])
    assert 0 < len(free) <= 9
    stop = free[2:4]
    cut, *_ = harness().generate_until([ask("a", {"until": stop, "max_gen_toks": 9})])
    assert cut == free[: free.find(stop)]


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({"max_new_tokens": 3}, 3),
        ({"max_tokens": 4, "temperature": 0.0, "top_p": 0.9}, 4),
        ({"max_completion_tokens": 5, "num_beams": 1}, 5),
        ({"max_gen_toks": 2, "max_tokens": 4, "do_sample": False, "temperature": 1.0}, 2),
        ({"until": "", "max_gen_toks": 6}, 6),
        ({"until": ["", "\n"], "max_gen_toks": 6}, 6),
    ],
    ids=str,
)
def test_settings_of_a_task_are_read_as_lm_eval_reads_them(options: dict[str, Any], length: int) -> None:
    (free,) = harness().generate_until([ask("a", {"max_gen_toks": 9})])
    assert harness().generate_until([ask("a", options)]) == [free[:length]]


@pytest.mark.parametrize(
    "options",
    [{"do_sample": True}, {"temperature": 0.7}, {"num_beams": 4}, {"repetition_penalty": 1.3, "do_sample": False}],
    ids=str,
)
def test_tasks_that_need_other_decoding_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"this lm-eval task needs (sampling|{next(iter(options))})"):
        harness().generate_until([ask("a", options)])


def test_answers_end_at_every_end_token_and_lack_special_tokens() -> None:
    (free,) = harness().generate_until([ask("a", {"max_gen_toks": 9})])
    ended = harness()
    for eos_token_id in (LETTERS.index(free[2]), [1, LETTERS.index(free[2])]):
        ended.eos_token_id = eos_token_id
        assert ended.generate_until([ask("a", {"max_gen_toks": 9})]) == [free[:2]]

    class Named(Letters):
        specials = {"name": LETTERS.index(free[1])}

    named = Harness(logits_of, Named(), 6, torch.device("cpu"))  # type: ignore[arg-type]
    assert named.generate_until([ask("a", {"max_gen_toks": 9})]) == [free.replace(free[1], "")]
    assert named.generate_until([ask("a", {"until": free[1]})]) == [free[0]], "a name may be a stop word"


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


@pytest.mark.parametrize("members", ["\n  - one\n  - two", " [one, two]", "  # both\n  - one"])
def test_a_group_of_tasks_names_no_task_of_its_own(members: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n")
    (tmp_path / "group.yaml").write_text(f"group: both\ntask:{members}\n")
    assert local_tasks(tmp_path) == ["one", "two"]
