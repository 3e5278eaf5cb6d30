"""Code from other projects' pages runs: commands of Ascend's Megatron-DeepSpeed and a training loop of DeepSpeed."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from data_utils.tokenizer_training import train_byte_bpe
from megatron.data.indexed_dataset import IndexedDataset
from tests.materials import SAMPLE
from tests.support import FULL, ROOT, command, on_ranks

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --hidden-dropout 0 --attention-dropout 0 "
    "--eval-iters 1 --log-interval 1"
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the commands of Ascend's Megatron-DeepSpeed read.

    They are data/gpt2-vocab.json, data/gpt2-merges.txt and data/my-gpt_text_sentence.{bin,idx}.
    """
    folder = tmp_path_factory.mktemp("ascend")
    texts = [json.loads(line)["text"] for line in SAMPLE.read_text(encoding="utf-8").splitlines()]
    train_byte_bpe(texts, str(folder / "data"), 600, "gpt2-bpe")
    for name in ("vocab.json", "merges.txt"):
        (folder / "data" / name).rename(folder / "data" / f"gpt2-{name}")
    shutil.copy(SAMPLE, folder / "my.jsonl")
    data = folder / "data"
    argv = ["--input", str(folder / "my.jsonl"), "--output-prefix", str(data / "my-gpt"), "--split-sentences"]
    done = command(
        "python", "tools/preprocess_data.py", *argv, "--vocab-file", str(data / "gpt2-vocab.json"), "--quiet"
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_data_of_the_page(prepared: Path) -> None:
    sentences = IndexedDataset(str(prepared / "data/my-gpt_text_sentence"))
    assert len(sentences) > sentences.num_documents > 100


@pytest.mark.parametrize("kind", ["full", pytest.param("performance", marks=FULL)])
@pytest.mark.parametrize("size", ["345M", pytest.param("345M_without_mp", marks=FULL)])
def test_the_scripts_of_the_page(prepared: Path, tmp_path: Path, kind: str, size: str) -> None:
    env = {**os.environ, "VOCAB_FILE": str(prepared / "data/gpt2-vocab.json"), "RUN_DIR": "ckpts/ckpts_tmp"}
    argv = [f"--data_path={prepared / 'data/my-gpt_text_sentence'}", f"--model_size={size}", "--train_iters=2"]
    script = ["bash", str(ROOT / f"scripts/train_{kind}.sh")]
    done = subprocess.run(
        [*script, *argv, *SMALL.split()],
        cwd=tmp_path, env={**env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    run = tmp_path / "ckpts/ckpts_tmp"
    assert "median speed" in done.stdout
    assert (run / "report.html").is_file()
    assert (run / "checkpoints/iter_0000002").is_dir() == (kind == "full")


# The ds_config of DeepSpeed's Getting Started page, with its misplaced comma corrected.
DS_CONFIG = {
    "train_batch_size": 8, "gradient_accumulation_steps": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
    "fp16": {"enabled": True}, "zero_optimization": True,
}  # fmt: skip


def _loop(name: str, folder: str, config: dict[str, Any], ranks: int) -> list[list[float]]:
    """Run the training loop of DeepSpeed's Getting Started page with the module `name`, tds or deepspeed.

    Returns three lists of losses: of steps 0 to 3, before a checkpoint; of steps 4 to 7, after it; and of steps 4 to 7
    again, in a new engine that has loaded the checkpoint.
    """
    import importlib

    import torch.distributed as dist

    deepspeed = importlib.import_module(name)
    deepspeed.init_distributed("gloo") if name == "deepspeed" else deepspeed.init_distributed()

    def started() -> Any:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        params = [p for p in net.parameters() if p.requires_grad]
        own: dict[str, Any] = {"config": config}
        if name == "deepspeed":  # pass torch's equivalent AdamW, since DeepSpeed would compile its own for the CPU
            given = {key: value for key, value in config.items() if key != "optimizer"}
            own = {"config": {**given, "zero_allow_untested_optimizer": True}}
            own["optimizer"] = torch.optim.AdamW(params, **config["optimizer"]["params"], weight_decay=0.0)
        model_engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=params, **own)
        return model_engine

    def steps(model_engine: Any, first: int, last: int) -> list[float]:
        found = []
        for step in range(first, last):
            torch.manual_seed(10 * step + dist.get_rank())
            batch = torch.randn(8 // ranks, 6).to(next(model_engine.parameters()).dtype)
            loss = model_engine(batch).float().square().mean()
            model_engine.backward(loss)
            model_engine.step()
            found.append(loss.item())
        return found

    model_engine = started()
    before = steps(model_engine, 0, 4)
    client_sd = {"step": 4}
    model_engine.save_checkpoint(folder, "tag", client_state=client_sd)
    whole = steps(model_engine, 4, 8)
    again = started()
    _, client_sd = again.load_checkpoint(folder, "tag")
    return [before, whole, steps(again, client_sd["step"], 8)]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=FULL)])
def test_the_loop_of_the_page(tmp_path: Path, ranks: int) -> None:
    """DeepSpeed's Getting Started loop has equal losses with tds and DeepSpeed, also after loading a checkpoint."""
    found = {
        name: on_ranks(ranks, _loop, name, str(tmp_path / name), DS_CONFIG, ranks) for name in ("tds", "deepspeed")
    }
    for ours, theirs in zip(found["tds"], found["deepspeed"], strict=True):
        assert ours[1] == ours[2]
        for here, there in zip(ours, theirs, strict=True):
            assert here == pytest.approx(there, rel=1e-3)  # tds and DeepSpeed sum fp16 numbers in different order
