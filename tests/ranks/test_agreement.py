"""Ranks with different settings refuse to train, and replicas with different weights are not saved."""

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn

from megatron import mpu
from megatron.config.command_line import parse
from megatron.features.stragglers import Straggler, slowest_rank
from megatron.model.layers import global_parameters
from megatron.ranks.errors import RunError
from megatron.ranks.initialize import initialize_megatron
from megatron.ranks.replicas import check_replicas, fingerprint
from megatron.ranks.source import source_files
from megatron.training.loop import train
from megatron.training.model_checks import check_declared_shards, refuse_unstorable_weights
from tests.checkpoints.runs import Start, losses_of, make, run_all
from tests.conformance.engines import remembered_groups
from tests.ranks.test_overlap_gather import gather_late
from tests.support import FULL, ROOT, covering, on_ranks

DIFFERENT = {
    "--lr 1e-3": ("--lr 2e-3", "--lr is 0.001 on rank 0 and 0.002 on rank 2"),
    "--seed 1": ("--seed 2", "--seed is 1 on rank 0 and 2 on rank 2"),
    "--gas 1": ("--gas 2", "--gas is 1 on rank 0 and 2 on rank 2"),
    "--pipe-parallel-size 3": ("", "--pipe-parallel-size is 3 on rank 0 and 0 on rank 2"),
    "--no-eod-mask-loss --lr 1e-3": (
        "--eod-mask-loss --lr 2e-3",
        "--eod-mask-loss is False on rank 0 and True on rank 2; --lr is",
    ),
}


def _start_differently(folder: str) -> list[str]:
    rank, told = dist.get_rank(), []
    for usual, (other, _) in DIFFERENT.items():
        with pytest.raises(RunError) as error:
            initialize_megatron(parse((other if rank == 2 else usual).split()))
        told.append(str(error.value))
    own = Path(folder) / str(rank)  # one folder per rank, as on nodes whose files differ
    own.mkdir()
    os.chdir(own)
    Path("ds.json").write_text(json.dumps({"gradient_clipping": float(rank == 2)}))
    with pytest.raises(RunError) as error:
        initialize_megatron(parse(["--deepspeed-config", "ds.json"]))
    return [*told, str(error.value)]


def test_ranks_that_were_started_differently_say_so(tmp_path: Path) -> None:
    """The errors of all ranks name the settings, versions or ds_config files that differ between ranks."""
    for told in on_ranks(3, _start_differently, str(tmp_path)):
        for sentence, (_, words) in zip(told, DIFFERENT.values(), strict=False):
            assert sentence.startswith(words)
            assert sentence.endswith(": start all ranks with the same settings, code and versions")
        assert told[-1].startswith("the SHA-256 of --deepspeed-config ds.json is ")


def _refused(argv: Sequence[str] = ()) -> str | None:
    try:
        initialize_megatron(parse([*argv]))
    except RunError as error:
        return str(error)
    return None


def _run_other_files(folder: str) -> list[str | None]:
    """Return the refusals of ranks that differ in a script, a module, a module of one rank only, and a variable."""
    rank = dist.get_rank()
    own = Path(folder) / str(rank)
    (own / "site-packages").mkdir(parents=True)
    told = []
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    main.__file__ = str(own / f"train{rank}.py")
    for factor in (1, 1 + rank):
        Path(main.__file__).write_text(f"FACTOR = {factor}\n")
        told.append(_refused())
    del main.__file__
    for name, where in (("rate", "."), ("library", "site-packages"), (f"only_on_{rank}", ".")):
        path = own / where / f"{name}.py"
        path.write_text(f"RATE = {rank}\n")
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__file__ = str(path)
        told.append(_refused())
        del sys.modules[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVIDIA_TF32_OVERRIDE", str(rank))
        told.append(_refused())
    return told


def test_ranks_with_other_scripts_or_modules_are_refused(tmp_path: Path) -> None:
    for told in on_ranks(2, _run_other_files, str(tmp_path)):
        same, script, module, library, alone, variable = told
        assert same is None and library is None and alone is None
        assert script is not None and "script" in script and "rank 1" in script
        assert module is not None and "rate" in module
        assert variable is not None and "NVIDIA_TF32_OVERRIDE" in variable


def _other_end(folder: str) -> str:
    """Start with a tokenizer whose vocabulary is the same on all ranks, but whose end of document is not."""
    own = Path(folder) / str(dist.get_rank())
    tokenizer = Tokenizer(WordLevel({"a": 0, "<end>": 1, "<stop>": 2}))
    tokenizer.add_special_tokens(["<end>", "<stop>"])
    own.mkdir()
    os.chdir(own)  # as on nodes with disks of their own, the paths are the same and the files are not
    tokenizer.save("tokenizer.json")
    Path("tokenizer_config.json").write_text(json.dumps({"eos_token": ["<end>", "<stop>"][dist.get_rank()]}))
    with pytest.raises(RunError) as error:
        make(Start("gpt2", Path("run"), ""), None, "tokenizer.json")
    return str(error.value)


def test_ranks_with_other_ends_of_documents_are_refused(tmp_path: Path) -> None:
    for told in on_ranks(2, _other_end, str(tmp_path)):
        assert "end-of-document" in told and "rank 1" in told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_fingerprint_sees_every_bit_and_every_place(dtype: torch.dtype) -> None:
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    raw, seen = x.view(torch.uint8), {int(fingerprint(x))}
    for at in range(raw.numel()):
        for bit in range(8):
            changed = raw.clone()
            changed.view(-1)[at] ^= 1 << bit
            seen.add(int(fingerprint(changed.view(dtype).view(7, 5))))
    assert len(seen) == 8 * raw.numel() + 1
    assert int(fingerprint(x.T.contiguous())) not in seen
    assert int(fingerprint(x[:0])) == 0


def test_a_fingerprint_goes_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(10.0)
    monkeypatch.setattr("megatron.ranks.replicas.CHUNK_ELEMENTS", 4)
    assert int(fingerprint(x)) != int(fingerprint(torch.cat([x[4:8], x[:4], x[8:]])))


LAYOUTS = {  # name -> (flags, replicated weight in which the test flips a bit on the last rank)
    "dp2": ("--precision fp32", "layers.0.mlp.dense_h_to_4h.weight"),
    "dp2-zero1-bf16": ("--precision bf16", "embedding.word_embeddings.weight"),
    "dp2-zero2": ("--precision fp32 --zero-stage 2", "final_norm.norm.bias"),
    "tp2": ("--precision fp32 --model-parallel-size 2 --hidden-dropout 0.1", "layers.1.input_layernorm.weight"),
    "tp2-bf16": (
        "--precision bf16 --model-parallel-size 2 --sequence-parallel",
        "final_norm.norm.weight",
    ),
    "tp2-zero3": ("--precision fp32 --model-parallel-size 2 --zero-stage 3", "layers.0.attention.dense.bias"),
    "pp2": ("--precision fp32 --pipe-parallel-size 2 --gas 2", "embedding.word_embeddings.weight"),
    "dp2-pipe1": ("--precision bf16 --pipe-parallel-size 1", "layers.1.mlp.dense_4h_to_h.bias"),
}
IN_CI = ["dp2", "tp2", "pp2"]


THREE = {
    "plain": "gpt2 --gas 2 --precision fp32",
    "fp32": "gpt2 --gas 4 --precision fp32 --pipe-parallel-size 2 --partition-method 0,7,8",
    "fp32-zero1": "gpt2 --gas 4 --precision fp32 --pipe-parallel-size 2 --partition-method 0,3,8 --zero-stage 1",
    "bf16": "gpt2 --gas 4 --precision bf16 --pipe-parallel-size 2 --partition-method 0,5,8",
    "fp16": "gpt2 --gas 4 --precision fp16 --pipe-parallel-size 2 --partition-method 0,4,8 --zero-stage 1",
    "T5": "t5-cpm --gas 4 --precision fp32 --pipe-parallel-size 2 --partition-method 0,9,12",
}


def _three_replicas(folder: str, data: str, vocab_file: str) -> None:
    """Train with three replicas, whose weights --check-replicas 1 compares after every iteration."""
    with remembered_groups() as begin, contextlib.redirect_stdout(io.StringIO()):
        for name, words in THREE.items():
            begin()
            model, flags = words.split(" ", 1)
            common = "--batch-size 1 --train-iters 4 --check-replicas 1 --no-save-at-end"
            with make(Start(model, Path(folder) / name, f"{common} {flags}"), data, vocab_file) as run:
                train(run)


@FULL
def test_tied_weights_stay_the_same_bits_with_three_replicas(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """Copies of a tied weight stay bit-identical, although their stages reduce gradients in different orders."""
    on_ranks(6, _three_replicas, str(tmp_path), tiny_data, vocab_file, timeout=300)
    found = {name: losses_of(tmp_path / name) for name in THREE}
    for name, tolerance in (("fp32", 1e-6), ("fp32-zero1", 1e-6), ("bf16", 2e-3), ("fp16", 2e-3)):
        assert found[name] == pytest.approx(found["plain"], rel=tolerance), name


def _uneven_groups(folder: str, data: str, vocab_file: str) -> str:
    flags = (
        "--batch-size 1 --train-iters 1 --precision fp32 --pipe-parallel-size 2 --zero-stage 1 --partition-method 0,2,8"
    )
    with make(Start("gpt2", Path(folder), flags), data, vocab_file) as run, contextlib.redirect_stdout(io.StringIO()):
        train(run)  # no error: DistributedOptimizer reduces one norm for all parameter groups
    flags += " --no-overlap-grad-reduce"
    with pytest.raises(ValueError) as error:
        make(Start("gpt2", Path(folder), flags), data, vocab_file)
    return str(error.value)


def test_a_stage_without_a_group_of_weights_is_refused(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """A stage that lacks a parameter group is refused with DeepSpeed's ZeRO, since the run would hang.

    DeepSpeed reduces a gradient norm for each parameter group over all stages. A stage with only embeddings has no
    parameter in the group without weight decay.
    """
    for told in on_ranks(2, _uneven_groups, str(tmp_path), tiny_data, vocab_file):
        assert told.startswith(
            "the stage of rank 0 has weights for 1 of the optimizer's 2 parameter groups, but ZeRO needs"
        )
        assert told.endswith("cut the layers differently (partition_method), or train in bf16 or without ZeRO")


def _flip(names: list[str], folder: str, data: str, vocab_file: str) -> dict[str, list[str]]:
    """Train, then flip a bit of a weight on the last rank; return the errors that a save and `check_replicas` raise."""
    told: dict[str, list[str]] = {}
    with remembered_groups() as begin, contextlib.redirect_stdout(io.StringIO()):
        for name in names:
            begin()
            flags, where = LAYOUTS[name]
            common = "--num-layers 2 --batch-size 2 --train-iters 4 --save-interval 1 --keep-last 2 --check-replicas 1"
            run = make(Start("gpt2", Path(folder) / name, f"{common} {flags}"), data, vocab_file)
            train(run)  # --check-replicas 1 finds no difference before the flip
            if dist.get_rank() == dist.get_world_size() - 1:
                weight: Any = next(p for n, p in global_parameters(run.engine.deepspeed.module) if n == where)
                own = getattr(weight, "ds_tensor", weight)
                with torch.no_grad():
                    own.view(-1)[:1].view(torch.uint8)[0] ^= 1
            told[name] = []
            for action in (
                lambda run=run: run.saver.save(run.state, wait=True),
                lambda run=run: check_replicas(run.engine.deepspeed),
            ):
                with pytest.raises(RunError) as error:
                    action()
                told[name].append(str(error.value))
            run.__exit__()
    return told


@pytest.mark.parametrize(
    "names", covering([IN_CI, [n for n in LAYOUTS if n not in IN_CI]], lambda names: names is IN_CI)
)
def test_copies_that_differ_by_a_bit_are_not_saved(
    names: list[str], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    for told in on_ranks(2, _flip, names, str(tmp_path), tiny_data, vocab_file, timeout=300):
        for name in names:
            for sentence in told[name]:
                assert sentence.startswith(
                    f"the weight {LAYOUTS[name][1]} on rank 1 differs from its copy on rank 0"
                ), sentence
    for name in names:
        left = sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir())
        assert left == ["iter_0000003", "iter_0000004", "latest"]


def _undeclared(folder: str, data: str, vocab_file: str) -> None:
    """Train with a shard of a bias that no longer has its declaration: zeros on both ranks before the first step."""
    with contextlib.redirect_stdout(io.StringIO()):
        common = "--num-layers 1 --batch-size 2 --train-iters 100 --save-interval 0 --no-save-at-end"
        flags = "--precision bf16 --model-parallel-size 2 --lr 1e-3"
        run = make(Start("gpt2", Path(folder), f"{common} {flags}"), data, vocab_file)
        parameters = dict(global_parameters(run.engine.deepspeed.module))
        bias: Any = parameters["layers.0.mlp.dense_h_to_4h.bias"]
        bias.spec = mpu.spec_of(nn.Parameter(bias.detach()))
        bias.tensor_model_parallel = False
        with pytest.raises(RunError, match="dense_h_to_4h.bias on rank 1"):
            train(run)
        assert run.state.iteration == 1
        run.__exit__()


def test_an_undeclared_shard_ends_a_run_that_never_saves(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    on_ranks(2, _undeclared, str(tmp_path), tiny_data, vocab_file)


def _marked() -> None:
    """A shard with Megatron-LM's attribute alone: a checkpoint would hold the shard of rank 0 for all ranks."""
    initialize_megatron(parse(["--num-layers", "1", "--model-parallel-size", "2", "--vocab-size", "64"], {}, 2))
    for name in ("model_parallel", "tensor_model_parallel"):
        model = nn.Linear(4, 4)
        setattr(model.bias, name, True)
        with pytest.raises(ValueError, match="bias .*mpu.declare"):
            check_declared_shards(model)
        mpu.declare(model.bias, dim=0)
        check_declared_shards(model)


def test_a_shard_of_unknown_place_is_refused() -> None:
    on_ranks(2, _marked)


@pytest.mark.parametrize("trains", [False, True])
def test_a_weight_that_no_checkpoint_can_store_is_refused(trains: bool) -> None:
    model = nn.Linear(2, 2)
    model.turn = nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=trains)
    with pytest.raises(ValueError, match="turn .*complex64"):
        refuse_unstorable_weights(model)
    model.turn = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    refuse_unstorable_weights(model)


def _minority() -> list[str]:
    """Call `check_replicas` three times, with rank 0, 1 and 2 as the replica that differs; return the three errors."""
    mpu.initialize_model_parallel(1, 1)
    told = []
    for victim in range(3):
        layer = torch.nn.Linear(2, 2)
        torch.nn.init.ones_(layer.weight)
        torch.nn.init.constant_(layer.bias, 2.0 if dist.get_rank() == victim else 1.0)
        with pytest.raises(RunError) as error:
            check_replicas(SimpleNamespace(module=layer, device=torch.device("cpu"), optimizer=None))
        told.append(str(error.value))
    return told


def test_of_three_the_one_that_differs_is_named() -> None:
    for told in on_ranks(3, _minority):
        for victim, sentence in enumerate(told):
            assert sentence.startswith(
                f"the weight bias on rank {victim} differs from its copy on rank {int(victim == 0)},"
            )


def _wait_for(names: dict[str, str], folder: str, data: str, vocab_file: str) -> dict[str, str]:
    """Train with each set of flags while the last rank sleeps 0.2 s in each forward pass; return name -> output."""
    told = {}
    with remembered_groups() as begin:
        for name, flags in names.items():
            begin()
            with contextlib.redirect_stdout(io.StringIO()) as said:
                common = (
                    "--num-layers 2 --batch-size 1 --train-iters 3 --save-interval 0 --log-interval 3 --no-save-at-end"
                )
                run = make(Start("gpt2", Path(folder) / name, f"{common} --precision fp32 {flags}"), data, vocab_file)
                if dist.get_rank() == dist.get_world_size() - 1:
                    run.engine.deepspeed.module.register_forward_pre_hook(lambda *_: time.sleep(0.2))
                train(run)
                run.__exit__()
            told[name] = said.getvalue()
    return told


def test_the_rank_that_others_wait_for_is_in_the_line(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    flags = {"dp2": "", "pp2": "--pipe-parallel-size 2"}
    told = on_ranks(2, _wait_for, flags, str(tmp_path), tiny_data, vocab_file)[0]
    for name, there in (("dp2", True), ("pp2", False)):  # a slow stage is no straggler: it may have more layers
        (line,) = [line for line in told[name].splitlines() if "tokens/s" in line]
        assert ("| rank 1 takes " in line) == there, line
        row = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0])
        assert (row.get("straggler") or {}).get("rank") == (1 if there else None)


def test_who_is_far_behind() -> None:
    assert slowest_rank([(1.0, 0), (1.1, 0), (1.2, 0)], 3.0) is None
    assert slowest_rank([(1.0, 0), (1.1, 0), (2.2, 0)], 3.0) == Straggler(2, 2.0)
    assert slowest_rank([(1.0, 0), (3.0, 1), (1.1, 0), (3.0, 1)], 9.0) is None, (
        "different stages may take different times"
    )
    assert slowest_rank([(0.001, 0), (0.005, 0)], 3.0) is None, "a wait of milliseconds is not reported"
    assert slowest_rank([(1.0, 0), (2.0, 1)], 3.0) is None, "one of two stages may have more layers"
    assert slowest_rank([(1.0, 0), (1.1, 1), (2.2, 2)], 3.0) == Straggler(2, 2.0)
    assert slowest_rank([(0.0, 0), (0.0, 1), (0.0, 2)], 3.0) is None


def test_the_source_is_all_of_it() -> None:
    """source_files(), whose hash ranks compare, lists all Python files of megatron and tds."""
    found = set(source_files())
    assert {"tds/engine.py", "megatron/model/gpt2.py", "megatron/ranks/agreement.py", "megatron/__init__.py"} <= found
    assert len(found) == sum(1 for package in ("megatron", "tds") for _ in (ROOT / package).rglob("*.py"))


def _late(start: Start, data: str, vocab_file: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        gather_late(patch)
        run_all([start], data, vocab_file)


def test_replicas_are_compared_after_late_gathers(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    flags = "--zero-stage 1 --overlap-param-gather --check-replicas 1 --train-iters 2 --precision fp32"
    on_ranks(2, _late, Start("gpt2", tmp_path, flags), tiny_data, vocab_file)
    assert len(losses_of(tmp_path)) == 2
