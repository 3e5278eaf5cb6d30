"""The parity fuzzer's draws, flags, comparison and shrinking, without ranks."""

import math
import random
from typing import Any

import pytest
import torch

from megatron_tools.verify.fuzz import CaseResult, Fuzzer, compare_values, reference_flags
from megatron_tools.verify.fuzz_campaign import Campaign, failure_kind, shrink
from megatron_tools.verify.fuzz_ranks import OK, Outcome
from megatron_tools.verify.fuzz_table import RANGES, Case, case_of, draw
from megatron_tools.verify.layouts import Layout
from megatron_tools.verify.verify_layout import build_parser, main


def test_a_draw_depends_on_seed_and_number_only() -> None:
    one = [draw(random.Random(f"7 {number} 0"), few=True) for number in range(50)]
    again = [draw(random.Random(f"7 {number} 0"), few=True) for number in reversed(range(50))]
    assert one == again[::-1]
    assert len({str(each) for each in one}) > 45


def test_every_setting_is_drawn_alone_and_with_others() -> None:
    for few in (True, False):
        drawn = [draw(random.Random(f"{few} {number}"), few) for number in range(2000)]
        assert {each.name for each in RANGES} <= set().union(*drawn)
        assert {"pp", "tp", "dp", "cp", "ep", "vpp", "sp", "zero"} <= set().union(*drawn)
        settings = [len(each) for each in drawn]
        assert max(settings) <= 13 if few else max(settings) > 15
        assert all(case_of(each).layout.ranks <= 4 for each in drawn)


def test_a_family_has_its_own_settings_only() -> None:
    chosen = {"--family": "t5", "--qk-norm": True, "--enc-seq-length": 12, "--experts-per-token": 1}
    flags = case_of(chosen).flags
    assert "--qk-norm" not in flags
    assert "--experts-per-token" not in flags, "it needs --num-experts"
    assert flags[flags.index("--enc-seq-length") + 1] == "12"
    assert "--enc-seq-length" not in case_of({"--family": "gpt2", "--enc-seq-length": 12}).flags


def test_the_run_in_one_process_has_one_micro_batch_and_no_neutral_flag() -> None:
    flags = ("--num-layers", "2", "--logits-chunk-size", "3", "--no-overlap-grad-reduce", "--recompute-modules", "norm",
             "qkv", "--z-loss", "1", "--batch-size", "2")  # fmt: skip
    found = reference_flags(Case(Layout(dp=2), 6, flags), 2)
    assert found[:4] == ["--num-layers", "2", "--z-loss", "1"]
    assert not {"--logits-chunk-size", "--no-overlap-grad-reduce", "--recompute-modules", "qkv"} & set(found)
    assert found[found.index("--batch-size") + 1] == "12" and found[found.index("--gas") + 1] == "1"


def test_the_comparison_sees_missing_and_different_values() -> None:
    like = {"train 1 lm_loss": torch.tensor(2.0), "weight.a": torch.ones(4), "weight.b": torch.zeros(2)}
    assert compare_values(like, like, 1e-9) == CaseResult(OK, 0.0)
    missing = compare_values(like, {name: like[name] for name in list(like)[1:]}, 1e-9)
    assert missing.failed and "lm_loss" in missing.outcome.message
    other = compare_values(like, like | {"weight.a": torch.tensor([1.0, 1, 1, 1 + 1e-6], dtype=torch.float64)}, 1e-9)
    assert other.failed and other.largest_error == pytest.approx(5e-7, rel=1e-3)
    nan = compare_values(like, like | {"train 1 lm_loss": torch.tensor(math.nan)}, 1e-9)
    assert nan.failed and nan.largest_error == math.inf
    # Rounding errors of a weight that is mathematically zero are no difference, but other weights of its kind are.
    rounded = compare_values(like, like | {"weight.b": torch.full((2,), 1e-14)}, 1e-9)
    assert not rounded.failed
    assert compare_values(like, like | {"weight.b": torch.full((2,), 1e-9)}, 1e-9).failed


class Faulty(Fuzzer):
    """Fuzzer whose tensor parallelism is wrong with --z-loss, and which refuses --qk-norm without experts."""

    def run(self, case: Case) -> CaseResult:
        if "--qk-norm" in case.flags and "--num-experts" not in case.flags:
            return CaseResult(Outcome("refused", "--qk-norm needs --num-experts"))
        wrong = case.layout.tp > 1 and "--z-loss" in case.flags
        return CaseResult(Outcome("differs", "train 1 lm_loss differs"), 1e-3) if wrong else CaseResult(OK)


def test_a_failure_is_shrunk_to_what_it_needs(tmp_path: Any) -> None:
    chosen = {"--family": "llama", "tp": 2, "sp": True, "dp": 2, "gas": 3, "--z-loss": 1.0, "--qk-norm": True,
              "--num-experts": 4, "--hidden-size": 8, "--lr": 0.1}  # fmt: skip
    fuzzer = Faulty(tmp_path)
    smallest, found = shrink(fuzzer, chosen, fuzzer.run(case_of(chosen)))
    assert smallest == {"--family": "llama", "tp": 2, "--z-loss": 0.01}, "the simpler value of --z-loss"
    assert found.outcome.kind == "differs"


def test_another_exception_is_another_failure() -> None:
    words = "Traceback:\n  File x\n{}: of draw 1"
    first, second = (CaseResult(Outcome("crash", words.format(name))) for name in ("ValueError", "KeyError"))
    assert failure_kind(first) != failure_kind(second)
    assert failure_kind(first) == failure_kind(CaseResult(Outcome("crash", "elsewhere\nValueError: 2")))


def test_failures_give_a_command_and_exit_code_1(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    campaign = Campaign(Faulty(tmp_path), 0, verbose=False)
    flags = ["--family", "llama", "--num-layers", "2", "--z-loss", "1"]
    args = build_parser().parse_args(["--fuzz", "1", "--layouts", "tp 2", "pp 2"])
    args.flags = flags
    assert not campaign.run(args)
    assert campaign.failures == 1
    assert "2 layouts" in capsys.readouterr().out
    assert case_of({"tp": 2, "gas": 3}).command.startswith("--fuzz 1 --layouts 'tp 2' --micros 3 -- --family llama")


@pytest.mark.parametrize(
    ("words", "flags", "named"),
    [
        ([], [], "--fuzz"),
        (["--fuzz", "1"], ["--num-layers", "2"], "--family"),
        (["--fuzz", "1"], ["--family=gpt2"], "two words"),
        (["--fuzz", "1", "--layouts", "tp 2"], [], "--layouts"),
        (["--fuzz", "1", "--micros", "5"], [], "--micros"),
        (["--fuzz", "1", "--precision", "fp64"], [], "--precision"),
        (["--fuzz", "1", "--keep-dropout"], ["--family", "gpt2"], "--keep-dropout"),
        (["pretrain_gpt2.py", "--fuzz", "1"], [], "pretrain_gpt2.py"),
        (["--fuzz", "4"], ["--family", "gpt2"], "--fuzz 4"),
        (["--fuzz", "1", "--draw", "3"], ["--family", "gpt2"], "--draw"),
    ],
)
def test_wrong_arguments_are_refused(words: list[str], flags: list[str], named: str) -> None:
    args = build_parser().parse_args(words)
    args.flags = flags
    with pytest.raises(ValueError, match=named):
        main(args)
