"""tools/demo.py: texts as of tools/generate.py, probabilities as of transformers, and poems that keep their form."""

import argparse
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_tools.write
from megatron.config.command_line import parse
from megatron.model import GPT2Model, T5Model
from megatron.tokenizer import SentinelTokenizer, load_tokenizer
from megatron_tools.write import demo, demo_flags, generate
from megatron_tools.write.demo_html import probability_bars, text_cards
from megatron_tools.write.questions import PromptEncoder
from megatron_tools.write.writer import Writer
from tests import llama_twins as twins

from .test_generation import CPM_FLAGS

VOCAB = 3000
PROMPT = "春天"


def flags(*more: str) -> argparse.Namespace:
    found: argparse.Namespace = demo_flags.build_parser().parse_args(["--load", "run", *more])
    return found


@pytest.fixture(scope="module")
def pair(vocab_file: str) -> tuple[Any, Writer]:
    """A random Llama of transformers, and this project's with the same weights."""
    pytest.importorskip("transformers")
    other = twins.theirs("Llama", vocab=VOCAB)
    config = parse(twins.flags_of("Llama").replace(f"--vocab-size {twins.VOCAB}", f"--vocab-size {VOCAB}").split())
    model = GPT2Model(config, parallel_output=False).eval()
    twins.copy_weights(other, model, twins.USUAL)
    tokenizer = load_tokenizer(vocab_file)
    return other, Writer(model, tokenizer, config, None, PromptEncoder(tokenizer))


@torch.no_grad()
def probabilities(model: Any, ids: list[int]) -> torch.Tensor:
    """Return transformers' probabilities of the token after `ids`, [v]."""
    found: torch.Tensor = model(torch.tensor([ids])).logits[0, -1].double().softmax(-1)
    return found


def test_each_step_shows_the_text_so_far_and_its_next_tokens(pair: tuple[Any, Writer]) -> None:
    other, writer = pair
    shown = list(demo.stream_text(writer, PROMPT, flags("--temperature", "0", "--max-new-tokens", "5")))
    ids = writer.tokenizer.encode(PROMPT)
    length = len(ids)
    assert len(shown) == 6, "five tokens and the start"
    for each in shown:
        p = probabilities(other, ids)
        assert each.texts == [(PROMPT, writer.tokenizer.decode(ids)[len(PROMPT) :].rstrip("\ufffd"))]
        assert [share for _, share in each.bars] == pytest.approx(p.topk(demo.MAX_BARS).values.tolist(), rel=1e-4)
        ids.append(int(p.argmax()))
    written = other.generate(torch.tensor([ids[:length]]), max_new_tokens=5, do_sample=False, eos_token_id=-1)
    assert written[0].tolist() == ids[:-1]


def test_samples_side_by_side_are_those_of_generate(pair: tuple[Any, Writer]) -> None:
    _, writer = pair
    args = flags("--num-samples", "3", "--max-new-tokens", "9", "--temperature", "1.3", "--top-k", "50")
    (expected,) = writer.write([writer.question(PROMPT)], args, None)
    *_, last = demo.stream_text(writer, PROMPT, args)
    assert [prompt + text for prompt, text in last.texts] == expected and len(set(expected)) == 3


def test_settings_of_sampling_do_not_change_the_bars(pair: tuple[Any, Writer]) -> None:
    _, writer = pair
    plain = next(demo.stream_text(writer, PROMPT, flags()))
    other = demo.with_settings(flags(), {"temperature": 0.1, "top_k": 2, "top_p": 0.5})
    assert next(demo.stream_text(writer, PROMPT, other)).bars == plain.bars


@pytest.mark.parametrize(("name", "value"), [("temperature", -1.0), ("top_p", 0.0), ("num_samples", 0)])
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}"):
        demo.with_settings(flags(), {name: value})


@pytest.mark.parametrize(("lines", "characters"), [(4, 5), (8, 7)])
def test_a_poem_keeps_its_form(pair: tuple[Any, Writer], lines: int, characters: int) -> None:
    """A random model keeps the form, too. The bars are the model's own probabilities."""
    other, writer = pair
    args = flags("--num-samples", "2", "--temperature", "2", "--top-p", "1", "--max-new-tokens", "3")
    first, *_, last = demo.stream_poem(writer, " 月夜\n忆 ", lines, characters, args)
    line = f"[\u3400-\u9fff]{{{characters}}}"
    poem = "\n".join([f"{line}，{line}。"] * (lines // 2))
    for title, text in last.texts:
        assert title == "月夜 忆\n" and re.fullmatch(poem, text)
    assert last.texts[0] != last.texts[1]
    known = [writer.tokenizer.eod, *writer.tokenizer.encode("月夜 忆\n")]
    expected = probabilities(other, known).topk(demo.MAX_BARS).values.tolist()
    assert [share for _, share in first.bars] == pytest.approx(expected, rel=1e-4)


def test_a_poem_without_a_title_is_refused(pair: tuple[Any, Writer]) -> None:
    with pytest.raises(ValueError, match="title"):
        demo.stream_poem(pair[1], " \n", 4, 5, flags())


@pytest.fixture
def t5(vocab_file: str) -> Writer:
    config = parse(CPM_FLAGS.replace("--vocab-size 50", f"--vocab-size {VOCAB + 10}").split())
    tokenizer = SentinelTokenizer(load_tokenizer(vocab_file), 10, "cpm")
    torch.manual_seed(1)
    return Writer(T5Model(config, parallel_output=False).eval(), tokenizer, config, None, PromptEncoder(tokenizer))


def test_a_t5_fills_the_spans_of_its_prompt(t5: Writer) -> None:
    prompt = "春天<s_0>花开。"
    args = flags("--num-samples", "2", "--max-new-tokens", "6", "--temperature", "1")
    first, *_, last = demo.stream_text(t5, prompt, args)
    (expected,) = t5.write([t5.question(prompt)], args, None)
    assert [text for _, text in last.texts] == expected
    assert first.texts[0][1] == prompt


def test_a_form_for_poems_of_a_t5_is_refused(t5: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    page = SimpleNamespace(serve=lambda *_: None)
    monkeypatch.setattr(megatron_tools.write, "demo_page", page, raising=False)
    monkeypatch.setattr(generate, "load_writer", lambda _: t5)
    demo.main(flags())
    with pytest.raises(ValueError, match="--poem"):
        demo.main(flags("--poem"))


def test_without_gradio_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(megatron_tools.write, "demo_page", raising=False)
    monkeypatch.delitem(sys.modules, "megatron_tools.write.demo_page", raising=False)
    monkeypatch.setitem(sys.modules, "gradio", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pip install 'gradio"):
        demo.main(flags())


def test_text_of_a_model_is_no_html() -> None:
    shown = demo.PageContent([("<b>", "&"), ("", "a")], [("<i>", 0.5), ("x", 0.25), ("y", 0.00001)])
    page = text_cards(shown, poems=False) + probability_bars(shown)
    assert "<b>" not in page and "<i>" not in page and "&lt;b&gt;" in page and "&lt;i&gt;" in page
    assert [float(width) for width in re.findall(r"width:([\d.]+)%", page)] == [100.0, 50.0, 0.0]
