"""Contracts of the installed packages hold, and the table of docs/releases.md covers the oldest allowed releases."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import pytest
from packaging.requirements import Requirement

from docs.site.releases import PACKAGE_ZH, PACKAGES, rows
from megatron_tools.convert import hf_compare
from tests.unit.test_requirements import PROJECT

from .watch import WATCHED, describe, outcome

# Contracts that other tests check with the installed release, or that take long
ELSEWHERE = {"s3fs", "lm-eval", "megatron-core"}
# Contracts that no release in our range fulfils; docs/releases.md says what users can do instead
UNFULFILLED = {"vocab_file= of GPT2Tokenizer", "T5 loss of accumulated batches"}
QUICK = [(name, contract) for name in WATCHED if name not in ELSEWHERE for contract in WATCHED[name].uses]


@pytest.mark.parametrize(("package", "contract"), QUICK)
def test_the_installed_release_is_right(package: str, contract: str) -> None:
    try:
        release = version(package)
    except PackageNotFoundError:
        pytest.skip(f"needs {package}")
    module = import_module(f"{__package__}.{WATCHED[package].module}")
    found = outcome(module.CHECKS[package][contract], release)
    if contract in UNFULFILLED:
        assert found.startswith("wrong"), "this release is right: update docs/releases.md and UNFULFILLED"
    elif contract == "logits of UMT5 that are not scaled":
        assert found.partition(":")[0] in ("right", "refused")
    else:
        assert found == "right"


def test_each_outcome_is_named() -> None:
    assert describe(ValueError("use another than 5.0.0"), "5.0.0").startswith("refused")
    assert describe(ValueError("5.0.0"), "5.1.0").startswith("fails")
    assert describe(AssertionError("other ids"), "5.0.0") == "wrong: other ids"


def test_the_oldest_releases_are_those_of_the_requirements() -> None:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    required = {each.name: each.specifier for group in groups for each in map(Requirement, group) if each.specifier}
    for name, watched in WATCHED.items():
        if name == "megatron-core":  # only tests need it, in any release
            continue
        (lowest,) = (each.version for each in required[name] if each.operator == ">=")
        assert watched.releases[0].startswith(lowest), name
        assert all(required[name].contains(release) for release in watched.releases), name


def test_each_contract_of_each_release_was_measured() -> None:
    measured = {(row["package"], row["release"]): row["contracts"] for row in rows(PACKAGES)}
    for name, watched in WATCHED.items():
        for release in watched.releases:
            assert measured[name, release].keys() == watched.uses.keys(), (name, release)
        for contract in watched.uses:
            assert contract in PACKAGE_ZH


@pytest.mark.parametrize("release", ["4.57.6", "5.0.0", "5.2.0"])
def test_verify_refuses_old_transformers(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers, "__version__", release)
    with pytest.raises(ValueError, match=f"--verify.*{release}"):
        hf_compare._import_transformers()
    monkeypatch.setattr(transformers, "__version__", "5.3.0")
    assert hf_compare._import_transformers() is transformers
