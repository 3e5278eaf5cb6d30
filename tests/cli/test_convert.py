"""To Hugging Face and back: the same logits, the same bits, from every layout that saved."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing import CheckpointReader, find_checkpoint, load_weights, plain_config
from megatron.generation import Sampling, T5Stepper, sample
from megatron.model import GPT2Model, T5Model
from megatron.tokenizer import SentinelTokenizer, load_tokenizer
from tests.support import FULL, ROOT, command, train_gpt2, train_t5

transformers = pytest.importorskip("transformers")

SMALL = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--batch-size", "2", "--lr", "0.05", "--train-iters", "2", "--eval-iters", "0", "--precision", "fp32", "--no-tensorboard", "--log-interval", "1"]  # fmt: skip
T5 = ["--num-decoder-layers", "3", "--kv-hidden-size", "6", "--ff-hidden-size", "40", "--no-hidden-bias", "--normalization", "rmsnorm", "--enc-seq-length", "32", "--position-embedding", "relative", "--no-scale-attention", "--activation", "gated-gelu", "--num-sentinels", "20"]  # fmt: skip


@pytest.fixture(scope="module")
def hf_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer that transformers can read."""
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
    worst = float(said.split("largest difference of a logit: ")[1].split()[0])
    assert worst < 1e-5
    back = convert("--from-hf", str(tmp_path / "hf"), "--output", str(tmp_path / "back"), "--verify")
    assert float(back.split("largest difference of a logit: ")[1].split()[0]) < 1e-5
    ours, again = weights(run), weights(tmp_path / "back")
    assert ours.keys() == again.keys()
    assert all(torch.equal(ours[key], again[key]) for key in ours)


def check_evaluation(tmp_path: Path, theirs: Any, tokenizer: Any) -> None:
    """Perplexity with a stride of one token, against a loop that asks for each token by itself."""
    texts = ["春天来了，花开了。", "It was a dark night, and the rain fell in torrents over the town. " * 2]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    nats, count, eod = 0.0, 0, theirs.config.eos_token_id
    for text in texts:
        ids = [eod, *tokenizer(text)["input_ids"], eod]
        for at in range(1, len(ids)):
            with torch.no_grad():
                logits = theirs(torch.tensor([ids[max(at - 24, 0) : at]])).logits[0, -1]
            nats -= float(logits.log_softmax(-1)[ids[at]])
            count += 1
    bits = nats / math.log(2) / sum(len(text.encode()) for text in texts)
    for source in (["--load", str(tmp_path / "run")], ["--hf", str(tmp_path / "hf")]):
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
        assert found["loss"] == pytest.approx(nats / count, rel=1e-5)
        assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-5)


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, []),  # and evaluated
        (4, ["--pipe-parallel-size", "2", "--model-parallel-size", "2"]),
        pytest.param(2, ["--model-parallel-size", "2", "--no-tie-embeddings"], marks=FULL),
    ],
    ids=["one process", "pp2-tp2", "tp2 untied"],
)
def test_gpt2(tmp_path: Path, tiny_data: str, hf_file: str, vocab_file: str, world: int, layout: list[str]) -> None:
    """With the tokenizer that our scripts train as well as with one of theirs."""
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
    assert (theirs.config.pad_token_id, theirs.config.eos_token_id) == (ours.pad, ours.eod)
    path = find_checkpoint(str(tmp_path / "run"))
    model = T5Model(plain_config(CheckpointReader(path)), parallel_output=False).eval()
    load_weights(path, model)
    source = [*ours.encode(text), ours.eod]
    (found,) = sample(T5Stepper(model, source, ours.pad), 1, 12, ours.eod, Sampling(temperature=0), seed=0)
    # Without its cache, which counts the encoder's layers where it needs the decoder's (transformers 5.23).
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
        (["--no-hidden-bias"], "cannot be a model with --no-hidden-bias"),
        (["--kv-hidden-size", "6"], "cannot be a model with --kv-hidden-size 6"),
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
    assert "weights in pickled files are not read" in says("--from-hf", str(tmp_path / "pickled"))
    assert "a model of type 'bert'; gpt2, t5 and mt5 can be converted" in says("--from-hf", str(tmp_path / "other"))
    assert "is not a model of Hugging Face" in says("--from-hf", str(tmp_path))
    assert "give one of --load" in says()


def test_a_tokenizer_that_cuts_words_stays_what_it_is(tmp_path: Path, sample_corpus: Path) -> None:
    """transformers cannot run jieba from a tokenizer.json: nothing that would split otherwise is written."""
    from data_utils.documents import texts
    from megatron.hf_tokenizer import as_theirs
    from megatron.tokenizer.train import train_cpm, train_sentencepiece

    train_cpm(texts([str(sample_corpus)]), str(tmp_path / "cpm.model"), 3000)
    assert as_theirs(load_tokenizer(str(tmp_path / "cpm.model"))) is None
    for kind in ("bpe", "unigram"):
        train_sentencepiece(texts([str(sample_corpus)]), str(tmp_path / "own.model"), 3000, kind)
        ours = load_tokenizer(str(tmp_path / "own.model"))
        theirs: Any = as_theirs(ours)
        for text in texts([str(sample_corpus)]):
            assert theirs.encode(text, add_special_tokens=False).ids == ours.encode(text)
            assert theirs.decode(ours.encode(text)) == text
