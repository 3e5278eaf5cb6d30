"""Prompts and conversations are encoded as in transformers, and fill-in-the-middle prompts as in training data."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_utils import inspect_data
from data_utils.chat_messages import Message, parse_messages
from data_utils.chat_templates import BEGIN, END, ChatML, load_template, template_from
from data_utils.tokenizer_training import train_byte_bpe, train_sentencepiece
from megatron.config.command_line import parse
from megatron.data.fim import FillInTheMiddle
from megatron.tokenizer import SentinelTokenizer, Tokenizer, load_tokenizer
from megatron_tools.convert import export_tokenizer
from megatron_tools.write import generate_flags
from megatron_tools.write import prompts as asking
from megatron_tools.write.generate import token_printer
from megatron_tools.write.questions import Conversation, Infill, PromptEncoder, decode_answer
from megatron_tools.write.writer import Writer
from tests.cli.test_convert_llama import TEXT as LLAMA_TEXT
from tests.cli.test_convert_llama import tokenizer_of
from tests.sentences import SENTENCES

from .test_sft import CHAT, CHATML
from .test_sft import _corpus as corpus

FIM = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
ENDS_WITH_EOS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
TEXTS = [
    "<|im_start|>user\nhi<|im_end|>\n",
    "a<|im_end|> b",
    " <|endoftext|>x<|im_start|>",
    "春<|fim_prefix|><|im_end|>",
    "plain",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder that transformers can load: byte-level BPE with chat and fill-in-the-middle tokens."""
    folder = tmp_path_factory.mktemp("hf")
    text = ["What is the capital of France? system user assistant. " * 20]
    train_byte_bpe(text, str(folder / "tokenizer.json"), 300, "hf", [BEGIN, END, *FIM])
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder))


def flags(*argv: str) -> Any:
    return generate_flags.build_parser().parse_args(["--load", "x", *argv])


def test_names_are_ids_only_where_that_is_asked_for(folder: Path, tokenizer: Tokenizer) -> None:
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    config = parse([])
    for text in TEXTS:
        named = asking.prompt_encoder(flags("--special-tokens"), config, tokenizer, str(folder)).question(text)
        assert named.tokens == theirs(text)["input_ids"], text
        plain = asking.prompt_encoder(flags(), config, tokenizer, str(folder)).question(text)
        assert not set(plain.tokens) & set(tokenizer.specials.values()) and tokenizer.decode(plain.tokens) == text


# A chat template in which each role has its own start-of-turn token.
ROLE_MARKS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ '<think>' if m.role == 'assistant' }}{{ m.content }}<|im_end|>{% "
    "endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
ADDED = ["<think>", "<tool_call>", "<|system|>", "<|user|>", "<|assistant|>", BEGIN, END, "春天", "covid"]


def test_a_vocabulary_that_was_extended(tmp_path: Path) -> None:
    """Added tokens are encoded as in transformers, also in chat messages, except for the template's turn tokens."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    train_byte_bpe(["What is the capital of France? 春天 covid"] * 9, str(tmp_path / "tokenizer.json"), 290, "hf")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    theirs: Any = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs.add_tokens(ADDED)
    theirs.save_pretrained(tmp_path)
    ours = load_tokenizer(str(tmp_path))
    assert set(ours.marks) == {"<|endoftext|>", *ADDED[:-2]}
    text = "春天 of covid <tool_call> is <think>"
    assert PromptEncoder(ours).question(text).tokens == ours.encode(text) == theirs(text)["input_ids"]
    turns = [{"role": "system", "content": text}, {"role": "user", "content": text}]
    for source in (CHATML, ROLE_MARKS):
        reader = PromptEncoder(ours, template_from(source, ours, str(tmp_path)))
        asked: Any = theirs.apply_chat_template(turns, chat_template=source, add_generation_prompt=True)
        assert reader.question(Conversation(parse_messages(turns))).tokens == asked["input_ids"]
        for name in ADDED[2:5] if source == ROLE_MARKS else (BEGIN, END):
            for role in ("system", "user"):
                with pytest.raises(ValueError, match=SENTENCES["a_message_contains_which_is_a"]):
                    reader.question(Conversation((Message(role, f"a{name}"), Message("user", "b"))))


@pytest.mark.parametrize("style", ["llama2", "llama3", "qwen"])
def test_names_in_tokenizers_of_their_models(style: str, tmp_path: Path) -> None:
    """A prompt with names of special tokens has the ids of transformers, including the start token and spaces."""
    transformers = pytest.importorskip("transformers")
    made, named = tokenizer_of(style)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named}))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))
    for text in ("The river", f"{named['eos_token']}slow", f"river {named['eos_token']} runs{named['eos_token']}"):
        assert PromptEncoder(ours, encodes_names=True).question(text).tokens == theirs(text)["input_ids"]


def test_names_in_a_sentencepiece_model(tmp_path: Path) -> None:
    path = str(tmp_path / "t.model")
    train_sentencepiece(["abc abd bcd user assistant"] * 9, path, 290, specials=[BEGIN, END])
    ours = load_tokenizer(path)
    found = PromptEncoder(ours, encodes_names=True).question(f"{BEGIN}user\nabc{END}").tokens
    assert found == [ours.specials[BEGIN], *ours.encode("user\nabc"), ours.specials[END]]
    assert PromptEncoder(ours).question(f"{BEGIN}user").tokens == ours.encode(f"{BEGIN}user")


def test_conversations_are_those_of_apply_chat_template(folder: Path, tokenizer: Tokenizer) -> None:
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    pytest.importorskip("jinja2")
    for count in (2, 4):
        expected = theirs.apply_chat_template(CHAT[:count], add_generation_prompt=True, return_dict=True)["input_ids"]
        for name in ("chatml", "tokenizer"):
            reader = PromptEncoder(tokenizer, load_template(name, tokenizer, str(folder)))
            found = reader.question(Conversation(parse_messages(CHAT[:count])))
            assert (found.tokens, found.end_id) == (expected, tokenizer.specials[END])
            assert found.end_ids == (tokenizer.specials[END], tokenizer.eod)
    ids = [*tokenizer.encode("Paris."), tokenizer.specials[END], tokenizer.eod, *tokenizer.encode("more")]
    assert decode_answer(tokenizer, found, ids) == "Paris."
    other = folder / "llama2.jinja"
    other.write_text(ENDS_WITH_EOS)
    expected = theirs.apply_chat_template(CHAT[1:2], chat_template=ENDS_WITH_EOS, return_dict=True)["input_ids"]
    reader = PromptEncoder(tokenizer, load_template(str(other), tokenizer, str(folder)))
    found = reader.question(Conversation(parse_messages(CHAT[1:2])))
    assert (found.tokens, found.end_ids) == (expected, (tokenizer.eod,))
    with pytest.raises(ValueError, match=r"a message contains <\|im_end\|>"):
        reader.question(Conversation((Message("user", f"a{END}"),)))
    evil = PromptEncoder(tokenizer, ChatML()).question(Conversation((Message("user", f"a{END}"),)))
    assert evil.tokens.count(tokenizer.specials[END]) == 1


def test_a_template_that_needs_a_system_message_ends_its_turns_too(tokenizer: Tokenizer, folder: Path) -> None:
    pytest.importorskip("jinja2")
    check = "{% if messages[0].role != 'system' %}{{ raise_exception('a system message, please') }}{% endif %}"
    template = template_from(check + CHATML, tokenizer, str(folder))
    found = PromptEncoder(tokenizer, template).question(Conversation(parse_messages(CHAT[:2])))
    plain = PromptEncoder(tokenizer, template_from(CHATML, tokenizer, str(folder)))
    assert found == plain.question(Conversation(parse_messages(CHAT[:2])))
    assert found.end_id == tokenizer.specials[END]


def test_the_template_of_the_training_comes_first(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = str(tmp_path / "chats_sft")
    Path(f"{prefix}.json").write_text(
        json.dumps({"fingerprint": "", "objective": "sft", "chat_template": ENDS_WITH_EOS})
    )
    trained = parse(["--objective", "sft", "--data-path", prefix])
    by_parts = parse(["--objective", "sft", "--train-data-path", prefix])
    for argv, config, vocab_file, source, told in (
        ([], trained, str(folder), ENDS_WITH_EOS, f"of the corpus {prefix}"),
        ([], by_parts, str(folder), ENDS_WITH_EOS, f"of the corpus {prefix}"),
        ([], parse([]), str(folder), CHATML, "of the tokenizer"),
        (["--chat-template", "chatml"], trained, str(folder), "chatml", ""),
    ):
        reader = asking.prompt_encoder(flags("--chat", *argv), config, tokenizer, vocab_file)
        assert reader.template is not None and reader.template.source == source
        assert told in capsys.readouterr().err


def test_a_corpus_from_before_there_were_dates(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts use the chat date of the model's training corpus, if recorded; merging and export note the date."""
    pytest.importorskip("jinja2")
    source = "{{ strftime_now('%Y') if strftime_now is defined else 'undated' }}" + CHATML
    old = tmp_path / "old_sft"
    about = {"objective": "sft", "chat_template": source, "fingerprint": tokenizer.fingerprint}
    old.with_name("old_sft.json").write_text(json.dumps(about))
    config = parse(["--objective", "sft", "--data-path", str(old)])
    for date, expected in ((None, "undated"), ("2024-07-26", "2024")):
        old.with_name("old_sft.json").write_text(json.dumps({**about, **({"chat_date": date} if date else {})}))
        reader = asking.prompt_encoder(flags("--chat"), config, tokenizer, str(folder))
        assert f"{old}, {'of 2024-07-26' if date else 'without a date'}" in capsys.readouterr().err
        asked = reader.question(Conversation(parse_messages(CHAT[1:2])))
        assert tokenizer.decode(asked.tokens).startswith(f"{expected}<|im_start|>user")
        chat = export_tokenizer.chat_format_of(config, tokenizer, str(folder))
        assert chat.end_id == tokenizer.marks[END]
        (note,) = chat.notes
        assert ("trained without a date" if date is None else "trained with 2024-07-26") in note
    assert template_from(source, tokenizer, str(folder)).date is not None  # today's date, as no date is given
    for name, more in (("a", {}), ("b", {"chat_date": "2024-07-26"})):
        corpus(tmp_path / name, [([1, 2, 3], [0, 1, 1])])
        (tmp_path / f"{name}.json").write_text(json.dumps({**about, **more}))
    pairs = [str(tmp_path / name) for name in "ab"]
    inspect_data.merge_pairs(Namespace(prefixes=pairs, output=str(tmp_path / "m")))
    assert "the new sidecar records the date 2024-07-26" in capsys.readouterr().out


@pytest.mark.parametrize("spm", [False, True])
def test_gaps_are_asked_as_they_are_trained(tokenizer: Tokenizer, folder: Path, spm: bool) -> None:
    """A fill-in-the-middle prompt plus the middle plus the end token equals a training document."""
    prefix, middle, suffix = (tokenizer.specials[name] for name in FIM)
    text = np.array([*tokenizer.encode("What is the capital"), tokenizer.eod])
    gaps = FillInTheMiddle(1.0, float(spm), prefix, middle, suffix, tokenizer.eod)
    trained = gaps.rearrange_document(text, True, spm, (0.3, 0.6)).tolist()
    kept = len(text) - 4
    begin, end = int(0.3 * (kept + 1)), int(0.6 * (kept + 1))
    asked = Infill(tokenizer.decode(text[:begin]), tokenizer.decode(text[end:kept]))
    config = parse(["--fim-rate", "0.5", "--fim-spm-rate", str(float(spm)), "--fim-tokens", *FIM])
    found = asking.prompt_encoder(flags(), config, tokenizer, str(folder)).question(asked)
    assert [*found.tokens, *text[begin:end], found.end_id] == trained
    assert (found.text_before, found.text_after) == asked


@pytest.mark.parametrize("prefix", ["Prepend", "always", "first"])
def test_gaps_of_a_tokenizer_that_puts_a_space_in_front(prefix: str, tmp_path: Path) -> None:
    """Prompts are those of training, and the filled text is the document, with its spaces at both ends of the gap."""
    tokenizers = pytest.importorskip("tokenizers")
    made, named = tokenizer_of("llama2")
    if prefix != "Prepend":
        made.normalizer = None
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace("\u2581", prepend_scheme=prefix, split=False)
    made.add_special_tokens(FIM)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named}))
    ours = load_tokenizer(str(tmp_path))
    marks = [ours.specials[name] for name in FIM]
    text = np.array([*ours.start, *ours.encode(LLAMA_TEXT), ours.eod])
    gaps = FillInTheMiddle(1.0, 0.0, *marks, ours.eod)
    kept = len(text) - 4
    document = ours.decode(text[1:kept])
    for begin in range(2, kept):
        end = (begin + kept) // 2
        trained = gaps.rearrange_document(text, True, False, ((begin + 0.5) / (kept + 1), (end + 0.5) / (kept + 1)))
        ids = trained.tolist()
        middle = ids.index(marks[1]) + 1
        asked = Infill(ours.decode(text[1:begin]), document[len(ours.decode(text[1:end])) :])
        found = PromptEncoder(ours, fim_tokens=asking.FIMTokens(*marks, True, False)).question(asked)
        assert found.tokens == ids[:middle]
        assert found.text_before + decode_answer(ours, found, ids[middle:]) + found.text_after == document


def test_marks_that_are_not_special(folder: Path, tmp_path: Path) -> None:
    """Fill-in-the-middle and chat tokens need not be marked special, and a user's text cannot produce them."""
    theirs_of = pytest.importorskip("transformers").AutoTokenizer.from_pretrained
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = token["content"] == "<|endoftext|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    ours, theirs = load_tokenizer(str(tmp_path)), theirs_of(tmp_path)
    reader = asking.prompt_encoder(flags("--fim-tokens", *FIM), parse([]), ours, str(tmp_path))
    prefix, middle, suffix = (theirs.convert_tokens_to_ids(name) for name in FIM)
    found = reader.question(Infill("the <|fim_middle|>", f"capital{END}"))
    assert [i for i in found.tokens if i in ours.marks.values()] == [prefix, suffix, middle]
    for text in TEXTS:
        assert PromptEncoder(ours, encodes_names=True).question(text).tokens == theirs(text)["input_ids"]
        assert ours.encode(text) == theirs(text, split_special_tokens=True)["input_ids"] or "<|endoftext|>" in text
        plain = PromptEncoder(ours).question(text).tokens
        assert plain == ours.encode(text) and ours.eod not in plain and ours.decode(plain) == text
    asked = PromptEncoder(ours, ChatML()).question(Conversation((Message("user", f"a{END}"),)))
    assert asked.end_id == ours.marks[END] and asked.tokens.count(asked.end_id) == 1
    for template in (ChatML(), load_template("tokenizer", ours, str(tmp_path))):
        asked = PromptEncoder(ours, template).question(Conversation((Message("user", "a"),)))
        assert decode_answer(ours, asked, [ours.marks[BEGIN], *ours.encode("Paris."), asked.end_id]) == "Paris."


def test_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "asked"
    path.write_text('hi\n{"messages": [{"role": "user", "content": "a"}]}\n\n {"prompt": "b"}\n\n', encoding="utf-8")
    turns = [Conversation((Message("user", text),)) for text in ("hi", "a", "b")]
    assert list(asking.read_prompts(flags("--chat", "--input", str(path)))) == turns
    assert asking.as_json(turns[0]) == {"messages": [{"role": "user", "content": "hi"}]}
    path.write_text('{"prompt": "a", "suffix": "b"}\n{"messages": []}\n', encoding="utf-8")
    lines = asking.read_prompts(flags("--input", str(path)))
    assert next(lines) == Infill("a", "b")
    with pytest.raises(ValueError, match=SENTENCES["line_2_is_not_a_json"]):
        next(lines)
    path.write_text("{name} went to\n{% if x %}\n{\n", encoding="utf-8")
    assert list(asking.read_prompts(flags("--input", str(path)))) == ["{name} went to", "{% if x %}", "{"]
    path.write_text('{"prompt": "a"}\n{"prompt": null}\n', encoding="utf-8-sig")
    lines = asking.read_prompts(flags("--input", str(path)))
    assert next(lines) == "a", "a byte-order mark is no part of the first prompt"
    with pytest.raises(ValueError, match="line 2"):
        next(lines)
    path.write_text('{"prompt": "a", "system": "b"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: 'system' is not rendered"):
        next(asking.read_prompts(flags("--chat", "--input", str(path))))
    for line, chat in ('{"prompt": "a", "suffix": 5}', ()), ('{"prompt": "a", "suffix": "b"}', ("--chat",)):
        path.write_text(f"{line}\n", encoding="utf-8")
        with pytest.raises(ValueError, match="line 1: .*suffix"):
            next(asking.read_prompts(flags(*chat, "--input", str(path))))
    thought = {"role": "user", "content": "a", "thinking": "b", "calls": None}
    path.write_text(json.dumps({"messages": [thought]}), encoding="utf-8")
    (asked,) = asking.read_prompts(flags("--chat", "--input", str(path)))
    assert asking.as_json(asked) == {"messages": [thought]}
    path.write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=SENTENCES["line_1_the_conversation_must_end"]):
        next(asking.read_prompts(flags("--chat", "--input", str(path))))


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--chat --special-tokens", "omit --special-tokens"),
        ("--chat-template chatml", "--chat-template needs --chat"),
        ("--suffix a --input b", "--suffix needs --prompt"),
        ("--prompt a --interactive", "give one of --prompt, --input and --interactive"),
        ("--prompt a --fim-tokens a b c", "--fim-tokens needs --suffix or --input"),
    ],
)
def test_flags_that_do_not_go_together(argv: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        asking.check_prompt_flags(flags(*argv.split()))


@pytest.mark.parametrize("prompt", ["\udcc4\udce3", Infill("a", "b\ud83d")])
def test_text_that_is_not_unicode_is_refused(prompt: str | Infill, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        PromptEncoder(tokenizer).question(prompt)


def test_prompts_in_another_encoding_are_refused_with_the_name_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "gbk.txt"
    path.write_bytes("你好".encode("gbk"))
    with pytest.raises(ValueError, match="gbk.txt is not UTF-8"):
        next(asking.read_prompts(flags("--input", str(path))))


def test_what_a_model_cannot_be_asked(tokenizer: Tokenizer, folder: Path) -> None:
    with pytest.raises(ValueError, match=SENTENCES["a_is_not_a_special_token"]):
        asking.prompt_encoder(flags("--fim-tokens", "<a>", *FIM[1:]), parse([]), tokenizer, str(folder))
    t5 = parse(["--family", "t5"])
    with pytest.raises(ValueError, match="--chat"):
        asking.prompt_encoder(flags("--chat"), t5, tokenizer, str(folder))
    with pytest.raises(ValueError, match=SENTENCES["omit_the_suffix"]):
        PromptEncoder(SentinelTokenizer(tokenizer, 4, "t5")).question(Infill("a", "b"))
    with pytest.raises(ValueError, match="--fim-tokens"):
        writer: Any = Writer(None, tokenizer, parse([]), None, PromptEncoder(tokenizer))  # type: ignore[arg-type]
        writer.question(Infill("a", "b"))


def test_an_answer_ends_with_a_whole_character(tokenizer: Tokenizer, folder: Path) -> None:
    """An answer omits its last character if the generated ids have only some of the character's bytes."""
    question = PromptEncoder(tokenizer).question("a")
    ids = tokenizer.encode("b春天")
    assert decode_answer(tokenizer, question, ids) == "b春天"
    assert len(ids) == 7
    for kept, text in ((6, "b春"), (5, "b春"), (4, "b春"), (3, "b"), (1, "b")):
        assert decode_answer(tokenizer, question, ids[:kept]) == text


def test_no_character_is_printed_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A decoder with byte fallback turns the complete characters before an incomplete one into U+FFFD, too."""
    made, named = tokenizer_of("llama2")
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    ours = load_tokenizer(str(tmp_path))
    question = PromptEncoder(ours).question("The river")
    ids = ours.encode_content("饕餮😀!", after_text=True)
    assert [decode_answer(ours, question, ids[:kept]) for kept in (11, 10, 7, 6, 5, 3, 2)] == [
        "饕餮😀!", "饕餮😀", "饕餮", "饕餮", "饕", "饕", ""
    ]  # fmt: skip
    on_tokens = token_printer(ours, question)
    for token in ids:
        on_tokens([token])
    assert capsys.readouterr().out == "饕餮😀!"
