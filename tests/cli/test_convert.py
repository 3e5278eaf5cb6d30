"""Checkpoints of every layout convert to Hugging Face with equal logits, and back with bit-identical weights."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing import CheckpointReader, find_checkpoint, load_weights, plain_config
from megatron.model import GPT2Model, T5Model
from megatron.tokenizer import SentinelTokenizer, load_tokenizer
from megatron_tools.convert import convert_flags
from megatron_tools.write.generation import Sampling, T5Stepper, sample
from megatron_tools.write.questions import PromptEncoder
from tests.sentences import SENTENCES
from tests.support import FULL, ROOT, command, train_gpt2, train_t5

transformers = pytest.importorskip("transformers")

SMALL = [
    "--num-layers",
    "2",
    "--hidden-size",
    "32",
    "--num-attention-heads",
    "4",
    "--batch-size",
    "2",
    "--lr",
    "0.05",
    "--train-iters",
    "2",
    "--eval-iters",
    "0",
    "--precision",
    "fp32",
    "--no-tensorboard",
    "--log-interval",
    "1",
]
T5 = [
    "--num-decoder-layers",
    "3",
    "--kv-hidden-size",
    "6",
    "--ff-hidden-size",
    "40",
    "--no-hidden-bias",
    "--normalization",
    "rmsnorm",
    "--family",
    "t5",
    "--enc-seq-length",
    "32",
    "--position-embedding",
    "relative",
    "--no-scale-attention",
    "--activation",
    "gated-gelu",
    "--num-sentinels",
    "20",
]


@pytest.fixture(scope="module")
def hf_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer file that transformers can read."""
    path = str(tmp_path_factory.mktemp("hf") / "tokenizer.json")
    argv = [
        "--input",
        str(ROOT / "corpus/sample.jsonl"),
        "--tokenizer-type",
        "hf",
        "--vocab-size",
        "3000",
        "--output",
        path,
    ]
    done = command("python", "tools/train_tokenizer.py", *argv, "--quiet")
    assert done.returncode == 0, done.stderr
    return path


def convert(*argv: str) -> str:
    done = command("python", "tools/convert_checkpoint.py", *argv)
    assert done.returncode == 0, done.stderr
    return done.stdout


def weights(path: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(find_checkpoint(str(path)))
    names = [key for key in reader.tensors if key.startswith("weight.")]
    return {
        key: reader.read(key, reader.tensors[key]["dim"], 0, reader.tensors[key]["shape"][reader.tensors[key]["dim"]])
        for key in names
    }


def round_trip(run: Path, tmp_path: Path, *shards: str) -> None:
    said = convert("--load", str(run), "--output", str(tmp_path / "hf"), "--verify", *shards)
    worst = float(said.split("largest logit difference: ")[1].split()[0])
    assert worst < 1e-5
    back = convert("--from-hf", str(tmp_path / "hf"), "--output", str(tmp_path / "back"), "--verify")
    assert float(back.split("largest logit difference: ")[1].split()[0]) < 1e-5
    ours, again = weights(run), weights(tmp_path / "back")
    assert ours.keys() == again.keys()
    assert all(torch.equal(ours[key], again[key]) for key in ours)


def check_evaluation(tmp_path: Path, theirs: Any, tokenizer: Any) -> None:
    """Check tools/evaluate.py --stride 1 against a loop that scores every token with transformers."""
    texts = ["春天来了，花开了。", "It was a dark night, and the rain fell in torrents over the town. " * 2]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    count, eod = 0, theirs.config.eos_token_id
    nats = dict.fromkeys((24, 5), 0.0)  # window length in tokens -> total loss in nats
    for text in texts:
        ids = [eod, *tokenizer(text)["input_ids"], eod]
        for at in range(1, len(ids)):
            for window in nats:
                with torch.no_grad():
                    logits = theirs(torch.tensor([ids[max(at - window, 0) : at]])).logits[0, -1]
                nats[window] -= float(logits.log_softmax(-1)[ids[at]])
            count += 1
    run, folder = ["--load", str(tmp_path / "run")], ["--hf", str(tmp_path / "hf")]
    for window, source in ((24, run), (24, folder), (5, [*run, "--window", "5"])):
        argv = [
            "--input",
            str(tmp_path / "x.jsonl"),
            "--stride",
            "1",
            "--json",
            str(tmp_path / "found.json"),
            "--quiet",
        ]
        done = command("python", "tools/evaluate.py", *source, *argv)
        assert done.returncode == 0, done.stderr
        found = json.loads((tmp_path / "found.json").read_text())
        assert found["tokens"] == count
        assert found["loss"] == pytest.approx(nats[window] / count, rel=1e-5)
        bits = nats[window] / math.log(2) / sum(len(text.encode()) for text in texts)
        assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    done = command("python", "tools/evaluate.py", *run, "--input", str(tmp_path / "x.jsonl"), "--window", "25")
    assert done.returncode and SENTENCES["window_25_must_be_from_1"] in done.stderr


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, []),  # on one rank, the test also checks evaluation
        (4, ["--pipe-parallel-size", "2", "--model-parallel-size", "2"]),
        pytest.param(2, ["--model-parallel-size", "2", "--no-tie-embeddings"], marks=FULL),
    ],
    ids=["one process", "pp2-tp2", "tp2 untied"],
)
def test_gpt2(tmp_path: Path, tiny_data: str, hf_file: str, vocab_file: str, world: int, layout: list[str]) -> None:
    """GPT-2 is converted to Hugging Face and back, with a sentencepiece tokenizer or with a tokenizer.json."""
    hf_file = vocab_file if world == 4 else hf_file
    train_gpt2(
        world,
        tmp_path / "run",
        *SMALL,
        "--data-path",
        tiny_data,
        "--vocab-file",
        hf_file,
        "--seq-length",
        "24",
        *layout,
    )
    round_trip(tmp_path / "run", tmp_path, *(["--max-shard-size", "0.0001"] if world == 4 else []))
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() == (world == 4)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = load_tokenizer(hf_file)
    if world == 1:
        check_evaluation(tmp_path, theirs, tokenizer)
    prompt = "春天来了"
    assert tokenizer(prompt)["input_ids"] == ours.encode(prompt)
    ids = theirs.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=8, do_sample=False)
    done = command(
        "python",
        "tools/generate.py",
        "--load",
        str(tmp_path / "run"),
        "--prompt",
        prompt,
        "--max-new-tokens",
        "8",
        "--top-k",
        "1",
        "--num-samples",
        "1",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip("\n") == tokenizer.decode(ids[0], skip_special_tokens=True).strip("\n")


@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, ["--no-tie-embeddings"]), (2, ["--pipe-parallel-size", "2", "--tie-embeddings", "--scale-tied-logits"])],
    ids=["untied", "pp2 tied"],
)
def test_t5(tmp_path: Path, tiny_data: str, hf_file: str, vocab_file: str, world: int, layout: list[str]) -> None:
    hf_file = vocab_file if world == 2 else hf_file
    train_t5(world, tmp_path / "run", *SMALL, *T5, "--data-path", tiny_data, "--vocab-file", hf_file, *layout)
    round_trip(tmp_path / "run", tmp_path)
    theirs: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = SentinelTokenizer(load_tokenizer(hf_file), 20, "t5")
    text = "春天<extra_id_0>花<extra_id_1>开"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
    asked = PromptEncoder(ours).question(text).tokens
    assert tokenizer(text)["input_ids"] == tokenizer(text_target=text)["input_ids"] == asked, "the end token ends both"
    assert (theirs.config.pad_token_id, theirs.config.eos_token_id) == (ours.pad, ours.eod)
    path = find_checkpoint(str(tmp_path / "run"))
    model = T5Model(plain_config(CheckpointReader(path)), parallel_output=False).eval()
    load_weights(path, model)
    source = [*ours.encode(text), ours.eod]
    (found,) = sample(T5Stepper(model, source, ours.pad), 1, 12, ours.eod, Sampling(temperature=0), seed=0)
    # The cache is off: transformers 5.23 sizes it by the encoder's layers instead of the decoder's.
    expected = theirs.generate(torch.tensor([source]), max_new_tokens=12, do_sample=False, use_cache=False)
    assert expected[0].tolist() == [ours.pad, *found]


def test_t5_with_divided_scores_is_exported_with_smaller_queries(tmp_path: Path, tiny_data: str, hf_file: str) -> None:
    data = ["--data-path", tiny_data, "--vocab-file", hf_file]
    train_t5(
        1, tmp_path / "run", *SMALL, *T5, *data, "--scale-attention", "--no-tie-embeddings", "--init-method-std", "0.3"
    )
    convert("--load", str(tmp_path / "run"), "--output", str(tmp_path / "hf"))
    theirs: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf")
    path = find_checkpoint(str(tmp_path / "run"))
    model = T5Model(plain_config(CheckpointReader(path)), parallel_output=False).eval()
    load_weights(path, model)
    read, written = torch.randint(2000, (2, 2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(input_ids=read, decoder_input_ids=written).logits
        torch.testing.assert_close(model(read, written), expected, rtol=1e-4, atol=1e-4)


@FULL
def test_a_model_of_theirs_trains_on(tmp_path: Path, tiny_data: str, hf_file: str) -> None:
    config = transformers.GPT2Config(vocab_size=3000, n_positions=24, n_embd=32, n_layer=2, n_head=4)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "hf")
    convert("--from-hf", str(tmp_path / "hf"), "--output", str(tmp_path / "c"), "--vocab-file", hf_file, "--verify")
    load = ["--load", str(tmp_path / "c"), "--data-path", tiny_data, "--vocab-file", hf_file, "--seq-length", "24"]
    rows = train_gpt2(
        2, tmp_path / "run", *SMALL, *load, "--pipe-parallel-size", "2", "--max-position-embeddings", "24"
    )
    model = GPT2Model(plain_config(CheckpointReader(find_checkpoint(str(tmp_path / "c")))))
    load_weights(find_checkpoint(str(tmp_path / "c")), model)
    assert [row["iteration"] for row in rows if row["split"] == "train"] == [1, 2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--no-hidden-bias"], "--no-hidden-bias"),
        (["--kv-hidden-size", "6"], "--kv-hidden-size 6"),
    ],
)
def test_what_gpt2_cannot_be_is_refused(
    tmp_path: Path, tiny_data: str, hf_file: str, flags: list[str], message: str
) -> None:
    train_gpt2(
        1, tmp_path / "run", *SMALL, "--data-path", tiny_data, "--vocab-file", hf_file, "--seq-length", "24", *flags
    )
    done = command(
        "python", "tools/convert_checkpoint.py", "--load", str(tmp_path / "run"), "--output", str(tmp_path / "hf")
    )
    assert done.returncode == 1
    assert message in done.stderr
    assert not (tmp_path / "hf").exists()


def test_mistakes(tmp_path: Path) -> None:
    def says(*argv: str) -> str:
        done = command("python", "tools/convert_checkpoint.py", *argv, "--output", str(tmp_path / "o"))
        assert done.returncode == 1
        assert len(done.stderr.strip().splitlines()) == 1
        return done.stderr

    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 9, "n_positions": 8})
    )
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "bert"}')
    assert "pickled weights are not read" in says("--from-hf", str(tmp_path / "pickled"))
    assert "'bert'; only gpt2, t5, mt5, umt5, llama, qwen2, qwen3, mistral" in says(
        "--from-hf", str(tmp_path / "other")
    )
    assert "is not a Hugging Face model" in says("--from-hf", str(tmp_path))
    assert "give one of --load" in says()


def test_a_tokenizer_that_cuts_words_stays_what_it_is(tmp_path: Path, sample_corpus: Path) -> None:
    """A tokenizer that needs jieba is not exported, since transformers would split text differently.

    A sentencepiece tokenizer is exported, and the exported tokenizer gives the same token ids.
    """
    from data_utils.documents import read_texts
    from data_utils.tokenizer_training import train_cpm, train_sentencepiece
    from megatron_tools.convert.hf_tokenizer import to_hf_tokenizer

    train_cpm(read_texts([str(sample_corpus)]), str(tmp_path / "cpm.model"), 3000)
    assert to_hf_tokenizer(load_tokenizer(str(tmp_path / "cpm.model"))) is None
    for kind in ("bpe", "unigram"):
        train_sentencepiece(read_texts([str(sample_corpus)]), str(tmp_path / "own.model"), 3000, kind)
        ours = load_tokenizer(str(tmp_path / "own.model"))
        theirs: Any = to_hf_tokenizer(ours)
        for text in read_texts([str(sample_corpus)]):
            assert theirs.encode(text, add_special_tokens=False).ids == ours.encode(text)
            assert theirs.decode(ours.encode(text)) == text


# ------------------------------------------------------------- Hugging Face's tokens and settings


def their_t5(folder: Path, hf_file: str) -> Any:
    """Save a transformers T5 and its tokenizer, with ids as in t5-small; return the model.

    <pad> and </s> come first, sentinels last, and the embedding has spare rows.
    """
    from tokenizers import Tokenizer

    content = json.loads(Path(hf_file).read_text(encoding="utf-8"))
    pieces = list(content["model"]["vocab"])
    content["model"]["vocab"] = {"<pad>": 0, "</s>": 1} | {
        piece: 2 + i for i, piece in enumerate(piece for piece in pieces if piece not in ("<pad>", "</s>"))
    }
    content["added_tokens"], content["post_processor"] = [], None
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens(["<pad>", "</s>", *(f"<extra_id_{i}>" for i in reversed(range(20)))])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"})
    )
    size = -(-tokenizer.get_vocab_size() // 64) * 64
    config = transformers.T5Config(
        vocab_size=size, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False, decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(3)
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    return tokenizer


def test_a_t5_of_theirs_keeps_its_special_tokens(tmp_path: Path, hf_file: str) -> None:
    tokenizer = their_t5(tmp_path / "theirs", hf_file)
    said = convert("--from-hf", str(tmp_path / "theirs"), "--output", str(tmp_path / "c"), "--verify")
    settings = tmp_path / "c" / "settings.json"
    assert f"--config {settings} --load {tmp_path / 'c'}" in said
    config = json.loads(settings.read_text())
    ours = SentinelTokenizer(load_tokenizer(config["data"]["vocab_file"]), config["data"]["num_sentinels"], "t5")
    assert (ours.pad, ours.eod, config["data"]["num_sentinels"]) == (0, 1, 20)
    assert ours.sentinels == tuple(tokenizer.token_to_id(f"<extra_id_{i}>") for i in range(20))
    assert ours.vocab_size == tokenizer.get_vocab_size() < config["model"]["vocab_size"]
    text = "春天<extra_id_0>花<extra_id_1>开"
    assert ours.encode(text) == tokenizer.encode(text).ids and ours.decode(ours.encode(text)) == text
    # Continue training with the command that the converter printed, convert the result back, and generate text.
    argv = ["--input", str(ROOT / "corpus/sample.jsonl"), "--vocab-file", str(tmp_path / "theirs"), "--quiet"]
    done = command("python", "tools/preprocess_data.py", *argv, "--output-prefix", str(tmp_path / "data"))
    assert done.returncode == 0, done.stderr
    train = [
        "--config",
        str(settings),
        "--load",
        str(tmp_path / "c"),
        "--data-path",
        str(tmp_path / "data_text_document"),
    ]
    more = [
        "--enc-seq-length",
        "32",
        "--batch-size",
        "2",
        "--train-iters",
        "2",
        "--eval-iters",
        "0",
        "--precision",
        "fp32",
    ]
    rows = train_t5(
        2, tmp_path / "run", *train, *more, "--pipe-parallel-size", "2", "--log-interval", "1", "--lr", "0.001"
    )
    assert len(rows) == 2
    convert("--load", str(tmp_path / "run"), "--output", str(tmp_path / "back"), "--verify")
    described = json.loads((tmp_path / "back" / "config.json").read_text())
    assert [described[key] for key in ("pad_token_id", "decoder_start_token_id", "eos_token_id")] == [0, 0, 1]
    theirs: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
    convert("--from-hf", str(tmp_path / "back"), "--output", str(tmp_path / "again"), "--verify")
    done = command(
        "python", "tools/generate.py", "--load", str(tmp_path / "again"), "--prompt", text, "--max-new-tokens", "5"
    )
    assert done.returncode == 0, done.stderr


def test_saved_again_by_transformers_it_is_the_same_to_the_bit(tmp_path: Path, tiny_data: str, hf_file: str) -> None:
    """A T5 that was exported, saved again by transformers 5 and imported has the same weights.

    transformers 5 writes `tie_word_embeddings: true` even for untied weights.
    """
    train_t5(1, tmp_path / "run", *SMALL, *T5, "--data-path", tiny_data, "--vocab-file", hf_file, "--no-tie-embeddings")
    convert("--load", str(tmp_path / "run"), "--output", str(tmp_path / "hf"), "--verify")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf")
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is True
    convert(
        "--from-hf", str(tmp_path / "saved"), "--output", str(tmp_path / "back"), "--verify", "--vocab-file", hf_file
    )
    ours, again = weights(tmp_path / "run"), weights(tmp_path / "back")
    assert ours.keys() == again.keys() and all(torch.equal(ours[key], again[key]) for key in ours)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"eos_token_id": 7}, "eos_token_id is 7, but the tokenizer ends texts with 1"),
        ({"pad_token_id": 7}, "pad_token_id is 7, but the tokenizer pads with 0"),
        ({"decoder_start_token_id": 7}, "decoder_start_token_id is 7"),
    ],
    ids=["eos", "pad", "start"],
)
def test_other_special_tokens_are_refused(tmp_path: Path, hf_file: str, edit: dict[str, int], message: str) -> None:
    their_t5(tmp_path / "hf", hf_file)
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | edit))
    done = command(
        "python", "tools/convert_checkpoint.py", "--from-hf", str(tmp_path / "hf"), "--output", str(tmp_path / "c")
    )
    assert done.returncode == 1 and message in done.stderr
    assert not (tmp_path / "c").exists()


def test_another_tokenizer_is_refused(tmp_path: Path, hf_file: str, vocab_file: str) -> None:
    their_t5(tmp_path / "hf", hf_file)
    given = ["--output", str(tmp_path / "c"), "--vocab-file", vocab_file]
    done = command("python", "tools/convert_checkpoint.py", "--from-hf", str(tmp_path / "hf"), *given)
    assert done.returncode == 1
    assert f"{vocab_file} is not the tokenizer of {tmp_path / 'hf'}" in done.stderr


@pytest.mark.parametrize("dtype", ["fp32", "bf16", pytest.param("fp16", marks=FULL)])
def test_verifying_fails_where_a_model_is_another(
    tmp_path: Path, tiny_data: str, hf_file: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_tools.convert import convert_checkpoint

    train_gpt2(1, tmp_path / "run", *SMALL, "--data-path", tiny_data, "--vocab-file", hf_file, "--seq-length", "24")
    convert("--load", str(tmp_path / "run"), "--output", str(tmp_path / "hf"), "--dtype", dtype, "--verify")
    entries = convert_checkpoint.export_entries

    def slightly_wrong(*args: Any) -> Any:
        found = entries(*args)
        last = found[-1]
        wrong = dataclasses.replace(last, build=lambda: last.build() * 1.01)
        return [*found[:-1], wrong]

    monkeypatch.setattr(convert_checkpoint, "export_entries", slightly_wrong)
    args = convert_flags.build_parser().parse_args(
        ["--load", str(tmp_path / "run"), "--output", str(tmp_path / "wrong"), "--dtype", dtype, "--verify"]
    )
    with pytest.raises(ValueError, match=SENTENCES["is_not_the_same_model_its"]):
        convert_checkpoint.main(args)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("wrong")] == []


def test_gpt2_is_continued_in_two_commands(tmp_path: Path, tiny_data: str, hf_file: str) -> None:
    config = transformers.GPT2Config(
        vocab_size=3000, n_positions=48, n_embd=32, n_layer=2, n_head=4, n_inner=40, activation_function="gelu"
    )
    torch.manual_seed(5)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "hf")
    convert("--from-hf", str(tmp_path / "hf"), "--output", str(tmp_path / "c"), "--vocab-file", hf_file, "--verify")
    load = ["--config", str(tmp_path / "c" / "settings.json"), "--load", str(tmp_path / "c"), "--data-path", tiny_data]
    more = [
        "--batch-size",
        "2",
        "--train-iters",
        "1",
        "--eval-iters",
        "0",
        "--precision",
        "fp32",
        "--log-interval",
        "1",
    ]
    rows = train_gpt2(
        2,
        tmp_path / "run",
        *load,
        *more,
        "--pipe-parallel-size",
        "2",
        "--hidden-dropout",
        "0",
        "--attention-dropout",
        "0",
    )
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["activation"] == "gelu"
    # The first training loss equals the loss of the transformers model on the same samples.
    from megatron.data.gpt2_dataset import build_train_valid_test_datasets

    (samples, _, _), _ = build_train_valid_test_datasets([tiny_data], "949,50,1", 48, 1234, 3000)
    text = torch.stack([torch.as_tensor(samples[i]["text"]) for i in range(2)]).long()
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        logits = model(text[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    assert rows[0]["lm_loss"] == pytest.approx(expected.item(), rel=1e-5)
