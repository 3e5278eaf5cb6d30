"""A user's own feature: rows, state that survives a resume, refusals, and the rules of the table."""

import ast
import contextlib
import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config import feature_table
from megatron.config.command_line import parse
from megatron.config.feature_settings import FeatureSettings, with_features
from megatron.config.feature_table import TABLE, Row
from megatron.config.fields import ConfigError, at_least, opt
from megatron.config.train import TrainConfig
from megatron.model.attention import Attention
from megatron.model.attention_kernels import AttentionArgs
from megatron.ranks.errors import RunError
from megatron.rows import parse_row
from megatron.tasks import functions as home
from megatron.training import Feature, Run, train
from megatron.training.feature import Interval
from megatron.training.features import Features
from tests.checkpoints.runs import Start, make
from tests.conformance.engines import remembered_groups
from tests.ranks.test_bad_gradients import NORM, spoil
from tests.support import ROOT, command, on_ranks

FLAGS = "--batch-size 2 --gas 2 --precision fp32 --save-interval 2"


class MeanNorm(Feature):
    """Mean of the gradient norms of all steps since the start of the run, not of this process."""

    def start(self, run: Run) -> None:
        self.calls = ["start"]
        self.micro_batches = 0

    def __init__(self) -> None:
        self.total = 0.0
        self.steps = 0

    def batches(self, batches: Any) -> Any:
        return None if batches is None else self._counted(batches)

    def _counted(self, batches: Any) -> Any:
        for each in batches:
            self.micro_batches += 1
            yield each

    def before_step(self, iteration: int) -> None:
        self.calls.append(f"before {iteration}")

    def after_step(self, step: Any, samples: Any) -> None:
        self.calls.append(f"after {samples.iteration}")
        self.total += float(step.grad_norm)
        self.steps += 1

    def row(self, interval: Interval) -> dict[str, Any]:
        return {"mean_norm": self.total / self.steps}

    def end(self) -> None:
        self.calls.append("end")

    def close(self, error: BaseException | None) -> None:
        self.calls.append(f"close {error}")

    def state(self) -> dict[str, Any]:
        return {"total": self.total, "steps": self.steps} if self.steps else {}

    def load(self, state: dict[str, Any]) -> None:
        self.total = state["total"]
        self.steps = state["steps"]


def _train(folder: str, data: str, vocab_file: str, more: str, own: bool = True) -> tuple[list[str], int] | str:
    features = [MeanNorm()] if own else []
    start = Start("gpt2", Path(folder), f"{FLAGS} {more}")
    try:
        with make(start, data, vocab_file, features) as run:
            train(run)
    except RunError as error:
        return str(error)
    return (features[0].calls, features[0].micro_batches) if own else ([], 0)


def test_its_state_survives_a_resume_in_another_layout(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    about = (str(tmp_path), tiny_data, vocab_file)
    first = on_ranks(2, _train, *about, "--pipe-parallel-size 2 --train-iters 6 --exit-interval 4")
    assert first[0] == (["start", *_steps(1, 4), "close None"], 8)
    assert first[1] == first[0]
    second = on_ranks(1, _train, *about, "--train-iters 6")
    assert second == [(["start", *_steps(5, 6), "close None", "end"], 4)]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    norms = [row["grad_norm"] for row in rows]
    for at, row in enumerate(rows, start=1):
        assert math.isclose(row["mean_norm"], sum(norms[:at]) / at, rel_tol=1e-12)
    assert len(rows) == 6
    other = tmp_path / "other"
    on_ranks(1, _train, str(other), *about[1:], f"--load {tmp_path} --no-load-optim --train-iters 7")
    (row,) = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    # --no-load-optim concerns the optimizer, not the features.
    assert math.isclose(row["mean_norm"], (sum(norms) + row["grad_norm"]) / 7, rel_tol=1e-12)
    (words,) = on_ranks(1, _train, *about, "--train-iters 8 --override-lr-schedule", False)
    assert "MeanNorm" in words, "a state that no feature takes must not be dropped"


def _steps(first: int, last: int) -> list[str]:
    return [f"{when} {at}" for at in range(first, last + 1) for when in ("before", "after")]


class Failing(Feature):
    """Feature that fails in the second iteration."""

    def before_step(self, iteration: int) -> None:
        if iteration == 2:
            raise RunError("enough")


def _fail(folder: str, data: str, vocab_file: str) -> list[str]:
    feature = MeanNorm()
    start = Start("gpt2", Path(folder), f"{FLAGS} --train-iters 3")
    with pytest.raises(RunError), make(start, data, vocab_file, [feature, Failing()]) as run:
        train(run)
    return feature.calls


def test_it_is_closed_when_an_error_ends_the_run(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    assert on_ranks(1, _fail, str(tmp_path), tiny_data, vocab_file)[0][-2:] == ["before 2", "close enough"]


class Refusing(Feature):
    """Feature that cannot be used."""

    def prepare(self, plan: Any) -> None:
        raise ValueError(f"--num-layers {plan.config.model.num_layers} is too few")


def _refuse(folder: str, data: str, vocab_file: str) -> str:
    with pytest.raises(RunError) as caught:
        make(Start("gpt2", Path(folder) / "new", FLAGS), data, vocab_file, [Refusing()])
    return str(caught.value)


def test_it_can_refuse_before_the_model_is_built(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    for words in on_ranks(2, _refuse, str(tmp_path), tiny_data, vocab_file):
        assert words.startswith("--num-layers 4 is too few")
    assert not (tmp_path / "new").exists()


def test_two_features_of_one_name_are_refused() -> None:
    config = parse(["--vocab-size", "64"], {"family": "gpt2"})
    with pytest.raises(ValueError, match="MeanNorm"):
        Features(config, [MeanNorm(), MeanNorm()])
    taken = MeanNorm()
    taken.name = "garbage"
    with pytest.raises(ValueError, match="garbage"):
        Features(config, [taken])


@dataclass(frozen=True, kw_only=True)
class PatienceSettings(FeatureSettings):
    """A flag as in the file of a feature."""

    patience: int = opt(3, "number of evaluations without improvement after which the run ends", at_least(1))
    patience_delta: float = opt(0.0, "smallest improvement that counts")

    def problems(self) -> Any:
        if self.patience == 3 and self.patience_delta:
            yield "--patience-delta needs --patience"

    def conflicts(self, config: Any) -> Any:
        if self.patience > config.train.eval_iters:
            yield "--patience is too large"


class Patience(Feature):
    """Feature with settings."""

    Settings = PatienceSettings


def test_settings_of_a_feature_are_fields_of_a_section(monkeypatch: pytest.MonkeyPatch) -> None:
    class_path = f"{__name__}:Patience"
    monkeypatch.setitem(TABLE, "patience", Row(class_path, feature_table.always, "train"))
    Train = with_features("train", TrainConfig)  # noqa: N806
    made = Train(patience=5, train_iters=7)
    assert (made.patience, made.train_iters, made.skip_step_window) == (5, 7, 128)
    assert isinstance(made, PatienceSettings) and isinstance(made, TrainConfig)
    for values, flag in (
        ({"patience": 0}, "--patience"),
        ({"patience": "4"}, "--patience"),
        ({"patience_delta": 0.5}, "--patience-delta"),
        ({"train_iters": -1}, "--train-iters"),
        ({"skip_step_window": 64}, "--skip-step-window"),
    ):
        with pytest.raises(ConfigError, match=flag):
            Train(**values)


def test_a_flag_of_a_feature_is_parsed_checked_and_stored() -> None:
    config = parse(["--skip-step-sigma", "6"], {"family": "gpt2"})
    assert config.to_dict()["train"]["skip_step_sigma"] == 6.0
    with pytest.raises(ConfigError, match="--skip-step-window"):
        parse(["--skip-step-window", "64"], {"family": "gpt2"})
    names = [each.name for each in Features(config)]
    assert "spike_guard" in names and "layer_log" not in names
    assert names == sorted(names, key=list(TABLE).index)


def test_files_of_features_with_settings_import_no_torch() -> None:
    """They are imported for --help and for refusals, which must not wait for torch."""
    allowed = ("config", "training.feature", "json_text", "frozen")
    files = {row.class_path.split(":")[0] for row in TABLE.values() if row.section}
    assert files
    for module in files:
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.module is not None and node.module.startswith(allowed), (module, node.module)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
                assert not {str(name).split(".")[0] for name in names} & {"torch", "tds", "numpy", "deepspeed"}


def _plain(call: AttentionArgs) -> Any:
    """The kernel that docs/own_model.md shows, for calls without bias, dropout and grouped heads."""
    mask, causal = call.added()
    scores = call.scale * call.query @ call.key.mT
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ call.value


class PlainAttention(Feature):
    """Feature that replaces the kernel of all attention layers."""

    def model(self, model: Any, plan: Any) -> None:
        self.replaced = 0
        for module in model.modules():
            if isinstance(module, Attention):
                module.kernel = _plain
                self.replaced += 1


def _losses(folder: str, data: str, vocab_file: str, own: bool) -> tuple[list[float], int]:
    features = [PlainAttention()] if own else []
    start = Start("gpt2", Path(folder), "--precision fp64 --train-iters 3 --save-interval 0 --reset-attention-mask")
    with make(start, data, vocab_file, features) as run:
        train(run)
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [row["lm_loss"] for row in rows], features[0].replaced if own else 0


def test_a_feature_replaces_the_attention_kernel(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    usual = on_ranks(1, _losses, str(tmp_path / "usual"), tiny_data, vocab_file, False)[0]
    plain = on_ranks(1, _losses, str(tmp_path / "plain"), tiny_data, vocab_file, True)[0]
    assert plain[1] == 4, "each of the four layers has the new kernel"
    assert np.allclose(plain[0], usual[0], rtol=1e-12)


class EarlyStop(Feature):
    """Feature that ends a run after the second evaluation, with a row of its own."""

    def __init__(self, ends: bool = True) -> None:
        self.ends = ends
        self.found: list[tuple[str, int, float]] = []

    def start(self, run: Run) -> None:
        self.run = run

    def evaluated(self, split: str, iteration: int, sums: Any) -> list[dict[str, Any]]:
        self.found.append((split, iteration, sums["loss"] / sums["targets"]))
        if self.ends and len(self.found) == 2:
            self.run.stop = True
        return [{"split": "valid/count", "iteration": iteration, "evaluations": len(self.found)}]

    def state(self) -> dict[str, Any]:
        return {"evaluations": len(self.found)}


def _evaluate(folder: str, data: str | None, vocab_file: str, more: str) -> tuple[list[Any], int, Any]:
    feature = EarlyStop("--valid-data-path" not in more)
    flags = f"{FLAGS} --train-iters 9 --eval-interval 2 --eval-iters 1 --save-interval 0 {more}"
    with make(Start("gpt2", Path(folder), flags), data, vocab_file, [feature]) as run:
        train(run)
        return feature.found, run.state.iteration, run.state.features


def test_a_feature_ends_a_run_in_any_layout(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    for ranks, layout in ((1, ""), (2, "--pipe-parallel-size 2")):
        folder = tmp_path / str(ranks)
        every = on_ranks(ranks, _evaluate, str(folder), tiny_data, vocab_file, f"{layout} --split 90,10,0")
        found, iteration, _ = every[0]
        assert all(each == every[0] for each in every)
        assert iteration == 4 and [each[:2] for each in found] == [("valid", 2), ("valid", 4)]
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["evaluations"] for row in rows if row["split"] == "valid/count"] == [1, 2]
        losses = [row["lm_loss"] for row in rows if row["split"] == "valid"]
        assert np.allclose([loss for _, _, loss in found], losses)
        saved = json.loads((folder / "checkpoints/iter_0000004/checkpoint.json").read_text())
        assert saved["state"]["features"]["EarlyStop"] == {"evaluations": 2}, "the evaluation of this iteration counts"


def test_named_validation_sets_are_evaluated_for_features_too(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    sets = f"--train-data-path {tiny_data} --valid-data-path a={tiny_data} b={tiny_data}"
    (found, iteration, _), = on_ranks(1, _evaluate, str(tmp_path), None, vocab_file, sets)  # fmt: skip
    assert iteration == 9 and [each[:2] for each in found] == [("valid", at) for at in (2, 4, 6, 8, 9)]


class Endless(Feature):
    """Feature whose state or row JSON cannot hold."""

    def __init__(self, state: dict[str, Any], row: Any) -> None:
        self._state = state
        self._row = row

    def state(self) -> dict[str, Any]:
        return self._state

    def row(self, interval: Any) -> dict[str, Any]:
        return self._row  # type: ignore[no-any-return]


def _endless(folder: str, data: str, vocab_file: str) -> list[str]:
    found = []
    for state, row in (
        ({"best": math.inf}, {}),
        ({}, None),
        ({}, {"norm": torch.ones(())}),
        ({}, {"accuracy": [0.5, 0.6]}),  # a resume could not read these two
        ({}, {"samples": 128}),
    ):
        feature = Endless(state, row)
        with (
            pytest.raises(RunError if state else ValueError) as caught,
            make(Start("gpt2", Path(folder), FLAGS), data, vocab_file, [feature]) as run,
        ):
            train(run)
        found.append(str(caught.value))
    return found


def test_what_json_cannot_hold_is_refused_at_the_first_step(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    (words,) = on_ranks(1, _endless, str(tmp_path), tiny_data, vocab_file)
    assert ["Endless has a state" in words[0], *("Endless has a row" in each for each in words[1:])] == [True] * 5
    assert not list(tmp_path.glob("checkpoints/iter_*"))


class Rows(Feature):
    """Feature with rows of its own, which adds `entries` to training rows."""

    def __init__(
        self,
        entries: dict[str, Any] | None = None,
        rows: list[dict[str, Any]] | None = None,
        evaluated: list[dict[str, Any]] | None = None,
    ) -> None:
        self._entries = entries or {}
        self._rows = rows or []
        self._evaluated = evaluated or []

    def extend(self, row: dict[str, Any]) -> None:
        if row["split"] == "train":
            row.update(self._entries)

    def rows(self, iteration: int) -> list[dict[str, Any]]:
        return self._rows

    def evaluated(self, split: str, iteration: int, sums: Any) -> list[dict[str, Any]]:
        return self._evaluated


BAD_ROWS: dict[str, Feature] = {
    "a list in place of a number": Rows({"accuracy": [0.5]}),
    "a tensor": Rows({"mine": torch.ones(())}),
    "a row without split": Rows(rows=[{"iteration": 1, "lm_loss": 1.0}]),
    "a text in an evaluation": Rows(evaluated=[{"iteration": 1, "split": "valid/mine", "lm_loss": "low"}]),
    "a fraction of an iteration": Endless({}, {"iteration": 1.5}),
    "no samples": Endless({}, {"split": "train", "consumed_samples": None}),
}


def _bad_rows(folder: str, data: str, vocab_file: str) -> dict[str, str]:
    """Return, for each case of BAD_ROWS, the name of the class of the error that ends its run."""
    ends = {}
    flags = "--num-layers 1 --batch-size 2 --precision fp32 --train-iters 1 --eval-interval 1 --eval-iters 1"
    with remembered_groups() as begin, contextlib.redirect_stdout(io.StringIO()):
        for name, feature in BAD_ROWS.items():
            begin()
            start = Start("gpt2", Path(folder) / name.replace(" ", "_"), f"{flags} --split 9,1 --no-save-at-end")
            try:
                with make(start, data, vocab_file, [feature]) as run:
                    train(run)
            except Exception as error:
                ends[name] = type(error).__name__
    return ends


def test_rows_that_a_resumed_run_could_not_read_end_the_run(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    (ends,) = on_ranks(1, _bad_rows, str(tmp_path), tiny_data, vocab_file)
    # A row may be bad on one rank only, so that this rank must not enter collectives, as after a RunError.
    assert ends == dict.fromkeys(BAD_ROWS, "ValueError")
    for path in tmp_path.glob("*/metrics.jsonl"):
        for line in path.read_text().splitlines():
            assert parse_row(line) is not None, path.parent.name


def _printed(folder: str, data: str, vocab_file: str, feature: Feature) -> str:
    """Return what a run of one iteration and one evaluation prints."""
    flags = "--num-layers 1 --batch-size 2 --precision fp32 --train-iters 1 --eval-interval 1 --eval-iters 1"
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        make(Start("gpt2", Path(folder), f"{flags} --split 9,1 --no-save-at-end"), data, vocab_file, [feature]) as run,
    ):
        train(run)
    return printed.getvalue()


def _losses_of_rows(run_dir: Path) -> dict[str, float | None]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["split"]: row["lm_loss"] for row in rows if "lm_loss" in row}


def test_the_log_line_has_what_a_feature_changed_in_the_row(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    (printed,) = on_ranks(1, _printed, str(tmp_path), tiny_data, vocab_file, Rows({"lm_loss": 123.25}))
    assert _losses_of_rows(tmp_path)["train"] == 123.25
    assert "123.25" in printed


def test_a_row_of_an_evaluation_may_have_no_loss(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """None stands for infinity and NaN."""
    feature = Rows(evaluated=[{"iteration": 1, "split": "valid/mine", "lm_loss": None}])
    on_ranks(1, _printed, str(tmp_path), tiny_data, vocab_file, feature)
    losses = _losses_of_rows(tmp_path)
    assert losses["valid/mine"] is None and losses["valid"] is not None


class Seen(Feature):
    """Feature whose state is its own list, which it changes in each step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def after_step(self, step: Any, samples: Any) -> None:
        self.seen.append(samples.iteration)

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen, "deep": {"seen": self.seen}}  # the list itself, not a copy


def _skip_before_a_save(folder: str, data: str, vocab_file: str) -> None:
    flags = "--num-layers 2 --batch-size 2 --precision fp32 --train-iters 9 --exit-interval 5 --save-interval 0"
    evaluations = "--eval-interval 4 --eval-iters 1 --split 9,1"
    features = [EarlyStop(ends=False), Seen()]
    with (
        contextlib.redirect_stdout(io.StringIO()),
        make(Start("gpt2", Path(folder), f"{flags} {evaluations}"), data, vocab_file, features) as run,
    ):
        spoil(run, NORM, [4])  # the step of iteration 5
        train(run)


def test_a_save_after_skipped_steps_has_the_states_of_features_before_them(
    tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    on_ranks(1, _skip_before_a_save, str(tmp_path), tiny_data, vocab_file)
    (path,) = (tmp_path / "checkpoints").glob("iter_*")
    assert path.name == "iter_0000004"
    features = json.loads((path / "checkpoint.json").read_text())["state"]["features"]
    assert features["EarlyStop"] == {"evaluations": 1}, "of iteration 4, which follows the log"
    assert features["Seen"] == {"seen": [1, 2, 3, 4], "deep": {"seen": [1, 2, 3, 4]}}


@pytest.mark.parametrize("own", [[MeanNorm], MeanNorm()], ids=["a class", "one object"])
def test_features_are_a_list_of_objects(own: Any) -> None:
    with pytest.raises(ValueError, match="features must be a list of objects"):
        Features(parse([]), own)


def test_the_file_of_a_feature_can_be_imported_first() -> None:
    done = command("python", "-c", "from megatron.features.spike_guard import Guard; print(Guard.Settings.__name__)")
    assert done.stdout == "GuardSettings\n", done.stderr


def test_pretrain_passes_features_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(home, "run", lambda task, words, exit, features: found.append((words, features)))
    feature = MeanNorm()
    home.pretrain(lambda: (None, None, None), lambda: None, argv=["--lr", "1"], features=[feature])  # type: ignore[arg-type,return-value]
    assert found == [(["--lr", "1"], [feature])]
