"""Checks of lm-eval and megatron-core: the comparisons that the tests make with their installed releases."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.unit import test_foreign_defaults, test_harness, test_indexed_dataset


def in_folder(test: Callable[..., Any], **given: Any) -> Callable[[], None]:
    """Return a check that runs a test in an empty folder."""

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            test(tmp_path=Path(folder), **given)

    return run


CHECKS = {
    "lm-eval": {"accuracy of a task": in_folder(test_harness.test_a_task_of_our_own)},
    "megatron-core": {
        "corpus files": in_folder(
            test_indexed_dataset.test_megatron_core_reads_ours_and_we_read_theirs, dtype=np.uint16
        ),
        "defaults, learning rates, router loss": (
            test_foreign_defaults.test_defaults_and_curves_are_those_of_megatron_core
        ),
    },
}
