"""--log-layers gives the numbers of plain torch in one process, and the same ones in every layout."""

import contextlib
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tds
from data_utils.indexed_writer import IndexedDatasetBuilder
from megatron.features.layer_log import METRICS, LayerLog
from megatron.model.block import TransformerLayer
from megatron.model.layers import global_parameters
from megatron.model.masks import no_documents
from megatron.model.router import Router, RouterOutput
from megatron.training.loop import train
from tds.groups import max_with_nan
from tds.step_norms import StepNorms
from tests.checkpoints.runs import Start, make, run_all
from tests.support import FULL, on_ranks

FLAGS = "--num-layers 2 --train-iters 3 --log-interval 2 --log-layers --no-save-at-end"
LAYOUTS = {
    "dp2": "--batch-size 2",
    "dp2-zero1": "--batch-size 1 --gas 2 --zero-stage 1",
    "dp2-muon": "--batch-size 2 --optimizer muon",
    "dp2-muon-zero1": "--batch-size 2 --optimizer muon --zero-stage 1",
    "tp2-muon-zero1": "--batch-size 4 --model-parallel-size 2 --optimizer muon --zero-stage 1",
    "dp2-zero2": "--batch-size 2 --zero-stage 2",
    "dp2-zero3": "--batch-size 2 --zero-stage 3",
    "pp2": "--batch-size 2 --gas 2 --pipe-parallel-size 2",
    "tp2-sequence": "--batch-size 2 --gas 2 --model-parallel-size 2 --sequence-parallel",
    "tp2-zero1": "--batch-size 4 --model-parallel-size 2 --zero-stage 1 --checkpoint-activations",
    "pp2-bf16": "--batch-size 2 --gas 2 --pipe-parallel-size 2",
    "dp2-zero2-bf16": "--batch-size 2 --zero-stage 2",
    "dp2-zero3-bf16": "--batch-size 2 --zero-stage 3",
    "dp2-zero2-fp16": "--batch-size 2 --zero-stage 2 --deepspeed-config {folder}/fp16.json",
    "dp2-zero1-offload": "--batch-size 2 --zero-stage 1 --deepspeed-config {folder}/offload.json",
    "cp2": "--batch-size 4 --context-parallel-size 2",
    "dp2-ep2": "--batch-size 2 --expert-parallel-size 2",
    "dp2-ep2-zero1": "--batch-size 1 --gas 2 --expert-parallel-size 2 --zero-stage 1",
}
EXPERTS = "--num-experts 4 --experts-per-token 2 --num-shared-experts 1 --router-z-loss 0.01"
CASES = [
    ("gpt2", ["dp2-zero3", "dp2-muon-zero1", "pp2", "tp2-sequence", "cp2"]),
    ("gpt2 experts", ["dp2-ep2-zero1", "pp2"]),
    ("t5-cpm experts", ["dp2-ep2", "tp2-sequence"]),
]
MORE = [
    ("gpt2", ["dp2-muon", "tp2-muon-zero1"]),
    ("gpt2", ["dp2", "dp2-zero1", "dp2-zero2", "tp2-zero1"]),
    ("gpt2 experts", ["dp2-ep2"]),
    ("t5-cpm experts", ["pp2"]),
    ("gpt2", ["pp2-bf16", "dp2-zero2-bf16", "dp2-zero3-bf16", "dp2-zero2-fp16", "dp2-zero1-offload"]),
    ("llama", ["dp2-zero1", "pp2", "tp2-sequence", "cp2"]),
    ("t5-v1.1", ["dp2-zero1", "pp2", "tp2-sequence", "tp2-zero1"]),
    ("t5-v1.1 experts", ["dp2-ep2", "dp2-ep2-zero1", "pp2", "tp2-zero1"]),
]


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["split"] == "train"]


def _layers(run_dir: Path) -> list[dict[str, dict[str, float]]]:
    return [row["layers"] for row in _rows(run_dir)]


@pytest.mark.parametrize(("model", "names"), [*CASES, *(pytest.param(*each, marks=FULL) for each in MORE)])
def test_every_layout_logs_the_same(
    model: str, names: list[str], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    model, _, experts = model.partition(" ")
    flags = FLAGS if model == "gpt2" else FLAGS.replace("--num-layers 2", "")
    flags = f"{flags} {EXPERTS}" if experts else flags
    (tmp_path / "fp16.json").write_text(json.dumps({"fp16": {"enabled": True, "initial_scale_power": 4}}))
    offload = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "offload.json").write_text(json.dumps({"zero_optimization": offload}))
    half = {name: name[-4:] for name in names if name.endswith(("bf16", "fp16"))}
    # fp64 is for ZeRO stage 0 only.
    precision = {name: half.get(name, "fp32" if "zero" in name else "fp64") for name in names}
    ones = {name: ("fp32" if name in half else precision[name], "muon" if "muon" in name else "adam") for name in names}
    layouts = {name: LAYOUTS[name].format(folder=tmp_path) for name in names}
    starts = [
        Start(model, tmp_path / "-".join(one), f"{flags} --precision {one[0]} --optimizer {one[1]} --batch-size 4")
        for one in sorted(set(ones.values()))
    ]
    on_ranks(1, run_all, starts, tiny_data, vocab_file)
    starts = [Start(model, tmp_path / name, f"{flags} --precision {precision[name]} {layouts[name]}") for name in names]
    on_ranks(2, run_all, starts, tiny_data, vocab_file, timeout=300)
    for name in names:
        one = tmp_path / "-".join(ones[name])
        of_experts = [row.get("expert_tokens") for row in _rows(one)]
        assert bool(experts) == all(of_experts)
        assert [row.get("expert_tokens") for row in _rows(tmp_path / name)] == of_experts, name
        for found, wanted in zip(_layers(tmp_path / name), _layers(one), strict=True):
            assert found.keys() == wanted.keys()
            for layer, metrics in wanted.items():
                # In fp32, the rounding of few numbers does not average out: the largest logit is one of them, and in
                # these models an RMSNorm has 16 weights near 1, which can only change by multiples of 6e-8.
                for metric, value in metrics.items():
                    fp32 = 2e-5 if model != "gpt2" or metric == "attention_logit" else 1e-6
                    exact = {"fp64": 1e-8, "fp32": fp32}.get(precision[name], 0.05)
                    assert found[layer][metric] == pytest.approx(value, rel=exact), (name, layer, metric)


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A corpus of 200 documents of 3 to 12 tokens; T5 samples of such documents contain padding."""
    prefix = str(tmp_path_factory.mktemp("short") / "corpus_text_document")
    rng = np.random.default_rng(2)
    with IndexedDatasetBuilder(prefix, np.uint16) as tokens:
        for _ in range(200):
            tokens.add_document(rng.integers(10, 2900, int(rng.integers(3, 13))))
    return prefix


@pytest.mark.parametrize("kind", ["cpm", "t5"])
def test_padding_of_sequence_parallelism_is_not_counted(
    kind: str, tmp_path: Path, short_documents: str, vocab_file: str
) -> None:
    """Lengths that two ranks cannot divide are padded; the decoder needs document ids only if something is counted."""
    lengths = "--enc-seq-length 31 --dec-seq-length 13" if kind == "cpm" else "--enc-seq-length 32 --dec-seq-length 13"
    model = "t5-cpm" if kind == "cpm" else "t5-v1.1"
    flags = f"--train-iters 2 --log-layers --precision fp64 {EXPERTS} {lengths} --batch-size 4"
    on_ranks(1, run_all, [Start(model, tmp_path / "one", flags)], short_documents, vocab_file)
    start = Start(model, tmp_path / "two", f"{flags} --model-parallel-size 2 --sequence-parallel")
    on_ranks(2, run_all, [start], short_documents, vocab_file)
    assert (kind == "cpm") <= all(row["padding"] > 0 for row in _rows(tmp_path / "one"))
    for found, wanted in zip(_rows(tmp_path / "two"), _rows(tmp_path / "one"), strict=True):
        assert found["expert_tokens"] == wanted["expert_tokens"]
        assert found["router_loss"] == pytest.approx(wanted["router_loss"], rel=1e-8)
        for layer, metrics in wanted["layers"].items():
            assert found["layers"][layer] == pytest.approx(metrics, rel=1e-8), layer


def _one_nan() -> tuple[Any, Any]:
    """Return the rows of two layers, of which the first has NaN on rank 1, and the third has no attention."""
    own = [math.nan if dist.get_rank() else 1.0, 2.0 + dist.get_rank(), -math.inf]
    log = LayerLog.__new__(LayerLog)
    log.names = ["a", "b", "c"]
    log._logits = max_with_nan(torch.tensor(own, dtype=torch.float64))
    sums = torch.ones(5, 3, dtype=torch.float64)
    sums[3, 1] = math.nan
    sums[4, 2] = 0
    sums[3, 2] = 0
    return log._logits.tolist(), log._compute_metrics(sums, 1.0)


def _measure_transposed() -> list[list[float]]:
    """Return the squared norms of a step of a weight that is not contiguous, measured and by hand."""
    model = nn.Linear(4, 3, bias=False)
    model.weight = nn.Parameter(torch.arange(12.0).view(4, 3).sin().t())
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    config = {"train_batch_size": 4, "gradient_clipping": 0.0}
    engine, *_ = tds.initialize(model=model, optimizer=optimizer, config=config)
    norms = StepNorms(engine, {model.weight: 0}, 1, first_replica=True)
    norms.begin()
    engine.backward(engine(torch.arange(16.0).view(4, 4).cos()).square().mean())
    gradient = cast(Tensor, model.weight.grad).clone()
    engine.step()
    update = 0.5 * gradient
    by_hand = [tensor.square().sum().item() for tensor in (before - update, gradient, update)]
    return [norms.take().flatten().tolist(), by_hand]


def test_a_weight_need_not_be_contiguous() -> None:
    ((measured, by_hand),) = on_ranks(1, _measure_transposed)
    assert measured == pytest.approx(by_hand, rel=1e-5)


def _measure_frozen_bf16() -> float:
    """Return the squared norm of a frozen weight in bf16."""
    model = nn.Linear(768, 1)
    model.weight = nn.Parameter(torch.full((1, 768), 1.01, dtype=torch.bfloat16), requires_grad=False)
    optimizer = torch.optim.SGD([model.bias], lr=0.5)
    config = {"train_batch_size": 4, "gradient_clipping": 0.0}
    engine, *_ = tds.initialize(model=model, optimizer=optimizer, config=config)
    norms = StepNorms(engine, {model.weight: 0}, 1, first_replica=True)
    norms.begin()
    engine.step()
    return float(norms.take()[0, 0])


def test_norms_of_frozen_weights_are_not_rounded_to_their_dtype() -> None:
    exact = 768 * torch.tensor(1.01, dtype=torch.bfloat16).double().item() ** 2
    assert on_ranks(1, _measure_frozen_bf16) == [pytest.approx(exact, rel=1e-6)]


def test_a_nan_of_one_rank_is_logged_as_null() -> None:
    for logits, row in on_ranks(2, _one_nan):
        assert math.isnan(logits[0]) and logits[1:] == [3.0, -math.inf]
        assert [row[name].get("attention_logit", "none") for name in "abc"] == [None, 3.0, "none"]
        assert [row[name].get("activation_rms", "none") for name in "abc"] == [1.0, None, "none"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations_of_large_tensors_are_exact(dtype: torch.dtype) -> None:
    hidden = torch.randn(512, 4, 768, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums: Any = SimpleNamespace(
        _model=SimpleNamespace(training=True), _layer_index={"x": 0}, _activations=torch.zeros(2, 1).double()
    )
    layer: Any = SimpleNamespace(repeated=True, name="x", outputs=("hidden", "document_ids"))
    LayerLog._record_activations(sums, layer, lambda inputs: inputs, (hidden, no_documents(hidden.device)))
    square, count = sums._activations[:, 0].tolist()
    assert square / count == pytest.approx(hidden.double().square().mean().item(), rel=1e-6)


def _plain(start: Start, data: str, vocab_file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return layer -> the numbers of the first iteration by hooks and plain torch, and those that the run logs."""
    with contextlib.redirect_stdout(io.StringIO()):
        run = make(start, data, vocab_file)
        model: Any = run.engine.deepspeed.module
        before = {name: p.detach().clone() for name, p in global_parameters(model)}
        gradients: dict[str, Any] = {name: 0 for name in before}
        outputs: dict[str, list[torch.Tensor]] = {}
        scores: dict[str, list[torch.Tensor]] = {}
        for name, p in global_parameters(model):
            p.register_hook(lambda g, name=name: gradients.__setitem__(name, gradients[name] + g))
        for name, layer in model.named_layers():
            if isinstance(layer, TransformerLayer):
                layer.register_forward_hook(lambda _m, _i, out, name=name: outputs.setdefault(name, []).append(out[0]))
                layer.attention.query_key_value.register_forward_hook(
                    lambda _m, _i, out, name=name: scores.setdefault(name, []).append(out[0])
                )
        train(run)
        run.__exit__()
    found: dict[str, dict[str, float]] = {}
    for name, p in global_parameters(model):
        layer = next(each for each, _ in model.named_layers() if name.startswith(f"{each}."))
        sums = found.setdefault(layer, dict.fromkeys(METRICS[:3], 0.0))
        for metric, tensor in zip(METRICS, (p.detach(), gradients[name], p.detach() - before[name]), strict=False):
            sums[metric] += float(tensor.double().square().sum())
    for layer, sums in found.items():
        found[layer] = {name: math.sqrt(value) for name, value in sums.items()}
        found[layer]["update_ratio"] /= found[layer]["weight_norm"]
        if layer in outputs:
            every = torch.stack([each.detach().double() for each in outputs[layer]])
            found[layer]["activation_rms"] = float(every.square().mean().sqrt())
            largest = -math.inf
            for qkv in scores[layer]:  # [s, b, 3 x 4 heads x 4], by head: query, key, value
                s, b, _ = qkv.shape
                q, k, _ = qkv.detach().double().view(s, b, 4, 3, 4).permute(1, 2, 3, 0, 4).unbind(2)
                logits = q @ k.transpose(-1, -2) / 2
                largest = max(largest, float(logits.masked_fill(torch.ones(s, s).triu(1).bool(), -math.inf).max()))
            found[layer]["attention_logit"] = largest
    return found, _layers(start.run_dir)[0]


def test_the_numbers_are_those_of_plain_torch(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """Gradients are logged before clipping, summed over the micro-batches."""
    flags = f"{FLAGS} --precision fp32 --train-iters 1 --batch-size 2 --gas 2 --clip-grad 0.01 --attention-dropout 0"
    ((expected, found),) = on_ranks(1, _plain, Start("gpt2", tmp_path / "run", flags), tiny_data, vocab_file)
    assert found.keys() == expected.keys()
    for layer, metrics in expected.items():
        assert found[layer] == pytest.approx(metrics, rel=1e-6), layer


def _routed(start: Start, data: str, vocab_file: str) -> dict[str, list[int]]:
    """Train; return layer -> tokens of each of the 4 experts in the last iteration, counted from routers' outputs."""
    counts: dict[str, list[int]] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        run = make(start, data, vocab_file)
        model: Any = run.engine.deepspeed.module

        def count(name: str, routing: RouterOutput) -> None:
            chosen = routing.experts.flatten().tolist()
            counts[name] = [counts.get(name, [0] * 4)[i] + chosen.count(i) for i in range(4)]

        for name, layer in model.named_layers():
            for module in layer.modules():
                if isinstance(module, Router):
                    module.register_forward_hook(lambda _m, _i, out, name=name: count(name, out))
        train(run)
        run.__exit__()
    return counts


def test_tokens_of_experts_are_those_that_the_routers_chose(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """A layer without experts has no such numbers. Large initial weights make the shares unequal."""
    flags = f"--num-layers 3 {EXPERTS} --moe-layer-frequency 2 --init-method-std 1 --train-iters 1 --log-interval 1"
    flags += " --precision fp32 --batch-size 2 --gas 2 --eval-interval 0"
    (expected,) = on_ranks(1, _routed, Start("gpt2", tmp_path / "run", flags), tiny_data, vocab_file)
    (row,) = _rows(tmp_path / "run")
    assert row["expert_tokens"] == expected
    assert expected.keys() == row["layers"].keys() == {"layers.0", "layers.2"}
    for name, tokens in expected.items():
        assert sum(tokens) == 2 * 4 * 24, "2 experts for each of 4 samples of 24 tokens"
        assert row["layers"][name]["imbalance"] == pytest.approx(max(tokens) / (2 * 4 * 24 / 4))
        assert row["layers"][name]["dead_experts"] == sum(n == 0 for n in tokens)
    # In the first step the auxiliary loss of each layer is its factor, 0.01. The z-loss is positive.
    assert row["router_loss"] > 2 * 0.01


def _with_dirty_memory(start: Start, data: str, vocab_file: str) -> None:
    """Do a run in which new memory holds large numbers instead of zeros."""
    honest = torch.empty

    def empty(*size: Any, **more: Any) -> torch.Tensor:
        tensor = honest(*size, **more)
        return tensor.data.fill_(1e3) if tensor.is_floating_point() and not tensor.requires_grad else tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        run_all([start], data, vocab_file)


def test_padding_of_shards_is_not_counted(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """With ZeRO 3 and three replicas, the shards of most weights end with padding."""
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([{"pattern": "layers.0.*", "frozen": True}]))
    flags = f"{FLAGS} --precision fp32 --param-groups {rules}"
    on_ranks(1, run_all, [Start("gpt2", tmp_path / "one", f"{flags} --batch-size 3")], tiny_data, vocab_file)
    start = Start("gpt2", tmp_path / "three", f"{flags} --batch-size 1 --zero-stage 3")
    on_ranks(3, _with_dirty_memory, start, tiny_data, vocab_file)
    for found, wanted in zip(_layers(tmp_path / "three"), _layers(tmp_path / "one"), strict=True):
        for layer, metrics in wanted.items():
            assert found[layer] == pytest.approx(metrics, rel=2e-5), layer
