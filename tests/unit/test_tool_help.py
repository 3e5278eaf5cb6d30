"""The --help of the tools fits into the terminal, and its examples are commands."""

from pathlib import Path
from typing import Any

import pytest

from data_utils import clean_corpus, inspect_data, preprocess_data, train_tokenizer
from data_utils.cli import Parser
from megatron_tools.doctor import doctor
from megatron_tools.plan import plan_flags
from megatron_tools.report import coordinate_flags, draw_schedule, report
from megatron_tools.verify import verify_layout
from megatron_tools.write import demo_flags, evaluate_flags
from tests.support import ROOT


@pytest.mark.parametrize("columns", [60, 80, 100, 150])
def test_lines_are_as_long_as_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    examples = "  python tools/do.py --input texts/ \\\n      --quiet"
    parser = Parser("What it does. " * 30, examples)
    parser.add_argument("--kind", choices=[f"kind-number-{i}" for i in range(20)], help="the kind")
    parser.add_argument("--few", choices=["a", "b"])
    text = parser.format_help()
    assert max(map(len, text.splitlines())) <= columns
    assert all(f"kind-number-{i}" in text for i in range(20))
    assert "--few {a,b}" in text
    assert text.endswith(f"examples:\n{examples}\n")


@pytest.mark.parametrize(
    ("tool", "flags"),
    [
        (
            clean_corpus,
            "--similarity 80,--similarity -1,--similarity nan,--max-repeated -1,--max-mojibake 2,--max-markup 1.1,"
            "--max-encoded inf,--max-urls 50,--min-script 30,--min-chars -5,--max-chars 0,--workers -1",
        ),
        (train_tokenizer, "--max-mb 0,--max-mb -1,--max-document-mb 0,--max-document-mb inf"),
        (
            preprocess_data,
            "--noise-density 15,--noise-density 1,--noise-density 0,--noise-density -0.15,--noise-density nan,"
            "--mean-span-length 0,--mean-span-length -3,--workers -1,--seed -1",
        ),
        (inspect_data, "stages --samples 0,stages --samples -1,sample -1"),
        (evaluate_flags, "--stride 0,--limit 0,--limit -1,--window 0"),
        (draw_schedule, "--forward -1,--backward 0,--message -1,--stages 0,--micros 0"),
        (doctor, "--ranks 0,--ssh-timeout 0"),
        (verify_layout, "--timeout 0,--timeout -1,--steps 0,--micros 0,--fuzz 0"),
        (coordinate_flags, "--widths 0,--steps 0,--seeds 0"),
        (plan_flags, "--devices 0,--tokens 0,--tokens inf,--top 0,--gas 0"),
        (demo_flags, "--port 0,--port 99999"),
    ],
)
def test_numbers_out_of_range_are_refused(tool: Any, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = tool.build_parser()
    for words in flags.split(","):
        with pytest.raises(SystemExit):
            parser.parse_args(words.split())
        error = capsys.readouterr().err
        assert f": {words.split()[-1]} must" in error, error


@pytest.mark.parametrize(
    ("tool", "flags", "words"),
    [
        (clean_corpus, "--similarity 0.9", "--similarity has no effect without --near-duplicates"),
        (clean_corpus, "--on nfkc --off nfkc", "--on and --off both name nfkc"),
        (preprocess_data, "--noise-density 0.5", "require --objective cpm-t5"),
        (preprocess_data, "--mean-span-length 10", "require --objective cpm-t5"),
        (train_tokenizer, "--special-tokens <a> <a>", "--special-tokens lists a name twice"),
        (train_tokenizer, "--special-tokens <eod>", "--special-tokens lists a name twice"),
        (train_tokenizer, "--special-tokens <0x0A>", "--special-tokens lists a name twice"),
        (train_tokenizer, "--output x.json", "must end with .model for --tokenizer-type sentencepiece"),
        (train_tokenizer, "--tokenizer-type cpm --output x.txt", "must end with .model for --tokenizer-type cpm"),
        (train_tokenizer, "--tokenizer-type cpm-vocab", "must end with .txt for --tokenizer-type cpm-vocab"),
        (train_tokenizer, "--tokenizer-type hf", "must end with .json for --tokenizer-type hf"),
    ],
)
def test_flags_that_do_not_fit_are_refused(tool: Any, flags: str, words: str, tmp_path: Path) -> None:
    output = (
        f"--output-prefix {tmp_path}/x --vocab-file x" if tool is preprocess_data else f"--output {tmp_path}/x.jsonl"
    )
    args = tool.build_parser().parse_args(f"--input {ROOT}/corpus/sample.jsonl {output} {flags}".split())
    with pytest.raises(ValueError, match=words):
        tool.main(args)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tool", "flag"),
    [
        (clean_corpus, "--output"),
        (clean_corpus, "--dropped"),
        (evaluate_flags, "--json"),
        (report, "--output"),
        (draw_schedule, "--svg"),
        (plan_flags, "--chart"),
    ],
)
def test_outputs_that_cannot_be_files_are_refused(
    tool: Any, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for path, words in ((tmp_path, "is a folder; name a file"), (tmp_path / "file/x", "cannot be written to")):
        with pytest.raises(SystemExit):
            tool.build_parser().parse_args([flag, str(path)])
        assert f"argument {flag}: {path} {words}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--output-prefix", "data/"], ["--output-prefix", ""]])
def test_an_output_prefix_needs_a_name(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        preprocess_data.build_parser().parse_args(words)
    assert f"{words[1]!r} needs a name after the folder, such as {words[1]}corpus" in capsys.readouterr().err
