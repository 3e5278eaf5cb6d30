import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_utils.clean import DEFAULT_RULES, RULES, Limits, clean
from data_utils.dedup import ExactDuplicates, NearDuplicates
from data_utils.sentences import split_sentences
from data_utils.shuffle import shuffled

LONG = "这是一篇足够长的文章，没有什么毛病。\n它有两行。"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (LONG, LONG),
        (LONG.replace("\n", "\r\n"), LONG),
        ("\ufeff" + LONG + "\x07\u200b  \n\n\n\n", LONG),
        (LONG + "\n广告：请点击这里\n广告：请点击这里\n广告：请点击这里", LONG + "\n广告：请点击这里"),
        (LONG + "  \n\n\n\n" + LONG[:9], LONG + "\n\n" + LONG[:9]),
        ("emoji 👩‍👩‍👧 keep their joiners, ＡＢＣ stays wide", "emoji 👩‍👩‍👧 keep their joiners, ＡＢＣ stays wide"),
    ],
)
def test_what_is_mended(before: str, after: str) -> None:
    outcome = clean(before)
    assert outcome.text == after
    assert bool(outcome.changed) == (before != after)
    assert clean(after).text == after  # once is enough


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("太短", "too short"),
        ("è¿™æ˜¯ä¸€ç¯‡ UTF-8 read as Latin-1: Ã©tÃ© Ã  la plage", "mojibake"),
        ("锟斤拷锟斤拷锟斤拷 is what GBK makes of lost characters", "mojibake"),
        ("A line of a menu\nSomething else\n" * 9, "repeated lines"),
        ("长" * 300, "too long"),
        ("English only, not a single Chinese character.", "not Han"),
    ],
)
def test_what_is_dropped_and_why(text: str, reason: str) -> None:
    limits = Limits(max_chars=250, min_script=0.3)
    outcome = clean(text, limits=limits)
    assert (outcome.text, outcome.reason) == (None, reason)
    rule = {"too short": "length", "too long": "length", "repeated lines": "repeated", "not Han": "script"}.get(
        reason, reason
    )
    assert clean(text, [name for name in DEFAULT_RULES if name != rule], limits).reason != reason


def test_normalisation_is_by_choice() -> None:
    assert clean("ＡＢＣ，全角的标点符号和字母，够长了", RULES).text == "ABC,全角的标点符号和字母,够长了"


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("你好。世界！真的吗？“是的。”他说……好吧", ["你好。", "世界！", "真的吗？", "“是的。”", "他说……", "好吧"]),
        (
            "It is 3.14. Dr. Smith agrees. e.g. this! J. R. R. Tolkien wrote. End",
            ["It is 3.14. ", "Dr. Smith agrees. ", "e.g. this! ", "J. R. R. Tolkien wrote. ", "End"],
        ),
        ("标题\n第一句。 第二句。\n\n尾", ["标题\n", "第一句。 ", "第二句。\n\n", "尾"]),
        ("", []),
        ("  ", ["  "]),
        ("1. item one\n2. item two", ["1. item one\n", "2. item two"]),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


@given(st.text(st.sampled_from("你好a.B !?。！？“”\n ）)1…；Dr"), max_size=80))
@settings(max_examples=500, deadline=None)
def test_sentences_joined_are_the_text(text: str) -> None:
    sentences = split_sentences(text)
    assert "".join(sentences) == text
    assert all(sentences)
    assert len(sentences) == 1 or all(s.strip() for s in sentences)


def test_exact_duplicates() -> None:
    found = ExactDuplicates()
    texts = ["你好，世界", "你好世界！", "Hello", "hello.", "你好", "...", "!!!"]
    assert [found.seen(text) for text in texts] == [False, True, False, True, False, False, False]


def test_near_duplicates_against_the_definition() -> None:
    """Pairs whose Jaccard similarity is clearly above or below the threshold are told apart."""
    pytest.importorskip("datasketch")
    rng = random.Random(3)
    base = ["".join(chr(0x4E00 + rng.randrange(3000)) for _ in range(300)) for _ in range(30)]
    found = NearDuplicates(0.8)
    assert not any(found.seen(text) for text in base)
    for text in base:
        near = text[:150] + "改" + text[151:]  # 5 of 296 shingles are others: similarity 0.97
        far = text[:150] + "".join(chr(0x4E00 + rng.randrange(3000)) for _ in range(150))  # similarity 0.33
        assert found.seen(near)
        assert not found.seen(far)


def test_shuffle() -> None:
    lines = [f"{i}\n".encode() for i in range(2000)]
    once, again, other = (list(shuffled(lines, seed, piles=7)) for seed in (1, 1, 2))
    assert once == again != other
    assert Counter(once) == Counter(lines)
    # Every line is as likely at every place: the mean place of the first half is that of a fair shuffle.
    means = [sum(place for place, line in enumerate(shuffled(lines, s)) if int(line) < 1000) / 1000 for s in range(20)]
    assert abs(sum(means) / 20 - 999.5) < 4 * 2000 / (12 * 1000 * 20) ** 0.5
