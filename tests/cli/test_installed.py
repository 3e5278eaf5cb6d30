"""The installed package works from a folder outside the checkout."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import megatron
from tests.sentences import SENTENCES
from tests.support import FULL, ROOT

LEFT_OUT = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "tests", "benchmarks", "__pycache__")
# An interpreter that imports torch once and runs each script of bin/ that it reads, [path, arguments...], in a fork,
# with the output in the files `out` and `err`.
FORKS = """
import atexit, json, os, runpy, sys
import megatron.tasks, megatron.training.entry, torch.distributed.run
for line in sys.stdin:
    sys.argv = json.loads(line)
    child = os.fork()
    if not child:
        for number, name in enumerate((os.devnull, "out", "err")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        code = 1
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin/ folder of a new environment with this project; other packages come from the tests' environment.

    If scripts/test_versions.sh has set $INSTALLED to the bin/ folder of another environment, that folder is used.
    """
    if there := os.environ.get("INSTALLED"):
        return Path(there)
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT, folder / "source", ignore=LEFT_OUT)
    venv.create(folder / "env")
    (packages,) = (folder / "env/lib").glob("python3*/site-packages")
    (packages / "more.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(folder / "env/bin/python"), "install"]
    own = [*pip, "--no-deps", "--no-index", "--no-build-isolation", str(folder / "source")]
    subprocess.run(own, check=True, capture_output=True, text=True, timeout=300)
    shutil.rmtree(folder / "source")
    return folder / "env/bin"


@pytest.fixture
def run(commands: Path, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Function (name, *arguments) -> output of a command of bin/, which runs in a fork to save seconds."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    argv = [str(commands / "python"), "-c", FORKS]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=tmp_path, env=environment, stdin=pipe, stdout=pipe, text=True) as server:
        asked, told = server.stdin, server.stdout
        assert asked and told

        def call(name: str, *argv: str) -> str:
            asked.write(json.dumps([str(commands / name), *argv]) + "\n")
            asked.flush()
            code = told.readline().strip()
            assert code == "0", (code, (tmp_path / "err").read_text())
            return (tmp_path / "out").read_text()

        yield call


def test_from_text_to_text(commands: Path, run: Callable[..., str], tmp_path: Path) -> None:
    """The installed commands work outside a checkout.

    They train a tokenizer and a model, resume the run, convert its checkpoint, generate text and plan a run.
    """
    shutil.copy(ROOT / "corpus/sample.jsonl", tmp_path / "text.jsonl")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run("train-tokenizer", "--input", "text.jsonl", "--vocab-size", "2000", "--output", "tokenizer.model", "--quiet")
    corpus = ["--vocab-file", "tokenizer.model", "--output-prefix", "data", "--workers", "1", "--quiet"]
    run("preprocess-data", "--input", "text.jsonl", *corpus)
    model = ["--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16"]
    given = ["--data-path", "data_text_document", "--vocab-file", "tokenizer.model", "--run-dir", "run"]
    ranks = ["--standalone", "--nproc-per-node", "2", "-m", "pretrain_gpt2", "--pipe-parallel-size", "2"]
    said = run("megatron-launch", *ranks, *model, *given, "--train-iters", "10", "--eval-iters", "1")
    assert "saved run/checkpoints/iter_0000010" in said
    more = run("pretrain-gpt2", *model, *given, "--train-iters", "11", "--log-interval", "1", "--eval-iters", "1")
    assert "iteration 11/11" in more
    run("convert-checkpoint", "--load", "run", "--output", "exported")
    text = run("megatron-generate", "--load", "run", "--prompt", "春", "--max-new-tokens", "3", "--temperature", "0")
    assert text.startswith("春")
    assert (tmp_path / "exported/model.safetensors").is_file()
    planned = ["--model", "gpt2_345M", "--cluster", "a100", "--devices", "8", "--global-batch-size", "64"]
    assert "354,823,168 parameters" in run("megatron-plan", *planned)
    planned = ["--family", "gpt2", *model, "--cluster", "laptop_cpu", "--devices", "1", "--global-batch-size", "8"]
    run("megatron-plan", *planned, "--write", "plan")
    environment |= {"PATH": f"{commands}:{os.environ['PATH']}", "DATA_PATH": str(tmp_path / "data_text_document")}
    done = subprocess.run(["bash", "plan/run.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode and SENTENCES["vocab_file_the_tokenizer_train_tokenizer"] in done.stderr
    environment |= {"VOCAB_FILE": str(tmp_path / "tokenizer.model")}
    subprocess.run(
        ["bash", "plan/run.sh", "--train-iters", "2"], cwd=tmp_path, env=environment, check=True, timeout=300
    )
    typed = (
        "from megatron import get_args, mpu; import data_utils, megatron, megatron_compat, megatron_tools, tds; "
        "from pathlib import Path as P"
    )
    homes = (
        "print([P(each.__file__).with_name('py.typed').is_file() for each in (megatron, megatron_compat, "
        "megatron_tools, tds, data_utils)])"
    )
    (tmp_path / "homes.py").write_text(f"{typed}; {homes}")
    assert "[True, True, True, True, True]" in run(str(tmp_path / "homes.py"))
    files = {path.stem.replace("_", "-") for path in (ROOT / "tools").glob("[a-z]*.py")} - {"result-table"}
    there = {path.name.removeprefix("megatron-") for path in commands.iterdir()}
    assert files | {"pretrain-gpt2", "pretrain-t5"} <= there


def test_setup_py_knows_the_version() -> None:
    """`python setup.py --version` prints the package's version."""
    done = subprocess.run([sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == megatron.__version__


@FULL
def test_a_source_distribution_by_setup_py_installs(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=LEFT_OUT)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist"], cwd=source, check=True, capture_output=True, timeout=300
    )
    (archive,) = (source / "dist").glob("*.tar.gz")
    venv.create(tmp_path / "env")
    (packages,) = (tmp_path / "env/lib").glob("python3*/site-packages")
    (packages / "more.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(tmp_path / "env/bin/python"), "install", "--no-deps"]
    build = [*pip, "--no-index", "--no-build-isolation", str(archive)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    done = subprocess.run(
        [str(tmp_path / "env/bin/python"), "-c", "import megatron; print(megatron.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert str(tmp_path / "env") in done.stdout, done.stderr


BOTH = (
    "import megatron.core; from megatron import get_args, mpu; print(mpu.__file__)",
    "from megatron import get_args, mpu; import megatron.core; print(mpu.__file__)",
)


@FULL  # takes 30 seconds
@pytest.mark.parametrize("order", BOTH)
def test_beside_megatron_core(order: str, tmp_path: Path) -> None:
    """`import megatron` finds this project's package even if megatron-core is installed.

    The test imports it in a checkout and in an editable installation.
    """
    pytest.importorskip("megatron.core")
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=LEFT_OUT)
    venv.create(tmp_path / "env")
    (packages,) = (tmp_path / "env/lib").glob("python3*/site-packages")
    (packages / "more.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = str(tmp_path / "env/bin/python")
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", python, "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", "-e", str(source)], check=True, capture_output=True, timeout=300)
    for interpreter, where, home in ((sys.executable, ROOT, ROOT), (python, tmp_path, source)):
        done = subprocess.run([interpreter, "-W", "ignore", "-c", order], cwd=where, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[-1] == str(home / "megatron/mpu/__init__.py")
