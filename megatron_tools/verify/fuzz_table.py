"""Table of the settings and layouts that the parity fuzzer draws; a new setting is one more line of RANGES."""

import random
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.config.messages import format_flag

from .layouts import LAYOUT_KEYS, Layout

ALL_FAMILIES = "gpt2 llama t5"
DECODER_FAMILIES = "gpt2 llama"
Chosen = Mapping[str, Any]  # flag, or word of a layout -> value that is not the plain one


@dataclass(frozen=True)
class Range:
    """Values of one setting, or of several settings of which only some combinations are possible.

    name: a flag, or a name of its own if the values contain the flags. plain: the simplest value, to which a failing
    draw is shrunk; None leaves the flag out. alternatives: values to draw, the simpler ones first.
    families: model families that have the setting. needs: names of ranges that must not have their plain values.
    neutral: whether the value may not change any number; the run in one process never has the flag.
    often: whether to draw the setting three times as often, because layouts have code of their own for it.
    """

    name: str
    plain: Any
    alternatives: Sequence[Any]
    families: str = ALL_FAMILIES
    needs: Sequence[str] = ()
    neutral: bool = False
    often: bool = False

    def to_flags(self, value: Any) -> list[str]:
        """Return the words of a command line that give this value; [] for None.

        The words of a range without a flag of its own are those of the value.
        """
        if value is None:
            return []
        # Range("--num-layers", ...) gives ["--num-layers", "3"] for the value 3. Range("rotary", ...) is named after no
        # flag, so its values are words themselves: "--rope-theta 50" gives ["--rope-theta", "50"].
        words: str = value
        if self.name.startswith("--"):
            words = format_flag(self.name, value)
        return words.split()


EXPERTS = ("--num-experts",)
GROUPS_FILE = "groups.json"
RESET = "--reset-position-ids"
FIM = "--fim-rate 0.7 --fim-tokens <prefix> <middle> <suffix>"
OPERATIONS = "biased-attention cross-entropy document-attention gated-gelu relative-positions rms-norm rope swiglu"
RELATIVE = "relative --relative-attention-num-buckets 8 --relative-attention-max-distance 12"
RECOMPUTATION = (
    "--checkpoint-activations",
    "--checkpoint-attention",
    "--offload-activations",
    "--recompute-modules norm",
    "--recompute-modules qkv activation",
    "--checkpoint-activations --checkpoint-num-layers 2",
)
ROTARY = ("--rope-theta 50", "--rotary-percent 0.5", "--rope-scaling linear --rope-scaling-factor 2")
MUON = "muon --muon-momentum 0.5 --no-muon-nesterov --muon-ns-steps 2 --muon-adjust-lr-fn original --muon-lr-factor 0.5"
RANGES = (
    # sizes and layers
    Range("--num-layers", 2, (1, 3, 4)),
    Range("--num-decoder-layers", None, (1, 3, 4), "t5"),
    Range("--hidden-size", 16, (8, 24)),
    Range("--num-attention-heads", 4, (2, 1)),
    Range("--kv-hidden-size", None, (8, 6)),
    Range("--num-key-value-heads", None, (2, 1), "llama", often=True),
    Range("--ff-hidden-size", 32, (12, 20)),
    Range("--seq-length", 16, (8, 12, 24, 32), DECODER_FAMILIES),
    Range("--seq-length", 32, (40,), "t5"),
    Range("--enc-seq-length", 16, (12, 15, 24), "t5"),
    Range("--normalization", None, ("layernorm", "rmsnorm")),
    Range("--activation", None, ("gelu", "gelu-tanh", "relu", "gated-gelu", "swiglu")),
    Range("--position-embedding", None, (RELATIVE, f"{RELATIVE} --relative-attention-per-layer"), "t5", often=True),
    Range("rotary", None, ROTARY, "llama"),
    Range("--scale-attention", None, (False,)),
    Range("--tie-embeddings", None, (True, False), often=True),
    Range("--scale-tied-logits", None, (True,), "t5"),
    Range("--hidden-bias", None, (True, False), often=True),
    Range("--qkv-bias", None, (True, False), "llama"),
    Range("--qk-norm", None, (True,), "llama", often=True),
    Range("--sliding-window", None, (9, 5, 3, 2), "llama", often=True),
    Range("--make-vocab-size-divisible-by", 8, (1, 3, 64)),
    Range("--init-method-std", 0.15, (0.02, 0.3)),
    # experts
    Range("--num-experts", None, (2, 4), often=True),
    Range("--experts-per-token", 2, (1,), needs=EXPERTS),
    Range("--expert-ff-hidden-size", None, (4, 12), needs=EXPERTS),
    Range("--num-shared-experts", None, (1, 2, "1 --shared-expert-gate"), needs=EXPERTS),
    Range("--moe-layer-frequency", None, (2,), needs=EXPERTS),
    Range("--router-score", None, ("sigmoid",), needs=EXPERTS),
    Range("--normalize-expert-weights", None, (False,), needs=EXPERTS),
    Range("--router-balance", None, ("none", "bias --router-bias-rate 0.05", "bias-and-aux-loss"), needs=EXPERTS),
    Range("--router-aux-loss", 0.1, (1.0,), needs=EXPERTS),
    Range("--router-z-loss", None, (0.05,), needs=EXPERTS),
    # data and objectives
    Range("--seed", 1, (2, 3, 4, 5)),
    Range("--data-path", ("a",), (("0.6", "a", "0.4", "b"), ("0.3", "b", "0.7", "c"), ("c",)), often=True),
    Range(
        "objective",
        None,
        ("--objective sft", "--objective prefix-lm", FIM, "--eod-mask-loss"),
        DECODER_FAMILIES,
        often=True,
    ),
    Range("objective", None, ("--objective prefix-lm", "--span-convention cpm"), "t5", often=True),
    Range("--noise-density", None, (0.3, "0.15 --mean-span-length 2"), "t5"),
    Range("--num-sentinels", 20, (30,), "t5"),
    Range("documents", None, ("--reset-attention-mask", f"{RESET} --reset-attention-mask", RESET), often=True),
    # loss and optimizer
    Range("--z-loss", None, (0.01, 1.0), often=True),
    Range("--optimizer", "adam", ("sgd", "muon", "muon", MUON), often=True),
    Range("--lr", 0.01, (0.03,)),  # rounding errors of fp32 grow with larger learning rates
    Range("--weight-decay", 0.1, (0, 1, "0.1 --no-embedding-weight-decay")),
    Range("--clip-grad", None, (0, 0.1, 100), often=True),
    Range("--adam-beta1", None, (0.5, "0.5 --adam-beta2 0.95")),
    Range("--ema-decay", None, (0.5,)),
    Range("--mup-base-hidden-size", None, (8, "8 --mup-base-num-layers 1", "8 --mup-base-kv-hidden-size 2")),
    Range("--param-groups", None, (GROUPS_FILE,)),
    Range("--skip-step-sigma", None, ("0.25 --skip-step-window 4",)),
    Range("--log-layers", None, (True,)),
    # settings that may not change any number
    Range("--batch-size", 2, (1, 3), neutral=True),
    Range("--logits-chunk-size", None, (3, 5, 16), neutral=True, often=True),
    Range("recomputation", None, RECOMPUTATION, neutral=True, often=True),
    Range("--reference-ops", None, (OPERATIONS,), neutral=True),
    Range("--async-tensor-model-parallel-allreduce", None, (False,), needs=("tp",), neutral=True),
    Range("--overlap-grad-reduce", None, (False,), neutral=True),
    Range("--overlap-param-gather", None, (True,), needs=("zero",), neutral=True),
    Range("--partition-method", None, ("uniform", "parameters"), needs=("pp",), neutral=True),
    Range("--pipeline-extra-warmup", None, (1,), needs=("pp",), neutral=True),
)
# Sizes of layouts. Those of two ranks are listed twice, because they take less time.
GRIDS = (
    *({"tp": 2}, {"dp": 2}, {"cp": 2}, {"pp": 2}) * 2,
    *({"tp": 2, "dp": 2}, {"tp": 2, "cp": 2}, {"tp": 2, "pp": 2}, {"dp": 2, "cp": 2}, {"dp": 2, "pp": 2}),
    *({"tp": 2, "pp": 2}, {"cp": 2, "pp": 2}, {"dp": 2, "pp": 2}, {"cp": 2, "pp": 2}, {"dp": 3}, {"pp": 3}),
    *({"tp": 2, "pp": 2},) * 2,
    *({"tp": 4}, {"dp": 4}, {"cp": 4}, {"pp": 4}, {"pp": 1}, {"pp": 1, "dp": 2}, {"pp": 1, "tp": 2}),
)
# Values to draw if the layout has more than one rank on one of these axes; None is the plain value.
OPTIONS = (
    ("sp", ("tp",), (None, True)),
    ("schedule", ("pp",), (None, None, "zb-h1", "zb-h1", "gpipe", "interleaved")),
    ("zero", ("dp", "cp"), (*(None,) * 7, 1, 1, 2, 3)),
    ("zero", ("pp", "tp"), (*(None,) * 5, 1)),  # tied weights and whole matrices of Muon, also on one replica
    ("ep", ("dp", "cp"), (*(None,) * 4, 2, 2, 4)),
    ("gas", ("pp", "tp", "dp", "cp"), (None, None, None, 1, 3, 4)),
)
# Stacks of a T5 that a uniform partition cuts between a table of relative positions and the layer that reads it.
CUT_BEFORE_A_LAYER = {
    "--partition-method": "uniform",
    "--num-layers": 4,
    "--num-decoder-layers": 1,
    "--position-embedding": RELATIVE,
}


def ranges_of(family: str) -> dict[str, Range]:
    """Return name -> range of the settings that a model family has."""
    return {each.name: each for each in RANGES if family in each.families}


def neutral_flags() -> set[str]:
    """Return all flags of settings that may not change any number, each without its form --no-X."""
    flags: list[str] = []
    for setting_range in RANGES:
        if setting_range.neutral:
            for value in setting_range.alternatives:
                flags += setting_range.to_flags(value)
    return {flag.replace("--no-", "--") for flag in flags if flag.startswith("--")}


class Case(NamedTuple):
    """One comparison: a layout, the micro-batches per step of all replicas, and the flags of an entry script."""

    layout: Layout
    micros: int
    flags: tuple[str, ...]

    @property
    def precision(self) -> str:
        """Precision of both runs: fp64, whose rounding errors are smallest, or fp32 with ZeRO, which refuses fp64."""
        return "fp32" if self.layout.zero else "fp64"

    @property
    def command(self) -> str:
        """Flags of tools/verify_layout.py that run this case."""
        # The text of this layout is `one process`, which --layouts cannot read.
        layout = "pp 0" if self.layout == Layout() else str(self.layout)
        arguments = ["--fuzz", "1", "--layouts", layout, "--micros", str(self.micros), "--", *self.flags]
        return shlex.join(arguments)


def case_of(chosen: Chosen) -> Case:
    """Return the case with the chosen values, and with the plain values of all other settings.

    Settings that the family lacks or whose needs are not met are left out, also if they are chosen.
    """
    family = chosen.get("--family", "llama")
    flags = ["--family", family]
    for setting_range in ranges_of(family).values():
        # --experts-per-token needs --num-experts: it has an effect only if --num-experts is not plain. What is in
        # `chosen` is not plain, so the needs must be keys of it.
        if set(setting_range.needs) <= chosen.keys():
            value = chosen.get(setting_range.name, setting_range.plain)
            flags += setting_range.to_flags(value)
    layout_sizes = {name: chosen[name] for name in LAYOUT_KEYS if name in chosen}
    if "--num-experts" not in chosen:  # `shrink` resets one value after another, and may reset this one before ep
        layout_sizes.pop("ep", None)
    layout = Layout(**layout_sizes)
    micros = layout.dp * chosen.get("gas", 2)  # gas counts the micro-batches of each replica; 2 is its plain value
    return Case(layout, micros, tuple(flags))


def draw(rng: random.Random, few: bool) -> dict[str, Any]:
    """Draw a family, a layout and settings; return the values that are not plain.

    few: whether to draw at most three settings, and those that they need, so that each setting is also seen alone.
    """
    family = rng.choice(("gpt2", "llama", "llama", "t5", "t5"))
    chosen = {"--family": family, **_draw_layout(rng, family)}
    ranges = ranges_of(family)

    def random_key(each: Range) -> float:
        # Sampling without replacement (Efraimidis and Spirakis 2006): the largest keys random() ** (1 / weight) win.
        # The weights are 1 for settings that are drawn often and 1/3 for others.
        return rng.random() if each.often else rng.random() ** 3

    ordered = sorted(ranges.values(), key=random_key, reverse=True)
    share = rng.choice((0.2, 0.4, 0.6))
    count = rng.randint(0, 3) if few else round(share * len(ordered))
    for each in ordered[:count]:
        if few:
            needed = {}
            for name in each.needs:
                # A need such as pp is no setting: it depends on the layout alone.
                if name in ranges:
                    needed[name] = rng.choice(ranges[name].alternatives)
            # Values that are already chosen override those drawn here.
            chosen = needed | chosen
        chosen.setdefault(each.name, rng.choice(each.alternatives))
    return chosen


def _draw_layout(rng: random.Random, family: str) -> dict[str, Any]:
    """Draw a layout of up to four ranks, and the micro-batches of each replica (gas).

    Return the values that are not plain. A T5 has no context parallelism, an interleaved schedule needs 4 layers, and
    expert parallelism needs experts.
    """
    grids = [grid for grid in GRIDS if family != "t5" or "cp" not in grid]
    chosen: dict[str, Any] = dict(rng.choice(grids))
    for name, axes, values in OPTIONS:
        value = rng.choice(values)
        if value and any(chosen.get(axis, 1) > 1 for axis in axes):
            chosen[name] = value
    if chosen.get("schedule") == "interleaved":
        chosen |= {"vpp": 2, "--num-layers": 4}
    if "ep" in chosen:
        chosen["--num-experts"] = 4
    # Chance alone would hardly draw this combination.
    if family == "t5" and "pp" in chosen and rng.random() < 0.2:
        chosen |= CUT_BEFORE_A_LAYER
    return chosen
