"""Llama, Qwen and Mistral of Hugging Face are imported, trained and exported, with tokenizers in their styles."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from data_utils.chat_encoder import ChatEncoder
from data_utils.chat_messages import parse_messages
from data_utils.chat_templates import BEGIN, END, ChatML
from data_utils.tokenizer_training import train_byte_bpe, train_sentencepiece
from megatron.config.command_line import parse
from megatron.tokenizer import load_tokenizer
from megatron_tools.convert import export_tokenizer
from megatron_tools.convert.export_roles import generation_settings
from megatron_tools.convert.hf_folder import is_hf_folder
from megatron_tools.write import evaluate, evaluate_flags, generate, generate_flags
from megatron_tools.write.generation import Sampling, sample
from megatron_tools.write.questions import Question, decode_answer
from tests.cli.test_convert import convert, round_trip
from tests.llama_twins import Sizes, theirs
from tests.sentences import SENTENCES
from tests.support import FULL, ROOT, command, covering, train
from tests.unit.test_sft import CHAT
from tests.unit.test_tokenizer import LLAMA, llama_folder

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
safetensors_torch = pytest.importorskip("safetensors.torch")

SIZES = Sizes(layers=2, hidden=32, heads=4, groups=2, head=10, inner=36)
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
# Model -> (style of its tokenizer, settings that are typical of it: RoPE scaling, sliding window, tied embeddings).
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama3", {"rope": LLAMA3}),
    "Qwen2": ("qwen", {"tied": True, "rope": {"rope_type": "linear", "factor": 2.0}}),
    "Qwen3": (
        "qwen",
        {
            "rope": {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            }
        },
    ),
    "Mistral": ("llama2", {"window": 7}),
}
TEXT = "The river runs slowly to the sea, and 春天来了."


def tokenizer_of(style: str) -> tuple[Any, dict[str, str]]:
    """Return a tokenizer in the style of llama2, llama3 or qwen, and its special tokens for tokenizer_config.json."""
    start, end = {
        "llama3": ("<|begin_of_text|>", "<|end_of_text|>"),
        "llama2": ("<s>", "</s>"),
        "qwen": (None, "<|endoftext|>"),
    }[style]
    specials = [name for name in (start, end) if name]
    decoders, normalizers, words = tokenizers.decoders, tokenizers.normalizers, tokenizers.pre_tokenizers
    if style == "llama2":
        made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        made.decoder = decoders.Sequence(parts)
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
        specials = ["<unk>", *specials]
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, special_tokens=[*specials, *alphabet])
    else:
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = words.Sequence(
            [
                words.Split(tokenizers.Regex(r"\p{N}{1,3}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+"), "isolated"),
                words.ByteLevel(False, use_regex=False),
            ]
        )
        made.decoder = decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=400, special_tokens=specials, initial_alphabet=words.ByteLevel.alphabet()
        )
    made.train_from_iterator(["The river runs slowly to the sea", "春天来了", "slow rivers run 123"] * 3, trainer)
    content = json.loads(made.to_str())  # the trainer marks byte tokens as special, which the next line undoes
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in specials]
    made = tokenizers.Tokenizer.from_str(json.dumps(content))
    if start:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{start} $A", special_tokens=[(start, made.token_to_id(start))]
        )
    return made, {"eos_token": end, **({"bos_token": start} if start else {})}


def folder_of(path: Path, kind: str) -> Path:
    """Save a random model and tokenizer of KINDS[kind] as a Hugging Face folder; return the folder."""
    style, settings = KINDS[kind]
    tokenizer, named = tokenizer_of(style)
    model = theirs(kind, SIZES, vocab=tokenizer.get_vocab_size() + 3, **settings)
    model.config.eos_token_id = tokenizer.token_to_id(named["eos_token"])
    model.config.bos_token_id = tokenizer.token_to_id(named["bos_token"]) if "bos_token" in named else None
    model.generation_config = transformers.GenerationConfig(eos_token_id=model.config.eos_token_id)
    model.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    (path / "tokenizer_config.json").write_text(json.dumps(about))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind: str, tmp_path: Path) -> None:
    """Import and export keep weights, settings and token ids; tools/generate.py generates transformers' text."""
    folder = folder_of(tmp_path / "theirs", kind)
    convert("--from-hf", str(folder), "--output", str(tmp_path / "c"), "--verify")
    convert(
        "--load", str(tmp_path / "c"), "--output", str(tmp_path / "back"), "--verify", "--max-shard-size", "0.00005"
    )
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(each) for each in (folder, tmp_path / "back"))
    assert type(after) is type(before) and (tmp_path / "back" / "model.safetensors.index.json").exists()
    wanted, found = before.state_dict(), after.state_dict()
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[name], found[name]) for name in wanted)
    for key in ("eos_token_id", "bos_token_id", "rope_parameters", "sliding_window", "head_dim"):
        if key != "bos_token_id" or not kind.startswith("Qwen"):  # Qwen has no bos, so the export writes eos as bos
            assert getattr(before.config, key, 0) == getattr(after.config, key, 0), key
    ours = load_tokenizer(str(folder))
    for source in (folder, tmp_path / "back"):
        other: Any = transformers.AutoTokenizer.from_pretrained(source)
        assert other(TEXT)["input_ids"] == [*ours.start, *ours.encode(TEXT)]
        check_text(source, other, before.eval())


def check_text(folder: Path, tokenizer: Any, model: Any) -> None:
    args = generate_flags.build_parser().parse_args(["--load", str(folder), "--prompt", TEXT])
    writer = generate.load_writer(args)
    for prompt in (TEXT, "sea"):
        asked = writer.question(prompt)
        (found,) = sample(writer.stepper([asked.tokens]), 1, 20, asked.end_id, Sampling(temperature=0), 0)
        ids = tokenizer(prompt, return_tensors="pt")
        wanted = model.generate(**ids, max_new_tokens=20, do_sample=False)[0].tolist()
        assert [*asked.tokens, *found] == wanted
        shown = tokenizer.decode(wanted, skip_special_tokens=True)
        if shown.startswith(prompt):  # false if the prompt's end and generated bytes form one character
            assert writer.text(asked, found) == shown.rstrip("\ufffd")  # `text` leaves out an incomplete last character


def test_a_text_goes_on_with_its_spaces() -> None:
    """A continuation keeps its leading space, although a Llama 2 tokenizer strips the first space that it decodes."""
    made, _ = tokenizer_of("llama2")
    ids = made.encode(TEXT, add_special_tokens=False).ids

    class Plain:
        decode, eod = staticmethod(made.decode), -1

        @staticmethod
        def encode_content(text: str) -> list[int]:
            return made.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]

    for cut in range(1, len(ids)):
        known = made.decode(ids[:cut])
        if "\ufffd" not in known:
            question = Question(known, ids[:cut], -1, known)
            assert known + decode_answer(Plain(), question, ids[cut:]) == TEXT  # type: ignore[arg-type]


@pytest.mark.parametrize(("template", "expected"), [("<s> $A", 1), ("$A </s>", 0), ("<s> $A </s>", 1), ("$A", 0)])
def test_what_begins_a_text(template: str, expected: int, tmp_path: Path) -> None:
    """A token that tokenizer.json adds before a text is the start token; a token that it adds after a text is not."""
    made, named = tokenizer_of("llama2")
    ids = [(name, made.token_to_id(name)) for name in ("<s>", "</s>")]
    made.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=ids)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    ours = load_tokenizer(str(tmp_path))
    assert ours.start == (made.token_to_id("<s>"),) * expected and ours.eod == made.token_to_id("</s>")
    assert ours.before == (ours.start or (ours.eod,))
    for said in (True, False):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**named, "add_bos_token": said}))
        if said == bool(expected):
            assert load_tokenizer(str(tmp_path)).start == ours.start
        else:
            with pytest.raises(ValueError, match=f"sets add_bos_token to {said}, but tokenizer.json begins"):
                load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "size"), covering(list(itertools.product(KINDS, (2, 4))), lambda c: c == ("Mistral", 2), True)
)
def test_over_ranks_the_text_is_the_same(kind: str, size: int, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "theirs", kind)
    flags = ["--load", str(folder), "--prompt", TEXT, "--max-new-tokens", "20", "--temperature", "0"]
    over = [
        "tools/launch.py",
        "--standalone",
        "--nproc-per-node",
        str(size),
        "tools/generate.py",
        "--model-parallel-size",
        str(size),
    ]
    one, several = command("python", "tools/generate.py", *flags), command("python", *over, *flags)
    assert (one.returncode, several.returncode) == (0, 0), (one.stderr, several.stderr)
    assert one.stdout == several.stdout and one.stdout.startswith(TEXT) and len(one.stdout) > len(TEXT) + 10
    streamed = command("python", "tools/generate.py", *flags, "--stream")
    whole = one.stdout.rstrip("\n").rstrip("\ufffd")  # --stream does not print an incomplete last character
    assert streamed.stdout.rstrip("\n") == whole


def test_evaluation_is_theirs(tmp_path: Path) -> None:
    """tools/evaluate.py puts a start token before each text and gives the same loss as transformers.

    The test passes the Hugging Face folder as --hf and as --load, and the imported checkpoint as --load.
    """
    folder = folder_of(tmp_path / "theirs", "Llama")
    convert("--from-hf", str(folder), "--output", str(tmp_path / "c"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [TEXT, "slow rivers"]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    nats, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], model.config.eos_token_id]])
        with torch.no_grad():
            nats += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    for source in (["--hf", str(folder)], ["--load", str(folder)], ["--load", str(tmp_path / "c")]):
        argv = [*source, "--input", str(tmp_path / "x.jsonl"), "--json", str(tmp_path / "found.json"), "--quiet"]
        evaluate.main(evaluate_flags.build_parser().parse_args(argv))
        found = json.loads((tmp_path / "found.json").read_text())
        assert (found["tokens"], found["loss"]) == (count, pytest.approx(nats / count, rel=1e-5))


ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "hidden_size": 8}
ONE_LAYER = {**ONE_HEAD, "num_hidden_layers": 1, "intermediate_size": 8, "max_position_embeddings": 32}
WITHOUT_THE_USUAL_NAME = {
    "bloom": ({"hidden_size": 8, "n_layer": 1, "n_head": 1}, 2048),  # no limit
    "mpt": ({"d_model": 8, "n_layers": 1, "n_heads": 1, "max_seq_len": 64}, 64),
    "gemma3": ({"text_config": ONE_LAYER, "vision_config": ONE_LAYER}, 32),  # reads images and text
}


@pytest.mark.parametrize("kind", WITHOUT_THE_USUAL_NAME)
def test_the_window_of_models_without_max_position_embeddings(kind: str, tmp_path: Path) -> None:
    made, named = tokenizer_of("llama3")
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    sizes, limit = WITHOUT_THE_USUAL_NAME[kind]
    config = transformers.AutoConfig.for_model(kind, **sizes)
    config.get_text_config().vocab_size = made.get_vocab_size()
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    wider = [(["--window", "5000"], 5000)] if kind == "bloom" else []
    for flags, window in (([], limit), *wider):
        argv = ["--hf", str(tmp_path), "--input", "x", *flags]
        subject = evaluate.load_hf_subject(evaluate_flags.build_parser().parse_args(argv))
        assert subject.max_length == window
        assert subject.logits_of(torch.tensor([[1, 2, 3]])).shape == (1, 3, made.get_vocab_size())


def test_it_trains_on_in_two_commands(tmp_path: Path) -> None:
    """Two commands continue the training of a Llama: one tokenizes with the Llama's tokenizer, the other trains.

    The first loss equals that of the transformers model. The run keeps a copy of the chat template and the end tokens,
    so it can be exported even if the original folder is gone.
    """
    folder = folder_of(tmp_path / "theirs", "Llama")
    template = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("r")
    (folder / "generation_config.json").unlink()
    about = json.loads((folder / "config.json").read_text())
    ends = [about["eos_token_id"], 5]
    (folder / "config.json").write_text(json.dumps({**about, "eos_token_id": ends}))
    said = convert("--from-hf", str(folder), "--output", str(tmp_path / "c"), "--verify")
    settings = tmp_path / "c" / "settings.json"
    assert f"python pretrain_llama.py --config {settings} --load {tmp_path / 'c'}" in said
    argv = ["--input", str(ROOT / "corpus/sample.jsonl"), "--vocab-file", str(folder), "--quiet"]
    done = command("python", "tools/preprocess_data.py", *argv, "--output-prefix", str(tmp_path / "data"))
    assert done.returncode == 0, done.stderr
    from megatron.data.indexed_dataset import IndexedDataset

    ours, corpus = load_tokenizer(str(folder)), IndexedDataset(str(tmp_path / "data_text_document"))
    assert all((corpus[i][0], corpus[i][-1]) == (*ours.start, ours.eod) for i in range(5))
    flags = [
        "--config",
        str(settings),
        "--load",
        str(tmp_path / "c"),
        "--data-path",
        str(tmp_path / "data_text_document"),
        "--seq-length",
        "48",
        "--batch-size",
        "2",
        "--train-iters",
        "2",
        "--eval-iters",
        "0",
        "--precision",
        "fp32",
        "--log-interval",
        "1",
        "--no-tensorboard",
        "--lr",
        "0.001",
    ]
    rows = train("llama", 2, tmp_path / "run", *flags, "--model-parallel-size", "2")
    from megatron.data.gpt2_dataset import build_train_valid_test_datasets

    prefix = str(tmp_path / "data_text_document")
    (samples, _, _), _ = build_train_valid_test_datasets([prefix], "949,50,1", 48, 1234, ours.vocab_size)
    text = torch.stack([torch.as_tensor(samples[i]["text"]) for i in range(2)]).long()
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(text[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    assert rows[0]["lm_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert not is_hf_folder(tmp_path / "run" / "tokenizer")
    folder.rename(tmp_path / "gone")
    said = convert("--load", str(tmp_path / "run"), "--output", str(tmp_path / "out"), "--verify", "--dtype", "bf16")
    assert "not exported: rag.jinja" in said
    before, after = (transformers.AutoTokenizer.from_pretrained(tmp_path / each) for each in ("gone", "out"))
    turns = [{"role": "user", "content": "slow rivers"}]
    assert after.apply_chat_template(turns) == before.apply_chat_template(turns)
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == ends
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (described["model_type"], described["rope_scaling"]["rope_type"]) == ("llama", "llama3")


def test_a_folder_of_2023_comes_back_as_it_was(tmp_path: Path) -> None:
    """A folder without tokenizer.json, as in 2023, is exported with equal ids, chat template, start and end tokens."""
    pytest.importorskip("google.protobuf")
    template = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
    folder = llama_folder(tmp_path / "theirs", {**LLAMA, "add_bos_token": True, "chat_template": template})
    model = theirs("Llama", SIZES, vocab=330)
    model.config.bos_token_id, model.config.eos_token_id = 1, 2
    model.generation_config = transformers.GenerationConfig(eos_token_id=[2, 300])
    model.save_pretrained(folder)
    convert("--from-hf", str(folder), "--output", str(tmp_path / "c"), "--verify")
    said = convert("--load", str(tmp_path / "c"), "--output", str(tmp_path / "back"), "--verify")
    assert "note" not in said
    before, after = (transformers.AutoTokenizer.from_pretrained(each) for each in (folder, tmp_path / "back"))
    turns, again = [{"role": "user", "content": "slow rivers"}], load_tokenizer(str(tmp_path / "back"))
    assert after(TEXT)["input_ids"] == before(TEXT)["input_ids"] == [1, *again.encode(TEXT)]
    assert after.apply_chat_template(turns) == before.apply_chat_template(turns)
    described = [
        json.loads((tmp_path / "back" / name).read_text()) for name in ("config.json", "generation_config.json")
    ]
    assert [(each["bos_token_id"], each["eos_token_id"]) for each in described] == [(1, 2), (1, [2, 300])]
    assert again.fingerprint == load_tokenizer(str(folder)).fingerprint


def test_a_tokenizer_that_becomes_theirs_keeps_what_begins_a_text(tmp_path: Path) -> None:
    """A Llama tokenizer.model that adds no leading space is exported as a tokenizer.json with its start token."""
    pytest.importorskip("google.protobuf")
    about = {**LLAMA, "add_bos_token": True, "add_prefix_space": False}
    folder, config = llama_folder(tmp_path / "theirs", about, add_dummy_prefix=False), parse(["--family", "gpt2"])
    ours, output = load_tokenizer(str(folder)), tmp_path / "out"
    output.mkdir()
    chat = export_tokenizer.chat_format_of(config, ours, str(folder))
    assert export_tokenizer.write_tokenizer(output, config, ours, str(folder), chat) == []
    before, after = (transformers.AutoTokenizer.from_pretrained(each) for each in (folder, output))
    assert (output / "tokenizer.json").exists()
    assert after(TEXT)["input_ids"] == before(TEXT)["input_ids"] == [1, *ours.encode(TEXT)]


@pytest.mark.parametrize("kind", [pytest.param("hf", marks=FULL), "sentencepiece"])
def test_what_was_learned_of_conversations_is_exported(kind: str, tmp_path: Path) -> None:
    """A chat model's exported template gives the token ids of training, and <|im_end|> is an exported end token."""
    pytest.importorskip("jinja2")
    vocab_file = str(tmp_path / ("tokenizer.json" if kind == "hf" else "t.model"))
    words = ["What is the capital of France? system user assistant. The river runs slowly to the sea. "] * 20
    if kind == "hf":
        train_byte_bpe(words, vocab_file, 310, "hf", [BEGIN, END])
    else:
        train_sentencepiece(words, vocab_file, 330, specials=[BEGIN, END])
    (tmp_path / "x.jsonl").write_text((json.dumps({"messages": CHAT}) + "\n") * 30)
    argv = ["--objective", "sft", "--input", str(tmp_path / "x.jsonl"), "--vocab-file", vocab_file, "--quiet"]
    done = command("python", "tools/preprocess_data.py", *argv, "--output-prefix", str(tmp_path / "chats"))
    assert done.returncode == 0, done.stderr
    flags = ["--objective", "sft", "--data-path", str(tmp_path / "chats_sft"), "--vocab-file", vocab_file]
    train("llama", 1, tmp_path / "run", *RUN, *flags, "--seq-length", "128")
    said = convert("--load", str(tmp_path / "run"), "--output", str(tmp_path / "out"))
    assert "note" not in said
    exported: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = load_tokenizer(vocab_file)
    for count in (4, 5):
        pieces = ChatML().pieces(parse_messages(CHAT[:count]))
        assert exported.apply_chat_template(CHAT[:count])["input_ids"] == ChatEncoder(ours, False).encode(pieces)[0]
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.eos_token_id == [ours.eod, ours.marks[END]]
    for flag, folder, load in (
        ("--load", "run", evaluate.load_subject),
        ("--load", "out", evaluate.load_subject),
        ("--hf", "out", evaluate.load_hf_subject),
    ):
        argv = [flag, str(tmp_path / folder), "--tasks", "gsm8k"]
        subject = load(evaluate_flags.build_parser().parse_args(argv))
        assert subject.eos_token_id == generation.eos_token_id, "an answer ends where one of transformers does"
    (tmp_path / "chats_sft.json").unlink()
    said = convert("--load", str(tmp_path / "run"), "--output", str(tmp_path / "lost"))
    assert "chats_sft has no sidecar file with the chat template, so no template is exported" in said
    assert json.loads((tmp_path / "lost" / "generation_config.json").read_text())["eos_token_id"] == ours.eod


def test_what_an_export_cannot_say_is_named(tmp_path: Path, vocab_file: str) -> None:
    """An export prints a note on each property of the chat format that the Hugging Face folder cannot express.

    The properties are: turn markers such as <|im_start|> that the tokenizer splits as plain text, the date in the
    prompts of the training data, templates besides the default one, and corpora with different templates.
    """
    pytest.importorskip("jinja2")
    sources = ["chatml", "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"]
    for name, source in zip("ab", sources, strict=True):
        about = {
            "fingerprint": "",
            "objective": "sft",
            "chat_template": source,
            **({"chat_date": "2024-07-26"} if name == "b" else {}),
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(about))
    ours = load_tokenizer(vocab_file)
    known = tmp_path / "t.model"
    known.write_bytes(Path(vocab_file).read_bytes())
    named = [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    for data, notes in (
        ("a", ["are text in this tokenizer", "not exported: rag"]),
        ("b", ["trained with 2024-07-26"]),
        ("b a", ["different chat templates; that of the first corpus"]),
    ):
        folder = tmp_path / f"out {data}"
        folder.mkdir()
        prefixes = [str(tmp_path / name) for name in data.split()]
        config = parse(["--family", "gpt2", "--objective", "sft", "--data-path", *prefixes])
        chat = export_tokenizer.chat_format_of(config, ours, str(known))
        said = "\n".join(export_tokenizer.write_tokenizer(folder, config, ours, str(known), chat))
        assert all(note in said for note in notes), said
        assert (folder / "chat_template.jinja").exists() == (data != "a")
        assert generation_settings({}, ours, known, chat.end_id)["eos_token_id"] == ours.eod
    plain = export_tokenizer.chat_format_of(parse(["--family", "gpt2"]), ours, str(known))
    assert plain.template == "d" and generation_settings({}, ours, known, plain.end_id)["eos_token_id"] == ours.eod


RUN = [
    "--split",
    "8,2",
    "--num-layers",
    "2",
    "--hidden-size",
    "32",
    "--num-attention-heads",
    "4",
    "--num-key-value-heads",
    "2",
    "--ff-hidden-size",
    "24",
    "--seq-length",
    "24",
    "--batch-size",
    "2",
    "--eval-iters",
    "0",
    "--no-tensorboard",
    "--precision",
    "fp32",
    "--train-iters",
    "2",
    "--lr",
    "0.05",
]
OURS = {
    "llama": "--kv-hidden-size 6",
    "llama with biases": "--hidden-bias --pipe-parallel-size 2",
    "qwen2": "--qkv-bias --tie-embeddings",
    "qwen3": "--qk-norm --sliding-window 8 --model-parallel-size 2",
    "mistral": "--sliding-window 8 --num-attention-heads 8 --num-key-value-heads 8",
}


@pytest.mark.parametrize("name", covering(list(OURS), lambda name: name == "qwen3"))
def test_ours_there_and_back(name: str, tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    world = 2 if "parallel" in OURS[name] else 1
    train(
        "llama",
        world,
        tmp_path / "run",
        *RUN,
        "--data-path",
        tiny_data,
        "--vocab-file",
        vocab_file,
        *OURS[name].split(),
    )
    round_trip(tmp_path / "run", tmp_path)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == name.split()[0]


@FULL
def test_what_none_of_theirs_is_leaves_nothing_behind(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    flags = [*RUN, "--data-path", tiny_data, "--vocab-file", vocab_file, "--qk-norm", "--qkv-bias"]
    train("llama", 1, tmp_path / "run", *flags)
    argv = ["--load", str(tmp_path / "run"), "--output", str(tmp_path / "hf")]
    done = command("python", "tools/convert_checkpoint.py", *argv)
    assert done.returncode == 1 and SENTENCES["qwen3_does_not_support_qkv_bias"] in done.stderr
    assert not (tmp_path / "hf").exists()
