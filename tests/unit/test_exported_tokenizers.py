"""A tokenizer is exported only if transformers then gives the same ids; tested with random tokenizers and texts."""

import contextlib
import io
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece

from data_utils.tokenizer_training import train_byte_bpe, train_cpm, train_cpm_vocab, train_sentencepiece
from megatron.config.command_line import parse
from megatron.tokenizer import SentinelTokenizer, Tokenizer, load_tokenizer
from megatron.tokenizer.base import TokenizerError
from megatron.tokenizer.model_proto import ALGORITHMS, NORMAL, USER_DEFINED, read_facts
from megatron_tools.convert import hf_compare
from megatron_tools.convert.convert_checkpoint import _config_contents
from megatron_tools.convert.export_tokenizer import ChatFormat, write_tokenizer
from tests.support import covering

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
COUNT = 200  # number of random tokenizers that --full tests; by default, only 24 are tested
HAN = [chr(c) for c in random.Random(5).sample(range(0x4E00, 0x9FA0), 300)]
FOREIGN = ("pieces", "t5", "llama")
OWN = ("sentencepiece", "cpm", "cpm-vocab", "gpt2-bpe", "hf")


def chinese(dice: random.Random) -> str:
    words = ["".join(dice.choices(HAN[:80], k=dice.randint(1, 3))) for _ in range(12)]
    return (
        "“"
        + dice.choice(("……”", "？”", "……", "。”")).join(words)
        + "……”"
        + "——".join(words[:3])
        + "，《"
        + words[0]
        + "》\n"
    )


def english(dice: random.Random) -> str:
    words = ["".join(dice.choices("aeioulnstrdm", k=dice.randint(1, 8))) for _ in range(14)]
    return dice.choice((" ", "  ", " -- ")).join(words).capitalize() + dice.choice(
        (".\n", "...\n", "?!\n", "'s 1,234.5\n")
    )


def code(dice: random.Random) -> str:
    names = dice.choices(("self", "i", "value", "total", "get_item"), k=4)
    return (
        f"    if {names[0]} == {names[1]}:\n        {names[2]} += {dice.randint(0, 999)}  # {names[3]}\n\treturn "
        f"({names[0]})\n"
    )


def heading(dice: random.Random) -> str:
    mark = dice.choice("=-#*")
    return f"{mark * dice.randint(2, 12)} {english(dice).strip()} {mark * dice.randint(2, 5)}\n\n"


SCRIPTS: tuple[Callable[[random.Random], str], ...] = (chinese, english, code, heading)


def texts(dice: random.Random, count: int) -> list[str]:
    chosen = dice.sample(SCRIPTS, dice.randint(1, 4))
    return ["".join(dice.choice(chosen)(dice) for _ in range(dice.randint(1, 6))) for _ in range(count)]


def held_out(dice: random.Random) -> Iterator[str]:
    yield from (
        "",
        " ",
        "  a",
        "a  ",
        "\n\n",
        "==",
        "……”",
        "a==b===c",
        "\t x",
        "é\u0301",
        "☃☃ ☃",
        "Ａﬁ①",
        "\u3000a\u00a0b",
    )
    for _ in range(60):
        text = "".join(dice.choice(SCRIPTS)(dice) for _ in range(dice.randint(1, 3)))
        yield text[dice.randrange(len(text)) :]


def train_foreign(kind: str, path: Path, given: list[str], dice: random.Random) -> None:
    """Train a sentencepiece model with random options of the kinds that other projects use."""
    t5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    options: dict[str, Any] = {"byte_fallback": dice.random() < 0.5, "add_dummy_prefix": dice.random() < 0.5}
    options |= {"model_type": dice.choice(("bpe", "bpe", "unigram", "unigram", "char", "word"))}
    options |= {"normalization_rule_name": dice.choice(("identity", "identity", "nmt_nfkc", "nfkc_cf"))}
    options |= {"remove_extra_whitespaces": dice.random() < 0.4, "split_digits": dice.random() < 0.5}
    if dice.random() < 0.4:
        options["user_defined_symbols"] = dice.sample(["==", "<mask>", "\n", "\t", "\u2581\u2581", "……", "0"], 3)
    if kind == "t5":
        plain = {"add_dummy_prefix": True, "remove_extra_whitespaces": True, "normalization_rule_name": "nmt_nfkc"}
        options |= {"model_type": "unigram", "byte_fallback": False, **plain} if dice.random() < 0.7 else {}
        options |= t5 if dice.random() < 0.9 else {}
        options.pop("user_defined_symbols", None)
    if kind == "llama":
        options |= {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
        options |= {"add_dummy_prefix": True, "remove_extra_whitespaces": False}
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("".join(given).split("\n")), model_writer=model, vocab_size=dice.choice((420, 500)),
        hard_vocab_limit=False, minloglevel=2, num_threads=1, character_coverage=dice.choice((0.98, 1.0)), **options,
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    if kind == "t5" and options["model_type"] == "unigram" and options.get("pad_id") == 0 and dice.random() < 0.5:
        path.with_name("tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "T5Tokenizer", "extra_ids": 20})
        )
    if kind == "llama":
        about = {
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": dice.random() < 0.5,
            "legacy": dice.random() < 0.3,
        }
        path.with_name("tokenizer_config.json").write_text(json.dumps(about))


def fitting(train: Callable[[int], None]) -> None:
    """Call `train` with the largest vocabulary size, 270 to 600, that the text allows."""
    for size in range(600, 260, -10):
        with contextlib.suppress(TokenizerError):
            train(size)
            return


def trained(folder: Path, dice: random.Random) -> tuple[str, Path]:
    """Train a tokenizer of a randomly chosen kind on random texts; return its kind and file."""
    given, kind = texts(dice, 120), dice.choice((*FOREIGN, *OWN, "sentencepiece", "pieces"))
    path = folder / dice.choice(("tokenizer.model", "spiece.model", "zh.model"))
    if kind in FOREIGN:
        path = folder / {"t5": "spiece.model", "llama": "tokenizer.model"}.get(kind, path.name)
        train_foreign(kind, path, given, dice)
    elif kind == "sentencepiece":
        specials = dice.choice(((), ("<|im_start|>", "<|im_end|>"), ("<pad>",)))
        learner = dice.choice(("bpe", "unigram"))
        fitting(lambda size: train_sentencepiece(given, str(path), size, learner, specials=specials))
    elif kind == "cpm":
        fitting(lambda size: train_cpm(given, str(path), size))
    elif kind == "cpm-vocab":
        path = folder / dice.choice(("vocab.txt", "vocab.json", "words.txt"))
        train_cpm_vocab(given, str(folder / "vocab.txt"), 300)
        lines = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")[:-1]
        if path.suffix == ".json":
            path.write_text(json.dumps({token: i for i, token in enumerate(lines)}))
        else:
            (folder / "vocab.txt").rename(path)
    else:
        path = folder / {"gpt2-bpe": "vocab.json", "hf": "tokenizer.json"}[kind]
        train_byte_bpe(given, str(folder if kind == "gpt2-bpe" else path), 300, kind)
    return kind, path


def exported(folder: Path, tokenizer: Tokenizer, path: Path, model_type: str) -> None:
    config = parse(["--family", "gpt2"])
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    write_tokenizer(folder, config, tokenizer, str(path), ChatFormat(None, None), model_type)


@pytest.mark.slow
@pytest.mark.parametrize("seed", covering(list(range(COUNT)), lambda seed: seed < 24))
def test_the_same_ids_or_no_tokenizer(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    source, output = tmp_path / "from", tmp_path / "to"
    source.mkdir()
    output.mkdir()
    kind, path = trained(source, dice)
    ours = load_tokenizer(str(path))
    model_type = "t5" if kind == "t5" else dice.choice(("gpt2", "llama", "qwen2", "qwen3", "mistral", "t5"))
    if model_type == "t5":
        ours = SentinelTokenizer(ours, 20, "t5")
    exported(output, ours, path, model_type)
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(output)
    except Exception as error:  # transformers raises a bare Exception
        assert path.name in str(error) and kind not in ("hf", "gpt2-bpe"), (kind, error)
        assert kind != "llama" or model_type == "t5", error  # LlamaTokenizer knows no sentinels
        assert load_tokenizer(str(output)).fingerprint == ours.fingerprint
        return
    given = ours.encode
    if kind == "t5":  # expect transformers' ids, since ours may differ where Unigram segmentations tie
        (source / "config.json").write_text('{"model_type": "t5"}')
        before = transformers.AutoTokenizer.from_pretrained(source)
        given = lambda text: before(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    for text in held_out(dice):
        assert theirs(text, add_special_tokens=False)["input_ids"] == given(text), (kind, model_type, text)
    if kind == "llama":  # transformers 5.3 to 5.5 take another class than the one that the folder names
        about = json.loads((output / "tokenizer_config.json").read_text())
        assert ("auto_map" in about) == (model_type != "llama")
    if isinstance(ours, SentinelTokenizer):
        sentinel = ours.decode(ours.sentinels[:1])
        assert theirs(sentinel)["input_ids"] == [*ours.start, *ours.sentinels[:1], ours.eod], kind
        assert theirs.pad_token_id == ours.pad


@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED])
@pytest.mark.parametrize("has_bytes", [False, True])
def test_an_mt5_is_exported_with_its_own_sentinels(kind: int, has_bytes: bool, tmp_path: Path) -> None:
    """The sentinels are pieces of the model, which T5Tokenizer would add once more; it also knows no bytes."""
    proto = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("".join(texts(random.Random(1), 120)).split("\n")), model_writer=model, minloglevel=2,
        vocab_size=900 if has_bytes else 500, hard_vocab_limit=False, model_type="unigram", num_threads=1,
        normalization_rule_name="nmt_nfkc", pad_id=0, eos_id=1, unk_id=2, bos_id=-1, byte_fallback=has_bytes,
    )  # fmt: skip
    content = proto.ModelProto.FromString(model.getvalue())
    for number in range(19, -1, -1):
        content.pieces.add(piece=f"\u2581<extra_id_{number}>", score=0.0, type=kind)
    path = tmp_path / "spiece.model"
    path.write_bytes(content.SerializeToString())
    given = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0, "eos_token": "</s>", "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
    ours = SentinelTokenizer(load_tokenizer(str(path)), 20, "t5")
    output = tmp_path / "out"
    output.mkdir()
    exported(output, ours, path, "mt5")
    theirs = transformers.AutoTokenizer.from_pretrained(output)
    assert len(theirs) == ours.vocab_size == len(content.pieces)
    assert theirs("a")["input_ids"] == [*ours.encode("a"), 1]
    bare = sentencepiece.SentencePieceProcessor(model_proto=content.SerializeToString())
    for text in held_out(random.Random(3)):
        assert theirs(text, add_special_tokens=False)["input_ids"] == bare.encode(text), text
    text = "one <extra_id_0> two <extra_id_3>, three"
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)


@pytest.mark.parametrize("model_type", ["t5", "umt5"])
def test_autotokenizer_loads_the_exported_model_of_a_t5(model_type: str, tmp_path: Path) -> None:
    """transformers has no tokenizer class for UMT5, so the export must name the class of its spiece.model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("".join(texts(random.Random(1), 120)).split("\n")), model_writer=model, minloglevel=2,
        vocab_size=500, hard_vocab_limit=False, model_type="unigram", num_threads=1,
        normalization_rule_name="nmt_nfkc", pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
    )  # fmt: skip
    path = tmp_path / "spiece.model"
    path.write_bytes(model.getvalue())
    about = {"tokenizer_class": "T5Tokenizer", "extra_ids": 20}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    ours = SentinelTokenizer(load_tokenizer(str(path)), 20, "t5")
    output = tmp_path / "out"
    output.mkdir()
    exported(output, ours, path, model_type)
    theirs = transformers.AutoTokenizer.from_pretrained(output)
    text = "one <extra_id_0> two <extra_id_3>, three"
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
    # The sentinels of T5Tokenizer have other ids than those of the convention cpm.
    exported(output, SentinelTokenizer(ours.base, 20, "cpm"), path, model_type)
    with pytest.raises(Exception, match=r"spiece\.model"):
        transformers.AutoTokenizer.from_pretrained(output)


@pytest.mark.parametrize(
    "options", [{"remove_extra_whitespaces": True}, {"normalization_rule_name": "nmt_nfkc"}, {"model_type": "unigram"}]
)
def test_a_llama_model_that_changes_texts_is_not_exported_to_llamatokenizer(
    options: dict[str, Any], tmp_path: Path
) -> None:
    plain = {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("".join(texts(random.Random(1), 120)).split("\n")), model_writer=model, minloglevel=2,
        vocab_size=500, hard_vocab_limit=False, byte_fallback=True, num_threads=1, **plain | options,
    )  # fmt: skip
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model.getvalue())
    about = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    output = tmp_path / "out"
    output.mkdir()
    exported(output, load_tokenizer(str(path)), path, "llama")
    with pytest.raises(Exception, match=r"tokenizer\.model"):
        transformers.AutoTokenizer.from_pretrained(output)


@pytest.mark.parametrize("convention", ["t5", "cpm"])
def test_an_exported_t5_reads_and_begins_texts_as_in_training(convention: str, tmp_path: Path) -> None:
    """The source puts a start and an end token around each text, has no sentinels, and names another decoder start."""
    path = tmp_path / "tokenizer.json"
    train_byte_bpe(texts(random.Random(1), 20), str(path), 300, "hf", ["<s>", "</s>"])
    library = tokenizers.Tokenizer.from_file(str(path))
    start, end = map(library.token_to_id, ("<s>", "</s>"))
    library.post_processor = tokenizers.processors.RobertaProcessing(("</s>", end), ("<s>", start))
    library.save(str(path))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": end}))
    ours = SentinelTokenizer(load_tokenizer(str(path)), 20, convention)
    output = tmp_path / "out"
    output.mkdir()
    exported(output, ours, path, "t5")
    theirs = transformers.AutoTokenizer.from_pretrained(output)
    first, second = ours.decode(ours.sentinels[:1]), ours.decode(ours.sentinels[1:2])
    for text in ("The river", f"The {first} runs{second}", f"{first}"):
        assert theirs(text)["input_ids"] == [start, *ours.encode(text), *[end] * (convention == "t5")]
    hf_compare.compare_token_ids(ours, output)
    flags = "--family t5 --position-embedding relative --normalization rmsnorm --no-hidden-bias"
    reader: Any = None
    contents = _config_contents(reader, parse(flags.split()), ours, str(path), ChatFormat(), "fp32")
    expected_start = theirs.convert_tokens_to_ids("<pad>" if convention == "t5" else "<s_0>")
    assert [content["decoder_start_token_id"] for content in contents] == [expected_start] * 2


def word_tokenizer(path: Path, specials: list[str], template: str) -> None:
    """Write a tokenizer.json with `specials` as ids 0, 1, ... and a few words, which puts `template` around texts."""
    names = [*specials, "one", "two"]
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(specials)
    framing = [(name, specials.index(name)) for name in template.split() if name in specials]
    pair = f"{template} {template.replace('$A', '$B')}"
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, pair=pair, special_tokens=framing
    )
    library.save(str(path))


@pytest.mark.parametrize("convention", ["t5", "cpm"])
@pytest.mark.parametrize("template", ["$A", "<s> $A", "$A </s>"])
def test_a_tokenizer_json_with_all_tokens_of_a_t5_frames_texts_as_in_training(
    template: str, convention: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    sentinel = "<extra_id_0>" if convention == "t5" else "<s_0>"
    word_tokenizer(path, ["<pad>", "</s>", "<unk>", "<s>", sentinel], template)
    ours = SentinelTokenizer(load_tokenizer(str(path)), 1, convention)
    output = tmp_path / "out"
    output.mkdir()
    exported(output, ours, path, "t5")
    theirs = transformers.AutoTokenizer.from_pretrained(output)
    end_ids = [ours.eod] if convention == "t5" else []
    assert theirs("one two")["input_ids"] == [*ours.start, *ours.encode("one two"), *end_ids]
    if (template, convention) == ("$A </s>", "t5"):
        assert (output / path.name).read_bytes() == path.read_bytes()


def test_an_exported_t5_pads_with_the_padding_token_of_the_model(tmp_path: Path) -> None:
    """The source names another token in special_tokens_map.json, which overrides tokenizer_config.json."""
    path = tmp_path / "tokenizer.json"
    word_tokenizer(path, ["[PAD]", "</s>", "<unk>"], "$A")
    roles = {"eos_token": "</s>", "pad_token": "[PAD]", "unk_token": "<unk>"}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / name).write_text(json.dumps(roles))
    ours = SentinelTokenizer(load_tokenizer(str(path)), 1, "t5")
    output = tmp_path / "out"
    output.mkdir()
    exported(output, ours, path, "t5")
    theirs = transformers.AutoTokenizer.from_pretrained(output)
    assert (theirs.pad_token_id, theirs.eos_token_id, theirs.unk_token_id) == (ours.pad, 1, 2)


@pytest.mark.parametrize(("template", "bos"), [("<s> $A", 0), ("$A", 1)])
def test_the_bos_token_of_an_exported_gpt2_is_the_token_before_texts(template: str, bos: int, tmp_path: Path) -> None:
    """It is the start token of the tokenizer, or the end-of-document token without one."""
    path = tmp_path / "tokenizer.json"
    word_tokenizer(path, ["<s>", "</s>", "<unk>"], template)
    reader: Any = SimpleNamespace(positions=16)
    config = parse(["--family", "gpt2"])
    contents = _config_contents(reader, config, load_tokenizer(str(path)), str(path), ChatFormat(), "fp32")
    assert [(content["bos_token_id"], content["eos_token_id"]) for content in contents] == [(bos, 1)] * 2


@pytest.mark.parametrize("given", ["== a ==\n=== b ===\n" * 40, "“好……”“是……”好……\n" * 40])
def test_a_first_piece_of_punctuation_is_a_piece(given: str, tmp_path: Path) -> None:
    """The first BPE merge is exported as a merge, although it has the same score, 0, as user-defined symbols."""
    path = tmp_path / "zh.model"
    train_sentencepiece([given], str(path), 268)
    ours, output = load_tokenizer(str(path)), tmp_path / "out"
    output.mkdir()
    exported(output, ours, path, "gpt2")
    theirs = transformers.AutoTokenizer.from_pretrained(output)
    for text in ("a====b", "……”", "==", "“……", given):
        assert theirs(text)["input_ids"] == ours.encode(text), text


@pytest.mark.parametrize(("end", "family"), [(256, "t5"), (300, "t5"), (300, "gpt2")])
def test_a_t5_whose_vocabulary_has_gaps_is_exported_with_a_placeholder(end: int, family: str, tmp_path: Path) -> None:
    """`tokenizers` would number the sentinels from the number of tokens, this project numbers them from `end` + 1."""
    characters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(characters)}  # 256 tokens
    library = tokenizers.Tokenizer(tokenizers.models.BPE({**vocabulary, "<|endoftext|>": end}, []))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    base = load_tokenizer(str(path))
    ours = SentinelTokenizer(base, 1, "t5") if family == "t5" else base
    output = tmp_path / "out"
    output.mkdir()
    notes = write_tokenizer(output, parse(["--family", "gpt2"]), ours, str(path), ChatFormat(), family)
    if (end, family) == (300, "t5"):
        assert "base_tokenizer.json" in notes[0]
        assert load_tokenizer(str(output)).fingerprint == base.fingerprint
        with pytest.raises(Exception, match="base_tokenizer"):  # the package has an error of its own
            tokenizers.Tokenizer.from_file(str(output / "tokenizer.json"))
        return
    theirs = tokenizers.Tokenizer.from_file(str(output / "tokenizer.json"))
    assert theirs.token_to_id("<|endoftext|>") == ours.eod == end
    if isinstance(ours, SentinelTokenizer):
        ids = [theirs.token_to_id(name) for name in ("<pad>", "<extra_id_0>")]
        assert ids == [ours.pad, *ours.sentinels] == [257, 258]


@pytest.mark.parametrize("algorithm", ALGORITHMS.values())
def test_facts_of_a_model_are_those_of_protobuf(algorithm: str) -> None:
    proto = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c == d"] * 20), model_writer=model, vocab_size=400, model_type=algorithm,
        user_defined_symbols=["<x>", "=="], byte_fallback=algorithm != "word", normalization_rule_name="nfkc",
        add_dummy_prefix=False, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    facts, message = read_facts(model.getvalue(), "m"), proto.ModelProto()
    message.ParseFromString(model.getvalue())
    assert facts.types == [piece.type for piece in message.pieces]
    assert (facts.algorithm, facts.normalization, facts.adds_prefix_space, facts.merges_spaces) == (
        algorithm,
        "nfkc",
        False,
        True,
    )


def test_a_comparison_without_transformers_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    tokenizer: Any = None
    for compared in (hf_compare.compare_token_ids, hf_compare.compare_imported_ids):
        with pytest.raises(ValueError, match="transformers"):
            compared(tokenizer, tmp_path)
