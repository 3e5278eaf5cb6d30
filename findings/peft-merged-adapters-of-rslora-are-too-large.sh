#!/usr/bin/env bash
# Surprise: add_weighted_adapter multiplies the result by the square root of the new rank if the adapters use rsLoRA. Two adapters
#   of rank 8, added with the weights 0.7 and 0.3 by "cat" or "svd", give 4.0 times the weighted sum. One adapter with the weight 0.5 gives
#   1.41 times itself, and with rank 64 it gives 4 times. Without rsLoRA the same calls are exact. There is no message.
#   A PiSSA adapter has a second effect: the call initialises the new adapter by PiSSA, which takes its part off the base
#   weights, so the outputs of the existing adapter change too.
# Versions: peft 0.21.2 (the newest release), torch 2.13.0, transformers 5.24.0. Date: 2026-11-29.
# Belief: the new adapter is the weighted sum of the old ones, and the base model and the old adapters stay as they are.
# Source: the docstring of add_weighted_adapter (adds a new adapter by merging the given adapters with the given weights; cat and svd are
#   precise methods), and that of use_rslora (the scaling factor is lora_alpha/math.sqrt(r)).
# Cause: LoraModel.add_weighted_adapter in peft/tuners/lora/model.py copies the configuration of the first adapter with
#   lora_alpha=new_rank, which means a scaling of 1 for plain LoRA. With use_rslora, which is copied too, the scaling
#   is new_rank / sqrt(new_rank). init_lora_weights="pissa" is copied as well.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 peft==0.21.2 transformers==5.24.0 accelerate==1.15.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import math
import sys
import warnings

warnings.filterwarnings("ignore")
import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

IDS = torch.arange(20)[None]


def model(names, rank=8, **options):
    """Return a small Llama with adapters whose matrices are random, as after training."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=4))
    config = LoraConfig(r=rank, lora_alpha=16, target_modules=["q_proj", "v_proj"], **options)
    adapted = get_peft_model(base, config, adapter_name=names[0])
    for name in names[1:]:
        adapted.add_adapter(name, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return adapted.eval()


def change(adapted, name, scaling):
    """Return the changes of all weights by an adapter, from its matrices: B A times the scaling."""
    layers = [layer for _, layer in adapted.named_modules() if hasattr(layer, "lora_A") and name in layer.lora_A]
    assert len(layers) == 4
    return torch.stack([layer.lora_B[name].weight @ layer.lora_A[name].weight for layer in layers]).detach() * scaling


def effect(adapted, name):
    """Return the changes of all weights by an adapter, as the model applies them: merged weights minus base weights."""
    adapted.set_adapter(name)
    changes = []
    for layer in [layer for _, layer in adapted.named_modules() if hasattr(layer, "lora_A") and name in layer.lora_A]:
        zero, unit = torch.zeros(1, layer.in_features), torch.eye(layer.in_features)
        changes.append((layer(unit) - layer.base_layer(unit) - layer(zero) + layer.base_layer(zero)).T.detach())
    return torch.stack(changes)


def factor(rslora, weights, method, rank=8):
    """Return how many times the weighted sum the merged adapter is, and the part of it that has another direction."""
    names = [f"adapter{number}" for number in range(len(weights))]
    adapted = model(names, rank, use_rslora=rslora)
    scaling = 16 / math.sqrt(rank) if rslora else 16 / rank
    wanted = sum(weight * change(adapted, name, scaling) for name, weight in zip(names, weights))
    adapted.add_weighted_adapter(names, weights, "merged", combination_type=method, svd_rank=rank * len(weights))
    seen = effect(adapted, "merged")
    times = ((seen * wanted).sum() / (wanted * wanted).sum()).item()
    assert (seen - times * wanted).norm() < 1e-3 * seen.norm()
    return round(times, 2)


def logits(adapted):
    with torch.no_grad():
        return adapted(IDS).logits


def pissa():
    """Return how far the outputs of an existing adapter move, relative to their norm, when a merged adapter is added."""
    moved = {}
    for name, kind in (("plain LoRA", True), ("PiSSA", "pissa")):
        adapted = model(["first"], init_lora_weights=kind)
        before = logits(adapted)
        adapted.add_weighted_adapter(["first"], [0.5], "smaller")
        adapted.set_adapter("first")
        moved[name] = round(((logits(adapted) - before).norm() / before.norm()).item(), 2)
    return moved


print("peft", peft.__version__, "torch", torch.__version__, "transformers", transformers.__version__)
cases = {
    "two adapters of rank 8, 0.7 and 0.3, cat": ([0.7, 0.3], "cat", 8),
    "two adapters of rank 8, 0.7 and 0.3, svd": ([0.7, 0.3], "svd", 8),
    "one adapter of rank 8, 0.5": ([0.5], "linear", 8),
    "one adapter of rank 64, 0.5": ([0.5], "linear", 64),
}
plain, stabilised = [], []
for name, (weights, method, rank) in cases.items():
    plain.append(factor(False, weights, method, rank))
    stabilised.append(factor(True, weights, method, rank))
    print(f"{name}: {plain[-1]} times the weighted sum with LoRA, {stabilised[-1]} times with rsLoRA")
moved = pissa()
for name, part in moved.items():
    print(f"{name}: the outputs of the existing adapter move by {part} of their norm")
print("belief: 1.0 times the weighted sum, and no output moves")
holds = plain == [1.0] * 4 and stabilised == [4.0, 4.0, 2.83, 8.0] and moved["plain LoRA"] == 0 and moved["PiSSA"] > 0.05
print("HOLDS: merged rsLoRA adapters are the square root of their rank too large" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
