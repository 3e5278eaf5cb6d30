"""Mixtures of experts through the commands: Hugging Face both ways, upcycling, averages, evaluation, generation."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpointing import CheckpointReader, find_checkpoint, load_weights, plain_config
from megatron.config.command_line import parse
from megatron.config.defaults import DEFAULTS
from megatron.model import GPT2Model, T5Model
from megatron_tools.convert import convert_checkpoint, convert_flags
from megatron_tools.convert.upcycle import upcycled_config
from megatron_tools.write import evaluate, evaluate_flags, generate, generate_flags
from megatron_tools.write.generation import Sampling, sample
from tests.checkpoints.test_contradicting_sizes import checkpoint, edit
from tests.cli.test_convert import T5, convert, round_trip
from tests.cli.test_convert_llama import RUN, TEXT, tokenizer_of
from tests.cli.test_tools import fails
from tests.support import ROOT, command, covering, losses, train
from tests.unit.test_hf_configs import KINDS

transformers = pytest.importorskip("transformers")
STYLES = {"mixtral": "llama2", "qwen2_moe": "qwen", "qwen3_moe": "qwen"}  # model -> style of its tokenizer
SMALL = covering(list(STYLES), lambda kind: kind == "qwen2_moe")


def folder_of(path: Path, kind: str) -> Path:
    """Save a random model of transformers with a tokenizer as a Hugging Face folder; return the folder."""
    tokenizer, named = tokenizer_of(STYLES[kind])
    make_config, make_model, small = KINDS[kind]
    ends = {f"{key}_id": tokenizer.token_to_id(name) for key, name in named.items()}
    sizes = {"vocab_size": tokenizer.get_vocab_size() + 3, "max_position_embeddings": 64}
    torch.manual_seed(1)
    model = make_model(make_config(**{**small, **sizes, **ends}))
    for parameter in model.parameters():
        parameter.data.normal_(0.0 if parameter.dim() > 1 else 0.5, 0.3)
    model.generation_config = transformers.GenerationConfig(eos_token_id=ends["eos_token_id"])
    model.save_pretrained(path, save_original_format=kind != "mixtral")
    tokenizer.save(str(path / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    (path / "tokenizer_config.json").write_text(json.dumps(about))
    return path


def theirs_of(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("kind", SMALL)
def test_there_and_back(kind: str, tmp_path: Path) -> None:
    """Weights survive import, two steps of training at rate 0 and export; tools use the folder as transformers does."""
    folder = folder_of(tmp_path / "theirs", kind)
    convert("--from-hf", str(folder), "--output", str(tmp_path / "c"), "--verify")
    argv = ["--input", str(ROOT / "corpus/sample.jsonl"), "--vocab-file", str(folder), "--quiet"]
    done = command("python", "tools/preprocess_data.py", *argv, "--output-prefix", str(tmp_path / "data"))
    assert done.returncode == 0, done.stderr
    flags = ["--config", str(tmp_path / "c/settings.json"), "--load", str(tmp_path / "c"), "--seq-length", "24"]
    flags += ["--data-path", str(tmp_path / "data_text_document"), "--batch-size", "2", "--train-iters", "2"]
    flags += ["--eval-iters", "0", "--precision", "fp32", "--no-tensorboard", "--lr", "0", "--min-lr", "0"]
    done = command("python", "pretrain_llama.py", *flags, "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stdout + done.stderr
    out = tmp_path / "out"
    convert("--load", str(tmp_path / "run"), "--output", str(out), "--verify", "--max-shard-size", "0.00005")
    before, after = theirs_of(folder), theirs_of(out)
    assert type(after) is type(before) and (out / "model.safetensors.index.json").exists()
    wanted, found = before.state_dict(), after.state_dict()
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[name], found[name]) for name in wanted)
    for source in (folder, out):
        check_text(source, before)
        check_loss(source, before, tmp_path)


def check_text(folder: Path, model: Any) -> None:
    """tools/generate.py continues a prompt with transformers' greedy tokens."""
    writer = generate.load_writer(generate_flags.build_parser().parse_args(["--load", str(folder), "--prompt", TEXT]))
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    asked = writer.question(TEXT)
    (found,) = sample(writer.stepper([asked.tokens]), 1, 20, asked.end_id, Sampling(temperature=0), 0)
    wanted = model.generate(**tokenizer(TEXT, return_tensors="pt"), max_new_tokens=20, do_sample=False)[0].tolist()
    assert [*asked.tokens, *found] == wanted


def check_loss(folder: Path, model: Any, tmp_path: Path) -> None:
    """tools/evaluate.py gives transformers' loss."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": TEXT}))
    ids, end = tokenizer(TEXT)["input_ids"], model.config.eos_token_id
    start = [] if ids[0] == model.config.bos_token_id else [end]  # Qwen has no token before a text
    text = torch.tensor([[*start, *ids, end]])
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(text[:, :-1]).logits[0], text[0, 1:])
    argv = ["--load", str(folder), "--input", str(tmp_path / "x.jsonl"), "--json", str(tmp_path / "e.json"), "--quiet"]
    evaluate.main(evaluate_flags.build_parser().parse_args(argv))
    found = json.loads((tmp_path / "e.json").read_text())
    assert (found["tokens"], found["loss"]) == (text.shape[1] - 1, pytest.approx(float(expected), rel=1e-5))


OURS = {
    "mixtral": "--num-experts 4 --expert-ff-hidden-size 12 --model-parallel-size 2",
    "qwen2_moe": "--num-experts 4 --qkv-bias --num-shared-experts 2 --shared-expert-gate --moe-layer-frequency 2 "
    "--tie-embeddings --pipe-parallel-size 2",
    "qwen3_moe": "--num-experts 4 --qk-norm --no-normalize-expert-weights --experts-per-token 3",
}


@pytest.mark.parametrize("kind", covering(list(OURS), lambda kind: kind == "mixtral"))
def test_ours_there_and_back(kind: str, tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    flags = OURS[kind].split()
    world = 2 if "parallel" in OURS[kind] else 1
    train("llama", world, tmp_path / "run", *RUN, "--data-path", tiny_data, "--vocab-file", vocab_file, *flags)
    round_trip(tmp_path / "run", tmp_path)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == kind


DENSE: dict[str, list[str]] = {
    "gpt2": ["--family", "gpt2", "--activation", "gelu"],
    "llama": ["--num-key-value-heads", "2"],
    "t5": [*T5, "--num-decoder-layers", "2"],
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory, tiny_data: str, vocab_file: str) -> Any:
    runs: dict[str, Path] = {}

    def run(family: str) -> Path:
        if family not in runs:
            runs[family] = tmp_path_factory.mktemp(family) / "run"
            at = RUN.index("--num-key-value-heads")  # a flag of Llama
            flags = [*RUN[:at], *RUN[at + 2 :], *DENSE[family], "--data-path", tiny_data, "--vocab-file", vocab_file]
            train(family, 1, runs[family], *flags)
        return runs[family]

    return run


@torch.no_grad()
def logits_of(load: Path) -> torch.Tensor:
    path = find_checkpoint(str(load))
    config = plain_config(CheckpointReader(path))
    model: Any = (T5Model if config.is_t5 else GPT2Model)(config, parallel_output=False).double().eval()
    load_weights(path, model)
    tokens = torch.randint(60, (3, 20), generator=torch.Generator().manual_seed(4))
    found: torch.Tensor = model(tokens, tokens[:, :9]) if config.is_t5 else model(tokens)
    return found


FLAGS = ["4", "1", "3 --experts-per-token 3", "5 --moe-layer-frequency 0 1"]
UPCYCLED = [(family, flags) for family in DENSE for flags in FLAGS]
# Each family with the usual flags and with one of the others.
IN_CI = [*((family, FLAGS[0]) for family in DENSE), *zip(DENSE, FLAGS[1:], strict=True)]


@pytest.mark.parametrize(("family", "flags"), covering(UPCYCLED, IN_CI.__contains__, several=True))
def test_an_upcycled_model_is_the_dense_one(family: str, flags: str, dense: Any, tmp_path: Path) -> None:
    """The logits are those of the dense model to 1e-6, every expert is its MLP, and there is no optimizer state."""
    load = dense(family)
    argv = ["--load", str(load), "--output", str(tmp_path / "c"), "--verify", "--upcycle", *flags.split()]
    said = convert(*argv)
    assert float(said.split("largest logit difference: ")[1].split()[0]) < 1e-5
    expected = logits_of(load)
    assert float((logits_of(tmp_path / "c") - expected).abs().max()) <= 1e-6 * float(expected.max() - expected.min())
    before, after = (CheckpointReader(find_checkpoint(str(each))) for each in (load, tmp_path / "c"))
    count, stack = int(flags.split()[0]), "encoder.layers.1" if family == "t5" else "layers.1"
    for what in ("dense_h_to_4h.weight", "dense_4h_to_h.weight"):
        wanted = before.read_whole(f"weight.{stack}.mlp.{what}")
        for e in range(count):
            assert torch.equal(after.read_whole(f"weight.{stack}.mlp.experts.{e}.{what}"), wanted)
    assert float(after.read_whole(f"weight.{stack}.mlp.router.weight").std()) == pytest.approx(0.02, rel=0.5)
    first = stack.replace("1", "0")
    assert (f"weight.{first}.mlp.router.weight" in after.tensors) == ("0 1" not in flags)
    assert not any(key.startswith(("exp_avg", "master")) for key in after.tensors)
    assert json.loads((after.path / "checkpoint.json").read_text())["optimizer"]["moments"] == []


@pytest.mark.parametrize("family", covering(list(DENSE), lambda family: family == "t5"))
def test_an_upcycled_model_trains_on(family: str, dense: Any, tmp_path: Path, tiny_data: str) -> None:
    """Training begins with the loss of the dense model, and changes the experts apart."""
    load = dense(family)
    convert("--load", str(load), "--output", str(tmp_path / "c"), "--upcycle", "4")
    flags = [
        "--data-path",
        tiny_data,
        "--split",
        "8,2",
        "--batch-size",
        "2",
        "--precision",
        "fp32",
        "--train-iters",
        "3",
    ]
    flags += ["--no-tensorboard", "--eval-iters", "0", "--log-interval", "1", "--lr", "0.01"]
    settings = tmp_path / "c" / "settings.json"
    vocab_file = json.loads(settings.read_text())["data"]["vocab_file"]
    assert Path(vocab_file).parent == tmp_path / "c" / "tokenizer"
    flags += ["--hidden-dropout", "0", "--attention-dropout", "0"]
    moe = train(family, 1, tmp_path / "moe", "--config", str(settings), "--load", str(tmp_path / "c"), *flags)
    dense_settings = json.loads(settings.read_text())
    del dense_settings["model"]["num_experts"]
    (tmp_path / "dense.json").write_text(json.dumps(dense_settings))
    start = ["--config", str(tmp_path / "dense.json"), "--load", str(load), "--finetune"]
    again = train(family, 1, tmp_path / "dense", *start, *flags)
    assert losses(moe)[0] == pytest.approx(losses(again)[0], rel=1e-6)
    assert losses(moe)[2] != losses(moe)[0]
    reader = CheckpointReader(find_checkpoint(str(tmp_path / "moe")))
    stack = "decoder.layers.1" if family == "t5" else "layers.1"
    experts = [reader.read_whole(f"weight.{stack}.mlp.experts.{e}.dense_4h_to_h.weight") for e in range(4)]
    assert all(not torch.equal(experts[0], each) for each in experts[1:])


def test_upcycling_refuses_by_name(dense: Any, tmp_path: Path) -> None:
    load = ["--load", str(dense("llama"))]
    convert(*load, "--output", str(tmp_path / "c"), "--upcycle", "4")
    out = ["--output", str(tmp_path / "d")]
    for argv, message in (
        ([*load, "--upcycle", "0"], "--num-experts 0 must be at least 1"),
        ([*load, "--upcycle", "2", "--experts-per-token", "3"], "--experts-per-token 3 is more than --num-experts 2"),
        ([*load, "--upcycle", "2", "--moe-layer-frequency", "1", "0", "1"], "--moe-layer-frequency has 3 numbers"),
        ([*load, "--experts-per-token", "3"], "--experts-per-token needs --upcycle"),
        ([*load, "--upcycle", "3", "--dtype", "bf16"], "--dtype is for an export"),
        (["--from-hf", "x", "--max-shard-size", "1"], "--max-shard-size is for an export"),
        (["--from-hf", "x", "--upcycle", "3"], "--upcycle needs --load"),
        (["--from-hf", "x", "--upcycle", "0"], "--upcycle needs --load"),
        ([*load, "--experts-per-token", "0"], "--experts-per-token needs --upcycle"),
        ([*load, "--upcycle", "2", "--experts-per-token", "0"], "--experts-per-token 0 must be at least 1"),
        (["--load", str(tmp_path / "c"), "--upcycle", "4"], "the model already has --num-experts 4"),
    ):
        assert message in fails("tools/convert_checkpoint.py", *argv, *out)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("--compile --precision bf16", {"compile": None, "precision": "bf16"}),
        ("--precision fp8", {"compile": None, "precision": "bf16"}),
    ],
)
def test_a_dense_run_may_use_what_experts_cannot(flags: str, kept: dict[str, Any], tmp_path: Path) -> None:
    reader: Any = SimpleNamespace(path=tmp_path, config=parse(flags.split()).to_dict(), tensors={})
    train = upcycled_config(reader, 4, None, None).train
    assert {name: getattr(train, name) for name in kept} == kept


def test_averages_of_mixtures(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """The average holds the mean of every expert and router, and the buffers of the last checkpoint."""
    flags = [*RUN, "--num-experts", "3", "--router-balance", "bias", "--save-interval", "1"]
    train("llama", 1, tmp_path / "run", *flags, "--data-path", tiny_data, "--vocab-file", vocab_file)
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("iter_*"))[-2:]
    argv = ["--load", *map(str, checkpoints), "--output", str(tmp_path / "out")]
    done = command("python", "tools/average_checkpoints.py", *argv)
    assert done.returncode == 0, done.stderr
    a, b, found = (CheckpointReader(path) for path in (*checkpoints, tmp_path / "out" / "iter_0000000"))
    keys = [key for key in b.tensors if key.startswith(("weight.", "buffer."))]
    assert any(".experts.2." in key for key in keys) and any(key.endswith("bias_steps") for key in keys)
    for key in keys:
        old, new, mean = (each.read_whole(key) for each in (a, b, found))
        expected = new if key.startswith("buffer.") else ((old.double() + new.double()) / 2).float()
        torch.testing.assert_close(mean, expected, rtol=1e-6, atol=1e-8)
    assert torch.isfinite(logits_of(tmp_path / "out")).all()


def test_an_upcycled_t5_keeps_the_length_of_its_decoder(tmp_path: Path) -> None:
    load = checkpoint(tmp_path, "t5")
    edit(load, lambda content: content["config"]["data"].update(dec_seq_length=6))
    argv = ["--load", str(load), "--output", str(tmp_path / "e"), "--upcycle", "2"]
    convert_checkpoint.main(convert_flags.build_parser().parse_args(argv))
    config = parse(["--config", str(tmp_path / "e" / "settings.json")], DEFAULTS["t5"])
    assert (config.data.dec_seq_length, config.model.num_experts) == (6, 2)
