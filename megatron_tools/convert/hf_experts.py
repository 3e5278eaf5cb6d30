"""Mixtures of experts in config.json: the keys of Mixtral, Qwen2-MoE and Qwen3-MoE and their settings in this project.

The factors of the auxiliary loss of the router differ. In transformers, the loss is computed from the shares of tokens
and the probabilities of all layers together, and its minimum is router_aux_loss_coef times the experts per token. In
this project, each layer has its own loss, whose minimum is --router-aux-loss. The conversion makes the sums of the
minima equal. If a single layer has experts, the two losses are then equal for equal shares.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.config import ModelConfig

Values = dict[str, Any]  # by name of a key or a setting

_ROUTER_LOSS_DEFAULTS = {"router_aux_loss_coef": 0.001, "output_router_logits": False}
_QWEN_EXPERT_DEFAULTS = {
    **_ROUTER_LOSS_DEFAULTS, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False,
}  # fmt: skip
# Model type -> keys that the dense model with the same attention lacks, with their defaults.
EXPERT_DEFAULTS: dict[str, Values] = {
    "mixtral": {**_ROUTER_LOSS_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2, "router_jitter_noise": 0.0},
    "qwen2_moe": {
        **_QWEN_EXPERT_DEFAULTS, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {**_QWEN_EXPERT_DEFAULTS, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}  # fmt: skip


def expert_settings(values: Mapping[str, Any], where: Path) -> tuple[Values, list[str]]:
    """Convert the values from `read_config` to (our settings of mixtures by name, notes for the user).

    Raises ValueError for settings that this project does not support.
    """
    model_type = values["model_type"]
    experts_per_token = values["num_experts_per_tok"]
    # Mixtral lacks two keys: its experts have the width intermediate_size, and it always normalises their weights.
    settings: Values = {
        "num_experts": values["num_local_experts" if model_type == "mixtral" else "num_experts"],
        "experts_per_token": experts_per_token,
        "expert_ff_hidden_size": values.get("moe_intermediate_size"),
        "normalize_expert_weights": values.get("norm_topk_prob", True),
    }
    noise = values.get("router_jitter_noise")
    if noise:
        raise ValueError(
            f"{where}: router_jitter_noise is {noise}; transformers also multiplies the input of the experts by this "
            f"noise, this project only that of the router, so set it to 0 and train with --router-jitter"
        )
    layers_with_experts = _layers_with_experts(values, where)
    if not all(layers_with_experts):
        # One 0 or 1 for each layer, as --moe-layer-frequency takes them.
        settings["moe_layer_frequency"] = tuple(str(int(has_experts)) for has_experts in layers_with_experts)
    if model_type == "qwen2_moe":
        shared = values["shared_expert_intermediate_size"]
        width = values["moe_intermediate_size"]
        if width < 1 or shared < 1 or shared % width:
            raise ValueError(
                f"{where}: shared_expert_intermediate_size is {shared}; it must be a multiple of moe_intermediate_size "
                f"{width}, because in this project shared experts have the width of the other experts"
            )
        settings |= {"num_shared_experts": shared // width, "shared_expert_gate": True}
    # In transformers, one loss for all layers has the minimum coefficient x experts per token. Here each layer with
    # experts has a loss with the minimum aux_loss. Equal sums of the minima: aux_loss x layers = coefficient x experts
    # per token. For example, 0.001 with 4 experts per token in 8 layers becomes 0.0005.
    aux_loss = values["router_aux_loss_coef"] * experts_per_token / sum(layers_with_experts)
    notes = []
    if aux_loss and not values["output_router_logits"]:
        notes.append(
            f"output_router_logits is false, so transformers would train without router_aux_loss_coef; settings.json "
            f"trains with --router-aux-loss {aux_loss:.4g} (--router-aux-loss 0 disables it)"
        )
    return {**settings, "router_aux_loss": aux_loss}, notes


def _layers_with_experts(values: Mapping[str, Any], where: Path) -> list[bool]:
    """Return for each layer whether it has experts. Raises ValueError if none has."""
    step = values.get("decoder_sparse_step", 1)
    if step < 1:
        raise ValueError(f"{where}: decoder_sparse_step is {step}; it must be at least 1")
    dense_layers = values.get("mlp_only_layers") or []
    has_experts = []
    # With decoder_sparse_step 2, the layers 1, 3, 5, ... have experts.
    for layer in range(values["num_hidden_layers"]):
        has_experts.append(layer not in dense_layers and (layer + 1) % step == 0)
    if not any(has_experts):
        raise ValueError(
            f"{where}: decoder_sparse_step {step} and mlp_only_layers {dense_layers} leave no layer with experts"
        )
    return has_experts


def unsupported_settings(m: ModelConfig, model_type: str) -> Sequence[tuple[bool, str]]:
    """Return pairs (whether the model uses it, flag) of settings of mixtures that `model_type` does not support.

    They are for `refuse_unsupported`.
    """
    if m.num_experts is None:
        return []
    has_dense_layers = not all(map(m.has_experts, range(m.num_layers)))
    return [
        (m.router_score != "softmax", f"--router-score {m.router_score}"),
        (m.has_router_bias, f"--router-balance {m.router_balance}"),
        (model_type != "qwen2_moe" and m.num_shared_experts > 0, f"--num-shared-experts {m.num_shared_experts}"),
        (model_type == "qwen2_moe" and not m.shared_expert_gate, "--num-shared-experts without --shared-expert-gate"),
        (model_type == "mixtral" and has_dense_layers, f"--moe-layer-frequency {' '.join(m.moe_layer_frequency)}"),
        (model_type == "mixtral" and not m.normalize_expert_weights, "--no-normalize-expert-weights"),
    ]


def expert_config(m: ModelConfig, model_type: str) -> Values:
    """Return the keys of config.json that describe the mixtures of `m`; none for a model without experts."""
    if m.num_experts is None:
        return {}
    dense_layers = [i for i in range(m.num_layers) if not m.has_experts(i)]
    aux_loss = m.router_aux_loss if m.has_aux_loss else 0.0
    entries: Values = {
        "num_experts_per_tok": m.experts_per_token,
        # The reverse of expert_settings: coefficient x experts per token = our loss x number of layers with experts.
        "router_aux_loss_coef": aux_loss * (m.num_layers - len(dense_layers)) / m.experts_per_token,
        "output_router_logits": False,
    }
    if model_type == "mixtral":
        return {**entries, "num_local_experts": m.num_experts, "intermediate_size": m.expert_ff_size}
    entries |= {
        "num_experts": m.num_experts,
        "moe_intermediate_size": m.expert_ff_size,
        "norm_topk_prob": m.normalize_expert_weights,
        # Step 1 gives all layers experts, except those in mlp_only_layers.
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense_layers,
    }
    if model_type == "qwen2_moe":
        entries["shared_expert_intermediate_size"] = m.num_shared_experts * m.expert_ff_size
    return entries


def unexported_notes(m: ModelConfig) -> Iterable[str]:
    """Yield notes on settings that config.json has no key for, or that some releases of transformers misread."""
    has_experts = m.num_experts is not None
    flags = [("--hidden-dropout", m.hidden_dropout, "dropout")]
    if has_experts:
        flags.append(("--router-z-loss", m.router_z_loss, "z-loss"))
        flags.append(("--router-jitter", m.router_jitter, "noise for the router alone"))
    for name, value, missing_key in flags:
        # A setting of 0 changes nothing, so its loss in the export needs no note.
        if value:
            yield f"{name} {value} is not exported: Llama's config.json has no {missing_key}"
    if has_experts and m.has_aux_loss and m.router_aux_loss:
        yield "transformers trains with the exported router_aux_loss_coef only if output_router_logits is true"
    # transformers 4.48 scales by max_position_embeddings, and 4.53 derives another factor from it. 4.57 does neither.
    if m.rope_scaling == "yarn":
        yield "transformers before 4.57 may scale the positions of yarn differently; use a later release"
