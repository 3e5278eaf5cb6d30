"""What an older DeepSpeed passes over without a word."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tds._deepspeed import complaint, refuse_unknown_autocast


@pytest.mark.parametrize("asked", [{}, {"torch_autocast": {"enabled": False}}, {"torch_autocast": {"enabled": True}}])
@pytest.mark.parametrize("known", [False, True])
def test_torch_autocast_is_refused_where_it_is_not_known(asked: dict[str, Any], known: bool) -> None:
    config = SimpleNamespace(_param_dict=asked, **({"torch_autocast_enabled": True} if known else {}))
    if asked.get("torch_autocast", {}).get("enabled") and not known:
        with pytest.raises(ValueError, match='does not know "torch_autocast" and would train without it'):
            refuse_unknown_autocast(SimpleNamespace(_config=config))
    else:
        refuse_unknown_autocast(SimpleNamespace(_config=config))


def test_sections_that_an_old_one_does_not_check(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "unknown" in str(complaint("bf16", {"enabled": True, "nonsense": 1}))
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.precision_config", None)
    monkeypatch.delattr("deepspeed.runtime.precision_config", raising=False)
    assert complaint("bf16", {"enabled": True, "nonsense": 1}) is None
    assert "unknown" in str(complaint("zero_optimization", {"stage": 1, "nonsense": 1}))
