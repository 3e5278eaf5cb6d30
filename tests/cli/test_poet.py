"""scripts/run_poet.sh and examples/poet/poems.py: poems from a package, their split, training, scores and new poems."""

import importlib
import io
import json
import math
import random
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import ROOT, command

CHARACTERS = [chr(0x4E00 + n) for n in range(300)]


def made(dice: random.Random, count: int, length: int) -> dict[str, object]:
    """Return a record of the package: a poem of `count` lines of `length` random characters."""
    lines = ["".join(dice.choices(CHARACTERS, k=length)) for _ in range(count)]
    rows = [f"{first}，{second}。" for first, second in zip(lines[::2], lines[1::2], strict=True)]
    return {"author": "某", "title": "".join(dice.choices(CHARACTERS, k=3)), "paragraphs": rows, "id": "0"}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder like npm's package, with 400 regulated poems, some others, a copy and a near copy."""
    dice = random.Random(3)
    records = [made(dice, *dice.choice([(4, 5), (8, 5), (4, 7), (8, 7)])) for _ in range(400)]
    records += [made(dice, 6, 5), made(dice, 4, 6), {**made(dice, 4, 5), "title": "長" * 30}]
    records.append({**records[0], "title": "副本"})
    folder = tmp_path / "package/dist/quantangshi"
    (folder / "error").mkdir(parents=True)
    (folder / "poet.tang.0.json").write_text(json.dumps(records[:200]))
    (folder / "poet.song.1000.json").write_text(json.dumps(records[200:]))
    (folder / "authors.tang.json").write_text("[]")
    (folder / "error/poet.tang.0.json").write_text("not JSON")
    return tmp_path / "package"


@pytest.fixture
def poems(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples/poet"))
    return importlib.import_module("poems")


def documents(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_poems_of_a_folder_and_of_a_package_are_the_same(package: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "package.tgz", "w:gz") as archive:
        for path in sorted(package.rglob("*.json")):
            content = path.read_bytes()
            info = tarfile.TarInfo(path.relative_to(package.parent).as_posix())
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    found = []
    for source in (package, tmp_path / "package.tgz"):
        out = tmp_path / source.name.replace(".", "_") / "out"
        flags = ["--input", str(source), "--output", str(out), "--script", "traditional"]
        done = command("python", "examples/poet/poems.py", *flags)
        assert done.returncode == 0, done.stderr
        assert "3 of another form" in done.stdout and "1 copies" in done.stdout
        found.append((documents(out / "train.jsonl"), documents(out / "valid.jsonl")))
    assert found[0] == found[1]
    train, valid = found[0]
    assert len(train) + len(valid) == 400 and not set(train) & set(valid)
    title, *rows = train[0].split("\n")
    assert len(title) == 3 and {len(row) for row in rows} <= {12, 16}


def test_a_folder_without_poems_is_refused(tmp_path: Path) -> None:
    done = command(
        "python",
        "examples/poet/poems.py",
        "--input",
        str(tmp_path),
        "--output",
        str(tmp_path / "out"),
        "--script",
        "traditional",
    )
    assert done.returncode == 1 and str(tmp_path) in done.stderr and "Traceback" not in done.stderr


def test_near_duplicates_share_most_of_their_pieces(poems: ModuleType) -> None:
    """A line of eight may differ much, or each line by one character of five, but not every line as a whole."""
    dice = random.Random(4)
    poem = poems.poem_of(made(dice, 8, 5))
    known = poems.NearDuplicates([poem])
    other_line = poem._replace(lines=(*poem.lines[:-1], "甲乙丙丁戊"))
    assert poem in known and other_line in known
    assert poems.poem_of(made(dice, 8, 5)) not in known
    one_of_five = poem._replace(lines=tuple(f"{line[:4]}甲" for line in poem.lines))
    assert one_of_five in known


def test_one_poem_of_a_hundred_is_held_out(poems: ModuleType) -> None:
    dice = random.Random(5)
    held_out = sum(poems.is_held_out(poems.poem_of(made(dice, 4, 5))) for _ in range(20_000))
    assert abs(held_out - 200) < 5 * math.sqrt(200)


def test_the_script_trains_resumes_and_writes(package: Path, tmp_path: Path) -> None:
    sizes = {"VOCAB_SIZE": "700", "NLAYERS": "1", "NHIDDEN": "32", "NHEADS": "2", "BATCHSIZE": "2"}
    env = {**sizes, "CORPUS": str(package), "CHARACTERS": "traditional", "RUN_DIR": str(tmp_path / "run")}
    env |= {"GPUS_PER_NODE": "1", "PRICE_PER_HOUR": "3"}
    for iterations in (3, 5):
        if iterations == 5:
            del env["VOCAB_SIZE"]  # a resume needs no size
        flags = ["--override-lr-schedule", "--no-tensorboard"]
        done = command("bash", "scripts/run_poet.sh", *flags, env={**env, "TRAIN_ITERS": str(iterations)}, timeout=600)
        assert done.returncode == 0, done.stderr
    other = command("bash", "scripts/run_poet.sh", env={**env, "CORPUS": str(tmp_path)})
    assert f"run/poems was prepared with CORPUS={package}, not {tmp_path}; set another RUN_DIR=" in other.stderr
    assert (tmp_path / "run/poems/variables").read_text() == f"CHARACTERS=traditional\nCORPUS={package}\n"
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if row["split"] == "samples"] == [3, 5]
    assert "bits per character" in done.stdout and "price" in done.stdout and "《月夜忆舍弟》" in done.stdout
    scored = command("python", "examples/poet/poet.py", str(tmp_path / "run"), "--json")
    found = json.loads(scored.stdout)
    valid = str(tmp_path / "run/poems/valid.jsonl")
    asked = ["--load", str(tmp_path / "run"), "--input", valid, "--json", str(tmp_path / "scores.json"), "--quiet"]
    assert command("python", "tools/evaluate.py", *asked).returncode == 0
    theirs = json.loads((tmp_path / "scores.json").read_text())
    assert found["bits"] == pytest.approx(theirs["bits_per_character"], rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(theirs["bits_per_byte"], rel=1e-5)


def test_a_mistake_costs_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for name, value in {"POET_SIZE": "huge", "CHARACTERS": "both"}.items():
        done = command("bash", "scripts/run_poet.sh", env={name: value, "RUN_DIR": str(run_dir)})
        assert done.returncode == 2 and f"{name}={value} is not one of" in done.stderr
    env = {"RUN_DIR": str(run_dir), "VOCAB_FILE": "README.md", "VOCAB_SIZE": "900"}
    done = command("bash", "scripts/run_poet.sh", env=env)
    assert done.returncode == 2 and "VOCAB_SIZE=900 has no effect beside VOCAB_FILE=README.md" in done.stderr
    done = command("bash", "scripts/run_poet.sh", "--hidden-sise", "3", env={"RUN_DIR": str(run_dir)})
    assert done.returncode == 2 and "--hidden-sise" in done.stderr and not run_dir.exists()


def test_titles_are_written_without_scores_and_with_other_seeds_each_time(
    poems: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """poet.py --title scores nothing, and its poems differ from those of another call, unless --seed is given."""
    poet = importlib.import_module("poet")
    seeds: list[list[int]] = []

    class Fake:
        def __init__(self, folder: str) -> None:
            seeds.append([])

        def poem(self, title: str, seed: int) -> str:
            seeds[-1].append(seed)
            return "春眠不覺曉，處處聞啼鳥。\n夜來風雨聲，花落知多少。"

    monkeypatch.setattr(poet, "Poet", Fake)
    for more in ([], [], ["--seed", "7"]):
        monkeypatch.setattr("sys.argv", ["poet.py", "run", "--title", "春曉", "--samples", "2", *more])
        poet.main()
    assert seeds[0] != seeds[1] and len(set(seeds[0])) == 2
    assert seeds[2] == [7, 8]
    printed = capsys.readouterr().out
    assert "bits" not in printed and printed.count("《春曉》") == 6
