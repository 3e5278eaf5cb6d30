"""T5 reads prompts and ends documents as in training: the encoder's tokens, the loss, and the generated text agree."""

import argparse
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from data_utils.sample_view import t5_view
from megatron.config.command_line import parse
from megatron.data.spans import SpanPlan
from megatron.data.t5_dataset import Objective, Specials, T5Dataset
from megatron.features.target_bytes import bytes_of_targets
from megatron.tasks import T5
from megatron.tokenizer import SentinelTokenizer, Tokenizer
from megatron_tools.write import generate
from megatron_tools.write.prompts import prompt_encoder
from megatron_tools.write.writer import Writer

SMALL = "--family t5 --num-layers 1 --hidden-size 16 --num-attention-heads 2"
ARGS = argparse.Namespace(
    special_tokens=False, chat=False, suffix=None, fim_tokens=None, num_samples=1, max_new_tokens=12, num_beams=0,
    temperature=0.0, top_k=0, top_p=1.0, seed=1,
)  # fmt: skip


def test_what_follows_an_end_of_document_does_not_count() -> None:
    """T5's loss with --eod-mask-loss and its bytes count an end-of-document token, but not the token after it."""
    eod, pad, first, second = 3, 48, 47, 46
    config = parse(f"{SMALL} --vocab-size 50 --enc-seq-length 8 --seq-length 8 --eod-mask-loss".split())
    data = T5Dataset.__new__(T5Dataset)
    data.specials = Specials(eod, pad, (first, second), config.data.eod_mask_loss)
    data.plan = SpanPlan(0, 0, 2, 8, 7)
    labels = np.array([first, 10, 11, eod, 12, second, eod])
    ones = np.ones(8, dtype=np.int64)
    sample = data.pad_sample(np.arange(8) + 4, ones, np.append(pad, labels[:-1]), labels, ones[:7])
    batch = {name: each[None] for name, each in sample.items()}
    tokenizer = cast(Tokenizer, SimpleNamespace(eod=eod, pad=pad))
    _, (found, mask) = T5().batch(batch, config, tokenizer)
    assert mask.tolist() == [[1, 1, 1, 1, 0, 1, 1]] and found.tolist() == [[first, 10, 11, eod, pad, second, eod]]
    letters = _Letters()
    letters.eod = eod
    letters.specials = {"<eod>": eod}
    view, _ = t5_view(sample, letters, config)
    assert view["decoder"]["loss"] == [1, 1, 1, 1, 0, 1, 1]
    assert (view["encoder"]["document"], view["decoder"]["document"]) == ([1] * 8, [1] * 7)
    assert bytes_of_targets(sample, letters) == (len("kl"), 6)


class _Letters(Tokenizer):
    name, vocab_size, eod, fingerprint = "letters", 27, 26, "x"
    specials: dict[str, int] = {}  # noqa: RUF012

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 97 for c in text]

    def decode(self, ids: Any) -> str:
        return "".join(chr(97 + i) for i in ids if i < 26)


class _Writes:
    """A stand-in for a model that generates the tokens `ids` one after another, and then only the token `z`."""

    def __init__(self, ids: list[int], vocab: int) -> None:
        self.ids, self.vocab, self.at = ids, vocab, 0

    def first(self, batch: int) -> Tensor:
        logits = torch.zeros(batch, self.vocab)
        logits[:, self.ids[self.at] if self.at < len(self.ids) else 25] = 9.0
        self.at += 1
        return logits

    def next(self, tokens: Tensor) -> Tensor:
        return self.first(len(tokens))

    def reorder(self, rows: Tensor) -> None:
        pass


def writer_of(tokenizer: SentinelTokenizer, ids: list[int], flags: str = "") -> Writer:
    """Return a writer whose model generates `ids`."""
    config = parse(f"{SMALL} {flags} --vocab-size {tokenizer.vocab_size}".split())
    writer = Writer(cast(Any, None), tokenizer, config, None, prompt_encoder(ARGS, config, tokenizer, ""))
    writer.stepper = lambda sources: _Writes(ids, tokenizer.vocab_size)  # type: ignore[method-assign, assignment, return-value]
    return writer


@pytest.mark.parametrize("convention", ["t5", "cpm"])
def test_without_masked_spans_a_t5_answers(convention: str) -> None:
    tokenizer = SentinelTokenizer(_Letters(), 10, convention)
    writer = writer_of(tokenizer, [2, 3, tokenizer.eod if convention == "t5" else tokenizer.sentinels[1]])
    question = writer.question("ab")
    assert writer.write([question], ARGS, None) == [["cd"]]
    assert writer.top_lift(question, 1).startswith("top lift: 'c'")


@pytest.mark.parametrize("convention", ["t5", "cpm"])
def test_a_t5_that_was_taught_to_go_on_goes_on(convention: str) -> None:
    """A prefix-LM T5 gets the prompt "ab" as in training on "abcd"; if it generates the labels, it prints "abcd"."""
    tokenizer = SentinelTokenizer(_Letters(), 10, convention)
    data = T5Dataset.__new__(T5Dataset)
    data.objective = Objective("prefix-lm", convention)
    data.specials = Specials(tokenizer.eod, tokenizer.pad, tokenizer.sentinels)
    data.sentinels = np.array(tokenizer.sentinels)
    data.plan = SpanPlan(4, 2, 1, 3 if convention == "t5" else 2, 3)
    masked = np.array([False, False, True, True])
    sample = data._build_sample(np.arange(4), np.ones(4, dtype=np.int64), masked, np.diff(masked, prepend=False))
    labels = sample["labels"].tolist()

    writer = writer_of(tokenizer, labels, "--objective prefix-lm")
    question = writer.question("ab")
    assert question.tokens == sample["encoder"].tolist() and question.end_id == labels[-1]
    written: list[int] = []
    assert writer.write([question], ARGS, lambda new: written.extend(new)) == [["abcd"]]
    assert len(written) == len(labels)


def test_a_t5_with_learned_positions_refuses_prompts_that_are_longer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other prompts of --interactive are answered."""
    tokenizer = SentinelTokenizer(_Letters(), 10, "t5")
    learned = writer_of(tokenizer, [], "--enc-seq-length 8 --max-position-embeddings 8 --dec-seq-length 8")
    size = len(learned.question("a").tokens)
    longest = "a" * (8 - size + 1)
    assert len(learned.question(longest).tokens) == 8
    with pytest.raises(ValueError, match=r"9 tokens.* 8 positions"):
        learned.question(longest + "a")
    relative = writer_of(tokenizer, [], "--position-embedding relative")
    assert len(relative.question("a" * 2000).tokens) > 2000
    monkeypatch.setattr(generate, "read_prompts", lambda args: iter([longest + "a", longest]))
    interactive = argparse.Namespace(interactive=True, **vars(ARGS))
    assert list(generate.valid_prompts(learned, interactive)) == [longest]
    assert "9 tokens" in capsys.readouterr().err
    monkeypatch.setattr(generate, "read_prompts", lambda args: iter([longest + "a"]))
    generate.stream_texts(learned, interactive)
    captured = capsys.readouterr()
    assert "9 tokens" in captured.err and not captured.out, "standard output has only the texts"
    with pytest.raises(ValueError, match="9 tokens"):
        generate.stream_texts(learned, argparse.Namespace(interactive=False, **vars(ARGS)))
