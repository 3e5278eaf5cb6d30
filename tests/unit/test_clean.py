import argparse
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_utils import clean_corpus
from data_utils.clean import DEFAULT_RULES, RULES, Limits, clean
from data_utils.dedup import ExactDuplicates, fingerprint
from data_utils.documents import read_texts
from data_utils.indexed_writer import IndexedDatasetBuilder
from data_utils.merge_commands import merge_pairs
from data_utils.quality import collapse_phrases
from data_utils.sentences import split_sentences
from data_utils.shuffle import shuffled
from tests.materials import SAMPLE

LONG = "这是一篇足够长的文章，没有什么毛病。\n它有两行。"


MORE = LONG + "".join(f"第{i}行讲的是数字{i * 7919}的故事，\n" for i in range(30))
CODE = (
    "for i in range(3):\n    x = [\n        0,\n        0,\n        0,\n        0,\n    ]\n    print(x)\n    "
    "print(x)\n    print(x)"
)
HEADER = "#if A\n#if B\n#ifndef C\n#define C\nint function_of_c(void);\nchar more\n#endif\n#endif\n#endif"
CHINESE = "春眠不觉晓，处处闻啼鸟。夜来风雨声，花落知多少。"
TRADITIONAL = "這是一個關於中文的故事。我們在這裡說的話和寫下來的字，都是人們自己的，不是他的，也不是大家的。"
HTML = '<div class="item"><a href="/x.html" target="_blank">新闻</a>&nbsp;<span style="color:red">更多</span></div>\n'
BASE64 = "\n".join("iVBORw0KGgoAAAANSUhEUgAAAAUAAAAFCAYAAACNbyblAAAAHElEQVQI12P4" for _ in range(3))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (LONG, LONG),
        (LONG.replace("\n", "\r\n"), LONG),
        ("\ufeff" + LONG + "\x07\u200b  \n\n\n\n", LONG),
        (LONG + "\n广告：请点击这里\n广告：请点击这里\n广告：请点击这里", LONG + "\n广告：请点击这里"),
        (LONG + "\n沙沙，沙沙。\n沙沙，沙沙。", LONG + "\n沙沙，沙沙。\n沙沙，沙沙。"),
        (CODE, CODE),
        (HEADER, HEADER),
        (MORE + "\n" + "哈哈，好。" * 30, MORE + "\n" + "哈哈，好。"),
        (MORE + "\n" + "-" * 300 + "\n" + "| --- |" * 50, MORE + "\n" + "-" * 300 + "\n" + "| --- |" * 50),
        (f"one\fpage, another\v\fline of text {LONG}", f"one page, another line of text {LONG}"),
        (LONG + "  \n\n\n\n" + LONG[:9], LONG + "\n\n" + LONG[:9]),
        ("emoji 👩‍👩‍👧 keep their joiners, ＡＢＣ stays wide", "emoji 👩‍👩‍👧 keep their joiners, ＡＢＣ stays wide"),
    ],
)
def test_what_is_mended(before: str, after: str) -> None:
    outcome = clean(before)
    assert outcome.text == after
    assert bool(outcome.changed) == (before != after)
    assert clean(after).text == after  # cleaning is idempotent


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("太短", "too short"),
        ("è¿™æ˜¯ä¸€ç¯‡ UTF-8 read as Latin-1: Ã©tÃ© Ã  la plage", "mojibake"),
        ("锟斤拷锟斤拷锟斤拷 is what GBK makes of lost characters", "mojibake"),
        (CHINESE.encode().decode("gb18030", "replace"), "mojibake"),
        (CHINESE.encode().decode("gb18030", "ignore"), "mojibake"),
        (CHINESE.encode("gb18030").decode("latin-1"), "mojibake"),
        ("“It’s the whale’s skeleton,” he said.".encode().decode("latin-1"), "mojibake"),
        (TRADITIONAL.encode("big5").decode("gb18030", "replace"), "mojibake"),
        (TRADITIONAL.encode("big5").decode("gb18030", "ignore"), "mojibake"),
        (HTML * 2, "html"),
        ('<svg viewBox="0 0 24 24"><path d="M1 2L5 8Z"></path><path d="M2 2L5 8Z"></path></svg>', "html"),
        ("<article><header>Whales</header><blockquote>They are not fish.</blockquote></article>", "html"),
        ("l&eacute;gende d&rsquo;un &oelig;uvre&hellip; &agrave; l&rsquo;&eacute;cole", "html"),
        ("A picture: " + BASE64, "base64"),
        ("https://example.org/a/b?c=1\n" * 3 + "www.example.org/x", "urls"),
        ("点击这里" * 40 + "。一句正常的话。", "repeated phrases"),
        ("A line of a menu\nSomething else\n" * 9, "repeated lines"),
        ("".join(map(chr, range(0x4E00, 0x4F00))), "too long"),
        ("English only, not a single Chinese character.", "not Han"),
    ],
)
def test_what_is_dropped_and_why(text: str, reason: str) -> None:
    limits = Limits(max_chars=250, min_script=0.3)
    outcome = clean(text, limits=limits)
    assert (outcome.text, outcome.reason) == (None, reason)
    rule = {
        "too short": "length",
        "too long": "length",
        "repeated lines": "repeated",
        "repeated phrases": "repeated",
        "not Han": "script",
    }.get(reason, reason)
    assert clean(text, [name for name in DEFAULT_RULES if name != rule], limits).reason != reason


KEPT = [
    CHINESE,
    "The letters of a word are ASCII, and in POSIX mode also ßàáâãäåæçèéêëìíîïðñòóôõöøùúûüýþÿ. "
    + " ".join(f"Comment {n}." for n in range(90)),
    "Müller, Größe, naïve café; “Où est-il?” — ŸžŠ, ÅÄÖ and ½ of ¿qué?, ªº, þorn, íslenskt mál á ég ætla að fara heim",
    "繁體中文：涓滴之水，鐵杵磨針，鏄鎛鐘鳴，浣紗溪畔。",
    "这里有一个链接 https://example.org/a/very/long/path?with=many&parameters=1 和一些文字，还有更多的文字，足够长了吧，再来一句。",
    "HTML 的 <div> 和 <span> 标签很常见，写网页的人都知道它们的区别：一个是块级元素，一个是行内元素；此外 <p> 表示段落。要注意的是，标签必须闭合。",
    "如果a<b，那么b>a；若a<b，则a+c>b不成立；设s<p，得p-s>0；若x<a，则a-x>0；若y<b，则b-y>0；又设i<b，则i+1>b不成立。",
    "sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08 is the digest of a word of four "
    "letters, as anybody may check",
    "पक्षी गीत गाते हैं, और सूरज उगता है।",
    "สวัสดีครับ ผมชื่อสมชาย ยินดีที่ได้รู้จัก",
    "こんにちは、世界。日本語のテキストです。",
    "It is <div data-v-7ba5bd90> once, and a<b，所以c>d twice: a <b and c2> d.",
    "いろいろなことがあったけれど、だから私もつられて笑ってしまった。よろしくね。",
    "Россия и Китай подписали соглашение о сотрудничестве.",
    "한국어 문장입니다. 안녕하세요, 여러분.",
]


@pytest.mark.parametrize("text", KEPT)
def test_what_is_kept(text: str) -> None:
    assert clean(text).text == text


def test_misread_text_is_found_everywhere() -> None:
    """No intact document of the bundled corpus is taken for mojibake; if decoded with a wrong codec, it is."""
    off_length = [name for name in DEFAULT_RULES if name != "length"]
    thrown_away: dict[str, list[bool]] = {"big5": [], "utf-8": []}
    for text in read_texts([str(SAMPLE)]):
        assert clean(text).reason != "mojibake"
        if sum("\u4e00" <= c <= "\u9fa5" for c in text) < 40:
            continue
        for wrong in (text.encode().decode("gb18030", "replace"), text.encode("gb18030", "ignore").decode("latin-1")):
            assert clean(wrong, off_length).reason == "mojibake"
        for kind in thrown_away:  # decoding drops invalid bytes, so only 60% must be detected
            wrong = text.encode("gb18030", "ignore").decode(kind, "ignore")
            thrown_away[kind].append(clean(wrong, off_length).reason == "mojibake")
    assert {kind: sum(found) / len(found) > 0.6 for kind, found in thrown_away.items()} == {"big5": True, "utf-8": True}


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
        ("Born in 1990. See https://x.org/?q=1!", ["Born in 1990. ", "See https://x.org/?q=1!"]),
        ("真的？！是!好?", ["真的？！", "是!", "好?"]),
        ("1. item one\n2. item two", ["1. item one\n", "2. item two"]),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


def test_a_long_number_ends_a_sentence() -> None:
    for digits in ("1381234567", "13812345678", "138123456789012"):
        assert split_sentences(f"Please call {digits}. Then wait.") == [f"Please call {digits}. ", "Then wait."]
    assert split_sentences("12. A point. Another") == ["12. A point. ", "Another"]


@given(st.text(st.sampled_from("你好a.B !?。！？“”\n ）)1…；Dr"), max_size=80))
@settings(max_examples=500, deadline=None)
def test_sentences_joined_are_the_text(text: str) -> None:
    sentences = split_sentences(text)
    assert "".join(sentences) == text
    assert all(sentences)
    assert len(sentences) == 1 or all(s.strip() for s in sentences)


def test_exact_duplicates() -> None:
    found = ExactDuplicates()
    given = ["你好，世界", "你好世界！", "Hello", "hello.", "你好", "...", "!!!"]
    assert [found.check_and_add(fingerprint(text)) for text in given] == [False, True, False, True, False, False, False]
    # Vowels of Hindi and Thai are combining marks: if they were ignored, different words would be duplicates.
    words = ("दिन", "दान", "दूना", "กิน", "กัน", "e\u0301", "e\u0300")
    assert not any(found.check_and_add(fingerprint(text)) for text in words)
    assert found.check_and_add(fingerprint("दिन।"))


def test_shuffle() -> None:
    lines = [f"{i}\n".encode() for i in range(2000)]
    once, again, other = (list(shuffled(lines, seed, piles=7)) for seed in (1, 1, 2))
    assert once == again != other
    assert Counter(once) == Counter(lines)
    # In a fair shuffle, the mean position of lines 0 to 999 of 2000 is 999.5, up to the sampling error of 20 shuffles.
    means = [sum(place for place, line in enumerate(shuffled(lines, s)) if int(line) < 1000) / 1000 for s in range(20)]
    assert abs(sum(means) / 20 - 999.5) < 4 * 2000 / (12 * 1000 * 20) ** 0.5


@pytest.mark.parametrize("size", [2, 3, 8, 9, 25, 200])
def test_ten_copies_of_a_phrase_become_one_wherever_they_are(size: int) -> None:
    """All characters of a line differ, except the copies of the phrase."""
    phrase = "".join(map(chr, range(0x4E00, 0x4E00 + size)))
    for place in (*range(20), 63, 64, 65, 700):
        before = "".join(map(chr, range(0x6000, 0x6000 + place)))
        for after in ("", "end"):
            assert collapse_phrases(before + 10 * phrase + after) == before + phrase + after
            nine = before + 9 * phrase + after
            assert collapse_phrases(nine) == nine


def test_copies_that_a_weight_asks_for_are_no_duplicates(tmp_path: Path) -> None:
    for name in ("a", "b"):
        texts = [f"{name}: document {number}, which is long enough to stay." for number in (1, 2, 2)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    inputs = [f"{tmp_path}/a.jsonl@3", f"{tmp_path}/b.jsonl"]
    argv = ["--input", *inputs, "--output", f"{tmp_path}/c.jsonl", "--workers", "0", "--quiet"]
    clean_corpus.main(clean_corpus.build_parser().parse_args(argv))
    kept = [json.loads(line)["text"].partition(",")[0] for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert Counter(kept) == {"a: document 1": 3, "a: document 2": 3, "b: document 1": 1, "b: document 2": 1}
    report = json.loads((tmp_path / "c.jsonl.report.json").read_text())
    assert (report["read"], report["kept"], report["dropped"]) == (12, 8, {"exact duplicate": 4})


def test_vowel_signs_are_no_letters_of_a_script() -> None:
    text = "กิ" * 9 + "x" * 11  # 9 consonants, each with a vowel sign, among 20 letters
    assert clean(text, limits=Limits(script="Thai", min_script=0.45)).text == text
    assert clean(text, limits=Limits(script="Thai", min_script=0.46)).reason == "not Thai"


def cleaned(*flags: str) -> None:
    clean_corpus.main(clean_corpus.build_parser().parse_args([*flags, "--workers", "0", "--quiet"]))


def test_documents_that_differ_in_symbols_are_kept(tmp_path: Path) -> None:
    texts = ["return a > b and c", "return a < b and c", "Return a > b, and c."]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    cleaned("--input", str(tmp_path / "x.jsonl"), "--output", str(tmp_path / "y.jsonl"), "--no-shuffle")
    assert list(read_texts([str(tmp_path / "y.jsonl")])) == texts[:2]


def test_equal_runs_write_equal_compressed_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": CHINESE}) + "\n")
    contents = []
    for name in ("a", "b"):
        output = tmp_path / name / "y.jsonl.gz"
        cleaned("--input", f"{tmp_path}/x.jsonl@2", "--output", str(output))
        contents.append(output.read_bytes())
    assert contents[0] == contents[1] and b"y.jsonl\0" in contents[0]
    assert list(read_texts([str(output)])) == [CHINESE] * 2
    assert "--split" in capsys.readouterr().out, "a note on copies in training and validation"


def test_an_output_in_the_folder_of_the_input_is_no_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": CHINESE}) + "\n")
    cleaned("--input", str(tmp_path), "--output", f"{tmp_path}/y.jsonl", "--dropped", f"{tmp_path}/z.jsonl")
    assert capsys.readouterr().err == "", "no file of the folder is skipped"


@pytest.mark.parametrize("flags", [("--script", "Latin"), ("--dropped", "d.jsonl.gz")])
def test_flags_of_cleaning_without_effect_are_refused(flags: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": CHINESE}) + "\n")
    with pytest.raises(ValueError, match=flags[0]):
        cleaned("--input", str(tmp_path / "x.jsonl"), "--output", str(tmp_path / "y.jsonl"), *flags)


def test_parts_of_masked_corpora_and_unknown_tokenizers_in_a_merge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("x_context", "x_target", "x_target_offset", "a", "b"):
        with IndexedDatasetBuilder(tmp_path / name, np.int32) as builder:
            builder.add_document([1, 2, 3])
    parts = [str(tmp_path / f"x_{part}") for part in ("context", "target", "target_offset")]
    with pytest.raises(ValueError, match="separately"):
        merge_pairs(argparse.Namespace(prefixes=parts, output=str(tmp_path / "all")))
    metadata = {"tokenizer": "t", "fingerprint": "f", "vocab_size": 9, "eod": 0, "append_eod": True}
    (tmp_path / "a.json").write_text(json.dumps(metadata))
    pairs = [str(tmp_path / "a"), str(tmp_path / "b")]
    merge_pairs(argparse.Namespace(prefixes=pairs, output=str(tmp_path / "all")))
    assert "no sidecar" in capsys.readouterr().out
    assert not (tmp_path / "all.json").exists()
