"""The HTML report shows what runs logged, and is a single self-contained file."""

import json
import math
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron.config.command_line import parse, with_values
from megatron.locks.run_lock import Holder, RunLock
from megatron_tools.report import report
from megatron_tools.report.curves import all_charts, thin_out
from megatron_tools.report.differences import compare_settings
from megatron_tools.report.facts import as_text, layout_label, machine_facts, progress, result_facts, tokenizer_note
from megatron_tools.report.layers import expert_shares, heat_map, layer_values
from megatron_tools.report.page import as_data
from megatron_tools.report.runs import read_run, short_names
from megatron_tools.report.timetable import ideal_spans
from tds.timetable import Span
from tests.sentences import SENTENCES

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --vocab-size 100 --batch-size 2 --gas 2 --train-iters 40"
)


def made(folder: Path, flags: str = "", **more: Any) -> Path:
    """Write a run directory of two replicas and 20 iterations; return its path.

    Its metrics.jsonl ends in an incomplete line.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps(parse([*FLAGS.split(), *flags.split()], {"family": "gpt2"}, 4).to_dict())
    )
    rows: list[dict[str, Any]] = []
    for i in (10, 20):
        rows.append(
            {
                "split": "train",
                "iteration": i,
                "consumed_samples": 8 * i,
                "consumed_tokens": 1000 * i,
                "lm_loss": 8 - i / 10,
                "lr": 1e-3,
                "grad_norm": None if i == 20 else 1.5,
                "loss_scale": None,
                "skipped_steps": i // 20,
                "tokens_per_second": 500.0,
                "tflops": 0.25,
                "mfu": None,
                "memory_mb": 300.0,
                **more,
            }
        )
        rows.append({"split": "valid", "iteration": i, "lm_loss": 7.0, "ppl": math.exp(7.0)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"split": "train", "iter')
    return folder


def page_of(folders: list[Path], *flags: str) -> str:
    output = folders[0] / "page.html"
    report.main(report.build_parser().parse_args([*map(str, folders), "--output", str(output), *flags]))
    return output.read_text(encoding="utf-8")


def test_facts_are_those_of_the_lines(tmp_path: Path) -> None:
    run = read_run(made(tmp_path / "a"))
    assert run.rows_of("train")[-1]["iteration"] == 20, "a line that is still being written is left out"
    assert layout_label(run) == "no pipeline x data 2 x model 1"  # 8 samples a step / (--batch-size 2 x --gas 2) = 2
    divided = read_run(made(tmp_path / "b", "--num-experts 4 --expert-parallel-size 2"))
    assert layout_label(divided) == "no pipeline x data 2 x model 1, experts over 2"
    assert progress(run) == ("stopped · iteration 20 of 40", 0.5)
    assert ("training loss, first and last line", "7.000, 6.000 nats/token") in result_facts(run)
    assert as_text(["a", "b"], [[("x", "1"), ("y", "2")], [("y", "3")]]) == "   a  b\nx  1\ny  2  3"
    axes = run.axes()
    assert (axes["iteration"], axes["tokens"]) == ([0, 10, 20], [0, 10_000, 20_000])
    assert axes["hours"] == pytest.approx([0, 20 / 3600, 40 / 3600])


def test_skipped_iterations_take_no_time(tmp_path: Path) -> None:
    """Of 10 iterations of 1,000 tokens at 500 tokens/s, 9 are skipped; the next 10 all are, and have no speed."""
    skips = ((10, 9, 500.0), (20, 10, 0.0), (30, 0, 500.0))
    rows = []
    for iteration, skipped, speed in skips:
        row = {"split": "train", "iteration": iteration, "consumed_tokens": 1000 * iteration}
        rows.append({**row, "passed_over": skipped, "tokens_per_second": speed})
    hours = read_run(_with_rows(tmp_path / "run", rows)).axes()["hours"]
    assert hours == pytest.approx([0, 2 / 3600, 2 / 3600, 22 / 3600])


@pytest.mark.parametrize(("logged", "begin"), [((410, 420), 400), ((410,), 400), ((10, 15), 0), ((100, 200), 0)])
def test_hours_leave_out_the_run_that_a_run_continues(logged: tuple[int, ...], begin: int, tmp_path: Path) -> None:
    """Each iteration has 1,000 tokens at 500 tokens/s; a line follows 10 iterations, or 100 by --deepspeed-config."""
    rows = [{"split": "train", "iteration": i, "consumed_tokens": 1000 * i} for i in logged]
    axes = read_run(_with_rows(tmp_path / "run", rows)).axes()
    assert axes["hours"] == pytest.approx([2 * (i - begin) / 3600 for i in (begin, *logged)])


def _with_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a run directory with these rows, completed by values that do not matter; return its path."""
    run = made(folder)
    template = read_run(run).rows_of("train")[0]
    lines = [json.dumps({**(template if row["split"] == "train" else {}), **row}) + "\n" for row in rows]
    (run / "metrics.jsonl").write_text("".join(lines))
    return run


def test_a_run_whose_validation_was_nan_has_a_report(tmp_path: Path) -> None:
    """metrics.jsonl has null for a loss that is NaN, and for what is computed from it."""
    bad = {"split": "valid", "lm_loss": None, "ppl": None, "text_loss": None, "text_accuracy": None}
    good = {"split": "valid", "lm_loss": 3.0, "ppl": 20.0, "text_loss": 3.0, "text_accuracy": 0.1}
    train = {"split": "train", "iteration": 10}
    for name, first, last, best in (("first", bad, good, 20), ("last", good, bad, 10)):
        run = _with_rows(tmp_path / name, [train, {**first, "iteration": 10}, {**last, "iteration": 20}])
        facts = dict(result_facts(read_run(run)))
        assert facts["best validation loss"] == f"3.000 at iteration {best} (perplexity 20.0)"
        assert "nan" in facts["validation loss, first and last"]
    run = _with_rows(tmp_path / "both", [train, {**bad, "iteration": 10}])
    assert dict(result_facts(read_run(run)))["best validation loss"] == "nan at iteration 10 (perplexity nan)"


def test_the_number_of_replicas_is_that_of_the_last_iterations(tmp_path: Path) -> None:
    """A run that was resumed with another --gas has other samples in an iteration."""
    rows = [
        {"split": "train", "iteration": iteration, "consumed_samples": samples}
        for iteration, samples in ((10, 640), (20, 1280), (30, 1360), (40, 1440))
    ]
    run = read_run(_with_rows(tmp_path / "a", rows))
    assert run.global_batch == 8
    assert layout_label(run) == "no pipeline x data 2 x model 1"


def test_baselines_of_a_t5_count_the_samples_of_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations use batches of the largest size, also while the batches of training are smaller."""
    flags = f"{FLAGS} --batch-size-schedule 0:8,1M_samples:16 --eval-iters 3".split()
    run = replace(read_run(made(tmp_path / "a")), config=parse(flags, {"family": "t5"}, 4))
    counts: list[int] = []
    monkeypatch.setattr(report, "read_run", lambda *_: run)
    monkeypatch.setattr(report, "target_entropies", lambda _, samples: counts.append(samples))
    report._read_with_baselines(run.folder, "a")
    assert counts == [3 * 16]


def test_a_stage_begins_between_the_rows_around_it(tmp_path: Path) -> None:
    """8 samples in each of 100 iterations, then 64: the stage at sample 4000 begins at iteration 150."""
    rows = [
        {"split": "train", "iteration": iteration, "consumed_samples": samples}
        for iteration, samples in ((100, 800), (200, 7200))
    ]
    run = read_run(_with_rows(tmp_path / "a", rows))
    staged = replace(run, config=with_values(run.config, {"data_stages": ("0: a; 4000: b",)}))
    assert report.stage_starts(staged) == [150.0]


def test_the_ideal_timetable_has_the_micro_batches_of_its_iteration() -> None:
    """The trace names those of the largest batch; an iteration with a schedule of batch sizes may have fewer."""
    about = {"stages": 2, "chunks": 1, "schedule": "1f1b", "micros": 8, "extra_warmup": 0}
    spans = [
        Span(stage, micro, 0, kind, float(micro), micro + length)
        for stage in range(2)
        for micro in range(2)
        for kind, length in (("F", 1.0), ("B", 2.0))
    ]
    ideal = ideal_spans(about, spans)
    assert {span.micro for span in ideal} == {0, 1}
    assert max(span.end for span in ideal) == 2 * 3.0 + 3.0  # two micro-batches of 3 s, and 3 s to fill and drain


def test_a_wide_table_has_the_runs_as_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    facts = [("speed", "1,234 tokens/s"), ("loss", "3.5"), ("memory", "1.25 GB")]
    lines = as_text(["a", "b"], [facts, facts]).splitlines()
    assert max(map(len, lines)) <= 24
    assert [line.split()[0] for line in lines if line] == ["speed", "a", "b", "memory", "a", "b"]
    assert as_text(["a"], [facts]).splitlines()[0] == "speed   1,234 tokens/s"


def test_the_state_is_that_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A living run with old log lines is running, and a run that an error has ended has failed, with the reason."""
    folder = made(tmp_path / "a")
    run = replace(read_run(folder), metrics_time=0.0)
    lock = RunLock(folder)
    assert run.state() == "running"
    lock.release()
    assert run.state() == "stopped"
    ended = asdict(Holder.here())
    (folder / "run.lock").write_text(json.dumps(ended))
    assert run.state(now=10.0) == "stopped", "the lock is of a process that has ended"
    monkeypatch.setattr("megatron.locks.advisory.LOCAL", ())
    (folder / "run.lock").write_text(json.dumps({**ended, "host": "another"}))
    assert (run.state(now=10.0), run.state(now=10_000.0)) == ("running", "stopped")
    (folder / "run.lock").write_text(json.dumps(ended))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("\n" + json.dumps({"split": "end", "iteration": 23, "reason": "interrupted (Ctrl-C)"}) + "\n")
    assert progress(read_run(folder))[0] == "stopped · iteration 23 of 40"
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"split": "end", "iteration": 23, "reason": "NaN <b>"}) + "\n")
    failed = read_run(folder)
    assert progress(failed)[0] == "failed · iteration 23 of 40"
    assert "failed: NaN &lt;b&gt;" in page_of([folder])


def test_losses_that_stay_nan_are_marked(tmp_path: Path) -> None:
    folder = made(tmp_path / "a")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()[:-1]]
    for i in (30, 31):
        rows.append({**rows[2], "iteration": i, "lm_loss": None})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loss = next(chart for chart in all_charts([read_run(folder)]) if chart.name == "loss")
    assert [(mark["x"], mark["line"]) for mark in loss.marks] == [(30, True)]


def test_rows_without_a_loss_are_no_results(tmp_path: Path) -> None:
    """--skip-iterations leaves out all iterations of three rows."""
    folder = made(tmp_path / "a")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()[:-1]]
    skipped = {key: value for key, value in rows[2].items() if key not in ("lm_loss", "grad_norm")}
    for i in (30, 40, 50):
        rows.append({**skipped, "iteration": i, "passed_over": 10, "tokens_per_second": 0.0, "tflops": 0.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(folder)
    assert ("median speed", "500 tokens/s") in result_facts(run)
    assert ("training loss, first and last line", "7.000, 6.000 nats/token") in result_facts(run)
    assert ("speed of a rank", "0.25 TFLOP/s") in machine_facts(run, None)
    assert not [chart.name for chart in all_charts([run]) if chart.marks]
    assert "training loss 6.000" in page_of([folder])


def test_curves_have_the_values_with_gaps_where_there_are_none(tmp_path: Path) -> None:
    spike = {"iteration": 7, "lm_loss": 9.5}
    run = replace(read_run(made(tmp_path / "a", "", spikes=[spike])), baselines={"text": 7.3})
    found = {chart.name: chart for chart in all_charts([run])}
    assert [(line["label"], line["y"]) for line in found["loss"].lines] == [
        ("training", [7, 6]),
        ("validation", [7, 7]),
    ]
    assert found["loss"].levels == [{"run": 0, "label": "unigram entropy of the text", "y": 7.3}]
    assert found["loss"].marks[0]["x"] == 7
    assert found["ppl"].lines[1]["y"] == pytest.approx([math.exp(7)] * 2, rel=1e-5)
    assert found["grad_norm"].lines[0]["y"] == [1.5, None]
    assert found["memory_mb"].lines[0]["y"] == [0.3, 0.3]
    assert not {"mfu", "loss_scale", "accuracy"} & found.keys(), "charts of nothing are left out"
    both = {chart.name: chart for chart in all_charts([run, run])}
    assert [level["run"] for level in both["loss"].levels] == [None], "what all runs share is drawn once"


def test_kinds_of_losses_are_named_and_marked_apart(tmp_path: Path) -> None:
    folder = made(tmp_path / "a")
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines()[:-1]
    lines.append(json.dumps({"split": "test", "iteration": 20, "lm_loss": 6.5, "ppl": math.exp(6.5)}))
    metrics.write_text("\n".join(lines) + "\n")
    loss = {chart.name: chart for chart in all_charts([read_run(folder)])}["loss"]
    kinds = {line["label"]: line["kind"] for line in loss.lines}
    assert kinds.keys() == {"training", "validation", "test"} and len(set(kinds.values())) == 3
    assert "training loss 6.000" in page_of([folder])
    assert len(set(report.MARKERS.values())) == len(report.MARKERS)


def test_accuracies_of_tasks_have_their_own_chart(tmp_path: Path) -> None:
    folder = made(tmp_path / "a")
    row = {"split": "eval/quiz", "iteration": 20, "accuracy": 0.25, "lm_loss": 3.0}
    kept = (folder / "metrics.jsonl").read_text().rpartition("\n")[0]
    (folder / "metrics.jsonl").write_text(f"{kept}\n{json.dumps(row)}\n")
    found = {chart.name: chart for chart in all_charts([read_run(folder)])}
    assert [(line["label"], line["x"], line["y"]) for line in found["tasks"].lines] == [("eval/quiz", [20], [25])]
    assert "corpora" not in found, "a task is not a corpus"


def test_long_lines_keep_their_ends_and_their_peaks() -> None:
    points: list[tuple[float, float | None]] = [(float(i), math.sin(i / 50)) for i in range(100_000)]
    points[54_321] = (54_321.0, 9.0)
    points[54_329] = (54_329.0, None)
    kept = thin_out(points)
    assert len(kept) <= 1600
    assert kept[0] == points[0] and kept[-1] == points[-1] and points[54_321] in kept
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_settings_that_differ_are_told_apart_from_folders(tmp_path: Path) -> None:
    runs = [read_run(made(tmp_path / name, flags)) for name, flags in (("a", "--lr 1e-3"), ("b", "--lr 2e-3"))]
    found = compare_settings([run.saved_config for run in runs])
    assert [(row.flag, row.values) for row in found if row.differs] == [("--lr", ["0.001", "0.002"])]
    assert {"--num-layers", "--gas"} <= {row.flag for row in found if row.changed}
    assert short_names([Path("/x/a/run"), Path("/x/b/run")]) == ["a/run", "b/run"]


@pytest.mark.parametrize("count", [1, 2])
def test_folders_of_several_runs_do_not_count_as_equal_settings(count: int) -> None:
    flags = ("--run-dir runs/a --load runs/old --save runs/saved --lr 2", "--run-dir runs/b --lr 2")
    found = compare_settings([parse(each.split()) for each in flags[:count]])
    folders = {"--run-dir", "--load", "--save"} if count == 1 else set()
    assert {row.flag for row in found if row.changed} == {"--lr", *folders}
    assert not any(row.differs for row in found)


@pytest.mark.parametrize(
    ("speeds", "median"), [([1000], "1,000"), ([1000, 3000], "3,000"), ([1, 2000, 3000, 5000, 4000], "3,500")]
)
def test_the_median_speed_leaves_out_the_first_line(speeds: list[float], median: str, tmp_path: Path) -> None:
    """The first line also measures the start of training."""
    rows = []
    for i, speed in enumerate(speeds, 1):
        row = {"split": "train", "iteration": i, "consumed_tokens": 1000 * i, "lm_loss": 2.0}
        rows.append({**row, "tokens_per_second": speed})
    assert dict(result_facts(read_run(_with_rows(tmp_path / "run", rows))))["median speed"] == f"{median} tokens/s"


def test_the_page_needs_nothing_and_runs_nothing_that_a_run_says(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    runs = [made(tmp_path / "a"), made(tmp_path / "b<i>")]
    for run in runs:
        settings_file = run / "config.json"
        content = json.loads(settings_file.read_text())
        content["data"]["vocab_file"] = evil
        settings_file.write_text(json.dumps(content))
    text = page_of(runs)
    assert evil not in text and "<i>" not in text.replace('<i class="dot"', "")
    assert "</script" not in as_data({"x": evil})
    assert not re.search(r"""<[^>]*\s(?:src|href)=|@import|url\((?!#)|https?://(?!www\.w3\.org/2000/svg")""", text)
    assert text.count("<script>") == 1
    data = [json.loads(each) for each in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.S)]
    assert data[0]["names"] == ["a", "b<i>"]
    assert {"loss", "ppl", "lr", "grad_norm", "tokens_per_second", "memory_mb"} <= {chart["name"] for chart in data[1:]}
    assert "alert(1)" in text  # the page shows the setting
    assert "Settings that differ" not in text and "No setting differs" in text


def test_a_run_without_a_row_stands_beside_others(tmp_path: Path) -> None:
    """The first row of a large model may come after minutes."""
    begun = made(tmp_path / "begun")
    (begun / "metrics.jsonl").unlink()
    text = page_of([made(tmp_path / "a"), begun])
    assert ">begun<" in text and ">a<" in text
    assert page_of([begun])


def test_a_folder_that_holds_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path} is not a run directory"):
        page_of([tmp_path])
    with pytest.raises(ValueError, match=SENTENCES["give_the_folders_of_runs"]):
        report.main(report.build_parser().parse_args([]))


def test_layers_have_a_chart_and_a_heat_map(tmp_path: Path) -> None:
    """Each metric of --log-layers has a chart with a line, and a heat map with a row, for each layer that has it."""
    layers = {
        "embedding": {"weight_norm": 2.0, "grad_norm": None, "update_ratio": 0.0},
        "layers.<0>": {"weight_norm": 200.0, "grad_norm": 1e-3, "update_ratio": 1e-3, "attention_logit": -3.0},
    }
    run = read_run(made(tmp_path / "a", layers=layers))
    found = {chart.name: chart for chart in all_charts([run])}
    assert [line["label"] for line in found["weight_norm0"].lines] == ["embedding", "layers.<0>"]
    assert found["weight_norm0"].lines[1]["y"] == [200.0, 200.0]
    assert found["weight_norm0"].log
    assert [line["label"] for line in found["attention_logit0"].lines] == ["layers.<0>"]
    assert not found["attention_logit0"].log
    assert "activation_rms0" not in found
    maps = {values.metric: heat_map(values) for values in layer_values(run)}
    assert maps.keys() == {"weight_norm", "grad_norm", "update_ratio", "attention_logit"}
    assert maps["weight_norm"].count("<rect") == 4
    assert maps["update_ratio"].count("<rect") == 2, "a ratio of 0 has no logarithm"
    assert '#440154"><title>embedding, iteration 10: 2<' in maps["weight_norm"]
    assert '#fde725"><title>layers.&lt;0&gt;, iteration 20: 200<' in maps["weight_norm"]
    assert "</i>200 (logarithmic)" in maps["weight_norm"]
    assert 'aria-label="Weight norm by layer"' in page_of([tmp_path / "a"])


def test_experts_have_a_curve_of_imbalance_and_a_heat_map_of_shares(tmp_path: Path) -> None:
    """Both show what equal shares would be: an imbalance of 1, and a share of 1/4 in the first row."""
    layers = {"layers.0": {"imbalance": 2.0, "dead_experts": 1}, "layers.1": {"imbalance": 1.0, "dead_experts": 0}}
    tokens = {"layers.0": [4, 2, 2, 0], "layers.1": [2, 2, 2, 2]}
    run = read_run(made(tmp_path / "a", layers=layers, expert_tokens=tokens, router_loss=0.02))
    found = {chart.name: chart for chart in all_charts([run])}
    assert [line["y"] for line in found["imbalance0"].lines] == [[2.0, 2.0], [1.0, 1.0]]
    assert [level["y"] for level in found["imbalance0"].levels] == [1.0]
    assert not found["imbalance0"].log
    assert [line["y"] for line in found["dead_experts0"].lines] == [[1.0, 1.0], [0.0, 0.0]]
    assert found["router_loss"].lines[0]["y"] == [0.02, 0.02]
    shares = expert_shares(run)
    assert shares is not None
    assert list(shares.layers.values()) == [[0.25] * 4, [0.5, 0.25, 0.25, 0.0], [0.25] * 4]
    figure = heat_map(shares)
    assert figure.count("<rect") == 12
    assert 'aria-label="Share of tokens by expert' in figure
    assert ">0<i" in figure and "</i>0.5 (linear)" in figure, "the colours have a scale"
    assert '#440154"><title>layers.0, expert 3: 0<' in figure
    assert '#fde725"><title>layers.0, expert 0: 0.5<' in figure
    assert "even share, 1/4" in page_of([tmp_path / "a"])
    assert expert_shares(read_run(made(tmp_path / "b"))) is None


def test_samples_of_runs_stand_beside_each_other(tmp_path: Path) -> None:
    folders = []
    for name in ("a", "b"):
        folder = made(tmp_path / name)
        texts = [{"prompt": "春 <b>", "text": f"春 <b>\nline of {name}"}]
        row = {"split": "samples", "iteration": 20, "samples": texts}
        lines = (folder / "metrics.jsonl").read_text().splitlines()[:-1]
        (folder / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(row)]) + "\n")
        folders.append(str(folder))
    report.main(report.build_parser().parse_args([*folders, "--output", str(tmp_path / "page.html")]))
    page = (tmp_path / "page.html").read_text()
    assert "Samples of “春 &lt;b&gt;”" in page
    row_of_texts = page[page.index("<th>20</th>") :].partition("</tr>")[0]
    assert row_of_texts.index("line of a") < row_of_texts.index("line of b")


@pytest.mark.parametrize("samples", [7, [7], [{"prompt": "x"}], [{"prompt": "x", "text": 3}]])
def test_samples_that_no_run_writes_are_refused(samples: Any, tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("\n" + json.dumps({"split": "samples", "iteration": 20, "samples": samples}) + "\n")
    with pytest.raises(ValueError, match="samples"):
        read_run(folder)


def test_skipped_spikes_are_marked(tmp_path: Path) -> None:
    spike = {"iteration": 9, "first_sample": 64, "samples": 8, "name": "loss", "value": 9.5, "mean": 3, "deviation": 1}
    run = read_run(made(tmp_path / "a", skipped_spikes=[spike]))
    loss = next(chart for chart in all_charts([run]) if chart.name == "loss")
    assert loss.marks[0]["x"] == 9
    assert "9.5" in loss.marks[0]["label"]


def test_runs_with_different_tokenizers_get_a_note(tmp_path: Path) -> None:
    """Losses are in nats per token, so those of two tokenizers cannot be compared."""
    for name in "ab":
        (tmp_path / f"{name}.model").write_bytes(name.encode())
    folders = []
    for run_name, vocabulary in (("1", "a"), ("2", "a"), ("3", "b")):
        folders.append(made(tmp_path / run_name, f"--vocab-file {tmp_path / vocabulary}.model"))
    runs = [read_run(folder, folder.name) for folder in folders]
    assert tokenizer_note(runs[:2]) == ""
    assert "tokenizers" in tokenizer_note(runs)
    assert tokenizer_note(runs) in page_of(folders)
    assert tokenizer_note(runs[:1]) == ""


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_run_has_a_report_after_its_corpus_is_gone_or_replaced(
    is_gone: bool, tmp_path: Path, tiny_data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tmp_path / "text"
    for end in (".bin", ".idx"):
        shutil.copy(tiny_data + end, f"{prefix}{end}")
    if is_gone:
        Path(f"{prefix}.bin").unlink()
    # The vocabulary of 100 tokens is smaller than that of the corpus.
    run = made(tmp_path / "run", f"--data-path {prefix} --split 80,10,10")
    assert page_of([run])
    assert "unigram" in capsys.readouterr().err


def test_a_folder_that_is_given_twice_is_read_once(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    report.main(report.build_parser().parse_args([str(run), f"{run}/"]))
    assert (run / "loss.png").is_file()
