"""Each writer (TensorBoard, W&B, SwanLab, MLflow) gets all metrics; a resumed run continues its records."""

import importlib.util
import posixpath
import resource
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config.command_line import parse
from megatron.data.corpus_paths import corpus_names
from megatron.features import writers
from megatron.packages import is_installed, pip_install
from megatron.training.metrics import MetricsWriter

ROW = {"split": "train", "iteration": 10, "lm_loss": 7.5, "lr": 0.001, "loss_scale": None, "spikes": [{"iteration": 3}]}


class Said(list[Any]):
    """A stand-in for the module wandb, swanlab or mlflow that records the calls of its functions."""

    def __getattr__(self, name: str) -> Any:
        def asked(*args: Any, **kwargs: Any) -> Any:
            self.append((name, args, kwargs))
            return SimpleNamespace(
                info=SimpleNamespace(run_id="r1"), log=self.log, define_metric=self.define_metric, finish=self.finish
            )

        return asked

    def named(self, name: str) -> list[Any]:
        return [(args, kwargs) for asked, args, kwargs in self if asked == name]


def config(*flags: str) -> Any:
    return parse(["--no-tensorboard", *flags], {"family": "gpt2"})


def told(run_dir: Path, iteration: int, *flags: str, rows: tuple[dict[str, Any], ...] = (ROW,)) -> None:
    writer = MetricsWriter(str(run_dir), iteration, True)
    writer.forward_to(writers.build_writers(config(*flags), run_dir, iteration))
    for row in rows:
        writer.write(row)
    writer.close()


def test_wandb_gets_a_line_and_the_same_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Said()
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    for iteration in (0, 10, 0):
        told(tmp_path, iteration, "--wandb", "--lr", "0.25")
    first, second, third = (kwargs for _, kwargs in wandb.named("init"))
    assert (first["name"], first["config"]["lr"], first["resume"]) == (tmp_path.name, 0.25, "allow")
    assert first["id"] == second["id"] != third["id"], "a run that begins again is another one"
    assert wandb.named("log")[0][0] == ({"train/lm_loss": 7.5, "train/lr": 0.001, "iteration": 10},)
    assert len(wandb.named("finish")) == 3


def test_swanlab_gets_numbers_and_texts_and_the_same_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swanlab = Said()
    monkeypatch.setitem(sys.modules, "swanlab", swanlab)  # type: ignore[arg-type]
    monkeypatch.delenv("SWANLAB_PROJ_NAME", raising=False)
    monkeypatch.setenv("SWANLAB_EXP_NAME", "mine")
    samples = {"split": "samples", "iteration": 10, "samples": [{"prompt": "春天", "text": "春天来了"}]}
    for iteration in (0, 10, 0):
        told(tmp_path, iteration, "--swanlab", "--lr", "0.25", rows=(ROW, samples))
    first, second, third = (kwargs for _, kwargs in swanlab.named("init"))
    assert (first["project"], first["experiment_name"]) == (writers.PROJECT, "mine")
    assert (first["config"]["lr"], first["resume"], first["logdir"]) == (0.25, "allow", str(tmp_path / "swanlab"))
    assert first["id"] == second["id"] != third["id"], "a run that begins anew is another one"
    numbers, texts = swanlab.named("log")[:2]
    assert numbers == (({"train/lm_loss": 7.5, "train/lr": 0.001},), {"step": 10})
    assert list(texts[0][0]) == ["samples/春天"] and swanlab.named("Text")[0][0] == ("春天来了",)
    assert len(swanlab.named("finish")) == 3


def test_swanlab_leaves_the_handlers_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """swanlab's handler of Ctrl-C would end its run, and its `finish` would remove the handler of the training loop."""

    def take(*_: Any, **__: Any) -> Any:
        sys.excepthook = lambda *_: None
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return SimpleNamespace(finish=take)

    monkeypatch.setitem(sys.modules, "swanlab", SimpleNamespace(init=take, Text=str))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    before = signal.getsignal(signal.SIGINT)
    try:
        (writer,) = writers.build_writers(config("--swanlab"), tmp_path, 0)
        assert signal.getsignal(signal.SIGINT) is before
        signal.signal(signal.SIGINT, handler := lambda *_: None)  # The training loop does the same.
        sys.excepthook = hook = lambda *_: None
        writer.close()
        assert signal.getsignal(signal.SIGINT) is handler and sys.excepthook is hook
    finally:
        signal.signal(signal.SIGINT, before)


def test_mlflow_gets_a_line_and_the_same_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = Said()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)  # type: ignore[arg-type]
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    told(tmp_path, 0, "--mlflow")
    told(tmp_path, 10, "--mlflow")
    assert mlflow.named("set_tracking_uri")[0][0] == ((tmp_path / "mlflow").as_uri(),)
    assert [kwargs["run_id"] for _, kwargs in mlflow.named("start_run")] == [None, "r1"]
    logged = [params for (params,), _ in mlflow.named("log_params")]
    assert max(map(len, logged)) <= 100
    assert {**logged[0], **logged[1]}.keys() <= writers.flat_settings(config()).keys()
    assert mlflow.named("log_metrics")[0] == (({"train/lm_loss": 7.5, "train/lr": 0.001},), {"step": 10})
    writer = writers.MLflow(parse([]), tmp_path, 20)
    writer.write(30, {"train/c++ (1)/lm_loss": 1.0, "train/春天/lm_loss": 2.0})  # MLflow takes letters of any script
    assert mlflow.named("log_metrics")[-1][0] == ({"train/c__ _1_/lm_loss": 1.0, "train/春天/lm_loss": 2.0},)


@pytest.mark.parametrize(
    "prefixes",
    [
        ["/data/zh/web_text_document", "/data/en/web_text_document"],
        ["../a/x", "../b/x"],
        ["./a/x", "./b/x"],
        ["../../a/x", "../../b/x"],
    ],
)
def test_mlflow_gets_corpora_of_one_file_name_in_several_folders(
    prefixes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow refuses a name that is not a normalised path."""
    mlflow = Said()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)  # type: ignore[arg-type]
    writer = writers.MLflow(parse([]), tmp_path, 0)
    losses = {f"train/{name}/lm_loss": float(i) for i, name in enumerate(corpus_names(prefixes))}
    writer.write(10, losses)
    (logged,) = mlflow.named("log_metrics")[-1][0]
    assert list(logged.values()) == [0.0, 1.0]
    for name in logged:
        assert posixpath.normpath(name) == name
        assert name.startswith("train/") and name.endswith("/lm_loss")


@pytest.mark.parametrize("folder", ["tensorboard", "board"])
def test_tensorboard_gets_texts(tmp_path: Path, folder: str) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    chosen = [] if folder == "tensorboard" else ["--tensorboard-dir", str(tmp_path / folder)]
    config = parse(["--tensorboard", *chosen], {"family": "gpt2"})
    metrics = MetricsWriter(str(tmp_path), 0, active=True)
    metrics.forward_to(writers.build_writers(config, tmp_path, 0))
    metrics.write({"split": "samples", "iteration": 3, "samples": [{"prompt": "春天", "text": "春天来了"}]})
    assert metrics.close() == 0
    events = EventAccumulator(str(tmp_path / folder))
    events.Reload()
    settings, tag = events.Tags()["tensors"]
    assert "    train_iters: " in events.Tensors(settings)[0].tensor_proto.string_val[0].decode()
    (event,) = events.Tensors(tag)
    assert tag.startswith("samples/春天") and event.step == 3
    assert event.tensor_proto.string_val[0].decode() == "春天来了"


@pytest.mark.parametrize("name", ["wandb", "swanlab", "mlflow", "tensorboard"])
def test_a_package_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError) as error:
        writers.check_packages(parse([f"--{name}"]).log)
    assert pip_install(name) in str(error.value) and f"--{name}*" in str(error.value)
    # The advice holds for --tensorboard-dir, too, which --no-tensorboard would contradict.
    assert f"--no-{name}" not in str(error.value)
    writers.check_packages(parse([]).log)  # no package is needed: TensorBoard is optional by default


def test_a_folder_with_the_name_of_a_package_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python imports such a folder as a namespace package."""
    plain, asked = parse([], {"family": "gpt2"}), parse(["--wandb"])
    for name in ("tensorboard", "wandb"):
        (tmp_path / name).mkdir()
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # as if these packages were not installed
    assert list(writers.build_writers(plain, tmp_path, 0)) == []
    with pytest.raises(ValueError, match="--wandb needs the package wandb"):
        writers.check_packages(asked.log)
    (tmp_path / "tensorboard" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert is_installed("tensorboard") and not is_installed("wandb")


def test_one_that_cannot_begin_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError("api_key not configured\n(no-tty)")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"api_key.*pass --no-wandb.* flags --wandb\*"):
        list(writers.build_writers(config("--wandb"), tmp_path, 0))


def test_those_that_have_started_are_closed_if_another_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def set_experiment(_: str) -> None:
        raise ConnectionError("no server")

    wandb = Said()
    mlflow = SimpleNamespace(set_tracking_uri=str, set_experiment=set_experiment)
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)  # type: ignore[arg-type]
    metrics = MetricsWriter(str(tmp_path), 0, True)
    with pytest.raises(ValueError, match="--no-mlflow"):
        metrics.forward_to(writers.build_writers(config("--wandb", "--mlflow"), tmp_path, 0))
    metrics.close()
    assert len(wandb.named("init")) == len(wandb.named("finish")) == 1


def test_mlflow_is_closed_if_it_refuses_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses(Said):
        def log_params(self, _: dict[str, str]) -> None:
            raise ConnectionError("no server")

    mlflow = Refuses()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="--no-mlflow"):
        list(writers.build_writers(config("--mlflow"), tmp_path, 0))
    assert len(mlflow.named("start_run")) == len(mlflow.named("end_run")) == 1


def test_one_that_fails_later_stops_and_the_run_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        name = "MLflow"

        def write(self, *_: Any) -> None:
            raise ConnectionError("gone")

        def close(self) -> None:
            raise AssertionError("it was left out")

    writer = MetricsWriter(str(tmp_path), 0, True)
    writer.forward_to([Broken()])
    writer.write(ROW)
    writer.write(ROW)
    writer.close()
    assert capsys.readouterr().out == "note: MLflow failed at iteration 10, so it gets no more metrics: gone\n"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_writer_gets_its_rows_when_the_disk_has_space_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of files acts as a full disk."""
    pytest.importorskip("tensorboard")
    writer = MetricsWriter(str(tmp_path), 0, True)
    writer.forward_to(writers.build_writers(parse(["--tensorboard"]), tmp_path, 0))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for iteration in range(1, 6):
        full = iteration in (2, 3)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10 if full else before[0], before[1]))
        try:
            writer.write(ROW | {"iteration": iteration})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert writer.close() == 0
    printed = capsys.readouterr()
    assert len([line for line in printed.out.splitlines() if line.startswith("note: TensorBoard ")]) == 1
    assert "Traceback" not in printed.err
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = sorted({event.step for event in events.Scalars("train/lm_loss")})
    assert found == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("flags", [["--wandb"], ["--swanlab"], ["--mlflow"], ["--tensorboard"]])
def test_the_real_packages_offline(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run and its resumption are logged offline by the real wandb, swanlab, mlflow and TensorBoard, if installed."""
    pytest.importorskip(flags[0][2:])
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for iteration in (0, 10):
        told(tmp_path, iteration, *flags, rows=(ROW | {"iteration": iteration + 10},))
    if flags == ["--mlflow"]:
        (kept,) = tmp_path.glob("mlflow/*/*/metrics/train/lm_loss")
        assert [line.split()[1:] for line in kept.read_text().splitlines()] == [["7.5", "10"], ["7.5", "20"]]
    elif flags == ["--wandb"]:
        assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 2
    elif flags == ["--swanlab"]:
        files = sorted(tmp_path.glob("swanlab/run-*/*.swanlab"))
        assert len(files) == 2 and {file.name for file in files} == {files[0].name}, "both have the id of one run"
        assert all(b"train/lm_loss" in file.read_bytes() for file in files)
    else:
        assert len(list(tmp_path.glob("tensorboard/events*"))) == 2
