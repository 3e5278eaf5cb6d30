"""Layouts in the notation of --layouts, such as `pp 2, tp 2`, and their flags for an entry script."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.fields import ConfigError
from tds.schedule import BUILT_IN

NUMBER_KEYS = ("pp", "tp", "dp", "cp", "ep", "vpp", "zero")
LAYOUT_KEYS = (*NUMBER_KEYS, "sp", "schedule")


@dataclass(frozen=True)
class Layout:
    """A parallel layout.

    pp, tp, dp, cp: numbers of pipeline stages (0: no pipeline), model-parallel ranks, replicas and context-parallel
    ranks. ep: number of data-parallel ranks that divide the experts; they are some of the dp x cp ranks. vpp: layer
    chunks per stage. zero: ZeRO stage. sp: sequence parallelism over the model-parallel ranks.
    """

    pp: int = 0
    tp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    zero: int = 0
    sp: bool = False
    schedule: str = "1f1b"

    @property
    def ranks(self) -> int:
        """Number of ranks in the run."""
        return max(self.pp, 1) * self.tp * self.dp * self.cp

    def __str__(self) -> str:
        default = Layout()
        parts = []
        for name in LAYOUT_KEYS:
            value = getattr(self, name)
            if value != getattr(default, name):
                parts.append("sp" if name == "sp" else f"{name} {value}")
        return ", ".join(parts) or "one process"

    def flags(self, micros: int) -> list[str]:
        """Return an entry script's flags for `micros` micro-batches over all replicas.

        Raises ConfigError if the micro-batches cannot be split equally over the replicas.
        """
        if micros % self.dp:
            raise ConfigError(
                f"layout {self}: {micros} micro-batches cannot be split over {self.dp} replicas; change --micros"
            )
        sequence_flag = "--sequence-parallel" if self.sp else "--no-sequence-parallel"
        context_flags = ["--context-parallel-size", str(self.cp)] if self.cp > 1 else []  # a T5 rejects this flag
        return [
            "--pipe-parallel-size", str(self.pp), "--model-parallel-size", str(self.tp), *context_flags,
            sequence_flag, "--expert-parallel-size", str(self.ep), "--pipeline-schedule", self.schedule,
            "--virtual-pipeline-size", str(self.vpp), "--zero-stage", str(self.zero),
            "--gas", str(micros // self.dp),  # micro-batches of each replica
        ]  # fmt: skip


ONE_PROCESS = Layout()
DEFAULT_LAYOUTS = ("pp 2", "tp 2", "pp 2, tp 2", "dp 2, zero 1")


def read_layout(text: str) -> Layout:
    """Parse a layout such as `pp 2, tp 2, zero 1, sp, schedule zb-h1`. Raises ConfigError for invalid text."""
    values: dict[str, object] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, value = part.partition(" ")
        value = value.strip()
        minimum = 0 if name in ("pp", "zero") else 1  # pp 0: no pipeline; zero 0: no ZeRO
        if name == "sp" and not value:
            values["sp"] = True
        elif name == "schedule" and value in BUILT_IN:
            values["schedule"] = value
        elif name in NUMBER_KEYS and value.isdecimal() and int(value) >= minimum:
            values[name] = int(value)
        else:
            raise ConfigError(
                f"layout {text!r}: cannot parse {part!r}; write pp, tp, dp, cp, ep, vpp or zero with a number, sp, or "
                f"schedule with one of {', '.join(BUILT_IN)}, as in 'pp 2, tp 2, dp 2, zero 1'"
            )
    # With several layer chunks per stage, `interleaved` is the default, because no other schedule supports them.
    if values.get("vpp", 1) != 1:
        values.setdefault("schedule", "interleaved")
    return Layout(**values)  # type: ignore[arg-type]


def common_micros(layouts: Sequence[Layout]) -> int:
    """Return a number of micro-batches per iteration that can be split equally over the replicas of every layout.

    Each replica gets at least two micro-batches, and at least as many as it has pipeline stages.
    """
    # Two layouts with 2 and 3 replicas, the first of 4 stages, need 2 x 4 = 8 and 3 x 2 = 6 micro-batches: 12 fit both.
    replica_counts = [layout.dp for layout in layouts]
    common_replicas = math.lcm(*replica_counts)
    needed = max(layout.dp * max(2, layout.pp) for layout in layouts)
    return common_replicas * math.ceil(needed / common_replicas)
