"""The checks of an accelerator: on one where there is one, on the CPU as a dry run where there is none."""

import pytest

from .checks import CHECKS, Impossible


@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str) -> None:
    try:
        assert CHECKS[name]()
    except Impossible as error:
        pytest.skip(str(error))
