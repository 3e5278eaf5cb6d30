"""The work of tools/coordinate_check.py, whose flags are in coordinate_flags.py."""

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_utils.cli import new_figure, save_figure
from megatron.config import Config
from megatron.config.command_line import with_values
from megatron.config.families import parse_any_family
from megatron.config.mup import BASE_SIZES
from megatron.model.attention import Attention
from megatron.model.block import ParallelMLP, TransformerLayer
from megatron.model.gpt2 import GPT2Model
from megatron.model.gpt2_layers import StackNorm
from megatron.model.lr_factors import layer_lr_factors
from megatron.model.mixture import Mixture
from megatron.model.muon_parameters import muon_parameters
from megatron.model.t5 import T5Model
from megatron.mpu import VocabParallelEmbedding
from megatron.optim import build_optimizer, group_keys

# Module -> name of the activations that it returns.
KINDS: dict[type[nn.Module], str] = {
    VocabParallelEmbedding: "embedding",
    Attention: "attention",
    ParallelMLP: "MLP",
    Mixture: "MLP",
    TransformerLayer: "residual stream",
    StackNorm: "final norm",
}
DEFAULTS = ("--num-layers=2", "--num-attention-heads=4", "--seq-length=32", "--vocab-size=256", "--lr=0.01")
BATCH_SIZE = 4

Sizes = dict[str, float]  # name of the activations -> root mean square of their change since the first step


def config_of_width(width: int, base: Config, grow: str, mup: bool) -> Config:
    """Return the settings of the model of this width: the model `base` with more heads, or with wider heads.

    grow: heads or head-size. mup: scale the model by muP, with `base` as its base model.
    """
    m = base.model
    if width % m.hidden_size:
        raise ValueError(f"the width {width} is not a multiple of the smallest width {m.hidden_size}; change --widths")
    growth = width // m.hidden_size
    # kv_hidden_size is the size of a head. With more heads it stays, so it needs no base size.
    values: dict[str, Any] = {
        "hidden_size": width,
        "ff_hidden_size": m.ff_size * growth,
        "kv_hidden_size": m.head_size,
        "mup_base_hidden_size": m.hidden_size,
        "mup_base_kv_hidden_size": None,
    }
    if m.expert_ff_hidden_size:
        values["expert_ff_hidden_size"] = m.expert_ff_hidden_size * growth
    if grow == "heads":
        values["num_attention_heads"] = m.num_attention_heads * growth
        if m.num_key_value_heads:
            values["num_key_value_heads"] = m.num_key_value_heads * growth
    else:
        values["kv_hidden_size"] = m.head_size * growth
        values["mup_base_kv_hidden_size"] = m.head_size
    if not mup:
        # muP is off if its base sizes are None.
        values |= dict.fromkeys(("mup_base_hidden_size", *BASE_SIZES))
    return with_values(base, values)


def activation_changes(config: Config, steps: int) -> Sizes:
    """Train the model for `steps` steps on one random batch, and return how much its activations have changed."""
    model_class: Any = T5Model if config.is_t5 else GPT2Model
    model = model_class(config, parallel_output=False).eval()  # without dropout, which would change activations, too
    optim = config.optim
    factors = layer_lr_factors(model, config.model, optim.muon_scale)
    param_groups = group_keys(model, optim, factors=factors)
    muon_weights = muon_parameters(model) if optim.muon_scale else ()
    optimizer = build_optimizer(param_groups, optim, hidden=muon_weights, width=config.model.width_factor)
    for group in optimizer.param_groups:
        group["lr"] = optim.lr * group["lr_factor"]
    rng = torch.Generator().manual_seed(config.train.seed)
    sequence = torch.randint(config.model.vocab_size or 0, (BATCH_SIZE, config.data.seq_length + 1), generator=rng)
    tokens = sequence[:, :-1]
    labels = sequence[:, 1:]
    inputs = (tokens, tokens) if config.is_t5 else (tokens,)
    outputs: defaultdict[str, list[Tensor]] = defaultdict(list)
    _register_hooks(model, outputs)
    first_outputs = {}
    # The last round measures the trained model and updates nothing.
    for step in range(steps + 1):
        outputs.clear()
        logits = model(*inputs)
        outputs["logits"].append(logits.detach())
        if step == 0:
            first_outputs = dict(outputs)  # a copy, as the next round clears `outputs`
        if step < steps:
            optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    changes = {}
    for kind, tensors in outputs.items():
        squares = []
        for before, after in zip(first_outputs[kind], tensors, strict=True):
            squares.append((after - before).square().mean())
        changes[kind] = float(torch.stack(squares).mean().sqrt())
    return changes


def _register_hooks(model: nn.Module, outputs: Mapping[str, list[Tensor]]) -> None:
    """Let the forward pass append the outputs of the modules to `outputs`. A mixture of experts is one module."""
    inner_modules = set[nn.Module]()
    for mixture in model.modules():
        if isinstance(mixture, Mixture):
            inner_modules |= {*mixture.modules()} - {mixture}
    for module in model.modules():
        if module in inner_modules:
            continue
        for module_class, kind in KINDS.items():
            if isinstance(module, module_class):
                module.register_forward_hook(partial(_keep_output, outputs, kind))


def _keep_output(outputs: Mapping[str, list[Tensor]], kind: str, module: nn.Module, inputs: Any, output: Any) -> None:
    """Keep the output of `module`, a tensor, or a tuple that begins with hidden states and perhaps their bias."""
    hidden, *rest = output if isinstance(output, tuple) else (output,)
    if isinstance(module, (Attention, ParallelMLP)) and rest[0] is not None:
        hidden = hidden + rest[0]  # the bias
    outputs[kind].append(hidden.detach())


def measure_widths(base: Config, widths: Sequence[int], grow: str, steps: int, seeds: int) -> dict[bool, list[Sizes]]:
    """Return {with muP: sizes of the activations in each width}, means over seeds, without muP and with it."""
    changes: dict[bool, list[Sizes]] = {}
    for mup in (False, True):
        changes[mup] = []
        for width in widths:
            config = config_of_width(width, base, grow, mup)
            changes[mup].append(_mean_changes(config, steps, seeds))
    return changes


def _mean_changes(config: Config, steps: int, seeds: int) -> Sizes:
    """Return the mean of `activation_changes` over `seeds` seeds."""
    totals: Sizes = {}
    for seed in range(1, seeds + 1):
        seeded = with_values(config, {"seed": seed})
        for kind, change in activation_changes(seeded, steps).items():
            totals[kind] = totals.get(kind, 0.0) + change
    return {kind: total / seeds for kind, total in totals.items()}


def growth_exponent(widths: Sequence[int], sizes: Sequence[float]) -> float:
    """Return the exponent of the width with which the sizes grow, by least squares; NaN if one of them is 0."""
    if 0 in sizes:
        return math.nan
    log_widths = list(map(math.log, widths))
    log_sizes = list(map(math.log, sizes))
    return statistics.linear_regression(log_widths, log_sizes).slope


def draw_changes(path: str, widths: Sequence[int], changes: Mapping[bool, Sequence[Sizes]], steps: int) -> None:
    """Draw the sizes over the width, without and with muP. Raises ValueError without matplotlib."""
    figure = new_figure("--output", figsize=(8.4, 3.8), dpi=150)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, (mup, changes_by_width) in zip(panels, changes.items(), strict=True):
        for kind in changes_by_width[0]:
            panel.loglog(
                widths,
                [width_changes[kind] for width_changes in changes_by_width],
                marker="o",
                markersize=4,
                label=kind,
            )
        panel.set_title("with muP" if mup else "without muP")
        panel.set_xlabel("--hidden-size")
        panel.set_xticks(widths, labels=list(map(str, widths)))
        panel.minorticks_off()
        panel.grid(alpha=0.25)
    panels[0].set_ylabel(f"change of activations in {steps} steps (RMS)")
    panels[1].legend(fontsize=8)
    figure.tight_layout()
    save_figure(figure, path)


def main(args: argparse.Namespace) -> None:
    widths = sorted(set(args.widths))
    if len(widths) < 2:
        raise ValueError("give at least two different --widths")
    flag_names = {word.split("=")[0] for word in args.flags}
    for flag in ("--hidden-size", "--mup-base-hidden-size"):
        if flag in flag_names:
            raise ValueError(f"{flag} follows from --widths, of which the smallest is the base model: leave it out")
    base = parse_any_family([*DEFAULTS, *args.flags, "--hidden-size", str(widths[0])])
    changes = measure_widths(base, widths, args.grow, args.steps, args.seeds)
    # A table of the sizes, and of the exponents with which they grow with the width.
    header = "".join(f"{width:>10}" for width in widths)
    print(f"{'muP':<4} {'activations':<16}{header}  exponent")
    for mup, changes_by_width in changes.items():
        label = "with" if mup else "no"
        for kind in changes_by_width[0]:
            sizes = [width_changes[kind] for width_changes in changes_by_width]
            cells = ""
            for size in sizes:
                cells += f"{size:>10.4f}"
            print(f"{label:<4} {kind:<16}{cells}  {growth_exponent(widths, sizes):+8.2f}")
    if args.output:
        draw_changes(args.output, widths, changes, args.steps)
        print(f"figure -> {args.output}")
