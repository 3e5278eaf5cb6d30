"""pretrain_llama.py and the tools that read its runs work from the command line."""

import json
import re
from pathlib import Path

import pytest

from tests.sentences import SENTENCES
from tests.support import FULL, ROOT, command, losses, train

FAST = ["--pipe-parallel-size", "2", "--precision", "bf16", "--checkpoint-activations"]


@pytest.fixture(scope="module")
def flags(tiny_data: str, vocab_file: str) -> list[str]:
    return [
        "--data-path",
        tiny_data,
        "--vocab-file",
        vocab_file,
        "--split",
        "8,2",
        "--num-layers",
        "2",
        "--hidden-size",
        "16",
        "--num-attention-heads",
        "4",
        "--num-key-value-heads",
        "2",
        "--ff-hidden-size",
        "24",
        "--seq-length",
        "16",
        "--batch-size",
        "2",
        "--log-interval",
        "1",
        "--eval-iters",
        "2",
        "--no-tensorboard",
        "--train-iters",
        "4",
        "--save-interval",
        "2",
        "--eval-interval",
        "1",
        "--lr",
        "1e-2",
        "--lr-decay-iters",
        "4",
        "--hidden-dropout",
        "0.1",
        "--attention-dropout",
        "0.1",
    ]


@FULL
@pytest.mark.parametrize(
    "layout",
    [FAST, ["--model-parallel-size", "2", "--sequence-parallel"], ["--zero-stage", "3"]],
    ids=" ".join,
)
def test_the_same_command_continues(tmp_path: Path, flags: list[str], layout: list[str]) -> None:
    """A run that stops and resumes has exactly the losses of an uninterrupted one, with dropout and evaluations."""
    flags = [*flags, *layout]
    whole = losses(train("llama", 2, tmp_path / "whole", *flags))
    first = losses(train("llama", 2, tmp_path / "cut", *flags, "--train-iters", "2"))
    both = losses(train("llama", 2, tmp_path / "cut", *flags))
    assert first == whole[:2]
    assert both == whole


def test_tools_take_a_llama(tmp_path: Path, flags: list[str]) -> None:
    run = str(tmp_path / "run")
    done = command("python", "pretrain_llama.py", *flags, "--run-dir", run, "--sliding-window", "8", "--qk-norm")
    assert done.returncode == 0 and not done.stderr, done.stderr
    written = [command("python", "tools/generate.py", "--load", run, "--prompt", "路", "--max-new-tokens", "30")]
    over = [
        "tools/launch.py",
        "--standalone",
        "--nproc-per-node",
        "2",
        "tools/generate.py",
        "--model-parallel-size",
        "2",
    ]
    written.append(command("python", *over, "--load", run, "--prompt", "路", "--max-new-tokens", "30"))
    assert [each.returncode for each in written] == [0, 0], written
    assert written[0].stdout == written[1].stdout and len(written[0].stdout) > 10
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "春天来了。" * 9}, ensure_ascii=False), encoding="utf-8")
    scored = command("python", "tools/evaluate.py", "--load", run, "--input", str(text), "--quiet")
    assert scored.returncode == 0 and "perplexity" in scored.stdout, scored.stderr
    out = command("python", "tools/convert_checkpoint.py", "--load", run, "--output", str(tmp_path / "out"))
    assert out.returncode == 0 and SENTENCES["note_hidden_dropout_0_1_is"] in out.stdout, out.stderr
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3"
    again = command("python", "pretrain_llama.py", *flags, "--run-dir", run, "--sliding-window", "9", "--qk-norm")
    assert again.returncode and SENTENCES["sliding_window_is_8_in_the_checkpoint"] in again.stderr


@FULL
def test_the_script_of_the_readme(tmp_path: Path) -> None:
    """scripts/run_llama.sh trains on two stages and generates text; it refuses unknown variants."""
    small = {"TRAIN_ITERS": "3", "NLAYERS": "2", "NHIDDEN": "32", "SEQ_LENGTH": "32"}
    for variant, experts in (("llama", None), ("qwen3-moe", 8)):
        env = {**small, "VARIANT": variant, "RUN_DIR": str(tmp_path / variant)}
        done = command("bash", "scripts/run_llama.sh", env=env, timeout=600)
        assert done.returncode == 0, done.stderr
        assert SENTENCES["pipe_2_x_data_1_x"] in done.stdout and "loss curve" in done.stdout
        assert json.loads((tmp_path / variant / "config.json").read_text())["model"]["num_experts"] == experts
    for env, words in (
        ({"VARIANT": "opt"}, "VARIANT=opt is not one of llama, qwen3, mistral, mixtral, qwen3-moe"),
        ({"VARIANT": "qwen3"}, "needs a MODEL_SIZE; choose one of 0.6b 1.7b 8b"),
        ({"VARIANT": "mixtral"}, "needs a MODEL_SIZE; choose one of 8x7b"),
    ):
        refused = command("bash", "scripts/run_llama.sh", env={**env, "RUN_DIR": str(tmp_path / "no")}, timeout=600)
        assert refused.returncode == 2 and words in refused.stderr


def _commands(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_page_is_the_same_in_both_languages() -> None:
    """docs/llama.md and its Chinese version have the same commands, heading levels and settings, and valid links."""
    pages = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("llama.md", "llama_zh.md")]
    assert all(_commands("llama.md", kind) == _commands("llama_zh.md", kind) for kind in ("bash", "console"))
    for found in (r"^(#+) ", r"(--[a-z][a-z-]+)", r"^\| `(\w+)", r"\]\((?:\.\./)?([\w./]+?)(?:_zh)?\.(?:md|py|png)"):
        english, chinese = (re.findall(found, page, flags=re.MULTILINE) for page in pages)
        assert english and set(english) - {"llama"} == set(chinese) - {"llama"}, found
    links = [link for page in pages for link in re.findall(r"\]\(([^)#]+)", page)]
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


@FULL
@pytest.mark.timeout(900)
def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    """All `bash` blocks of docs/llama.md run in order, with a smaller model and another run directory."""
    small = {
        "TRAIN_ITERS": "3",
        "NLAYERS": "2",
        "NHIDDEN": "32",
        "SEQ_LENGTH": "32",
        "RUN_DIR": str(tmp_path / "llama"),
    }
    blocks = _commands("llama.md", "bash")
    assert len(blocks) == 3
    for block in blocks:
        done = command("bash", "-euc", block.replace("runs/", f"{tmp_path}/"), env=small, timeout=600)
        assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_presets_say_what_these_models_are() -> None:
    """The presets have the parameter counts that the models' authors published."""
    from torch import device

    from megatron.config.command_line import parse, with_values
    from megatron.model import GPT2Model
    from megatron.model.parameter_counts import count_parameters

    sizes = {
        "llama_1b": (128256, 1_235_814_400),
        "llama_3b": (128256, 3_212_749_824),
        "llama_8b": (128256, 8_030_261_248),
        "llama_70b": (128256, 70_553_706_496),
        "mistral_7b": (32000, 7_241_732_096),
        "mixtral_8x7b": (32000, 46_702_792_704),
        "qwen3_0.6b": (151936, 596_049_920),
        "qwen3_1.7b": (151936, 1_720_574_976),
        "qwen3_8b": (151936, 8_190_735_360),
        "qwen3-moe_30b-a3b": (151936, 30_532_122_624),
    }
    presets = {path.stem: path for path in (ROOT / "configs" / "models").glob("*.json")}
    named = {name for name in presets if name.startswith(("llama", "mistral", "mixtral", "qwen"))}
    assert sizes.keys() == named - {"llama_tiny", "llama_poet", "qwen3-moe_tiny"}
    for name, (vocabulary, parameters) in sizes.items():
        config = with_values(parse(["--config", str(presets[name])], {"family": "llama"}), {"vocab_size": vocabulary})
        counts = []
        for layers in (1, 2):  # all layers are alike; the whole of the large models would take seconds
            with device("meta"):
                counts.append(count_parameters(GPT2Model(with_values(config, {"num_layers": layers}))))
        assert counts[0] + (config.model.num_layers - 1) * (counts[1] - counts[0]) == parameters, name
