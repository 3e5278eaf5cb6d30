"""Entry scripts in CPM-Pretrain's form have the same losses as this project's scripts, in every layout."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from data_utils import preprocess_data
from tests.materials import SAMPLE
from tests.support import FULL, ROOT, ends_of_ranks, losses

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --batch-size 2 --gas 2 --train-iters 3 --lr-decay-iters 3 "
    "--data-impl mmap --split 949,50,1 --distributed-backend nccl --lr 1.5e-3 --lr-decay-style cosine --min-lr 1.0e-5 "
    "--weight-decay 1e-2 --clip-grad 1.0 --warmup 0.01 --log-interval 1 --save-interval 500 --eval-interval 100 "
    "--eval-iters 1 --hidden-bias --deepspeed --no-save-at-end"
)
FAMILIES = {
    "gpt2": "--seq-length 32 --max-position-embeddings 32",
    "t5": "--enc-seq-length 64 --dec-seq-length 40 --max-position-embeddings 64 --kv-hidden-size 8 --ff-hidden-size 48",
}
# Without a pipeline, CPM-Pretrain ignores the batch sizes of a ds_config. Tests with a pipeline set other batch sizes.
DS_CONFIG = {
    "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10, "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "initial_scale_power": 16},
    "zero_allow_untested_optimizer": True, "wall_clock_breakdown": True,
}  # fmt: skip
DOCUMENTS = "--reset-attention-mask --reset-position-ids --eod-mask-loss"
LAYOUTS = {  # name -> (number of stages, tensor-parallel size)
    "one": (0, 1),
    "one stage": (1, 1),
    "pp 2": (2, 1),
    "tp 2": (0, 2),
    "tp 2, one stage": (1, 2),
    "pp 2 x tp 2": (2, 2),
}


def _script(argv: list[str]) -> None:
    sys.argv = argv
    sys.path.insert(0, str(ROOT))
    runpy.run_path(argv[0], run_name="__main__")


def run(script: str, folder: Path, layout: str, flags: str) -> list[float]:
    """Run a script from the command line; return its training losses, followed by its validation losses."""
    stages, model = LAYOUTS[layout]
    argv = [str(ROOT / script), *flags.split(), "--run-dir", str(folder)]
    argv += ["--pipe-parallel-size", str(stages), "--model-parallel-size", str(model)]
    if script == "pretrain_t5.py":  # the default of scripts in CPM-Pretrain's form
        argv += ["--span-convention", "cpm"]
    ends = ends_of_ranks(max(stages, 1) * model, _script, argv)
    assert all(end.code == 0 for end in ends), [end.stderr[-2000:] for end in ends]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return losses(rows) + losses(rows, "valid")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_data: str, vocab_file: str) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("triples")
    argv = ["--objective", "cpm-t5", "--input", str(SAMPLE), "--vocab-file", vocab_file]
    argv += ["--output-prefix", str(folder / "x"), "--quiet", "--workers", "0"]
    preprocess_data.main(preprocess_data.build_parser().parse_args(argv))
    return {
        family: f"{FLAGS} {FAMILIES[family]} --vocab-file {vocab_file} --data-path {path}"
        for family, path in (("gpt2", tiny_data), ("t5", str(folder / "x_text_document")))
    }


@pytest.mark.parametrize("family", [pytest.param("gpt2", marks=FULL), "t5"])
@pytest.mark.parametrize("more", [DOCUMENTS, pytest.param("--eod-mask-loss", marks=FULL)], ids=["documents", "plain"])
def test_losses_are_those_of_our_script(
    data: dict[str, str], tmp_path: Path, family: str, more: str, request: pytest.FixtureRequest
) -> None:
    # Dropout is off, since hidden states of tensor-parallel ranks get different dropout masks, as in CPM-Pretrain.
    flags = f"{data[family]} {more} --precision fp32 --hidden-dropout 0 --attention-dropout 0"
    expected = run(f"pretrain_{family}.py", tmp_path / "ours", "one", flags)
    assert len(expected) == 4
    for layout in LAYOUTS if request.config.getoption("--full") else ("one", "tp 2", "pp 2 x tp 2"):
        found = run(f"tests/original/pretrain_{family}.py", tmp_path / layout.replace(" ", "-"), layout, flags)
        assert found == pytest.approx(expected, rel=1e-6), layout


@pytest.mark.parametrize("family", [pytest.param("gpt2", marks=FULL), "t5"])
@pytest.mark.parametrize(
    "layout",
    [
        "pp 2 x tp 2",
        pytest.param("one", marks=FULL),
        pytest.param("pp 2", marks=FULL),
        pytest.param("tp 2", marks=FULL),
    ],
)
def test_fp16_with_the_json_of_the_original(data: dict[str, str], tmp_path: Path, family: str, layout: str) -> None:
    """Scripts in CPM-Pretrain's form have the losses of this project's scripts with CPM-Pretrain's fp16 ds_config.

    Under a pipeline, the ds_config also sets the batch sizes.
    """
    stages, _ = LAYOUTS[layout]
    own = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2} if stages > 1 else {}
    (tmp_path / "ds.json").write_text(json.dumps({**DS_CONFIG, **own}))
    flags = f"{data[family]} --fp16 --eod-mask-loss --deepspeed_config {tmp_path / 'ds.json'}"
    expected = run(f"pretrain_{family}.py", tmp_path / "ours", layout, flags)
    found = run(f"tests/original/pretrain_{family}.py", tmp_path / "theirs", layout, flags)
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_model_of_the_tutorial(data: dict[str, str], tmp_path: Path) -> None:
    """The model of the tutorial in CPM-Pretrain's README has the same losses in all layouts.

    Layouts with a pipeline are only compared with each other, since a pipeline gives other initial weights.
    """
    flags = f"{data['gpt2']} --precision fp32 --hidden-dropout 0"
    found = {
        layout: run("tests/original/tutorial.py", tmp_path / layout.replace(" ", "-"), layout, flags)
        for layout in LAYOUTS
        if layout != "tp 2, one stage"
    }
    assert found["tp 2"] == pytest.approx(found["one"], rel=1e-6)
    for layout in ("pp 2", "pp 2 x tp 2"):
        assert found[layout] == pytest.approx(found["one stage"], rel=1e-6), layout
    assert all(losses_[2] < losses_[0] - 0.005 for losses_ in found.values())
