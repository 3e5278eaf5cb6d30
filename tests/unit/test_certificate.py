"""Certificates of tools/verify_layout.py: what they record, which files are refused, and what a repetition finds."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import megatron.ranks.source as source
from megatron.checkpointing import certificate as core
from megatron.checkpointing.certificate import (
    Certificate,
    CertificateError,
    LayoutResult,
    certificate_for_run,
    read_certificate,
)
from megatron.ranks.source import source_hash, versions
from megatron_tools.verify.certificate import certificate_of, checked, result_of
from megatron_tools.verify.compare import Comparison, Difference, Verdict
from megatron_tools.verify.verify_layout import refuse_flags_of_layouts

TOLERANCE = 1e-4
GOOD = Verdict("tp 2", 1e-7, 2e-7, 3e-7, weights={"a": 0.0, "b": 5e-7}, gradients={"a": 3e-7, "b": 1e-8})
BAD = replace(
    GOOD,
    layout="pp 2",
    gradients={"a": math.inf, "b": 1e-8},
    backward=Difference("a", "a", "", math.inf, "its gradient is missing"),
)
DEAD = Verdict("dp 2", stopped="it did not finish")
MODEL = {
    "family": "gpt2", "activation": "gelu", "qk_norm": False, "num_layers": 2, "num_experts": None,
    "hidden_dropout": 0.0,
}  # fmt: skip


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('training')\n")
    return str(path)


def _certificate(script: str, *verdicts: Verdict) -> Certificate:
    layouts = [result_of(each) for each in verdicts]
    return Certificate(
        certificate=1, passed=all(each.agrees for each in verdicts), date="2026-01-02T03:04:05+00:00", script=script,
        source=source_hash(script), versions=versions(), flags=["--num-layers", "2"], model=MODEL, reference="pp 0",
        steps=3, micros=2, precision="fp32", keep_dropout=False, tolerance=TOLERANCE, layouts=layouts,
    )  # fmt: skip


def _edited(folder: Path, certificate: Certificate, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Write a certificate, change its JSON with `edit`, and return its path."""
    content = json.loads(certificate.text())
    edit(content)
    path = folder / "edited.json"
    path.write_text(json.dumps(content))
    return path


def test_a_certificate_is_read_as_it_was_written(tmp_path: Path, script: str) -> None:
    written = _certificate(script, GOOD, BAD, DEAD)
    path = tmp_path / "c.json"
    path.write_text(written.text())
    found = read_certificate(path)
    assert found == written
    assert not found.passed and found.failed == ["pp 2", "dp 2"]
    good, bad, dead = found.layouts
    assert (good.verdict, bad.verdict, dead.verdict) == ("agrees", "differs", "did not run")
    assert (good.largest, bad.largest, dead.largest) == (5e-7, math.inf, None)
    assert good.weights == {"a": 0.0, "b": 5e-7} and good.gradients == {"a": 3e-7, "b": 1e-8}
    assert "its gradient is missing" in bad.words[0] and dead.words == ["it did not finish"]


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no certificate": (lambda c: c.pop("certificate"), "is not a certificate of tools/verify_layout.py"),
    "a newer format": (lambda c: c.update(certificate=2), "is a certificate of format 2, but this version"),
    "a missing key": (lambda c: c.pop("steps"), "is damaged: the key 'steps' is missing"),
    "a wrong type": (lambda c: c.update(steps="3"), "is damaged: the key 'steps' has an invalid value"),
    "a wrong type inside": (lambda c: c.update(flags=[1]), "is damaged: the key 'flags' has an invalid value"),
    "a layout that is none": (lambda c: c.update(layouts=["tp 2"]), "is damaged: a layout is not an object"),
    "a negative difference": (
        lambda c: c["layouts"][0]["weights"].update(a=-1.0),
        "is damaged: the key 'weights' has an invalid value",
    ),
    "no layouts": (lambda c: c.update(layouts=[]), "is damaged: it lists no layout"),
    "passed, with a failed layout": (
        lambda c: c["layouts"][0].update(verdict="differs"),
        "is damaged: it says that it passed, but its layouts say the opposite",
    ),
    "an unknown verdict": (lambda c: c["layouts"][0].update(verdict="fine"), "the verdict 'fine' of layout 'tp 2'"),
    "agrees, with a large difference": (
        lambda c: c["layouts"][0]["gradients"].update(b=1e-3),
        "it says that layout 'tp 2' agrees, but gradient b exceeds the tolerance",
    ),
    "agrees, with an infinite difference": (
        lambda c: c["layouts"][0].update(outputs="infinite"),
        "it says that layout 'tp 2' agrees, but outputs exceeds the tolerance",
    ),
    "agrees, without numbers": (
        lambda c: c["layouts"][0].update(losses=None),
        "it says that layout 'tp 2' agrees, but it has no losses",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_certificate_is_refused_in_one_sentence(name: str, tmp_path: Path, script: str) -> None:
    edit, words = BROKEN[name]
    path = _edited(tmp_path, _certificate(script, GOOD), edit)
    with pytest.raises(CertificateError) as error:
        read_certificate(path)
    assert words in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_files_that_are_no_certificates(tmp_path: Path, script: str) -> None:
    with pytest.raises(CertificateError, match=r"^there is no certificate .*none\.json$"):
        read_certificate(tmp_path / "none.json")
    with pytest.raises(CertificateError, match="cannot be read: Is a directory"):
        read_certificate(tmp_path)
    path, text = tmp_path / "c.json", _certificate(script, GOOD).text()
    for content in (text[: len(text) // 2].encode(), b"", b"\xff\xfe", b"[]"):
        path.write_bytes(content)
        with pytest.raises(CertificateError, match="is damaged, or not a certificate") as error:
            read_certificate(path)
        assert "\n" not in str(error.value)


def test_another_source_or_version_is_named(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    then = _certificate(script, GOOD)
    assert then.changes(script) == []
    Path(script).write_text("print('training differently')\n")
    (words,) = then.changes(script)
    assert words.startswith("the source has changed: tds, megatron or ") and script in words
    newer = {**versions(), "torch": "9.0"}
    monkeypatch.setattr(core, "versions", lambda: newer)
    assert then.changes(script)[1:] == [f"the version of torch was {versions()['torch']} and is now 9.0"]


def test_the_hash_covers_paths_and_contents(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("1")
    two.write_text("2")
    hashes = set()
    for files in ({"a.py": one, "b.py": two}, {"a.py": two, "b.py": one}, {"a.py": one, "c.py": two}, {"a.py": one}):
        monkeypatch.setattr(source, "source_files", lambda files=files: files)
        hashes |= {source_hash(), source_hash(script)}
    assert len(hashes) == 8


def test_a_repetition_confirms_only_what_is_the_same(script: str, tmp_path: Path) -> None:
    then, path = _certificate(script, GOOD), tmp_path / "c.json"
    lines, confirmed = checked(path, then, then)
    assert confirmed and "differences: all 7 as in the certificate" in lines
    assert lines[-1] == "the certificate is confirmed"

    rounding = _certificate(script, replace(GOOD, gradients={"a": 4e-7, "b": 1e-8}))
    lines, confirmed = checked(path, then, rounding)
    assert confirmed
    assert any(
        "1 of 7 are not" in line and "3.0e-07 and is 4.0e-07 (gradient a, layout 'tp 2')" in line for line in lines
    )

    lines, confirmed = checked(path, then, _certificate(script, replace(BAD, layout="tp 2")))
    assert not confirmed and "layout 'tp 2': agrees in the certificate, but differs now" in lines

    lines, confirmed = checked(path, then, _certificate(script, replace(GOOD, weights={"a": 0.0})))
    assert not confirmed and "layout 'tp 2': only one of certificate and repetition has the weight b" in lines

    changed = replace(then, source="0" * 64)
    lines, confirmed = checked(path, changed, then)
    assert not confirmed and any(line.startswith("the source has changed") for line in lines)


def test_a_failed_certificate_is_never_confirmed(script: str, tmp_path: Path) -> None:
    failed = _certificate(script, GOOD, BAD)
    lines, confirmed = checked(tmp_path / "c.json", failed, failed)
    assert not confirmed
    assert lines[0].endswith("did not pass: pp 2") and lines[-1] == "the certificate is NOT CONFIRMED"


def test_a_run_takes_only_a_certificate_of_its_own(tmp_path: Path, script: str) -> None:
    path = tmp_path / "c.json"
    good = _certificate(script, GOOD)
    path.write_text(good.text())
    assert certificate_for_run(str(path), script, {**MODEL, "num_layers": 96, "hidden_dropout": 0.1}) == good.text()
    for name, value in (("activation", "swiglu"), ("num_experts", 8), ("qk_norm", True)):
        with pytest.raises(CertificateError, match="the model had --" + name.replace("_", "-")):
            certificate_for_run(str(path), script, {**MODEL, name: value})
    with pytest.raises(CertificateError, match="--certificate .* is not that of this run: the source has changed"):
        other = tmp_path / "other.py"
        other.write_text("another model")
        certificate_for_run(str(path), str(other), MODEL)
    path.write_text(_certificate(script, GOOD, DEAD).text())
    with pytest.raises(CertificateError, match="did not pass: its numbers do not agree in the layout 'dp 2'"):
        certificate_for_run(str(path), script, MODEL)


def test_the_largest_difference_includes_buffers() -> None:
    state = Difference("0", "0.mean", "", 0.25, "the buffer 0.mean differs")
    found: LayoutResult = result_of(replace(GOOD, state=state))
    assert found.verdict == "differs" and found.largest == 0.25


@pytest.mark.parametrize("flag", ["--gas", "--global-batch-size=8", "--context-parallel-size"])
def test_flags_that_layouts_set_are_refused(flag: str) -> None:
    with pytest.raises(ValueError, match=flag.partition("=")[0]):
        refuse_flags_of_layouts(["--num-layers", "2", flag, "2"])
    refuse_flags_of_layouts(["--num-layers", "2", "--batch-size", "4"])


def test_a_repetition_with_another_model_confirms_nothing(tmp_path: Path, script: str) -> None:
    then = _certificate(script, GOOD)
    assert checked(tmp_path, then, then)[1]
    lines, confirmed = checked(tmp_path, then, replace(then, model={**MODEL, "num_layers": 4}))
    assert not confirmed and any("--num-layers 2" in line for line in lines)


def test_a_source_that_changes_while_layouts_run_is_refused(script: str) -> None:
    args, before = SimpleNamespace(script=script), source_hash(script)
    Path(script).write_text("print('something else')\n")
    with pytest.raises(ValueError, match="changed while the layouts ran"):
        certificate_of(args, [GOOD], 2, TOLERANCE, MODEL, before)  # type: ignore[arg-type]


def test_a_loss_that_is_not_a_number_is_an_infinite_difference(script: str) -> None:
    """The certificate can be written, and the difference of another step does not hide the loss."""
    found = Verdict("tp 2")
    one, other = SimpleNamespace(losses=[1.0, 1.0]), SimpleNamespace(losses=[1.0, math.nan])
    Comparison._compare_losses(SimpleNamespace(one=one, other=other, tolerance=TOLERANCE), found)  # type: ignore[arg-type]
    assert (found.loss, found.loss_differs_at) == (math.inf, 2)
    assert json.loads(_certificate(script, found).text())["passed"] is False
