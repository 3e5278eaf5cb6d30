"""The planner's parameter counts, memory and speed agree with built models and published runs; layouts are legal."""

import json
import math
import os
import re
import subprocess
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron import mpu
from megatron.config import Config
from megatron.config.command_line import parse, with_values
from megatron.config.ds_config import resolve
from megatron.config.families import parse_any_family
from megatron.config.fields import ConfigError
from megatron.config.parallel import uses_sequence_parallel
from megatron.estimate.per_rank import _StepMemory, rank_memory, state_bytes
from megatron.estimate.sizes import Shapes, StageSchedule, count_layers, in_flight, layers_of, parameters, stages_of
from megatron.model import GPT2Model, T5Model
from megatron.model.cuts import partition_method
from megatron.model.parameter_counts import count_parameters
from megatron_tools.doctor import doctor
from megatron_tools.doctor.memory import checkpoint_bytes
from megatron_tools.plan import plan, plan_flags, scripts
from megatron_tools.plan.cluster import load_cluster
from megatron_tools.plan.cost import DEFAULT, boundary_bytes, pipeline_units
from megatron_tools.plan.layouts import Batch, Layout, SearchRequest, candidates, evaluate, search, solve_batch
from megatron_tools.plan.report import explain_layout
from tds.schedule import BUILT_IN, find_schedule
from tds.timetable import bubble_fraction, max_in_flight, simulate_times
from tests.sentences import SENTENCES
from tests.support import ROOT, covering

from . import published

MODELS = ["gpt2_345M", "llama_8b", "qwen3_0.6b", "cpm2_small", "t5_base"]
TINY = (
    "--family gpt2 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 500 "
    "--precision fp32"
)
EXPERTS = "--num-experts 8 --experts-per-token 3 --expert-ff-hidden-size 48"


def _config(name: str, vocabulary: int = 50257) -> Config:
    return parse(["--config", str(ROOT / f"configs/models/{name}.json"), "--vocab-size", str(vocabulary)])


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_built_model(name: str) -> None:
    config = _config(name)
    with torch.device("meta"):
        model = (T5Model if config.is_t5 else GPT2Model)(config)
    found = count_layers(layers_of(config), config)
    assert found.held == sum(p.numel() for p in model.parameters())
    assert found.whole == count_parameters(model)


def test_parameters_are_those_that_were_published() -> None:
    assert parameters(_config("llama_8b", 128256)) == 8_030_261_248  # Llama 3 8B, as published by Meta
    assert parameters(_config("gpt2_small")) == 124_439_808  # GPT-2 small, as published by OpenAI
    billions = [published.compare(run).parameters / 1e9 for run in published.PAPERS[:10:3]]
    # These are the parameter counts in Table 1 of Narayanan et al.
    assert [round(b, 1) for b in billions] == [1.7, 18.4, 145.6, 1008.0]


def test_model_parallel_ranks_hold_their_share() -> None:
    one = parse(TINY.split())
    four = parse([*TINY.split(), "--model-parallel-size", "4"])
    h, layers = 64, 4
    # Every rank holds a copy of these parameters: norms, row-parallel biases, final norm, position embeddings.
    copies = layers * (2 * 2 * h + 2 * h) + 2 * h + 32 * h
    split = sum(p for p in (count_layers(layers_of(one), one).held - 512 * h - copies,))
    assert count_layers(layers_of(four), four).held == split // 4 + copies + 512 * h // 4


@pytest.mark.parametrize(
    "more", ["", "--activation swiglu --no-hidden-bias --num-shared-experts 2 --shared-expert-gate"]
)
def test_expert_parallel_ranks_hold_their_experts(more: str) -> None:
    """A rank of two holds 4 of the 8 experts of layers 0 and 2, and all other parameters."""
    flags = f"{TINY} {EXPERTS} {more} --moe-layer-frequency 2 --make-vocab-size-divisible-by 1 --zero-stage 1".split()
    whole, halved = parse(flags), parse([*flags, "--expert-parallel-size", "2"])
    mesh = mpu.Mesh(expert=mpu.Axis(None, (0, 1), 1))
    with torch.device("meta"):
        model = GPT2Model(whole)
        with mpu.built_with(mesh):
            half = GPT2Model(halved)
    found = count_layers(layers_of(halved), halved)
    assert found.whole == sum(p.numel() for p in model.parameters()) == parameters(whole)
    assert found.held == sum(p.numel() for p in half.parameters())
    experts = {name: p for name, p in half.named_parameters() if ".experts." in name}
    assert found.experts == sum(p.numel() for p in experts.values())
    assert found.expert_matrices == sum(p.numel() for p in experts.values() if p.dim() == 2)
    assert {name.split(".")[1] for name in experts} == {"0", "2"}
    weights, _, optimizer = state_bytes(found, halved, resolve(halved, 4, False), 4)
    # On four ranks, ZeRO 1 shards the two moments of experts over two ranks, and those of other parameters over four.
    assert weights == 4 * found.held
    assert optimizer == 8 * (found.experts / 2 + (found.held - found.experts) / 4)


@pytest.mark.parametrize(
    ("pattern", "frozen", "held"),
    [("layers.[012].*", 3 * 49_984, 3 * 49_984), ("embedding*", 500 * 64, 512 * 64), ("*.bias", 0, 0)],
)
def test_frozen_layers_have_no_moments(pattern: str, frozen: int, held: int, tmp_path: Path) -> None:
    """A layer has 12 h^2 + 13 h parameters; the tied output layer is frozen with the embedding, padded to 512 rows.

    Weights that are only a part of a layer count as trained. A checkpoint has no padding.
    """
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([{"pattern": "*", "frozen": False}, {"pattern": pattern, "frozen": True}]))
    config = parse([*TINY.split(), "--param-groups", str(rules)])
    (found,) = rank_memory(config, resolve(config, 1, False), 1, False, stages_of(config))
    trained = count_layers(layers_of(config), config).held - held
    assert found.optimizer == 8 * trained
    assert found.gradients <= 4 * trained
    assert checkpoint_bytes(config) == 4 * (3 * parameters(config) - 2 * frozen)
    assert checkpoint_bytes(with_values(config, {"precision": "fp64"})) == 2 * checkpoint_bytes(config)


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        ("*mlp*", None),
        ("layers.1.mlp.*", 1),
        ("layers.[12].*", 2),
        ("layers.?.attention.dense.weight", 4),
        ("head.*", 0),
    ],
)
def test_a_layer_of_which_a_later_rule_unfreezes_a_part_counts_as_trained(
    pattern: str, layers: int | None, tmp_path: Path
) -> None:
    """`*mlp*` might match a weight of any layer. A layer has 12 h^2 + 13 h = 49,984 parameters."""
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([{"pattern": "*", "frozen": True}, {"pattern": pattern, "frozen": False}]))
    config = parse([*TINY.split(), "--param-groups", str(rules)])
    whole = count_layers(layers_of(config), config).held
    (found,) = rank_memory(config, resolve(config, 1, False), 1, False, stages_of(config))
    assert found.optimizer == 8 * (whole if layers is None else layers * 49_984)


def test_stages_hold_every_layer_once() -> None:
    """Each layer is on exactly one stage, although 30 layers are not divisible by four stages of two chunks."""
    flags = "--pipe-parallel-size 4 --pipeline-schedule interleaved --virtual-pipeline-size 2 --gas 8 --num-layers 30"
    config = parse([*TINY.split(), *flags.split()])
    stages = stages_of(config)
    names = [layer.name for stage in stages for layer in stage.layers]
    assert sorted(names) == sorted(layer.name for layer in layers_of(config))
    assert sum(stage.repeated for stage in stages) == 30


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ((64, 2, None), Batch(64, 2, 4)),
        ((64, None, 4), Batch(64, 2, 4)),
        ((None, 2, 4), Batch(64, 2, 4)),
        ((64, 2, 4), Batch(64, 2, 4)),
    ],
)
def test_the_third_of_a_batch(given: tuple[int | None, ...], found: Batch) -> None:
    assert solve_batch(8, *given) == found


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((60, 2, None), "set --global-batch-size to 64 or another multiple of 16"),
        ((64, None, None), "give two of"),
        ((64, 2, 5), "multiple of 80"),
        ((None, 0, 4), "at least 1"),
    ],
)
def test_batches_that_do_not_go_together(given: tuple[int | None, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        solve_batch(8, *given)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(("stages", "micros"), [(2, 4), (4, 32), (3, 21)])
def test_long_schedules_go_on_as_they_began(name: str, stages: int, micros: int) -> None:
    """The planner's bubble and peak memory, extrapolated from few micro-batches, equal those of the whole schedule."""
    chunks = 2 if name == "interleaved" else 1
    schedule = find_schedule({"schedule": name, "extra_warmup": 0}, chunks)
    plan = [list(schedule(stage, stages, micros)) for stage in range(stages)]
    for backward in (1.0, 2.0, 3.0):
        units = pipeline_units(name, 0, chunks, stages, micros, backward)
        assert 1 - micros / units == pytest.approx(bubble_fraction(simulate_times(plan, backward=backward)))
    for stage in range(stages):
        assert in_flight(StageSchedule(name, 0, chunks, stage, stages, micros)) == max_in_flight(plan[stage])


def test_layouts_are_legal() -> None:
    config = with_values(parse(TINY.split()), {"precision": "bf16"})
    wanted = SearchRequest(config, load_cluster("a100"), 16, 64)
    found = list(candidates(wanted))
    assert found
    for each in found:
        p = each.parallel
        assert p.data_parallel_size(16) * p.stages * p.model_parallel_size == 16
        assert each.train_batch_size(16) == 64
        assert p.model_parallel_size <= 4  # the model has 4 attention heads
        assert p.zero_stage and (p.zero_stage == 1 or not p.pipe_parallel_size)
        resolve(each, 16, True)


@pytest.mark.parametrize(("seq_length", "splits"), [(130, False), (132, True)])
def test_planned_layouts_split_only_sequences_that_their_ranks_can_split(seq_length: int, splits: bool) -> None:
    flags = f"{TINY} --seq-length {seq_length} --vocab-size 512"
    request = SearchRequest(parse(flags.split()), load_cluster("a100"), 4, 8)
    found = [each for each in candidates(request) if each.parallel.model_parallel_size == 4]
    assert found and {uses_sequence_parallel(each, True) for each in found} == {splits}


@pytest.mark.parametrize("gas", [6, 8])
def test_interleaved_layouts_need_no_multiple_of_the_stages_as_number_of_micro_batches(gas: int) -> None:
    flags = f"{TINY} --num-layers 8 --pipe-parallel-size 4 --virtual-pipeline-size 2 --pipeline-schedule interleaved"
    fixed = frozenset({"pipe_parallel_size", "virtual_pipeline_size"})
    request = SearchRequest(parse(flags.split()), load_cluster("a100"), 4, None, 1, gas, fixed)
    schedule = find_schedule({"schedule": "interleaved", "extra_warmup": 0}, 2)
    run = simulate_times([list(schedule(stage, 4, gas)) for stage in range(4)], backward=DEFAULT.backward)
    for layout in search(request):
        assert layout.cost.bubble == pytest.approx(bubble_fraction(run))


def test_layouts_divide_experts() -> None:
    """Sizes of expert-parallel groups are the divisors of experts and data ranks; ZeRO 2 and 3 do not go with them."""
    config = with_values(parse([*TINY.split(), *EXPERTS.split()]), {"precision": "bf16"})
    found = list(candidates(SearchRequest(config, load_cluster("a100"), 16, 64)))
    assert {each.parallel.expert_parallel_size for each in found} == {1, 2, 4, 8}
    divided = [each for each in found if each.parallel.expert_parallel_size > 1]
    assert {each.parallel.zero_stage for each in divided} == {1}
    for each in divided:
        assert each.parallel.data_parallel_size(16) % each.parallel.expert_parallel_size == 0
        resolve(each, 16, True)
    fixed = with_values(config, {"expert_parallel_size": 4})
    kept = candidates(SearchRequest(fixed, load_cluster("a100"), 16, 64, fixed=frozenset({"expert_parallel_size"})))
    assert {each.parallel.expert_parallel_size for each in kept} == {4}


def test_time_of_experts() -> None:
    """Only the experts of a token count as work. Only all-to-alls over more than one rank take time."""
    cluster = load_cluster("a100")

    def plan_of(more: str) -> Layout:
        flags = f"{TINY} {EXPERTS} --batch-size 2 --gas 1 --zero-stage 1 {more}"
        return evaluate(with_values(parse(flags.split(), None, 4), {"precision": "bf16"}), 4, cluster)

    three, two = plan_of("").cost, plan_of("--experts-per-token 2").cost
    divided, both = plan_of("--expert-parallel-size 4"), plan_of("--expert-parallel-size 4 --moe-layer-frequency 2")
    tokens = 4 * 2 * 32
    assert three.model_flops - two.model_flops == 6 * tokens * 4 * 2 * 64 * 48  # an expert less in 4 layers
    assert three.stages[0].expert_parallel == 0 == three.expert_bytes
    # Of each row, 3/4 go to other ranks, four times in each layer.
    assert divided.cost.expert_bytes == 4 * 4 * (64 * 3) * 64 * 2 * 3 / 4
    assert divided.cost.stages[0].expert_parallel == 2 * both.cost.stages[0].expert_parallel > 0
    assert "ep 4" in divided.name
    # 4 x 4 x 192 rows of 64 bf16 numbers, of which 3/4 are sent, are 0.29 MB.
    line = next(line for line in explain_layout(divided, None) if line.startswith("experts"))
    assert re.findall(r"[\d.]+", line) == ["2", "8", "4", "0.29", "1"]
    # The gradients of experts are reduced over one rank only, so their all-reduce takes no time.
    assert divided.cost.gradients < three.gradients


def test_the_search_finds_what_fits_and_says_what_does_not() -> None:
    config = with_values(parse(TINY.split()), {"precision": "bf16"})
    cluster = load_cluster("a100")
    best = search(SearchRequest(config, cluster, 8, 64))[0]
    assert 0 < best.cost.mfu < 1
    speeds = [each.cost.tokens_per_second for each in search(SearchRequest(config, cluster, 8, 64))]
    assert all(a >= 0.99 * b for a, b in pairwise(speeds))  # layouts are sorted by rounded speeds, hence 0.99
    with pytest.raises(ValueError, match=SENTENCES["do_not_fit_on_8_devices"]):
        search(SearchRequest(config, replace(cluster, memory=1e-6), 8, 64))
    with pytest.raises(ValueError, match="is not --micro-batch-size 3"):
        search(SearchRequest(config, cluster, 8, 64, micro=3, fixed=frozenset({"model_parallel_size"})))


def test_clusters_that_are_not_there_or_not_whole(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=SENTENCES["use_one_of_a100"]):
        load_cluster("b9000")
    (tmp_path / "mine.json").write_text('{"name": "mine"}')
    with pytest.raises(ValueError, match=SENTENCES["is_not_a_valid_cluster"]):
        load_cluster(str(tmp_path / "mine.json"))
    for path in sorted((ROOT / "configs/clusters").glob("*.json")):
        assert load_cluster(path.stem).sources


def test_published_runs_are_predicted() -> None:
    """One set of constants predicts the speeds of 228 published runs; the tables of the pages hold what is computed."""
    every = []
    for found in published.compared().values():
        every += found
    assert len(every) == 228
    assert published.median_error(every) < 0.06
    assert published.within(every, 0.2) > 0.95
    spanning = [each for each in every if each.run.nodes > 1]
    assert len(spanning) > 70 and published.median_error(spanning) < 0.08
    tables = tomllib.loads((ROOT / "benchmarks/results.toml").read_text(encoding="utf-8"))["table"]
    single = [published.row_of(published.compare(run)) for run in (*published.PAPERS, *published.PRESETS)]
    assert [row[3:] for row in tables["published"]["rows"]] == [row[3:] for row in single]
    assert tables["published-groups"]["rows"] == published.group_rows()
    assert tables["published-worst"]["rows"] == published.worst_rows()


def test_models_of_published_runs_are_theirs() -> None:
    """llm-foundry's table gives the number of parameters of each model at 2,048 tokens."""
    expected = {"125m": 125311488, "1b": 1315950592, "7b": 6658859008, "30b": 29975214080, "70b": 64862437376}
    for run in published.LLM_FOUNDRY:
        name = run.name.split()[1].strip(",")
        if run.config.data.seq_length == 2048 and name in expected:
            assert parameters(run.config) == pytest.approx(expected[name], rel=1e-3)


@pytest.mark.parametrize(
    ("ranks", "stride", "speed"),
    [
        (8, 1, 300.0),  # inside a node
        (16, 1, 200.0),  # 8 links of 25 GB/s a node
        (8, 2, 100.0),  # every second device: 4 links a node
        (4, 8, 25.0),  # one device a node
        (3, 24, 25.0),  # one device in every third node
        (4, 2, 300.0),
    ],
)
def test_ring_collectives_use_the_links_of_all_their_ranks_in_a_node(ranks: int, stride: int, speed: float) -> None:
    cluster = load_cluster("a100")
    assert cluster.ring(ranks, stride).gigabytes_per_second == speed
    slow = replace(cluster, inside=replace(cluster.inside, gigabytes_per_second=60.0))
    assert slow.ring(ranks, stride).gigabytes_per_second == min(speed, 60.0)


def test_expert_rows_for_other_nodes_leave_through_one_link() -> None:
    """Of 16 ranks in two nodes, 8/15 of the rows leave the node at 25 GB/s. Within a node, rows move at 300 GB/s."""
    cluster = load_cluster("a100")

    def seconds(ranks: int) -> tuple[float, float]:
        flags = f"{TINY} --num-experts 16 --experts-per-token 3 --batch-size 64 --gas 1 --zero-stage 1"
        config = parse([*flags.split(), "--expert-parallel-size", str(ranks)], None, ranks)
        cost = evaluate(with_values(config, {"precision": "bf16"}), ranks, cluster).cost
        return cost.stages[0].expert_parallel, cost.expert_bytes

    for ranks, share, speed in ((8, 1.0, 300e9), (16, 8 / 15, 25e9)):
        found, sent = seconds(ranks)
        latency = 16 * (ranks - 1) * (5e-6 if ranks == 8 else 1e-5)
        assert found == pytest.approx(sent * share / (speed * 0.75) + latency)


def test_written_settings_are_those_that_were_planned() -> None:
    """The planner writes tie_embeddings into its settings file, since Llama's embeddings are untied by default."""
    import json

    from megatron.config.command_line import parse
    from megatron.config.defaults import DEFAULTS
    from megatron_tools.plan.scripts import _config_json

    planned = parse(
        ["--config", str(ROOT / "configs/models/llama_1b.json"), "--hidden-dropout", "0.1"], DEFAULTS["llama"]
    )
    assert planned.model.tie_embeddings
    written = json.loads(_config_json(planned, None))["model"]
    assert (written["tie_embeddings"], written["hidden_dropout"]) == (True, 0.1)


WRONG: list[tuple[str, Any, str]] = [
    ("peak_tflops", {"fp32": 0}, "peak_tflops.fp32 is 0, not a positive number"),
    ("peak_tflops", {"bf61": 1}, "peak_tflops is {'bf61': 1}; it must have a number for at least one of fp64, fp32"),
    ("peak_tflops", {}, "it must have a number"),
    ("between", {"gigabytes_per_second": -1, "latency_seconds": 1e-5}, "between.gigabytes_per_second is -1"),
    ("inside", {"gigabytes_per_second": 1, "latency": 1e-5}, "inside lacks latency_seconds"),
    ("inside", 3, "inside is not a JSON object"),
    ("devices_per_node", 2.5, "devices_per_node is 2.5, not a whole number"),
    ("memory", True, "memory is True, not a positive number"),
    ("sustained", 0, "sustained is 0, not a positive number"),
    ("memory", math.nan, "memory is nan, not a positive number"),
    ("memroy", 80, "unknown keys: memroy"),
]


@pytest.mark.parametrize(("key", "value", "words"), WRONG, ids=str)
def test_a_cluster_with_a_wrong_figure_is_refused(key: str, value: Any, words: str, tmp_path: Path) -> None:
    content = json.loads((ROOT / "configs/clusters/a100.json").read_text())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**content, key: value}))
    with pytest.raises(ValueError, match=re.escape(words)):
        load_cluster(str(path))
    path.write_text("[1]")
    with pytest.raises(ValueError, match=SENTENCES["must_hold_a_json_object"]):
        load_cluster(str(path))


def test_virtual_stages_that_are_given_bring_their_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    given = (
        "--family gpt2 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 4000 "
        "--virtual-pipeline-size 2"
    )
    plan.main(
        plan_flags.build_parser().parse_args(
            [*given.split(), *["--cluster", "laptop_cpu", "--devices", "2", "--gas", "8", "--micro-batch-size", "1"]]
        )
    )
    printed = capsys.readouterr().out
    # With h = 64, there are 4 layers of 12 h^2 + 13 h parameters, token and position embeddings, and the final norm.
    assert printed.startswith(f"{4 * (12 * 64**2 + 13 * 64) + 4000 * 64 + 64 * 64 + 2 * 64:,} parameters")
    assert {tuple(row.split("|")[4:6]) for row in printed.splitlines()[3:]} == {(" 2  ", " 2  ")}


def test_what_cannot_be_together_is_said_by_its_rule() -> None:
    config = replace(
        parse(
            [
                "--config",
                "configs/models/llama_8b.json",
                "--vocab-size",
                "128256",
                "--precision",
                "bf16",
                "--zero-stage",
                "3",
                "--pipe-parallel-size",
                "2",
            ]
        )
    )
    with pytest.raises(ValueError, match="ZeRO"):
        search(
            SearchRequest(config, load_cluster("h100"), 64, 1024, fixed=frozenset({"zero_stage", "pipe_parallel_size"}))
        )


@pytest.mark.parametrize("path", sorted((ROOT / "configs/models").glob("*.json")), ids=lambda path: path.stem)
def test_settings_that_the_planner_writes_are_those_of_the_model(path: Path, tmp_path: Path) -> None:
    config = parse_any_family(["--config", str(path), "--vocab-size", "1000"])
    (tmp_path / "config.json").write_text(scripts._config_json(config, None))
    assert parse_any_family(["--config", str(tmp_path / "config.json")]).model == config.model


@pytest.mark.parametrize("more", ["", "--lr-decay-style wsd --lr-wsd-decay-samples 2"])
def test_planned_steps_win_over_samples(more: str, tmp_path: Path) -> None:
    config = parse([*TINY.split(), "--family", "gpt2", "--train-samples", "400", *more.split()])
    path = tmp_path / "config.json"
    path.write_text(scripts._config_json(config, 4, config.train_batch_size(1)))
    assert parse_any_family(["--config", str(path)]).with_derived_iters(1).train.train_iters == 4


@pytest.mark.parametrize("method", ["uniform", "parameters", "type:Block", "measured"])
def test_without_a_pipeline_the_estimate_needs_no_partition_method(method: str) -> None:
    def stages(flags: str) -> object:
        sizes = f"--family gpt2 --vocab-size 500 --num-layers 2 --hidden-size 24 --seq-length 8 {flags}"
        return stages_of(parse(sizes.split()))

    assert stages(f"--partition-method {method}") == stages("")
    with pytest.raises(ValueError, match="--partition-method"):
        stages(f"--partition-method {method} --pipe-parallel-size 2")


def test_more_ranges_than_layers_are_refused_and_left_out_of_a_search() -> None:
    """A model without a family may have more layers than --num-layers says, so its settings are accepted."""
    flags = ["--vocab-size", "512", "--num-layers", "2", "--pipe-parallel-size", "4", "--virtual-pipeline-size", "2"]
    config = parse([*flags, "--pipeline-schedule", "interleaved", "--gas", "4"])
    with pytest.raises(ConfigError, match="--pipe-parallel-size 4 x --virtual-pipeline-size 2"):
        stages_of(config)
    small = parse(["--vocab-size", "512", "--num-layers", "2"])
    assert search(SearchRequest(small, load_cluster("a100"), 8, 64))


@pytest.mark.parametrize("devices", [12, 20])
def test_nodes_that_would_be_used_in_part_are_refused(devices: int) -> None:
    flags = ["--model", "llama_1b", "--cluster", "h100", "--devices", str(devices), "--global-batch-size", "240"]
    with pytest.raises(ValueError, match="--devices"):
        plan.main(plan_flags.build_parser().parse_args(flags))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_time_of_unequal_stages(name: str, backward: float) -> None:
    """A timetable with each stage's own seconds takes as long as the planner says, within a tenth.

    The planner is told the duration of a backward pass, which is one or two forward passes.
    """
    flags = f"{TINY} --vocab-size 60000 --pipe-parallel-size 4 --gas 16 --zero-stage 1 --pipeline-schedule {name}"
    config = with_values(parse(flags.split(), None, 4), {"precision": "bf16", "hidden_size": 1024})
    cost = evaluate(config, 4, load_cluster("a100"), replace(DEFAULT, backward=backward)).cost
    seconds = [stage.total for stage in cost.stages]
    assert max(seconds) > 1.3 * min(seconds)
    schedule = find_schedule({"schedule": name, "extra_warmup": 0}, 1)
    table = [list(schedule(stage, 4, 16)) for stage in range(4)]
    parts = {"Forward": 1, "Backward": backward, "BackwardInput": backward / 2, "BackwardWeight": backward / 2}
    whole = 1 + backward
    spans = simulate_times(table, seconds=lambda kind, stage, chunk: seconds[stage] * parts[kind.__name__] / whole)
    assert cost.passes == pytest.approx(max(span.end for span in spans), rel=0.1)


PRESETS = sorted(path.stem for path in (ROOT / "configs/models").glob("*.json"))


@pytest.mark.parametrize("name", covering(PRESETS, lambda name: name in ("llama_tiny", "t5_small", "qwen3-moe_tiny")))
def test_the_doctor_accepts_what_the_planner_writes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--model {name} --cluster h200 --devices 32 --global-batch-size 256 --write {tmp_path}"
    plan.main(plan_flags.build_parser().parse_args(flags.split()))
    command = capsys.readouterr().out.splitlines()[-1].partition("doctor.py ")[2]
    assert doctor.main([*command.split(), "--quick", "--json"]) == 0
    printed = capsys.readouterr().out
    states = {each["check"]: each["state"] for each in json.loads(printed[printed.index("[\n") :])}
    assert {states[check] for check in ("settings", "layout", "ds_config", "memory")} == {"ok"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ["--data-path", "d", "--split", "90,10,0", "--vocab-file", "v"]),
        (
            ["--split", "80,20,0", "--vocab-file", "a b"],
            ["--data-path", "d", "--split", "80,20,0", "--vocab-file", "v"],
        ),
        (["--data-path", "x", "--vocab-file", "a b"], ["--vocab-file", "a b"]),
    ],
    ids=["nothing", "split", "corpus"],
)
def test_the_written_script_leaves_given_data_to_the_config(
    given: list[str], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script runs with `echo` in place of the launch; DATA_PATH and VOCAB_FILE are set if no corpus is given."""
    flags = "--model llama_tiny --cluster laptop_cpu --devices 1 --global-batch-size 8 --seq-length 32"
    words = [*flags.split(), *given, "--write", str(tmp_path)]
    monkeypatch.setattr(scripts, "CHECKOUT", tmp_path)  # as if installed: nothing is prepared
    plan.main(plan_flags.build_parser().parse_args(words))
    script = tmp_path / "run.sh"
    script.write_text(script.read_text().replace("megatron-launch", "printf '%s\\n'"))
    variables = {} if "--data-path" in given else {"DATA_PATH": "d", "VOCAB_FILE": "v"}
    environment = {"PATH": os.environ["PATH"], **variables}
    done = subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, check=True, timeout=20
    )
    passed = done.stdout.splitlines()
    begin = passed.index("--deepspeed-config") + 2
    assert passed[begin : passed.index("--run-dir")] == expected


def test_measured_runs_of_random_settings_are_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak memory of random runs of one to four ranks, measured by an allocator that counts every allocation.

    The CPU of these measurements emulates matmuls in fp16, and has instructions for bf16.
    Each row of measured_memory.json holds ranks, megabytes, reduce_bucket_size and flags (2026-11-29, torch 2.13).
    `python benchmarks/plan_memory.py --rows tests/unit/measured_memory.json` measures them again.
    """
    monkeypatch.setattr("megatron.estimate.sizes.emulates_matmul", lambda dtype: dtype == torch.float16)
    errors = []
    for ranks, measured, bucket, flags in json.loads(Path(__file__).with_name("measured_memory.json").read_text()):
        words = flags.split()
        if bucket is not None:
            path = tmp_path / f"{bucket}.json"
            path.write_text(json.dumps({"zero_optimization": {"stage": "auto", "reduce_bucket_size": bucket}}))
            words += ["--deepspeed-config", str(path)]
        config = parse(words, None, ranks)
        memory = rank_memory(config, resolve(config, ranks, False), ranks, False, stages_of(config))
        errors.append(max(each.total for each in memory) / 1e6 / measured - 1)
    close = [error for error in errors if abs(error) <= 0.1]
    assert len(close) / len(errors) >= 0.99
    assert min(errors) > -0.1


def test_only_stages_of_a_decoder_send_the_output_of_the_encoder() -> None:
    """Also if encoder and decoder have equally many tokens."""
    flags = (
        "--family t5 --num-layers 2 --hidden-size 16 --num-attention-heads 2 --vocab-size 100 --batch-size 3 "
        "--objective prefix-lm --enc-seq-length 32 --dec-seq-length 32 --pipe-parallel-size 4"
    )
    config = parse(flags.split())
    shapes = Shapes(config, "fp32", False, 0)
    sent = [boundary_bytes(stage, shapes) for stage in stages_of(config)]
    states = 4.0 * 3 * 32 * 16
    assert sent == [states, states, 2 * states, 2 * states]


def test_written_files_keep_the_settings_of_the_users_ds_config(tmp_path: Path) -> None:
    given = tmp_path / "given.json"
    flags = "--cluster v100 --devices 8 --global-batch-size 64 --top 1"
    words = [*TINY.replace("fp32", "fp16").split(), *flags.split(), "--deepspeed-config", str(given)]
    content: dict[str, Any] = {"gradient_clipping": 0.25, "steps_per_print": 7, "zero_optimization": True}
    folder = tmp_path / "out"
    files = ["--config", str(folder / "config.json"), "--deepspeed-config", str(folder / "ds_config.json")]
    for more in ({"fp16": {"enabled": "auto", "initial_scale_power": 12}}, {"zero_optimization": "auto"}):
        content |= more
        given.write_text(json.dumps(content))
        plan.main(plan_flags.build_parser().parse_args([*words, "--write", str(folder)]))
        resolved = resolve(parse_any_family(files, 8), 8, False)
        assert (resolved.clip_grad, resolved.log_interval, resolved.zero_stage) == (0.25, 7, 1)
        assert resolved.deepspeed["fp16"]["initial_scale_power"] == 12


@pytest.mark.parametrize("by_file", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_given_stage_of_zero_is_planned_for_a_single_replica(stage: int, by_file: bool, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    flags = f"--deepspeed-config {path}" if by_file else f"--zero-stage {stage}"
    fixed = frozenset() if by_file else frozenset({"zero_stage"})
    found = search(SearchRequest(parse([*TINY.split(), *flags.split()]), load_cluster("a100"), 1, 8, fixed=fixed))
    assert {layout.resolved.zero_stage for layout in found} == {stage}


@pytest.mark.parametrize("more", ["--sliding-window 1024", "--num-experts 64 --expert-ff-hidden-size 4096"])
def test_memory_does_not_depend_on_where_the_stage_of_zero_is_given(more: str, tmp_path: Path) -> None:
    """Under ZeRO 3, each layer has its own rotation angles and mask, and experts are computed one by one."""
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 3}}')
    flags = f"--family llama --num-layers 8 --hidden-size 192 --seq-length 8192 --vocab-size 500 --batch-size 1 {more}"
    found = []
    for stage in ("--zero-stage 3", f"--deepspeed-config {path}"):
        config = parse_any_family(f"{flags} --precision bf16 {stage}".split(), 4)
        found.append(rank_memory(config, resolve(config, 4, True), 4, True, stages_of(config)))
    assert found[0] == found[1]


def test_the_planner_refuses_offloading(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    config = parse([*TINY.split(), "--deepspeed-config", str(path)])
    request = SearchRequest(config, load_cluster("a100"), 8, 64)
    for setting in ({"offload_optimizer": {"device": "cpu"}}, {"cpu_offload": True}):
        path.write_text(json.dumps({"zero_optimization": {"stage": 2, **setting}}))
        with pytest.raises(ValueError, match="offload"):
            search(request)
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, "offload_param": {"device": "none"}}}))
    assert search(request)


def test_layout_flags_of_other_frameworks_are_kept_by_the_search() -> None:
    def fixed(flags: str) -> frozenset[str]:
        words = f"{TINY} {flags}".split()
        return plan.fixed_settings(words, parse(words, None, 8), 8)

    assert fixed("--tensor-model-parallel-size 4 --recompute-granularity full") == {
        "model_parallel_size",
        "checkpoint_activations",
    }
    assert fixed("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --gas 4") == {
        "pipe_parallel_size",
        "virtual_pipeline_size",
        "pipeline_schedule",
    }
    assert fixed("--no-sequence-parallel --zero-stage=1") == {"sequence_parallel", "zero_stage"}


def test_the_planner_takes_the_number_format_of_a_ds_config(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    words = f"{TINY.removesuffix('--precision fp32')} --cluster a100 --devices 8 --deepspeed-config {path}".split()
    cases: list[tuple[Any, str]] = [(True, "fp16"), ({"enabled": True}, "fp16"), ({"enabled": False}, "bf16")]
    for section, precision in cases:
        path.write_text(json.dumps({"fp16": section}))
        config = plan.run_settings(plan_flags.build_parser().parse_args(words), load_cluster("a100"))
        assert config.train.precision == precision


@pytest.mark.parametrize(("cluster", "precision"), [("v100", "fp32"), ("a100", "bf16")])
def test_the_planner_takes_the_number_format_that_a_run_chooses(cluster: str, precision: str) -> None:
    words = f"{TINY.removesuffix('--precision fp32')} --cluster {cluster} --devices 8".split()
    config = plan.run_settings(plan_flags.build_parser().parse_args(words), load_cluster(cluster))
    assert config.train.precision == precision


def test_groups_of_layers_have_no_effect_on_an_estimate_without_a_pipeline() -> None:
    def peak(flags: str) -> Any:
        config = parse([*TINY.split(), "--gas", "4", *flags.split()])
        return rank_memory(config, resolve(config, 1, False), 1, False, stages_of(config))

    for stages in ("", " --pipe-parallel-size 1"):
        assert peak(f"--pipeline-schedule interleaved --virtual-pipeline-size 2{stages}") == peak(stages)


@pytest.mark.parametrize(
    "cuts", ["0,4", "0,2,4,5", "0,5,3,6", "1,2,3,4", "0,2,4,30", "0,2,2,6", "0,4,4", "0,4,8", "0,0,4"]
)
def test_a_list_that_does_not_divide_the_layers_is_refused(cuts: str) -> None:
    """The model has 8 layers in 3 stages: 4 transformer layers, and those before and after them."""
    config = parse([*TINY.split(), "--pipe-parallel-size", "3", "--partition-method", cuts])
    assert len(layers_of(config)) == 8
    with pytest.raises(ConfigError, match="--partition-method"):
        stages_of(config)
    with pytest.raises(ConfigError, match="--partition-method"):
        partition_method(layers_of(config), config)


def test_a_list_of_cuts_may_omit_the_number_of_layers() -> None:
    for cuts in ("0,2,4,6", "0,2,4,6,8", "0, 2, 4, 6,"):
        config = parse([*TINY.split(), "--pipe-parallel-size", "4", "--partition-method", cuts])
        assert [len(stage.layers) for stage in stages_of(config)] == [2, 2, 2, 2]
        assert partition_method(layers_of(config), config) == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("pattern", ["0 1 1 0", "0 1 0 1", "1 0 0 0 1 1"])
def test_the_peak_of_dense_and_expert_layers_is_that_of_all_layers(pattern: str) -> None:
    flags = "--family llama --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --vocab-size 8000 --gas 1"
    flags += f" --num-layers {len(pattern.split())} --num-experts 16 --experts-per-token 8 --checkpoint-activations"
    flags += f" --batch-size 4 --precision bf16 --zero-stage 1 --moe-layer-frequency {pattern}"
    config = parse_any_family(flags.split(), 8)
    resolved = resolve(config, 8, True)
    (stage,) = stages_of(config)
    step = _StepMemory(stage, config, resolved, 8, True)
    peaks = [step.backward(index).total for index, layer in enumerate(stage.layers) if layer.repeated]
    assert rank_memory(config, resolved, 8, True, [stage])[0].total == max(peaks)
