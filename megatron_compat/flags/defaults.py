"""Defaults of Megatron-LM that differ from this project's, and notes on them for command lines of Megatron-LM.

The values of the model and the optimizer are those of TransformerConfig, GPTModel and OptimizerConfig in megatron-core
0.16.1, whose wheel has no argument parser. Those of the learning rate, Muon, the splits and the tied embeddings are the
defaults of Megatron-LM's pretrain_gpt.py.
"""

from collections.abc import Container, Mapping
from typing import Any

from megatron.config.defaults import DEFAULTS
from megatron.config.fields import flag
from megatron.config.messages import format_flag
from megatron.config.names import HOME
from megatron.config.sections import Config, settings

# A command line with one of these flags is taken for one of Megatron-LM.
MEGATRON_FLAGS = (
    "--micro-batch-size",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--use-rotary-position-embeddings",
    "--position-embedding-type",
)
WARMUPS = ("--lr-warmup-fraction", "--lr-warmup-iters", "--lr-warmup-samples")
# Setting -> Megatron-LM's default. Settings whose defaults are equal in both projects are included, because the
# scripts of single families override some of them.
MEGATRON: Mapping[str, Any] = {
    "position_embedding": "learned", "normalization": "layernorm", "activation": "gelu-tanh", "hidden_bias": True,
    "qkv_bias": None, "qk_norm": False, "tie_embeddings": True, "hidden_dropout": 0.1, "attention_dropout": 0.1,
    "layernorm_epsilon": 1e-5, "init_method_std": 0.02, "rope_theta": 10000.0, "rotary_percent": 1.0,
    "precision": "fp32", "weight_decay": 0.01, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8,
    "min_lr": 0.0, "lr_decay_style": "linear", "warmup": 0.0, "seed": 1234, "split": "969,30,1", "router_aux_loss": 0.0,
}  # fmt: skip
MUON = {"muon_momentum": 0.9, "muon_nesterov": False}
# Setting -> default of this project, which the scripts of single families override.
USUAL = {f.name: f.default for _, _, f in settings()}


def notes(config: Config, foreign: Container[str], given: set[str], defaults: Mapping[str, Any]) -> list[str]:
    """Return notes on what Megatron-LM would do otherwise with the same command line.

    foreign: the flags of other frameworks on the command line. given: names of the settings that the user has decided.
    defaults: those of the entry script, which has decided those that are not the usual ones of its family.
    """
    usual = {**USUAL, **DEFAULTS.get(defaults.get("family", ""), {})}
    # Values that the script has changed count as given, as the user has chosen the script.
    decided_by_script = {name for name, value in defaults.items() if usual.get(name) != value}
    notes_found = []
    # None if the command line is none of Megatron-LM.
    megatron_flag = next((name for name in MEGATRON_FLAGS if name in foreign), None)
    undecided = _undecided(config, foreign, given | decided_by_script) if megatron_flag else {}
    if undecided:
        flags = [format_flag(flag(name), value) for name, value in undecided.items()]
        # Undecided positions are those of another family than GPT-2, whose default is that of Megatron-LM.
        script = " and use pretrain_gpt2.py" if "position_embedding" in undecided else ""
        notes_found.append(
            f"Megatron-LM, to which {megatron_flag} belongs, has other defaults for settings that are not given; for "
            f"its run, add {' '.join(flags)}{script}"
        )
    if megatron_flag and config.optim.muon_scale == "match_rms_adamw":
        notes_found.append(
            "Muon's updates are 0.2 times those of Megatron-LM; --muon-lr-factor 5 makes them equal, but also "
            "multiplies their weight decay"
        )
    if megatron_flag or any(name in foreign for name in WARMUPS):
        notes_found.append(
            "Megatron-LM's learning rate in iteration N is this run's in iteration N - 1; with a warmup, its first "
            "rate is 0"
        )
    return notes_found


def _undecided(config: Config, foreign: Container[str], given: Container[str]) -> dict[str, Any]:
    """Return the settings that are not `given` and differ from Megatron-LM's defaults, with Megatron-LM's values."""
    defaults = {**USUAL, **DEFAULTS[config.model.family or "gpt2"]}
    megatron_values = dict(MEGATRON)
    # Megatron-LM has the tanh form of GELU only where it is fused with a bias, else the erf form.
    has_no_bias = "hidden_bias" in given and not config.model.hidden_bias
    if "--no-bias-gelu-fusion" in foreign or has_no_bias:
        megatron_values["activation"] = "gelu"
    # Leave out the values of settings that this run does not use.
    if config.data.train_data_path:
        del megatron_values["split"]
    if not config.model.num_experts or not config.model.has_aux_loss:
        del megatron_values["router_aux_loss"]
    if config.optim.muon_scale:
        megatron_values |= MUON
    undecided = {}
    for name, megatron_value in megatron_values.items():
        if config.is_t5 and HOME[name] == "model":
            continue  # the T5 of Megatron-LM is another model
        section = getattr(config, HOME[name])
        value = getattr(section, name)
        # A value other than the default was set by something else, such as a file or another flag.
        is_undecided = name not in given and value == defaults[name]
        if is_undecided and value != megatron_value:
            undecided[name] = megatron_value
    return undecided
