import functools
import hashlib
import importlib.util
import io
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from data_utils import preprocess_data
from data_utils.documents import read_texts
from data_utils.tokenizer_training import train_byte_bpe, train_cpm, train_cpm_vocab, train_sentencepiece
from megatron.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from megatron.tokenizer.segment import SEPARATOR, Cut, segmenter
from megatron.tokenizer.sentencepiece import open_model
from megatron_tools.convert.hf_config import check_tokenizer
from tests.materials import SAMPLE
from tests.sentences import SENTENCES

TEXTS = [
    "你好，世界。",
    "  two spaces, a\ttab\nand a newline\n\n",
    "ＡＢＣ　全角 and half-width",
    "emoji 😀👩‍👩‍👧 and rare 𠮷 𪚥",
    "",
    " ",
    "\u0000\u0007\u200b\r\n\ufeff",
    "naïve café — “quotes”",
    "<eod> is only text here, and so are <unk>, <0x41> and <|endoftext|>",
    "marks of sentencepiece \u2581 and of CPM \u2582\u2583, \u2581\u2581",
    "x" * 300 + "T恤和C++，用package.json写代码v1.5%",
]
KINDS = ("sentencepiece", "unigram", "borders", "cpm", "cpm-vocab", "gpt2-bpe", "hf")


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Kind -> a tokenizer of this kind with 2,000 tokens, trained on the bundled corpus."""
    folder = tmp_path_factory.mktemp("tokenizers")
    corpus = list(read_texts([str(SAMPLE)]))[:150]
    train_sentencepiece(corpus, str(folder / "sentencepiece.model"), 2000)
    train_sentencepiece(corpus, str(folder / "unigram.model"), 2000, "unigram")
    train_sentencepiece(corpus, str(folder / "borders.model"), 2000, word_borders="jieba")
    train_cpm(corpus, str(folder / "cpm.model"), 2000)
    train_cpm_vocab(corpus, str(folder / "cpm-vocab.txt"), 2000)
    train_byte_bpe(corpus, str(folder / "gpt2-bpe"), 2000, "gpt2-bpe")
    train_byte_bpe(corpus, str(folder / "hf.json"), 2000, "hf")
    files = {path.stem: path for path in folder.iterdir()}
    found = {kind: load_tokenizer(str(files[kind])) for kind in KINDS}
    assert [t.name for t in found.values()] == ["sentencepiece"] * 3 + ["cpm", "cpm-vocab", "gpt2-bpe", "hf"]
    return found


def check(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert not set(tokenizer.specials.values()) & set(ids)
    assert [each.tolist() for each in tokenizer.encode_batch([text, "x", text])][::2] == [ids, ids]


def test_the_advised_size_of_a_cpm_vocabulary_is_accepted(tmp_path: Path) -> None:
    """A smaller vocabulary has fewer characters, too, so these words fill far fewer tokens than a first estimate."""
    words = (
        "中国 人民 学校 经济 政治 文化 历史 地理 音乐 美术 体育 电脑 手机 汽车 飞机 火车 轮船 医院 警察 律师 记者 演员"
    )
    text = "，".join(f"{words} 导演 作家 诗歌 小说 散文 戏剧 电影 新闻 报纸 杂志 网络 游戏 软件 硬件 数据 算法".split())
    path = str(tmp_path / "vocab.txt")
    with pytest.raises(TokenizerError, match="--vocab-size") as refused:
        train_cpm_vocab([text], path, 5000)
    size = int(str(refused.value).split()[-1])
    train_cpm_vocab([text], path, size)
    with pytest.raises(TokenizerError, match=f" {size}$"):
        train_cpm_vocab([text], path, size + 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:30]))
def test_nothing_is_lost(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    check(tokenizers[kind], text)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_for_which_vocab_size_only_leaves_room_have_no_text(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """With --vocab-size 4000, a model may write ids beyond the 2,000 tokens."""
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("你好")
    assert tokenizer.decode([*ids, tokenizer.vocab_size, 3999]) == "你好"


UNICODE = st.text(st.characters(exclude_categories=["Cs"]))
CHINESE = st.text(
    st.sampled_from("的一是在不了有和人这中大为上个国我以要他\u2581\u2582\u2583 \n\tabcC+9.%T恤，。"), max_size=60
)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.one_of(UNICODE, CHINESE))
@example(text="\u2581")
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_comes_back(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    check(tokenizers[kind], text)


@functools.cache
def both_segmenters() -> tuple[Cut, Cut]:
    return segmenter("rjieba"), segmenter("jieba")


@pytest.mark.skipif(not importlib.util.find_spec("rjieba"), reason="needs rjieba")
@given(text=st.one_of(UNICODE, CHINESE))
@example(text="他常在这里看C盘，白云常在水潺潺，B34C常在书房里")
@example(text="来AddPort请求新端口，应用到GPU大型机")
@example(text="达至年近6，年近6岁，B年近达至")
@settings(max_examples=400, deadline=None)
def test_the_fast_segmenter_cuts_as_jieba(text: str) -> None:
    fast, slow = both_segmenters()
    assert fast(text) == slow(text)


def test_the_fast_segmenter_cuts_the_corpus_as_jieba(sample_corpus: Path) -> None:
    pytest.importorskip("rjieba")
    fast, slow = both_segmenters()
    for text in read_texts([str(sample_corpus)]):
        assert fast(text) == slow(text)
        assert fast(text).replace(SEPARATOR, "") == text


def test_ids_do_not_depend_on_what_is_installed(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    """jieba segments words even if rjieba is installed; "+rjieba" selects rjieba, with another name and fingerprint."""
    path = tmp_path / "vocab.txt"
    path.write_text("<unk>\n<eod>\n你\n", encoding="utf-8")
    plain, fast = load_tokenizer(str(path)), load_tokenizer(str(path), "cpm-vocab+rjieba")
    assert (plain.name, fast.name) == ("cpm-vocab", "cpm-vocab+rjieba")
    assert plain.fingerprint != fast.fingerprint
    assert load_tokenizer(str(path), "cpm-vocab").fingerprint == plain.fingerprint


def test_gpt2_ids_are_those_of_hugging_face(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    corpus = list(read_texts([str(SAMPLE)]))[:150]
    train_byte_bpe(corpus, str(tmp_path), 2000, "gpt2-bpe")
    theirs = GPT2Tokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    for text in [*TEXTS[:8], *corpus]:
        assert tokenizers["gpt2-bpe"].encode(text) == theirs(text)["input_ids"]


def test_a_folder_of_megatron_lms_is_the_same_tokenizer(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    """The path of Megatron-LM's gpt2-vocab.json or of its folder loads it with gpt2-merges.txt or merges.txt."""
    train_byte_bpe(list(read_texts([str(SAMPLE)]))[:150], str(tmp_path), 2000, "gpt2-bpe")
    (tmp_path / "vocab.json").rename(tmp_path / "gpt2-vocab.json")
    for name in ("merges.txt", "gpt2-merges.txt"):
        (tmp_path / "merges.txt").rename(tmp_path / name)
        for where in (tmp_path, tmp_path / "gpt2-vocab.json"):
            assert load_tokenizer(str(where)).fingerprint == tokenizers["gpt2-bpe"].fingerprint


def test_the_folder_of_cpm_1_is_encoded_by_its_model(tmp_path: Path) -> None:
    """Its vocab.json only lists the pieces of chinese_vocab.model, so encoding by longest match gives other ids."""
    corpus = list(read_texts([str(SAMPLE)]))[:150]
    model = tmp_path / "chinese_vocab.model"
    train_cpm(corpus, str(model), 2000)
    pieces = open_model(str(model))
    vocabulary = {pieces.id_to_piece(i): i for i in range(pieces.vocab_size())}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    assert load_tokenizer(str(tmp_path)).fingerprint == load_tokenizer(str(model)).fingerprint
    pieces_only = load_tokenizer(str(tmp_path / "vocab.json"))  # an earlier run with it continues
    with pytest.raises(TokenizerError, match=r"vocab\.json.*\.model"):
        pieces_only.refuse_contradiction()


def test_cpm_is_jieba_joined_by_spaces(tokenizers: dict[str, Tokenizer], sample_corpus: Path) -> None:
    """Like CPM-1, the cpm tokenizer splits words with jieba, joins them by spaces, and encodes with sentencepiece."""
    import jieba

    cpm = tokenizers["cpm"]
    table = str.maketrans(" \n", "\u2582\u2583")
    for text in list(read_texts([str(sample_corpus)]))[:50]:
        joined = " ".join(word.translate(table) for word in jieba.cut(text))
        assert cpm.encode(text) == cpm._model.encode(joined)  # type: ignore[attr-defined]


def longest_match(word: str, vocabulary: dict[str, int]) -> list[int]:
    ids = []
    while word:
        end = next((n for n in range(len(word), 0, -1) if word[:n] in vocabulary), 0)
        ids.append(vocabulary[word[:end]] if end else vocabulary["<unk>"])
        word = word[end or 1 :]
    return ids


@pytest.mark.parametrize("ending", ["txt", "json"])
def test_a_published_cpm_vocabulary(tmp_path: Path, ending: str) -> None:
    """A CPM vocabulary without byte tokens encodes unknown characters and words over 200 characters as <unk>."""
    import jieba

    tokens = [
        "<unk>",
        "<eod>",
        "<s_0>",
        "\u2582",
        "\u2583",
        "你",
        "好",
        "你好",
        "世界",
        "世",
        "，",
        "wor",
        "w",
        "o",
        "r",
        "ld",
    ]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    path = tmp_path / f"vocab.{ending}"
    path.write_text("\n".join(tokens) + "\n" if ending == "txt" else json.dumps(vocabulary), encoding="utf-8")
    tokenizer = load_tokenizer(str(path if ending == "json" else tmp_path), "cpm-vocab" if ending == "json" else "auto")
    for text in ["你好，世界 world\n你也好世", "wo" * 80]:
        words = [w.replace(" ", "\u2582").replace("\n", "\u2583") for w in jieba.cut(text)]
        assert tokenizer.encode(text) == [i for word in words for i in longest_match(word, vocabulary)]
    assert tokenizer.encode("w" * 201) == [0]
    assert tokenizer.decode(tokenizer.encode("你好 世界\n")) == "你好 世界\n"
    assert (tokenizer.eod, tokenizer.specials["<s_0>"], tokenizer.padded_vocab_size(128)) == (1, 2, 128)


@pytest.mark.parametrize("key", ["model", "added_tokens"])
def test_a_cpm_vocabulary_may_have_a_key_of_a_tokenizer_json_as_token(key: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"<unk>": 0, "<eod>": 1, key: 2, "a": 3}))
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.encode("a")) == ("cpm-vocab", 4, [3])


def test_a_sentencepiece_model_of_text_with_marks_of_cpm_is_not_cpm(tmp_path: Path) -> None:
    train_sentencepiece(["\u2582\u2583\u2582\u2583 a line"], str(tmp_path / "x.model"), 270)
    tokenizer = load_tokenizer(str(tmp_path / "x.model"))
    assert tokenizer.name == "sentencepiece" and len(tokenizer.encode("\u2582\u2583")) <= 2


def test_training_is_reproducible_and_the_fingerprint_tells(tmp_path: Path) -> None:
    corpus = ["春眠不觉晓，处处闻啼鸟。" * 3, "the quick brown fox jumps over the lazy dog " * 3]
    for name, size in (("a", 330), ("b", 330), ("c", 340)):
        train_sentencepiece(corpus, str(tmp_path / name), size)
    a, b, c = (load_tokenizer(str(tmp_path / name)) for name in "abc")
    assert a.fingerprint == b.fingerprint != c.fingerprint
    assert (a.vocab_size, c.vocab_size) == (330, 340)


def test_a_script_of_many_characters_fits_a_small_vocabulary(tmp_path: Path) -> None:
    corpus = ["".join(chr(0x4E00 + 7 * i % 3000) for i in range(9000)) + "的一是" * 300000]
    train_sentencepiece(corpus, str(tmp_path / "m"), 600)
    assert load_tokenizer(str(tmp_path / "m")).decode(load_tokenizer(str(tmp_path / "m")).encode("龘的")) == "龘的"


def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TokenizerError, match=SENTENCES["there_is_no_vocabulary_file"]):
        load_tokenizer(str(tmp_path / "none.model"))
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(TokenizerError, match=SENTENCES["bad_model_is_not_a_sentencepiece_model"]):
        load_tokenizer(str(tmp_path / "bad.model"))
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(TokenizerError, match=r"tokenizer.json is not a tokenizer.json"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    (tmp_path / "vocab.txt").write_bytes(b"a\nb\n")
    with pytest.raises(TokenizerError, match=r"vocab\.txt"):
        load_tokenizer(str(tmp_path / "vocab.txt"))
    with pytest.raises(TokenizerError, match=SENTENCES["contains_none_of_tokenizer_json"]):
        (tmp_path / "empty").mkdir()
        load_tokenizer(str(tmp_path / "empty"))
    with pytest.raises(TokenizerError, match="--vocab-size"):
        train_sentencepiece(["too short"], str(tmp_path / "m"), 5000)
    assert not (tmp_path / "m").exists()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TokenizerError, match=SENTENCES["pip_install_jieba"]):
        segmenter()


@pytest.mark.parametrize("train", [train_sentencepiece, train_cpm])
@pytest.mark.parametrize(
    ("size", "direction", "model_type"),
    # unigram has no "lower" case, since the largest size that works depends on --vocab-size itself.
    [(600, "raise", "bpe"), (600, "raise", "unigram"), (90_000, "lower", "bpe")],
)
def test_the_size_that_an_error_names_can_be_trained(
    tmp_path: Path, train: Any, model_type: str, size: int, direction: str
) -> None:
    """The error about a --vocab-size that is too small or too large names a size with which training works."""
    dice = random.Random(1)
    text = ["".join(chr(0x4E00 + int(dice.random() ** 3 * 1400)) for _ in range(60)) for _ in range(200)]
    with pytest.raises(TokenizerError, match=f"{direction} --vocab-size") as error:
        train(iter(text), str(tmp_path / "x.model"), size, model_type)
    named = int(str(error.value).rpartition(" ")[2])
    assert (named > size) == (direction == "raise")
    train(iter(text), str(tmp_path / "x.model"), named, model_type)
    assert load_tokenizer(str(tmp_path / "x.model")).vocab_size == named


RIVERS = ["The river runs slowly to the sea", "春天来了", "slow rivers run 123"] * 20
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def llama_folder(folder: Path, about: dict[str, Any] | None, **options: Any) -> Path:
    """Write and return a folder like Llama 2's: tokenizer.model and tokenizer_config.json, no tokenizer.json."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(RIVERS),
        model_writer=model,
        model_type="bpe",
        minloglevel=2,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        **{"byte_fallback": True, "vocab_size": 330, **options},
    )
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    if about is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("more", [{}, {"legacy": True}, {"add_prefix_space": False}], ids=str)
def test_a_llama_without_a_tokenizer_json_has_the_ids_of_transformers(
    tmp_path: Path, begins: bool, more: dict[str, bool]
) -> None:
    """A Llama tokenizer without tokenizer.json gives transformers' ids, also after special tokens within a text."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("google.protobuf")
    folder = llama_folder(tmp_path, {**LLAMA, "add_bos_token": begins, **more})
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(str(folder))
    assert ours.start == (theirs.bos_token_id,) * begins and ours.eod == theirs.eos_token_id
    for text in (*RIVERS[:3], " two  spaces", "a\nb", "slow\u2581river", "<0x41> <eod>"):
        assert [*ours.start, *ours.encode(text)] == theirs(text)["input_ids"], text
        named = f"{text}</s>river<s> runs"
        assert [*ours.start, *ours.encode_names(named)] == theirs(named)["input_ids"]
        assert not set(ours.specials.values()) & set(ours.encode(named))
    bare = load_tokenizer(str(llama_folder(tmp_path / "bare", None)))
    text = "river \u2581river\u2581 run"
    assert (bare.start, bare.decode(bare.encode(text))) == ((), text)
    assert bare.fingerprint != ours.fingerprint


@pytest.mark.parametrize("more", [{}, {"legacy": True}, {"add_prefix_space": False}], ids=str)
def test_user_defined_symbols_of_a_llama_cut_a_text_as_in_transformers(tmp_path: Path, more: dict[str, bool]) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("google.protobuf")
    about = {**LLAMA, "add_bos_token": False, **more}
    folder = llama_folder(tmp_path, about, user_defined_symbols=["iver", "\n", "s r"], vocab_size=320)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(str(folder))
    for text in ("The river runs", "slow\nrivers run\n", "iver", " iver  iver\u2581", "river\n\n to"):
        assert ours.encode(text) == theirs(text)["input_ids"], text


@pytest.mark.parametrize(
    "options", [{}, {"add_dummy_prefix": False}, {"byte_fallback": False, "vocab_size": 50}], ids=str
)
def test_fingerprints_of_one_model_are_the_same_where_its_ids_are(tmp_path: Path, options: dict[str, Any]) -> None:
    """Settings in tokenizer_config.json change the fingerprint of a tokenizer exactly if they change token ids.

    Without tokenizer_config.json, the fingerprint is the SHA-256 of tokenizer.model.
    """
    switches = [
        dict(zip(("add_bos_token", "add_prefix_space", "legacy"), said, strict=True))
        for said in itertools.product((False, True), repeat=3)
    ]
    prefixed = options.get("add_dummy_prefix", True)
    abouts = [{**LLAMA, **each} for each in switches if prefixed or not each["add_prefix_space"]]
    abouts += [{"tokenizer_class": "PreTrainedTokenizer", **each} for each in switches]
    found: dict[str, object] = {}
    for number, about in enumerate([None, *abouts]):
        folder = llama_folder(tmp_path / str(number), about, **options)
        ours = load_tokenizer(str(folder))
        if about is None:
            assert ours.fingerprint == hashlib.sha256((folder / "tokenizer.model").read_bytes()).hexdigest()
        texts = (*RIVERS[:3], " two  spaces", "slow\u2581river", "\u2581a")
        ids = ours.start, ours.eod, [(ours.encode(text), ours.encode_inside(text)) for text in texts]
        assert found.setdefault(ours.fingerprint, ids) == ids, about
    assert len({str(ids) for ids in found.values()}) == len(found) > 2


@pytest.mark.parametrize(
    ("about", "files", "message"),
    [
        ({}, {}, "does not set add_bos_token"),
        (
            {"add_bos_token": True, "bos_token": "<b>"},
            {},
            "bos_token is '<b>', which is not a token of tokenizer.model",
        ),
        (
            {"add_bos_token": True, "eos_token": "<e>"},
            {},
            "eos_token is '<e>', which is not a token of tokenizer.model",
        ),
        (
            {"add_bos_token": True},
            {"added_tokens.json": {"<|im_end|>": 330}},
            "tokenizer.model has no token '<.im_end.>' with id 330, .*as one tokenizer.json",
        ),
        (
            {"add_bos_token": True, "added_tokens_decoder": {"2": {"content": "</s>"}, "330": {"content": "<pad>"}}},
            {},
            "tokenizer.model has no token '<pad>' with id 330",
        ),
    ],
)
def test_what_such_a_folder_leaves_open_is_refused(
    tmp_path: Path, about: dict[str, Any], files: dict[str, Any], message: str
) -> None:
    folder = llama_folder(tmp_path, {**LLAMA, **about})
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(str(folder))


def test_marks_that_a_sentencepiece_model_finds_in_texts(tmp_path: Path) -> None:
    """User-defined symbols such as <|im_end|> become single tokens in a text, but not in a chat message's content."""
    ours = load_tokenizer(str(llama_folder(tmp_path, None, user_defined_symbols=["<|im_end|>", "\n"])))
    end = ours.marks["<|im_end|>"]
    assert set(ours.marks) - set(ours.specials) == {"<|im_end|>"}
    text = "river<|im_end|>\nruns<|im_end|>"
    assert ours.encode(text).count(end) == 2 and end not in ours.encode_content(text)
    assert ours.decode(ours.encode_content(text)) == text
    assert ours.encode_content("The river\nruns") == ours.encode("The river\nruns")


@pytest.mark.parametrize("place", [{}, {"inside": True}, {"inside": True, "after_text": True}], ids=str)
def test_a_u_2581_in_content_comes_back(place: dict[str, bool], tmp_path: Path) -> None:
    ours = load_tokenizer(str(llama_folder(tmp_path, None, user_defined_symbols=["<|im_end|>"])))
    for text in ("a\u2581b", "\u2581a \u2581", "a<|im_end|>\u2581river \u2581 b"):
        assert ours.decode(ours.encode_content(text, **place)) == text


def test_added_tokens_that_are_not_special(tmp_path: Path) -> None:
    """Non-special added tokens become single tokens in a text, as in transformers, but not in a message's content."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Theirs

    transformers = pytest.importorskip("transformers")
    train_byte_bpe(RIVERS, str(tmp_path / "tokenizer.json"), 290, "hf", ["<|im_end|>"])
    made = Theirs.from_file(str(tmp_path / "tokenizer.json"))
    made.add_tokens(
        [
            AddedToken("<|fim_prefix|>", normalized=False),
            AddedToken("<think>"),
            "   ",
            "[INST]",
            "covid",
            "春天",
            "sep here",
        ]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    assert "sep here" not in load_tokenizer(str(tmp_path)).marks
    about = {"eos_token": "<|endoftext|>", "sep_token": "sep here"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    ours = load_tokenizer(str(tmp_path))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, split_special_tokens=False)
    assert set(ours.marks) - set(ours.specials) == {"<|fim_prefix|>", "<think>", "[INST]", "sep here"}
    for text in ("a<|fim_prefix|>b <think>   c", "river   runs", *RIVERS[:3]):
        assert ours.encode(text) == ours.encode_batch([text])[0].tolist() == theirs(text)["input_ids"]
        said = ours.encode_content(text)
        assert ours.decode(said) == text and not set(ours.marks.values()) & set(said)
    for text in ("river   runs", "春天 of covid"):  # added words are found in content, too
        assert ours.encode_content(text) == ours.encode(text) == theirs(text)["input_ids"]


def test_a_model_without_a_space_in_front_says_so(tmp_path: Path) -> None:
    about = {**LLAMA, "add_bos_token": True}
    folder = llama_folder(tmp_path, about, add_dummy_prefix=False)
    with pytest.raises(TokenizerError, match=SENTENCES["set_add_prefix_space_to_false"]):
        load_tokenizer(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({**about, "add_prefix_space": False}))
    assert load_tokenizer(str(folder)).start


def test_a_tokenizer_json_that_adds_both_ends_begins_documents(tmp_path: Path) -> None:
    """`start` has the ids that transformers puts before a text, even if tokenizer.json also appends an end token."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    train_byte_bpe(["春天来了 spring"] * 20, str(tmp_path / "tokenizer.json"), 270, "hf", ["<s>", "</s>"])
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = {name: made.token_to_id(name) for name in ("<s>", "</s>")}
    for template, start in (("<s> $A </s>", True), ("<s> $A", True), ("$A </s>", False)):
        made.post_processor = tokenizers.processors.TemplateProcessing(template, special_tokens=list(ids.items()))
        made.save(str(tmp_path / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        ours, theirs = load_tokenizer(str(tmp_path)), transformers.AutoTokenizer.from_pretrained(tmp_path)
        expected = theirs("spring").input_ids
        assert ours.start == ((ids["<s>"],) if start else ())
        ended = [*ours.start, *ours.encode("spring"), ours.eod]
        assert ended == (expected if expected[-1] == ours.eod else [*expected, ours.eod])


def write_folder(folder: Path, kind: str, files: dict[str, Any], specials: Sequence[str] = ("<|im_end|>",)) -> Path:
    """Write and return a folder with a byte-level tokenizer of this kind and the JSON files `files` next to it."""
    folder.mkdir()
    train_byte_bpe(RIVERS, str(folder if kind == "gpt2-bpe" else folder / "tokenizer.json"), 290, kind, specials)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("gpt2-bpe", {"tokenizer_config.json": {"eos_token": "<|im_end|>"}}),
        ("gpt2-bpe", {"tokenizer_config.json": {"add_bos_token": True}}),
        ("hf", {"tokenizer_config.json": {"eos_token": "<|eot|>"}}),
        ("hf", {"special_tokens_map.json": {"eos_token": "<|im_end|>"}}),
        (
            "hf",
            {
                "tokenizer_config.json": {"eos_token": "<|endoftext|>"},
                "special_tokens_map.json": {"eos_token": {"content": "<|im_end|>", "lstrip": False}},
            },
        ),
    ],
)
def test_a_tokenizer_whose_neighbours_name_another_end_or_start_makes_no_new_corpus(
    kind: str, files: dict[str, Any], tmp_path: Path
) -> None:
    """transformers would follow these files. Runs that used other ends continue, so loading succeeds."""
    plain = load_tokenizer(str(write_folder(tmp_path / "plain", kind, {})))
    folder = write_folder(tmp_path / "named", kind, files)
    ours = load_tokenizer(str(folder))
    assert (ours.fingerprint, ours.eod, ours.start) == (plain.fingerprint, plain.eod, plain.start)
    text = tmp_path / "text.txt"
    text.write_text("The river")
    argv = ["--input", str(text), "--vocab-file", str(folder), "--output-prefix", str(tmp_path / "corpus"), "--quiet"]
    with pytest.raises(TokenizerError, match=str(folder)):
        preprocess_data.main(preprocess_data.build_parser().parse_args(argv))
    assert not list(tmp_path.glob("corpus*"))
    values = {"model_type": "gpt2", "vocab_size": ours.vocab_size, "eos_token_id": ours.eod}
    with pytest.raises(TokenizerError, match=str(folder)):
        check_tokenizer(values, values, ours, folder)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"eos_token": "<|endoftext|>", "add_bos_token": False}},
        {"special_tokens_map.json": {"eos_token": "<|endoftext|>", "pad_token": "<|im_end|>"}},
        {
            "tokenizer_config.json": {"eos_token": "<|endoftext|>", "added_tokens_decoder": {}},
            "special_tokens_map.json": {"eos_token": "<|im_end|>"},
        },
    ],
)
@pytest.mark.parametrize("kind", ["gpt2-bpe", "hf"])
def test_neighbours_that_agree_with_a_tokenizer_change_nothing(
    kind: str, files: dict[str, Any], tmp_path: Path
) -> None:
    """A special_tokens_map.json next to an added_tokens_decoder does not count, as in transformers."""
    transformers = pytest.importorskip("transformers")
    folder = write_folder(tmp_path / "folder", kind, {"config.json": {"model_type": "gpt2"}, **files})
    ours = load_tokenizer(str(folder))
    ours.refuse_contradiction()
    assert ours.eod == transformers.AutoTokenizer.from_pretrained(folder).eos_token_id


def test_a_gpt2_vocabulary_may_name_its_only_end(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    about = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "[a]", "eos_token": "[a]", "unk_token": "[a]"}
    files = {"tokenizer_config.json": about, "config.json": {"model_type": "gpt2"}}
    folder = write_folder(tmp_path / "folder", "gpt2-bpe", files)
    vocabulary = (folder / "vocab.json").read_text()
    for name in ("[a]", "</s>"):
        (folder / "vocab.json").write_text(vocabulary.replace("<|endoftext|>", name))
        ours = load_tokenizer(str(folder))
        assert ours.eod == json.loads(vocabulary)["<|endoftext|>"]
        assert bool(ours.contradiction) == (name != "[a]")
    (folder / "vocab.json").write_text(vocabulary.replace("<|endoftext|>", "[a]"))
    assert transformers.AutoTokenizer.from_pretrained(folder).eos_token_id == ours.eod


@pytest.mark.parametrize("eos", ["</s>", "<|im_end|>"])
def test_the_start_of_a_text_does_not_depend_on_the_end_of_documents(eos: str, tmp_path: Path) -> None:
    """A chat model may have another eos_token than the one that its tokenizer.json appends."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": eos}
    specials = ["<s>", "</s>", "<|im_end|>"]
    folder = write_folder(tmp_path / "folder", "hf", {"tokenizer_config.json": about}, specials)
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [(name, made.token_to_id(name)) for name in specials]
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A </s>", special_tokens=ids)
    made.save(str(folder / "tokenizer.json"))
    ours, theirs = load_tokenizer(str(folder)), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.eod == theirs.eos_token_id
    assert [*ours.start, *ours.encode("river"), made.token_to_id("</s>")] == theirs("river")["input_ids"]


@pytest.mark.parametrize("prepend_scheme", [None, "first", "always", "never"])
def test_a_llama_whose_files_disagree_about_the_space_in_front_makes_no_new_corpus(
    prepend_scheme: str | None, tmp_path: Path
) -> None:
    """add_prefix_space is compared with the normalizer Prepend, or with Metaspace. Null leaves it to the file."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    if prepend_scheme is None:
        made.normalizer = tokenizers.normalizers.Prepend("\u2581")
    else:
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace("\u2581", prepend_scheme=prepend_scheme)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, special_tokens=["<s>", "</s>"], show_progress=False)
    made.train_from_iterator(RIVERS, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    prepends = prepend_scheme != "never"
    for value in (None, False, True):
        for class_name in ("LlamaTokenizer", "PreTrainedTokenizerFast"):
            about = {**LLAMA, "unk_token": None, "tokenizer_class": class_name, "add_prefix_space": value}
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
            is_refused = class_name == "LlamaTokenizer" and value not in (None, prepends)
            assert bool(load_tokenizer(str(tmp_path)).contradiction) == is_refused
