"""tools/generate.py continues prompts from a flag, a file or a conversation, also on several ranks."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config.command_line import parse
from megatron.data.indexed_dataset import IndexedDataset
from megatron.model import GPT2Model, T5Model
from megatron.model.gpt2_layers import gpt2_layers
from megatron.model.t5 import t5_layers
from megatron.ranks import device as device_module
from megatron.ranks.initialize import initialize_megatron
from megatron_tools.write import evaluate, evaluate_flags, generate, generate_flags
from megatron_tools.write.generation import GPT2Stepper, Sampling, Stages, Stepper, T5Stepper, beam_searches, sample
from megatron_tools.write.writer import equal_length_batches, write_all
from tests.sentences import SENTENCES
from tests.support import FULL, ROOT, command, covering, on_ranks, train_gpt2
from tests.unit.test_generation import CPM_FLAGS, DECODERS, PROMPT
from tests.unit.test_t5_model import T5_FLAGS

KINDS = {
    "gpt2": DECODERS["gpt2"],
    "mistral": DECODERS["mistral"],
    "multi-query": DECODERS["llama"].replace(
        "--num-key-value-heads 2", "--num-key-value-heads 1"
    ),  # one key-value head for two tensor-parallel ranks
    "cpm": f"{CPM_FLAGS} --enc-seq-length 24",
    "t5": f"{T5_FLAGS} --init-method-std 0.2 --no-tie-embeddings --family t5 --enc-seq-length 24",
}


def _write(layout: str) -> list[Any]:
    """Return the token ids that each model of KINDS generates in `layout`, by sampling and by beam search."""
    found: list[Any] = []
    for kind, flags in KINDS.items():
        config = parse(f"{flags} {layout}".split())
        initialize_megatron(config)
        layers: Any = (gpt2_layers if kind not in ("cpm", "t5") else t5_layers)(config, 50)
        stages = Stages(layers) if config.parallel.pipe_parallel_size else None
        own = stages.own_layers if stages else None
        if kind not in ("cpm", "t5"):
            gpt2 = GPT2Model(config, parallel_output=False, own=own).eval()
            stepper: Stepper = GPT2Stepper(gpt2, PROMPT, 24, stages=stages)
        else:
            stepper = T5Stepper(T5Model(config, parallel_output=False, own=own).eval(), PROMPT * 3, 1, stages=stages)
        length = 30 if kind not in ("cpm", "t5") else 15  # GPT-2 must also continue beyond its 24 positions
        found += sample(stepper, 2, length, 49, Sampling(0.8, 0, 0.9), seed=3)
        found += [ids for _, ids in beam_searches(stepper, 3, 8, 49)[0]]
    return found


LAYOUTS = ["--pipe-parallel-size 2", "--pipe-parallel-size 2 --model-parallel-size 2", "--pipe-parallel-size 3"]


@pytest.mark.parametrize("layout", covering(LAYOUTS, lambda layout: layout.endswith("size 3")))
def test_stages_write_what_one_process_writes(layout: str) -> None:
    """All ranks of every layout generate the same tokens as one process, even with one layer per stage."""
    (expected,) = on_ranks(1, _write, "")
    world = 4 if "model" in layout else int(layout.split()[-1])
    for found in on_ranks(world, _write, layout):
        assert found == expected


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_data: str, vocab_file: str) -> str:
    folder = tmp_path_factory.mktemp("run")
    flags = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 32 --batch-size 2 --eval-iters 0"
    more = (
        f"--train-iters 1 --precision fp32 --sequence-parallel --no-tensorboard --data-path {tiny_data} "
        f"--vocab-file {vocab_file}"
    )
    train_gpt2(1, folder, *flags.split(), *more.split())
    return str(folder)


def test_a_file_of_prompts_over_ranks(tmp_path: Path, run: str) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text('春天\n{"prompt": "The road\\nhome"}\n\n', encoding="utf-8")
    argv = ["tools/generate.py", "--load", run, "--input", str(prompts), "--json", "--max-new-tokens", "12"]
    done = command("python", *argv)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["prompt"] for row in rows] == ["春天", "The road\nhome", ""]
    assert all(row["text"].startswith(row["prompt"]) and row["text"] != row["prompt"] for row in rows)
    layout = ["--pipe-parallel-size", "2", "--model-parallel-size", "2"]
    again = command("python", "tools/launch.py", "--standalone", "--nproc-per-node", "4", *argv, *layout)
    assert (again.returncode, again.stdout) == (0, done.stdout), again.stderr


def test_a_conversation_shows_texts_while_they_are_written(run: str) -> None:
    argv = [sys.executable, "tools/generate.py", "--load", run, "--max-new-tokens", "6", "--temperature", "0"]
    plain = [command("python", *argv[1:], "--prompt", text).stdout for text in ("春天", "路")]
    talk = subprocess.run(
        [*argv, "--interactive"], cwd=ROOT, input="春天\n路\n", capture_output=True, text=True, timeout=200, check=True
    )
    assert talk.stdout == "".join(plain)
    assert talk.stderr.count("> ") == 3


def test_a_gpt2_of_theirs(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=300, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path)
    argv = ["--input", str(ROOT / "corpus/sample.jsonl"), "--tokenizer-type", "hf", "--vocab-size", "300"]
    made = command("python", "tools/train_tokenizer.py", *argv, "--output", str(tmp_path / "tokenizer.json"), "--quiet")
    assert made.returncode == 0, made.stderr
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    ids = tokenizer("The road", return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=299, pad_token_id=299)
    more = ["--prompt", "The road", "--max-new-tokens", "8", "--temperature", "0"]
    done = command("python", "tools/generate.py", "--load", str(tmp_path), *more)
    assert done.returncode == 0, done.stderr
    assert done.stdout == tokenizer.decode(expected[0]) + "\n"


def test_what_does_not_go_together(run: str) -> None:
    done = command("python", "tools/generate.py", "--load", run, "--prompt", "a", "--stream", "--num-beams", "2")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert SENTENCES["stream_prints_one_text"] in done.stderr
    done = command("python", "tools/generate.py", "--load", run, "--prompt", "a", "--top-p", "0")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert SENTENCES["top_p_0_0_must_be"] in done.stderr
    done = command("python", "tools/generate.py", "--load", run, "--prompt", "a", "--interactive")
    assert SENTENCES["give_one_of_prompt_input_and"] in done.stderr


@pytest.fixture
def tool() -> Any:
    return generate


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--top-p 0", "--top-p 0.0 must be above 0 and at most 1"),
        ("--top-p nan", "--top-p nan must be above 0"),
        ("--top-p 1.5", "--top-p 1.5 must be above 0 and at most 1"),
        ("--top-k -1", "--top-k -1 must be at least 0"),
        ("--num-samples 0", "--num-samples 0 must be at least 1"),
        ("--temperature -1", "--temperature -1.0 must be at least 0"),
        ("--temperature inf", "--temperature inf must be at least 0"),
        ("--max-new-tokens 0", "--max-new-tokens 0 must be at least 1"),
        ("--num-beams -1", "--num-beams -1 must be at least 0"),
        ("--batch-size 0", "--batch-size 0 must be at least 1"),
        ("--model-parallel-size 0", "--model-parallel-size 0 must be at least 1"),
        ("--num-beams 2 --num-samples 3", "--num-samples 3 exceeds --num-beams 2"),
    ],
)
def test_numbers_without_sense(tool: Any, flags: str, sentence: str) -> None:
    args = generate_flags.build_parser().parse_args(["--load", "/no/where", *flags.split()])
    with pytest.raises(ValueError, match="^--") as error:
        tool.main(args)
    assert sentence in str(error.value)


TEXTS = ["春天", "The road", "一", "The road home", "春", "二", "The river", "", "三天"]


def test_different_prompts_draw_different_random_numbers(tool: Any, run: str) -> None:
    """All tokens are about equally likely at a high temperature; equal random numbers would give equal texts."""
    flags = ["--load", run, "--prompt", "", "--max-new-tokens", "12", "--temperature", "1000", "--top-p", "1"]
    args = generate_flags.build_parser().parse_args(flags)
    writer = tool.load_writer(args)
    prompts = ["春天", "秋天", "冬天", "夏天"]
    texts = {text.removeprefix(prompt) for prompt, (text,) in write_all(writer, prompts, args, 4)}
    assert len(texts) == 4


@pytest.mark.parametrize("flags", ["--temperature 0", "--num-beams 3 --num-samples 2", "--num-samples 2 --seed 5"])
def test_batches_of_prompts_are_answered_as_one_by_one(tool: Any, run: str, tmp_path: Path, flags: str) -> None:
    """A batch of prompts of different lengths gets the same continuations as each prompt alone, in the same order."""
    prompts = tmp_path / "prompts"
    prompts.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    base = ["--load", run, "--input", str(prompts), "--max-new-tokens", "12", *flags.split()]
    args = generate_flags.build_parser().parse_args(base)
    writer = tool.load_writer(args)
    asked = [writer.question(text) for text in TEXTS]
    sizes = [len(numbers) for numbers in equal_length_batches(asked, 3)]
    assert max(sizes) > 1 and len(sizes) > 2
    assert sorted(itertools.chain(*equal_length_batches(asked, 3))) == list(range(len(TEXTS)))
    single = list(write_all(writer, TEXTS, args, 1))
    assert [prompt for prompt, _ in single] == TEXTS
    for size in (2, 16):
        assert list(write_all(writer, TEXTS, args, size)) == single


def test_the_model_is_on_the_device_of_the_process(tool: Any, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are loaded to the process's device; torch's meta device stands in for a GPU."""
    there = torch.device("meta")
    monkeypatch.setattr(device_module, "current_device", lambda: there)
    model = tool.load_writer(generate_flags.build_parser().parse_args(["--load", run])).model
    assert {parameter.device for parameter in model.parameters()} == {there}
    monkeypatch.setattr(tool, "initialize_megatron", lambda config: there)
    monkeypatch.setattr(device_module, "current_device", lambda: torch.device("cpu"))
    model = tool.load_writer(
        generate_flags.build_parser().parse_args(["--load", run, "--model-parallel-size", "2"])
    ).model
    assert {parameter.device for parameter in model.parameters()} == {there}
    monkeypatch.setattr(device_module, "current_device", lambda: there)
    subject = evaluate.load_subject(evaluate_flags.build_parser().parse_args(["--load", run, "--cloze", "x"]))
    assert {parameter.device for parameter in subject.logits_of.parameters()} == {there} == {subject.device}
    assert subject.logits_of(torch.zeros(1, 5, dtype=torch.int64, device=there)).device == there


def test_what_the_model_puts_above_its_share(tool: Any, run: str) -> None:
    """The tokens with the highest lift p * log(p / q) are right, where p is a token's probability and q its frequency.

    The test computes p from the model's logits and q from the training corpus.
    """
    writer = tool.load_writer(generate_flags.build_parser().parse_args(["--load", run]))
    question = writer.question("春天")
    with torch.no_grad():
        logits = writer.model(torch.tensor([question.tokens]))[0, -1, : writer.tokenizer.vocab_size].double()
    p = logits.softmax(-1).numpy()
    prefix, split = writer.config.data.data_path[0], [float(x) for x in writer.config.data.split.split(",")]
    indexed = IndexedDataset(prefix)
    train = indexed.tokens[: indexed.document_ends()[int(round(split[0] / sum(split) * indexed.num_documents)) - 1]]
    share = (np.bincount(train, minlength=len(p)) + 1) / (len(train) + len(p))
    text = [i for i in range(len(p)) if i not in writer.tokenizer.specials.values()]
    best = sorted(text, key=lambda i: -p[i] * np.log(p[i] / share[i]))[:3]
    words = [f"{writer.tokenizer.decode([i])!r} {p[i]:.1%} ({p[i] / share[i]:.1f} times its share)" for i in best]
    assert writer.top_lift(question, 3) == "top lift: " + ", ".join(words)
    assert writer.top_lift(question, 10**6).count("times its share") == len(text), "all tokens but the special ones"


@FULL
@pytest.mark.timeout(1500)
def test_the_demo_of_t5_learns(tmp_path: Path) -> None:
    """scripts/run_t5.sh trains a T5 to a loss 0.5 nats below the unigram entropy; its predicted words fit the text."""
    done = command("bash", "scripts/run_t5.sh", env={"RUN_DIR": str(tmp_path / "t5")}, timeout=1200)
    assert done.returncode == 0, done.stderr
    text = float(re.findall(r"masked text only, first and last +[\d.]+, ([\d.]+)", done.stdout)[0])
    unigram = float(re.findall(r"unigram entropy of the masked text +([\d.]+)", done.stdout)[0])
    assert text < unigram - 0.5
    season, question, river = re.findall(r"top lift: (.*)", done.stdout)
    assert any(each in question for each in ("'吗'", "'。\"'")), "must end the question, or the quotation"
    assert re.search("' [a-z]+'", river) and not re.search("' [a-z]+'", season), "English words in English text only"
    assert re.search("[\\u4e00-\\u9fff]", season) and not re.search("[\\u4e00-\\u9fff]", river)
