"""tools/generate.py: prompts from a flag, a file or a conversation; over ranks of both kinds; from Hugging Face."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.arguments import parse
from megatron.generation import GPT2Stepper, Sampling, Stages, Stepper, T5Stepper, beam_search, sample
from megatron.initialize import initialize_megatron
from megatron.model import GPT2Model, T5Model
from megatron.model.gpt2 import gpt2_layers
from megatron.model.t5 import t5_layers
from tests.support import ROOT, command, covering, on_ranks, train_gpt2
from tests.unit.test_generation import CPM_FLAGS, GPT2_FLAGS, PROMPT
from tests.unit.test_t5_model import T5_FLAGS

KINDS = {
    "gpt2": GPT2_FLAGS,
    "cpm": f"{CPM_FLAGS} --enc-seq-length 24",
    "t5": f"{T5_FLAGS} --init-method-std 0.2 --no-tie-embeddings --enc-seq-length 24",
}


def _write(layout: str) -> list[Any]:
    """What each kind of model writes, by sampling and by beams."""
    found: list[Any] = []
    for kind, flags in KINDS.items():
        config = parse(f"{flags} {layout}".split())
        initialize_megatron(config)
        layers: Any = (gpt2_layers if kind == "gpt2" else t5_layers)(config, 50)
        stages = Stages(layers) if config.parallel.pipe_parallel_size else None
        own = stages.own if stages else None
        if kind == "gpt2":
            gpt2 = GPT2Model(config, parallel_output=False, own=own).eval()
            stepper: Stepper = GPT2Stepper(gpt2, PROMPT, 24, stages=stages)
        else:
            stepper = T5Stepper(T5Model(config, parallel_output=False, own=own).eval(), PROMPT * 3, 1, stages=stages)
        length = 30 if kind == "gpt2" else 15  # behind the last position of GPT-2
        found += sample(stepper, 2, length, 49, Sampling(0.8, 0, 0.9), seed=3)
        found += [ids for _, ids in beam_search(stepper, 3, 8, 49)]
    return found


LAYOUTS = ["--pipe-parallel-size 2", "--pipe-parallel-size 2 --model-parallel-size 2", "--pipe-parallel-size 3"]


@pytest.mark.parametrize("layout", covering(LAYOUTS, lambda layout: layout.endswith("size 3")))
def test_stages_write_what_one_process_writes(layout: str) -> None:
    """All ranks the same, and as many layers as there are stages is enough."""
    (expected,) = on_ranks(1, _write, "")
    world = 4 if "model" in layout else int(layout.split()[-1])
    for found in on_ranks(world, _write, layout):
        assert found == expected


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_data: str, vocab_file: str) -> str:
    folder = tmp_path_factory.mktemp("run")
    flags = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 32 --batch-size 2 --eval-iters 0"
    more = f"--train-iters 1 --precision fp32 --no-tensorboard --data-path {tiny_data} --vocab-file {vocab_file}"
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
    assert "--stream shows one text of a GPT-2" in done.stderr
    done = command("python", "tools/generate.py", "--load", run, "--prompt", "a", "--interactive")
    assert "give one of --prompt, --input and --interactive" in done.stderr
