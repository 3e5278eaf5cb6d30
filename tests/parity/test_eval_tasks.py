"""Evaluations on tasks while training: scores in every layout, rows and warnings, and unchanged training."""

import contextlib
import io
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.config.command_line import parse, with_values
from megatron.config.fields import ConfigError
from megatron.features import eval_tasks
from megatron.features.eval_tasks import RankScorer, check_scorable, evaluate_on_tasks
from megatron.features.harness import LogLikelihoods, evaluate_tasks
from megatron.features.scoring import Request
from megatron.features.task_sets import TaskSet, read_tasks
from megatron.model import GPT2Model
from megatron.tasks import TASKS
from megatron.tokenizer import load_tokenizer
from megatron.training.metrics import MetricsWriter
from megatron_tools.write.lm_eval import Harness
from tests.checkpoints.runs import MODELS, Start, losses_of, make, run_all
from tests.conformance.engines import remembered_groups
from tests.support import command, on_ranks

SEQ = 24
DROPOUT = "--hidden-dropout 0.2 --attention-dropout 0.2"
TEXTS = [("the quick brown", " fox"), ("a", " b c d"), ("one two ", "three"), ("x y z " * 30, "w"), ("", "no context")]
Answers = tuple[list[float], list[bool]]


def ask(*args: Any) -> Any:
    return SimpleNamespace(args=args)


def answers(model: LogLikelihoods, requests: Sequence[Request]) -> Answers:
    """Return log-probabilities and whether they are greedy, of token ids, texts with a context, and a long text."""
    found = [*model.score(requests), *model.loglikelihood([ask(*pair) for pair in TEXTS])]
    sums = model.loglikelihood_rolling([ask("some text that is longer than the window " * 5), ask("short")])
    return [*(total for total, _ in found), *sums], [bool(greedy) for _, greedy in found]


def scores_of_runs(starts: Sequence[Start], data: str, vocab_file: str, requests: Sequence[Request]) -> list[Answers]:
    found = []
    with remembered_groups() as begin:
        for start in starts:
            begin()
            with contextlib.redirect_stdout(io.StringIO()), make(start, data, vocab_file) as run:
                scorer = RankScorer(run)
                if dist.get_rank():
                    scorer.serve()
                else:
                    found.append(answers(scorer, requests))
                    scorer.end()
    return found


def harness_of(model: str, vocab_file: str) -> Harness:
    """Return the harness of tools/evaluate.py for a model with the initial weights of a run."""
    tokenizer = load_tokenizer(vocab_file)
    config = parse(MODELS[model].split(), TASKS[model]().defaults, 1)
    built = GPT2Model(with_values(config, {"vocab_size": tokenizer.vocab_size}), parallel_output=False).double().eval()
    return Harness(built, tokenizer, SEQ, torch.device("cpu"))


LAYOUTS = {
    1: ["--pipe-parallel-size 0 --batch-size 3", "--pipe-parallel-size 1 --precision fp32"],
    2: [
        "--pipe-parallel-size 0 --batch-size 2",
        "--pipe-parallel-size 0 --zero-stage 1 --batch-size 3 --precision fp32",
        "--pipe-parallel-size 0 --zero-stage 3 --batch-size 3 --precision fp32",
        "--pipe-parallel-size 0 --model-parallel-size 2 --logits-chunk-size 20",
        "--pipe-parallel-size 2 --reset-attention-mask --reset-position-ids --eod-mask-loss",
        "--pipe-parallel-size 2 --pipeline-schedule interleaved --virtual-pipeline-size 2",
        "--pipe-parallel-size 2 --pipeline-schedule zb-h1 --batch-size 16",
        "--pipe-parallel-size 1 --context-parallel-size 2",
    ],
}


@pytest.mark.parametrize("world", LAYOUTS)
def test_scores_are_those_of_one_process(world: int, tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    for model in ("gpt2", "llama")[:world]:
        harness = harness_of(model, vocab_file)
        ids = torch.randint(2000, (7,), generator=torch.Generator().manual_seed(3)).tolist()
        best = int(harness.logits_of(torch.tensor([ids]))[0, -1].argmax())
        requests = [Request([*ids, best], 1), Request([*ids, best], 4), Request([*ids, best - 1], 1)]
        totals, greedy = answers(harness, requests)
        assert greedy[:3] == [True, False, False]
        layouts = LAYOUTS[world] if model == "gpt2" else LAYOUTS[world][3:5]
        starts = [
            Start(model, tmp_path / f"{model}{i}", f"--precision fp64 --train-iters 1 --batch-size 4 {DROPOUT} {flags}")
            for i, flags in enumerate(layouts)
        ]
        ranks = on_ranks(world, scores_of_runs, starts, tiny_data, vocab_file, requests)
        for flags, (their_totals, their_greedy) in zip(layouts, ranks[0], strict=True):
            close = 1e-5 if "fp32" in flags else 1e-9
            assert their_totals == pytest.approx(totals, rel=close, abs=close), flags
            assert their_greedy == greedy, flags


def install_lm_eval() -> None:
    """Install a stub of the package lm-eval with the tasks `pair`, which scores two requests, and `broken`."""

    class Manager:
        all_tasks = ("pair", "broken")

        def __init__(self, include_path: Any) -> None:
            self.include_path = include_path

    def simple_evaluate(model: Any, tasks: list[str], limit: int | None, **_: Any) -> dict[str, Any]:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        found = model.loglikelihood([ask("a", " b"), ask("c", " d")])
        if tasks == ["broken"]:
            raise KeyError("no such column")
        row = {"alias": "pair", "acc,none": 0.5, "acc_stderr,none": 0.1, "nats,strict": -sum(nats for nats, _ in found)}
        return {"results": {"pair": row}}

    modules = {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": object},
        "lm_eval.tasks": {"TaskManager": Manager},
    }
    for name, values in modules.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(values)


def run_with_lm_eval(starts: Sequence[Start], data: str, vocab_file: str) -> str:
    install_lm_eval()
    out = io.StringIO()
    with contextlib.redirect_stdout(out), remembered_groups() as begin:
        from megatron.training import train

        for start in starts:
            begin()
            with make(start, data, vocab_file) as run:
                train(run)
    return out.getvalue()


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    rows = [{"context": context, "target": target} for context, target in TEXTS if context]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_training_is_the_same_with_evaluations(
    tmp_path: Path, tiny_data: str, vocab_file: str, questions: Path
) -> None:
    """Also with a task that fails and a package that seeds the random generators, in two layouts and after a resume."""
    more = f"--eval-tasks quiz={questions} pair broken --eval-tasks-interval 2"
    layouts = {"pp": "--pipe-parallel-size 2", "dp": "--pipe-parallel-size 0 --zero-stage 2"}
    dropout = f"{DROPOUT} --eval-iters 1 --eval-interval 3 --split 8,2"
    starts = []
    for name, layout in layouts.items():
        usual = f"{dropout} {layout} --batch-size 2 --gas 2 --save-interval 2"
        starts += [Start("gpt2", tmp_path / f"{name}-plain", f"{usual} --train-iters 5")]
        ends = ("--exit-interval 2", "") if name == "dp" else ("",)
        starts += [Start("gpt2", tmp_path / name, f"{usual} --train-iters 5 {more} {end}") for end in ends]
    printed = on_ranks(2, run_with_lm_eval, starts, tiny_data, vocab_file)[0]
    for name in layouts:
        plain, found = rows_of(tmp_path / f"{name}-plain"), rows_of(tmp_path / name)
        assert losses_of(tmp_path / name) == losses_of(tmp_path / f"{name}-plain")
        assert [row["lm_loss"] for row in plain if row["split"] == "valid"] == [
            row["lm_loss"] for row in found if row["split"] == "valid"
        ]
        quiz, pair = ([row for row in found if row["split"] == f"eval/{task}"] for task in ("quiz", "pair"))
        assert [row["iteration"] for row in quiz] == [row["iteration"] for row in pair] == [2, 4, 5]
        assert quiz[0]["questions"] == 4 and {"accuracy", "lm_loss", "ppl"} < quiz[0].keys()
        assert pair[0]["accuracy"] == 0.5 and pair[0]["nats_strict"] > pair[2]["nats_strict"] > 0
        assert "acc_stderr" not in pair[0]
    warning = "warning: --eval-tasks broken failed at iteration 4, and training continues: 'no such column'"
    assert printed.count(warning) == len(layouts)
    assert printed.count("| eval/quiz accuracy") == 3 * len(layouts)


def run_with_a_broken_rank(start: Start, data: str, vocab_file: str) -> str:
    def fails(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    if dist.get_rank() == 1:
        RankScorer.micro_batch = fails  # type: ignore[method-assign]
    return run_with_lm_eval([start], data, vocab_file)


def test_a_failure_of_another_rank_is_a_warning(
    tmp_path: Path, tiny_data: str, vocab_file: str, questions: Path
) -> None:
    flags = f"--batch-size 2 --train-iters 2 --eval-tasks {questions} pair --eval-tasks-interval 1"
    printed = on_ranks(2, run_with_a_broken_rank, Start("gpt2", tmp_path, flags), tiny_data, vocab_file)[0]
    assert len(losses_of(tmp_path)) == 2 and not [row for row in rows_of(tmp_path) if "eval" in row["split"]]
    for task in (questions, "pair"):
        assert printed.count(f"warning: --eval-tasks {task} failed at iteration") == 2
    assert printed.count("out of memory") == 4


def test_the_tool_gives_the_accuracy_and_a_finished_run_is_not_evaluated_again(
    tmp_path: Path, tiny_data: str, vocab_file: str, questions: Path
) -> None:
    """Without --eval-tasks-interval, tasks are evaluated when the run saves."""
    flags = f"--train-iters 3 --save-interval 2 --eval-tasks {questions} --eval-tasks-limit 3 --lr 1e-2"
    start = Start("gpt2", tmp_path / "run", flags)
    on_ranks(1, run_all, [start, start], tiny_data, vocab_file)
    rows = [row for row in rows_of(tmp_path / "run") if row["split"] == "eval/questions"]
    assert [row["iteration"] for row in rows] == [2, 3] and rows[0]["questions"] == 3
    done = command(
        *("python", "tools/evaluate.py", "--load", str(tmp_path / "run"), "--cloze", str(questions), "--limit", "3"),
        *("--json", str(tmp_path / "found.json")),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "found.json").read_text())["accuracy"] == rows[1]["accuracy"]
    assert json.loads((tmp_path / "found.json").read_text())["questions"] == 3


def test_a_finished_run_that_starts_again_has_one_row_for_each_task_of_a_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tag `both` has the tasks `pair` and `other`; lm-eval returns no result with the name of the tag."""
    results = {"pair": {"acc,none": 0.5}, "other": {"acc,none": 0.25}}
    monkeypatch.setattr(eval_tasks, "evaluate_tasks", lambda *_: results)
    loss = SimpleNamespace(deepspeed=SimpleNamespace(module=SimpleNamespace(loss_fn=None)))
    about = {"config": parse([]), "tokenizer": None, "engine": loss, "device": None}
    for _ in range(2):
        metrics = MetricsWriter(str(tmp_path), 3, active=True)
        run: Any = SimpleNamespace(**about, metrics=metrics, state=SimpleNamespace(iteration=3))
        evaluate_on_tasks(run, [TaskSet("both", tasks=["both"])])
        metrics.close()
    found = [(row["split"], row["iteration"], row["accuracy"]) for row in rows_of(tmp_path)]
    assert found == [("eval/pair", 3, 0.5), ("eval/other", 3, 0.25)]


@pytest.mark.parametrize(
    ("word", "text", "named"),
    [
        ("missing.jsonl", None, "--eval-tasks .*missing.jsonl: there is no file"),
        ("missing.yaml", None, "--eval-tasks .*missing.yaml: there is no file"),
        ("empty.jsonl", "", "empty.jsonl contains no questions"),
        ("bad.jsonl", '{"context": "a", "target": " b"}\n{"context": 3}\n', "bad.jsonl, line 2: the line must have"),
        ("bad.jsonl", '{"context": "a", "target": ""}\n', "bad.jsonl, line 1: the target has no token"),
        ("long.jsonl", json.dumps({"context": "a", "target": "b c " * 99}), "line 1: the target has .*context window"),
        ("none.yaml", "group: x\n", "none.yaml has no lm-eval task"),
        ("tasks.yml", "task: x\n", r"--eval-tasks .*tasks.yml: .*\.yaml"),
        ("name=tasks.yaml", "task: x\n", "name=: leave it out"),
        ("lambada", None, "--eval-tasks lambada needs the package lm-eval"),
    ],
)
def test_bad_tasks_are_refused(word: str, text: str | None, named: str, tmp_path: Path, vocab_file: str) -> None:
    *prefix, file = word.split("=")
    path = tmp_path / file
    if text is not None:
        path.write_text(text)
    config = parse(
        ["--eval-tasks", "=".join([*prefix, str(path)]) if path.suffix else word, "--seq-length", str(SEQ)], {}, 1
    )
    with pytest.raises(ValueError, match=named):
        read_tasks(config, load_tokenizer(vocab_file))


@pytest.mark.parametrize("prefix", ["", "lang=", "capitals=lang="])
def test_a_folder_may_have_an_equals_sign(
    prefix: str, tmp_path: Path, vocab_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(prefix.removeprefix("capitals=") + "en")
    folder.mkdir()
    text = '{"context": "a", "target": " b"}\n\n'
    (folder / "q.jsonl").write_text(text, encoding="utf-8-sig")
    config = parse(["--eval-tasks", f"{prefix}en/q.jsonl", "--seq-length", str(SEQ)], {}, 1)
    (found,) = read_tasks(config, load_tokenizer(vocab_file))
    assert (found.name, len(found.requests)) == ("capitals" if "capitals" in prefix else "q", 1)


def test_tasks_of_lm_eval_are_checked(tmp_path: Path, vocab_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    install_lm_eval()

    def read(*words: str) -> Any:
        return read_tasks(parse(["--eval-tasks", *words], {}, 1), load_tokenizer(vocab_file))

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    before = random.random(), np.random.rand(), torch.rand(1)
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    evaluate_tasks(harness_of("gpt2", vocab_file), ["pair"], None, [])
    assert (random.random(), np.random.rand(), torch.rand(1)) == before, "lm-eval seeds these generators"
    with pytest.raises(ValueError, match="--eval-tasks pears: lm-eval has no task pears"):
        read("pears")
    with pytest.raises(ValueError, match="two tasks pair"):
        read("pair", "pair")
    (tmp_path / "mine.yaml").write_text("tag: x\ntask: 'pair'  # mine\n")
    for word in (str(tmp_path), str(tmp_path / "mine.yaml")):
        (found,) = read(word)
        assert (list(found.tasks), list(found.folders)) == (["pair"], [str(tmp_path)])


def test_other_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="--eval-tasks .used by gpt2 and llama only"):
        parse(["--eval-tasks", "a.jsonl"], TASKS["t5"]().defaults, 1)
    with pytest.raises(ConfigError, match="--eval-tasks-interval needs --eval-tasks"):
        parse(["--eval-tasks-interval", "5"], {}, 1)
    with pytest.raises(ValueError, match="--eval-tasks needs a GPT2Model .* is a Linear"):
        check_scorable(nn.Linear(2, 2), "--eval-tasks")
