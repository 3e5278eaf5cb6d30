"""Each file of examples/ does what its docstring says.

test_own_model.py tests two of them, pretrain_decoder.py and write_with_decoder.py.
"""

import contextlib
import hashlib
import importlib
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.runs import Start, losses_of, run_all
from tests.sentences import SENTENCES
from tests.support import FULL, ROOT, RankFailure, command, losses, on_ranks

EXAMPLES = ROOT / "examples"
LONG = {"pretrain_decoder.py"}  # examples that may exceed 100 lines; this one defines a complete model


def test_each_is_short_and_says_what_it_shows_and_prints() -> None:
    for path in sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.sh")]):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 100 or path.name in LONG, path
        if path.name not in {"pretrain_decoder.py", "write_with_decoder.py"}:
            assert "The example shows" in text and "The example prints" in text, path


def _main(name: str) -> str:
    """Run an example's main() on this rank and return its output."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        importlib.import_module(f"examples.{name}").main()
    return said.getvalue()


def _launched(name: str, ranks: int) -> list[str]:
    first, *others = on_ranks(ranks, _main, name)
    assert not any(others)
    return list(first.splitlines())


def test_own_schedule() -> None:
    said = _launched("own_schedule", 2)
    assert said[:3] == [
        "stage 0 | F0 F1 B0 B1 F2 F3 B2 B3 F4 F5 B4 B5",
        "stage 1 | F0 F1 B0 B1 F2 F3 B2 B3 F4 F5 B4 B5",
        "bubble 33.3%; micro-batches kept by each stage: [2, 2]",
    ]
    assert re.fullmatch(r"losses( \d\.\d{6}){4} under 1f1b and under waves", said[3])


def _registered(folder: str, data: str, vocab_file: str) -> None:
    """Train with a schedule that the script has registered, and with 1f1b."""
    from examples.own_schedule import waves
    from tds.schedule import register

    register("waves of two", waves)
    flags = "--pipe-parallel-size 2 --batch-size 1 --gas 4 --train-iters 2 --precision fp32 --no-save-at-end"
    starts = [
        Start("gpt2", Path(folder) / "waves", f"{flags} --pipeline-schedule 'waves of two'"),
        Start("gpt2", Path(folder) / "1f1b", flags),
    ]
    run_all(starts, data, vocab_file)


def test_a_run_takes_a_registered_schedule(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    on_ranks(2, _registered, str(tmp_path), tiny_data, vocab_file)
    found = losses_of(tmp_path / "waves")
    assert len(found) == 2 and found == pytest.approx(losses_of(tmp_path / "1f1b"), rel=1e-6)


def _without_a_backward_pass() -> None:
    from examples.own_schedule import losses as trained
    from tds.schedule import Forward, register, with_messages

    register("lazy", lambda stage, stages, micros: with_messages(map(Forward, range(micros)), stage, stages))
    trained("lazy")


def test_a_schedule_of_ones_own_is_checked() -> None:
    from tds.schedule import BUILT_IN, Backward, Forward, Instruction, find_schedule, register, with_messages
    from tds.timetable import ScheduleError, check_plan

    for name in BUILT_IN:
        with pytest.raises(ValueError, match=SENTENCES["is_a_schedule_of_tds_give"]):
            register(name, find_schedule({}))

    def lazy(stage: int, stages: int, micros: int) -> Any:
        order: list[Instruction] = [*(Forward(i) for i in range(micros)), *(Backward(i) for i in range(micros - 1))]
        return with_messages(order, stage, stages)

    register("lazy", lazy)
    with pytest.raises(ScheduleError, match=SENTENCES["stage_0_3_backward_of_chunk"]):
        check_plan([list(find_schedule({"schedule": "lazy"})(stage, 2, 4)) for stage in range(2)], 4)
    with pytest.raises(ValueError, match=SENTENCES["there_is_no_pipeline_schedule_other"]):
        find_schedule({"schedule": "other"})
    with pytest.raises(ValueError, match=SENTENCES["a_model_with_2_chunks_a"]):
        find_schedule({"schedule": "lazy"}, chunks=2)
    with pytest.raises(RankFailure, match=SENTENCES["the_schedule_has_no_backward_pass"]):
        on_ranks(2, _without_a_backward_pass)


def _spirals_by_plain_torch() -> list[str]:
    """Train the layers of examples/tds_alone.py in plain torch, with tds's initialisation; return its output."""
    from examples.tds_alone import MICROS, ROWS, STEPS, points
    from tds.pipe import LayerSpec, SequentialModule, seeded_layers

    sizes, act = [(2, 64), (64, 64), (64, 64), (64, 2)], torch.nn.Tanh
    linear = [LayerSpec(torch.nn.Linear, *size) for size in sizes]
    with seeded_layers(3):
        net = SequentialModule([linear[0], LayerSpec(act), linear[1], LayerSpec(act), linear[2], linear[3]])
    optimizer, said = torch.optim.AdamW(net.parameters()), []
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, step / 10)
        optimizer.zero_grad()
        loss = sum(torch.nn.functional.cross_entropy(net(x), label) for x, label in points(step)) / MICROS
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            said.append(f"step {step} loss {loss.item():.4f}")
    right = sum((net(x).argmax(1) == label).sum().item() for x, label in points(0))
    return [*said, f"accuracy {right / (MICROS * ROWS):.1%}"]


def test_tds_alone() -> None:
    expected = _spirals_by_plain_torch()
    assert _launched("tds_alone", 2) == [*expected, "on 2 stages"]
    assert float(expected[-1].split()[1].rstrip("%")) > 80


def _sums(stages: int, folder: Path, vocab_file: str) -> None:
    from examples.own_dataset import OwnData
    from megatron.training import run

    argv = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --lr 3e-3 --log-interval 1 "
        "--eval-iters 1 --train-iters 12"
    )
    more = [
        "--pipe-parallel-size",
        str(stages),
        "--run-dir",
        str(folder),
        "--vocab-file",
        vocab_file,
        "--precision",
        "fp32",
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        run(
            OwnData(),
            [*argv.split(), *more, "--no-tensorboard", "--hidden-dropout", "0", "--attention-dropout", "0"],
            exit=False,
        )


def test_own_dataset(tmp_path: Path, vocab_file: str) -> None:
    """The example's dataset of sums is correct, and every layout reads the same samples."""
    from examples.own_dataset import Sums
    from megatron.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(vocab_file)
    sample = Sums(tokenizer, 32, "train")[7]["text"]
    assert torch.equal(sample, Sums(tokenizer, 32, "train")[7]["text"]) and len(sample) == 33
    first = tokenizer.decode(sample[: sample.tolist().index(tokenizer.eod)].tolist())
    left, right = first.split("=")
    assert sum(map(int, left.split("+"))) == int(right)
    found = []
    for stages in (1, 2):
        on_ranks(stages, _sums, stages, tmp_path / str(stages), vocab_file)
        found.append(
            losses([json.loads(line) for line in (tmp_path / str(stages) / "metrics.jsonl").read_text().splitlines()])
        )
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[0][-1] < found[0][0] - 0.5


def _prepared(folder: Path, **env: str) -> list[str]:
    argv = ["--input", "corpus/sample.jsonl", "--output", str(folder), "--vocab-size", "3000", "--workers", "2"]
    done = command("python", "examples/prepare_on_ray.py", *argv, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-2:]


def test_preparing_without_ray(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "ray.py").write_text("raise ImportError('as on a machine without it')\n")
    where, words = _prepared(tmp_path / "alone", PYTHONPATH=str(tmp_path / "none"))
    assert where == "2 workers on this machine, as Ray is not installed"
    assert words == f"sha256 {hashlib.sha256((tmp_path / 'alone' / 'data_text_document.bin').read_bytes()).hexdigest()}"


@FULL  # starting Ray takes ten seconds
def test_preparing_on_ray_gives_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "ray.py").write_text("raise ImportError('as on a machine without it')\n")
    alone = _prepared(tmp_path / "alone", PYTHONPATH=str(tmp_path / "none"))
    there = _prepared(tmp_path / "ray", RAY_ADDRESS="local")
    assert there[0] == "2 workers of the Ray cluster local"
    assert there[1] == alone[1]


@FULL
def test_continued_pretraining(tmp_path: Path) -> None:
    """continue_from_hf.sh trains and exports; a second start resumes the finished run and exports the same weights."""
    pytest.importorskip("transformers")
    for _ in range(2):
        done = command("bash", "examples/continue_from_hf.sh", "", "corpus/sample.jsonl", str(tmp_path / "more"))
        assert done.returncode == 0, done.stderr
        if _ == 0:
            assert re.search(r"iteration +20/20 \| loss +\d", done.stdout), done.stdout
        shutil.copytree(tmp_path / "more/exported", tmp_path / f"exported{_}")
    weights = [(tmp_path / f"exported{i}" / "model.safetensors").read_bytes() for i in range(2)]
    assert weights[0] == weights[1]
    done = command("bash", "examples/continue_from_hf.sh", "", "other.jsonl", str(tmp_path / "more"))
    assert done.returncode == 2 and "more contains a run with the arguments  corpus/sample.jsonl;" in done.stderr


def cells() -> list[dict[str, Any]]:
    notebook = json.loads((EXAMPLES / "first_run.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    return list(notebook["cells"])


def script(cell: dict[str, Any]) -> str:
    """Return a notebook cell as Python code, with `!command {variable}` as a call of `shell`."""
    text = "".join(cell["source"]).replace("\\\n", "")
    return re.sub(r"^!(.*)$", lambda found: f"shell(f{found[1]!r})", text, flags=re.MULTILINE)


def test_the_notebook_is_one() -> None:
    """The notebook has unique cell ids and no saved outputs, and the code of its cells compiles."""
    found = cells()
    assert len({cell["id"] for cell in found}) == len(found)
    for cell in found:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            compile(script(cell), cell["id"], "exec")


@FULL
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """All cells of the notebook run in order in one namespace, except for the cell that installs the package."""
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setenv("RUN_DIR", str(tmp_path / "run"))
    names = {"shell": lambda words: subprocess.run(words, shell=True, check=True)}
    for cell in cells():
        if cell["cell_type"] == "code" and "installs" not in cell["metadata"].get("tags", []):
            exec(compile(script(cell), cell["id"], "exec"), names)
    said = capfd.readouterr().out
    assert re.search(r"iteration +60/60", said) and "春天" in said
    assert names["python"] == sys.executable
