import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from data_utils.streams import InputError
from megatron.features.scoring import Request, read_cloze, score_one, token_nats, windows
from megatron_tools.write import evaluate, evaluate_flags

CPU = torch.device("cpu")


@pytest.mark.parametrize("length", [1, 2, 5, 8, 9, 30])
@pytest.mark.parametrize(("longest", "stride"), [(8, 1), (8, 4), (8, 7), (2, 1)])
def test_every_token_is_a_target_once(length: int, longest: int, stride: int) -> None:
    targets = []
    for window in windows(length, longest, stride):
        assert 0 < window.end - window.start <= longest
        assert window.start < window.first
        targets += range(window.first, window.end)
        if window.first > 1:  # the window must use all context that fits
            assert window.start == max(window.end - longest, 0)
    assert targets == list(range(1, length))


@pytest.mark.parametrize("stride", [0, 8, 9])
def test_bad_strides_are_refused(stride: int) -> None:
    with pytest.raises(ValueError, match=f"--stride {stride} must be from 1 to 7"):
        list(windows(20, 8, stride))


def table(tokens: Tensor) -> Tensor:
    """Return the logits [..., v] of a bigram model: for each token a row of a fixed table."""
    return torch.randn(11, 11, generator=torch.Generator().manual_seed(1))[tokens]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stride", [1, 3, 6])
def test_nats_against_a_bigram_table(stride: int, dtype: torch.dtype) -> None:
    """A bigram model scores a token with the log probability in its table, for any window stride."""
    ids = torch.randint(11, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    probabilities = table(torch.arange(11)).to(dtype).double().softmax(-1)
    expected = [-math.log(probabilities[a, b]) for a, b in zip(ids, ids[1:], strict=False)]

    def logits_of(tokens: Tensor) -> Tensor:
        return table(tokens).to(dtype)

    assert token_nats(ids, logits_of, 7, stride, CPU) == pytest.approx(expected, rel=1e-5)
    assert score_one(Request(ids, 30), logits_of, CPU).log_probability == pytest.approx(-sum(expected[-30:]), rel=1e-5)


def test_completion() -> None:
    best = table(torch.arange(11)).argmax(-1).tolist()
    start = next(t for t in range(11) if best[best[t]] != t)
    chain = [start, best[start], best[best[start]]]
    assert score_one(Request(chain, 2), table, CPU).greedy
    assert not score_one(Request([*chain[:2], (chain[2] + 1) % 11], 2), table, CPU).greedy


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_a_line_of_cloze_questions_ends_only_at_a_line_feed(separator: str, tmp_path: Path) -> None:
    questions = [{"context": f"a{separator}b", "target": "c"}, {"context": "d", "target": "e"}]
    text = "".join(json.dumps(each, ensure_ascii=False) + "\r\n" for each in questions)
    (tmp_path / "cloze.jsonl").write_text(text, encoding="utf-8", newline="")
    tokenizer = SimpleNamespace(before=[0], encode=lambda text: [ord(c) for c in text])
    found = read_cloze(str(tmp_path / "cloze.jsonl"), tokenizer, 9)  # type: ignore[arg-type]
    assert found == [Request([0, ord("a"), ord(separator), ord("b"), ord("c")], 1), Request([0, ord("d"), ord("e")], 1)]


def scored(*flags: str) -> dict[str, Any]:
    """Return the numbers of tools/evaluate.py --input for a model that gives every character the same probability."""
    tokenizer = SimpleNamespace(before=[0], eod=0, encode=lambda text: [ord(c) for c in text])
    uniform = torch.zeros(1, 1, 1).expand(1, 99, 0x110000)
    subject: Any = SimpleNamespace(
        tokenizer=tokenizer, max_length=99, logits_of=lambda tokens: uniform[:, : tokens.shape[1]], device=CPU
    )
    argv = ["--load", "x", "--quiet", "--input", *flags]
    return evaluate.measure_perplexity(subject, evaluate_flags.build_parser().parse_args(argv))


def test_a_text_in_another_encoding_is_scored(tmp_path: Path) -> None:
    text = "春天来了，花开了。"
    path = tmp_path / "gbk.txt"
    path.write_bytes(text.encode("gbk"))
    found = scored(str(path), "--encoding", "auto")
    assert (found["bytes"], found["tokens"]) == (len(text.encode()), len(text) + 1)
    assert found["loss"] == pytest.approx(math.log(0x110000))
    for flags, message in ([], "try --encoding gb18030"), (["--encoding", "auto", "--max-document-mb", "1e-5"], "-mb"):
        with pytest.raises(InputError, match=message):
            scored(str(path), *flags)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--load x --input x --limit 3", "--limit is for --cloze and --tasks"),
        ("--load x --cloze x --stride 3", "need --input"),
        ("--load x --tasks x --json-key y", "need --input"),
        ("--load x --cloze x --encoding auto", "need --input"),
        ("--load x --cloze x --task-folder y", "--task-folder needs --tasks"),
        ("--hf none/x --input x", "--hf none/x is not a folder"),
    ],
)
def test_flags_without_effect_are_refused(argv: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate.main(evaluate_flags.build_parser().parse_args(argv.split()))
