"""If one rank has a NaN gradient, all ranks skip the step. A run that keeps skipping ends and names rank and weight."""

import contextlib
import io
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron import mpu
from megatron.model.layers import global_buffers, global_parameters
from megatron.ranks.errors import RunError
from megatron.training.loop import Run, train
from tds import optimizer_state as zero_state
from tests.checkpoints.runs import Start, make, whole_tensors
from tests.conformance.engines import remembered_groups
from tests.support import covering, on_ranks

SMALL = "--num-layers 2 --batch-size 2 --train-iters 8 --save-interval 0"
EXPERTS = "--num-experts 4 --experts-per-token 2 --router-balance"
GUARD = "--skip-step-sigma 20 --skip-step-window 4"
BAD, SPIKE = 2, 6  # iterations with a NaN gradient and with a large one, counted from 0


class Layout(NamedTuple):
    """Flags of a run, and `where`, the parameter whose gradient becomes non-finite on the last rank.

    Other ranks hold copies of this parameter, since it is replicated or tied.
    """

    flags: str
    where: str = "layers.1.input_layernorm.weight"


LAYOUTS = {
    "dp2": Layout("--precision fp32 --zero-stage 0"),
    "dp2-unclipped-sgd": Layout("--precision fp32 --zero-stage 0 --optimizer sgd --clip-grad 0"),
    "dp2-zero1": Layout("--precision fp32 --zero-stage 1"),
    "dp2-zero3-bf16": Layout("--precision bf16 --zero-stage 3"),
    "dp2-zero2-bf16": Layout("--precision bf16 --zero-stage 2"),
    "dp2-zero1-bf16": Layout("--precision bf16 --zero-stage 1"),
    "dp2-fp64": Layout("--precision fp64"),
    "dp2-pipe1-unclipped": Layout("--precision fp32 --pipe-parallel-size 1 --clip-grad 0"),
    "pp2": Layout("--precision fp32 --pipe-parallel-size 2", "final_norm.norm.weight"),
    "pp2-zero1": Layout("--precision fp32 --pipe-parallel-size 2 --zero-stage 1", "embedding.word_embeddings.weight"),
    "pp2-zero1-bf16": Layout("--precision bf16 --pipe-parallel-size 2", "embedding.word_embeddings.weight"),
    "pp2-fp64": Layout("--precision fp64 --pipe-parallel-size 2", "embedding.word_embeddings.weight"),
    "tp2": Layout("--precision fp32 --model-parallel-size 2"),
    "tp2-zero1": Layout("--precision fp32 --model-parallel-size 2 --zero-stage 1"),
    "tp2-zero3": Layout("--precision fp32 --model-parallel-size 2 --zero-stage 3"),
    "tp2-zero1-bf16": Layout("--precision bf16 --model-parallel-size 2"),
    "tp2-zero2-bf16": Layout("--precision bf16 --model-parallel-size 2 --zero-stage 2"),
    "dp2-zero1-fp16": Layout("--deepspeed-config {folder}/fp16.json"),
    "dp2-zero3-fp16": Layout("--deepspeed-config {folder}/fp16.json --zero-stage 3"),
    "pp2-zero1-fp16": Layout(
        "--deepspeed-config {folder}/fp16.json --pipe-parallel-size 2", "embedding.word_embeddings.weight"
    ),
    "tp2-muon": Layout("--precision fp32 --model-parallel-size 2 --optimizer muon"),
    "tp2-zero1-bf16-muon": Layout("--precision bf16 --model-parallel-size 2 --optimizer muon"),
    "dp2-zero1-muon": Layout("--precision fp32 --zero-stage 1 --optimizer muon"),
    "pp2-muon": Layout("--precision fp64 --pipe-parallel-size 2 --optimizer muon", "embedding.word_embeddings.weight"),
    # The first stage has weights of AdamW only.
    "pp2-zero1-muon-vectors": Layout(
        "--precision fp32 --pipe-parallel-size 2 --zero-stage 1 --optimizer muon --param-groups {folder}/vectors.json",
        "embedding.word_embeddings.weight",
    ),
    "dp2-zero1-bf16-offload": Layout("--precision bf16 --deepspeed-config {folder}/offload.json"),
    "dp2-zero2-bf16-offload": Layout("--precision bf16 --zero-stage 2 --deepspeed-config {folder}/offload.json"),
    "dp2-zero1-offload": Layout("--precision fp32 --deepspeed-config {folder}/offload.json"),
    "pp2-zero1-bf16-offload": Layout(
        "--precision bf16 --no-tie-embeddings --pipe-parallel-size 2 --deepspeed-config {folder}/offload.json",
        "final_norm.norm.weight",
    ),
    "pp2-experts": Layout(f"--precision fp32 --pipe-parallel-size 2 {EXPERTS} bias", "final_norm.norm.weight"),
    "dp2-zero1-experts": Layout(f"--precision fp32 --zero-stage 1 --expert-parallel-size 2 {EXPERTS} aux-loss"),
    "dp2-zero1-bf16-experts": Layout(f"--precision bf16 --zero-stage 1 {EXPERTS} bias"),
    "tp2-pipe1": Layout("--precision fp32 --model-parallel-size 2 --pipe-parallel-size 1"),
}
IN_CI = [
    "dp2",
    "dp2-zero1",
    "tp2-zero1-bf16",
    "pp2-zero1-fp16",
    "dp2-zero1-muon",
    "dp2-zero1-bf16-offload",
    "pp2-experts",
    "pp2-zero1-muon-vectors",
]


def spoil(run: Run, where: str, iterations: Iterable[int], added: float = float("nan")) -> None:
    """Add `added` to the gradient of `where` in these iterations, on all ranks, or NaN on the last rank."""
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    found = [p for name, p in global_parameters(run.engine.deepspeed.module) if name == where]
    assert found or not last, [name for name, _ in global_parameters(run.engine.deepspeed.module)]
    if not found or not (last or math.isfinite(added)):
        return
    bad = set(iterations)
    rng = mpu.get_rng()
    found[0].register_hook(lambda g: g + added if rng.iteration in bad else g)  # type: ignore[no-untyped-call]


def everything(run: Run) -> list[bytes]:
    """Return, as bytes, the optimizer's step count and this rank's buffers, weights, master weights and moments."""
    ds = run.engine.deepspeed
    found = [str(zero_state.get_step(ds)).encode()]
    found += [name.encode() + str(values.tolist()).encode() for name, values in global_buffers(ds.module)]
    names = zero_state.moment_names(ds)
    for name, p in global_parameters(ds.module):
        tensors = [getattr(p, "ds_tensor", p), zero_state.get_weight(p)]
        tensors += [zero_state.get_moment(ds, p, m) for m in zero_state.moments_of(ds, p, names)]
        found += [
            name.encode() + t.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() for t in tensors
        ]
    return found


def watched(run: Run) -> list[list[bytes]]:
    """Return a list of the run's current state, from `everything()`; each later training step appends its new state."""
    found = [everything(run)]
    honest: Callable[..., Any] = run.engine.train_batch

    def train_batch(*args: Any) -> Any:
        step = honest(*args)
        found.append(everything(run))
        return step

    run.engine.train_batch = train_batch  # type: ignore[method-assign]
    return found


def _one_bad_step(
    flags: dict[str, Layout], folder: str, data: str, vocab_file: str
) -> dict[str, tuple[list[bool], str]]:
    """Run each layout with a NaN and a spike; return layout -> (whether each step changed the state, the output)."""
    results = {}
    with remembered_groups() as begin:
        for name, layout in flags.items():
            begin()
            with contextlib.redirect_stdout(io.StringIO()) as said:
                more = "--gas 2" if "pp2" in name else ""
                flags = f"{SMALL} {GUARD} --log-layers --no-save-at-end {layout.flags.format(folder=folder)} {more}"
                run = make(Start("gpt2", Path(folder) / name, flags), data, vocab_file)
                spoil(run, layout.where, [BAD])
                spoil(run, layout.where, [SPIKE], 500.0)
                found = watched(run)
                train(run)
                run.__exit__()
            changed = [a != b for a, b in zip(found, found[1:], strict=False)]
            assert found[-1][0] == (b"0" if "sgd" in name else b"6"), (name, found[-1][0])  # SGD has no step count
            results[name] = changed, said.getvalue()
    return results


@pytest.mark.parametrize(
    "names", covering([IN_CI, [n for n in LAYOUTS if n not in IN_CI]], lambda names: names is IN_CI)
)
def test_no_rank_applies_a_step_that_is_bad_on_one(
    names: list[str], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """No rank changes its weights or moments in a step in which one rank has a NaN gradient or a very large one."""
    (tmp_path / "fp16.json").write_text(json.dumps({"fp16": {"enabled": True, "initial_scale_power": 4}}))
    offload = {"offload_optimizer": {"device": "cpu"}}
    (tmp_path / "offload.json").write_text(json.dumps({"zero_optimization": offload}))
    (tmp_path / "vectors.json").write_text(json.dumps([{"pattern": "layers.0.*.weight", "frozen": True}]))
    chosen = {name: LAYOUTS[name] for name in names}
    found = on_ranks(2, _one_bad_step, chosen, str(tmp_path), tiny_data, vocab_file, timeout=500)
    for name in names:
        for rank in range(2):
            assert found[rank][name][0] == [i not in (BAD, SPIKE) for i in range(8)], (name, rank)
        text = (tmp_path / name / "metrics.jsonl").read_text()
        assert "NaN" not in text
        assert "Infinity" not in text
        rows = [json.loads(line) for line in text.splitlines()]
        assert [row["skipped_steps"] for row in rows] == [int(i in (BAD, SPIKE)) for i in range(8)], name
        for i, row in enumerate(rows):
            assert all((layer["grad_norm"] is None) == (i in (BAD, SPIKE)) for layer in row["layers"].values()), name
        assert rows[BAD]["grad_norm"] is None
        assert rows[SPIKE]["grad_norm"] > 100
        assert "| 1 skipped step" in found[0][name][1], name
        (spike,) = [spike for row in rows for spike in row.get("skipped_spikes", [])]
        batch = 2 if name.startswith("tp2") else 4
        assert (spike["iteration"], spike["samples"], spike["name"]) == (SPIKE + 1, batch, "gradient norm")
        assert spike["first_sample"] == SPIKE * batch
        scales = [row["loss_scale"] for row in rows]
        assert scales[SPIKE - 1] == scales[SPIKE], "a spike is no overflow"


def _refused(folder: str, data: str, vocab_file: str) -> str:
    offload = f"--precision bf16 --num-layers 3 --gas 2 --pipe-parallel-size 3 --deepspeed-config {folder}/offload.json"
    with pytest.raises((ValueError, RunError)) as error:
        make(Start("gpt2", Path(folder) / "refused", f"{SMALL} {offload}"), data, vocab_file)
    return str(error.value)


def test_all_stages_refuse_tied_weights_with_offloading_in_bf16(
    tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    (tmp_path / "offload.json").write_text(json.dumps({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}))
    for words in on_ranks(3, _refused, str(tmp_path), tiny_data, vocab_file):
        assert "offload_optimizer" in words and "tie" in words


def _ends(cases: dict[str, tuple[str, str, int]], folder: str, data: str, vocab_file: str) -> dict[str, str]:
    """Run all cases; return case -> the RunError that ended the case, without the cases that ended well.

    A case is (flags, parameter with the bad gradient, first bad iteration). A case "x+" resumes the run of case "x",
    with bad gradients only in iterations before 5.
    """
    ends = {}
    with remembered_groups() as begin:
        for name, (flags, where, since) in cases.items():
            begin()
            with contextlib.redirect_stdout(io.StringIO()):
                run = make(Start("gpt2", Path(folder) / name.rstrip("+"), f"{SMALL} {flags}"), data, vocab_file)
                added = 500.0 if "spike" in name else math.nan
                spoil(run, where, range(since, 5 if name.endswith("+") else 100), added)
                try:
                    train(run)
                except RunError as error:
                    ends[name] = str(error)
                run.__exit__()
    return ends


NORM = "layers.1.input_layernorm.weight"
STAYS = "--train-iters 9 --save-interval 1 --keep-last 1 --max-skipped-steps 3"
ENDS = {
    "dp2-fp32": (f"--precision fp32 {STAYS}", NORM, 2),
    "pp2-bf16-late": (f"--precision bf16 --pipe-parallel-size 2 {STAYS} --log-interval 9 --save-interval 2", NORM, 3),
    "dp2-spikes": (f"--precision fp32 {STAYS} {GUARD}", "layers.1.mlp.dense_h_to_4h.weight", 4),
    "dp2-async": (f"--precision bf16 --async-save {STAYS}", NORM, 2),
    "dp2-async+": (f"--precision bf16 {STAYS} --max-skipped-steps 1 --skip-iterations 3-5", NORM, 2),
}


@pytest.mark.parametrize(
    "some",
    covering(
        [["dp2-fp32", "dp2-spikes", "dp2-fp16"], ["pp2-bf16-late", "dp2-async", "dp2-async+"]],
        lambda some: "dp2-fp16" in some,
    ),
)
def test_a_run_that_learns_nothing_ends_and_keeps_its_last_good_checkpoint(
    some: list[str], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """A run that only skips steps ends with an error and keeps the checkpoint from before the skipped steps.

    If it resumes with --skip-iterations, it trains past the bad iterations.
    """
    (tmp_path / "fp16.json").write_text(
        json.dumps({"fp16": {"enabled": True, "initial_scale_power": 2, "hysteresis": 1}})
    )
    fp16 = {"dp2-fp16": (f"--deepspeed-config {tmp_path}/fp16.json {STAYS} --train-iters 20", NORM, 2)}
    cases = {name: case for name, case in (ENDS | fp16).items() if name in some}
    whole = {
        "dp2-fp32": "3 steps in a row were skipped, the last one at iteration 5 (samples 16 to 19): the gradient "
        "of "
        f"{NORM} is not finite on rank 1 (its samples: 18 to 19); --skip-iterations 3-5 continues past them; a lower "
        "--lr or a longer --warmup (with --override-lr-schedule, else a resumed run keeps its schedule) may avoid them",
        "dp2-fp16": "the loss scale of fp16 is at its minimum 1, but the gradient still overflows at iteration 5 "
        f"(samples 16 to 19): the gradient of {NORM} is not finite on rank 1 (its samples: 18 to 19); use --precision "
        "bf16 or fp32, or a lower --lr or a longer --warmup",
        "pp2-bf16-late": "3 steps in a row were skipped, the last one at iteration 6 (samples 10 to 11): the "
        "gradient "
        f"of {NORM} is not finite on rank 1 (its samples: 10 to 11); --skip-iterations 4-6",
        "dp2-spikes": "3 steps in a row were skipped, the last one at iteration 7 (samples 24 to 27): its "
        "gradient norm ",
        "dp2-async": "3 steps in a row were skipped, the last one at iteration 5",
    }
    for ends in on_ranks(2, _ends, cases, str(tmp_path), tiny_data, vocab_file, timeout=300):
        assert ends.keys() == {name for name in some if name in whole}, "a run with --skip-iterations must not fail"
        for name, words in ends.items():
            assert words.startswith(whole[name]), words
    for name, good in (("dp2-fp32", 2), ("dp2-spikes", 4), ("pp2-bf16-late", 3), ("dp2-async", 9)):
        folder = tmp_path / name / "checkpoints"
        if name in some:
            assert sorted(path.name for path in folder.iterdir()) == [f"iter_000000{good}", "latest"], name
            index = json.loads((folder / f"iter_000000{good}" / "checkpoint.json").read_text())
            assert index["state"]["iteration"] == good


def test_a_resumed_fp16_run_with_sgd_counts_skipped_steps(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """SGD has no step count, so a resumed run seemed to search for its first loss scale."""
    (tmp_path / "fp16.json").write_text(json.dumps({"fp16": {"enabled": True, "initial_scale_power": 8}}))
    flags = f"--deepspeed-config {tmp_path}/fp16.json --optimizer sgd --save-interval 1 --max-skipped-steps 2"
    cases = {"sgd+": (f"{flags} --train-iters 2", NORM, 9), "sgd": (f"{flags} --train-iters 6", NORM, 2)}
    (ends,) = on_ranks(1, _ends, cases, str(tmp_path), tiny_data, vocab_file)
    assert ends.keys() == {"sgd"}
    assert ends["sgd"].startswith("2 steps in a row were skipped, the last one at iteration 4")


def _all(starts: list[tuple[Start, list[int]]], data: str, vocab_file: str) -> None:
    with remembered_groups() as begin:
        for start, bad in starts:
            begin()
            with contextlib.redirect_stdout(io.StringIO()):
                run = make(start, data, vocab_file)
                spoil(run, NORM, bad)
                train(run)
                run.__exit__()


@pytest.mark.parametrize("workers", covering([0, 1], lambda workers: not workers))
def test_passing_over_a_batch_is_what_leaving_out_its_step_is(
    workers: int, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """A batch skipped by --skip-iterations or --skip-samples has the same effect as a step skipped due to a NaN."""
    flags = "--precision fp32 --save-interval 2 --train-iters 6"
    over = "--skip-iterations 3"
    starts = [
        (Start("gpt2", tmp_path / "bad", f"{SMALL} {flags}"), [2]),
        (Start("gpt2", tmp_path / "over", f"{SMALL} {flags} {over} --num-workers {workers}"), []),
        (Start("gpt2", tmp_path / "samples", f"{SMALL} {flags} --skip-samples 9-10"), []),
        (Start("gpt2", tmp_path / "again", f"{SMALL} {flags} {over} --exit-interval 2"), []),
        (Start("gpt2", tmp_path / "again", f"{SMALL} {flags} {over}"), []),
    ]
    on_ranks(2, _all, starts, tiny_data, vocab_file, timeout=300)
    ends = {name: tmp_path / name / "checkpoints" / "iter_0000006" for name in ("bad", "over", "samples", "again")}
    states = {name: json.loads((end / "checkpoint.json").read_text())["state"] for name, end in ends.items()}
    wanted = {key: value.tobytes() for key, value in whole_tensors(ends["bad"]).items()}
    for name, end in ends.items():
        assert states[name] == states["bad"], name
        assert {key: value.tobytes() for key, value in whole_tensors(end).items()} == wanted, name


def _spikes(starts: list[Start], data: str, vocab_file: str) -> None:
    with remembered_groups() as begin:
        for start in starts:
            begin()
            with contextlib.redirect_stdout(io.StringIO()):
                run = make(start, data, vocab_file)
                spoil(run, "layers.1.mlp.dense_h_to_4h.weight", [4, 5, 8], 500.0)
                train(run)
                run.__exit__()


def test_a_resume_in_another_layout_skips_the_same_spikes(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """The window is in the checkpoint: the first steps after a resume are compared with those before it."""
    flags = f"--num-layers 2 --train-iters 10 --precision fp32 {GUARD}"
    one, again = Start("gpt2", tmp_path / "one", f"{flags} --batch-size 4"), f"{flags} --batch-size 2"
    on_ranks(1, _spikes, [one], tiny_data, vocab_file)
    first = Start("gpt2", tmp_path / "again", f"{again} --exit-interval 4")
    resumed = Start("gpt2", tmp_path / "again", f"{again} --gas 2 --pipe-parallel-size 2 --zero-stage 1")
    on_ranks(2, _spikes, [first, resumed], tiny_data, vocab_file)
    rows = {
        name: [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "again")
    }
    skipped = {name: [s["iteration"] for row in of for s in row.get("skipped_spikes", [])] for name, of in rows.items()}
    assert skipped == {"one": [5, 6, 9], "again": [5, 6, 9]}
    both = [[row["lm_loss"] for row in of] for of in rows.values()]
    assert both[0] == pytest.approx(both[1], rel=1e-6)
    states = [json.loads((tmp_path / name / "checkpoints/iter_0000010/checkpoint.json").read_text()) for name in rows]
    windows = [torch.tensor(each["state"]["features"]["spike_guard"]["recent"]) for each in states]
    assert windows[0].allclose(windows[1], rtol=1e-5)


def test_an_exit_interval_passes_an_iteration_whose_step_is_always_skipped(
    tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """The first start saves iteration 3. The second one cannot save iteration 4 either, so it continues to 8."""
    start = Start("gpt2", tmp_path, f"{SMALL} --precision fp32 --train-iters 12 --exit-interval 4")
    on_ranks(1, _all, [(start, [3]), (start, [3])], tiny_data, vocab_file)
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*"))
    assert saved == ["iter_0000003", "iter_0000008"]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["split"] == "train"]
    assert [row["iteration"] for row in trained] == list(range(1, 9))
    assert [row["iteration"] for row in trained if row["skipped_steps"]] == [4]


def test_a_run_that_becomes_fp16_may_search_its_loss_scale(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """Adam has made steps in bf16 before, but the loss scale is a new one."""
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 32}}
    (tmp_path / "fp16.json").write_text(json.dumps(fp16))
    config = f"--deepspeed-config {tmp_path}/fp16.json --precision fp16"
    cases = {"run+": ("--precision bf16 --train-iters 2 --save-interval 1", NORM, 99)}
    cases["run"] = (f"{config} --train-iters 9 --max-skipped-steps 2 --save-interval 0", NORM, 99)
    (ends,) = on_ranks(1, _ends, cases, str(tmp_path), tiny_data, vocab_file)
    assert not ends
