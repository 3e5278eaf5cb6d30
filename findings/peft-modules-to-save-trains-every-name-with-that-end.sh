#!/usr/bin/env bash
# Surprise: peft's modules_to_save takes a module if its name ends with the given letters, even in the middle of a word. With
#   modules_to_save=["norm"], which is the name of Llama's last norm, all 5 norms of a model of 2 layers are trained (all of Qwen3's 9),
#   since input_layernorm and q_norm end with "norm" too. Full copies of them are trained and saved, without a message.
#   target_modules=["norm"] of the same package takes whole names only, and so does modules_to_save=["model.norm"].
# Versions: peft 0.21.2 and transformers 5.24.0 (the newest releases), accelerate 1.15.0, torch 2.13.0, numpy 2.4.6. Date: 2026-11-30.
# Belief: a name in modules_to_save means the modules with this name, by the rule of target_modules: equal, or ending with a dot and it.
# Source: LoraConfig's docstring: target_modules match exactly or by the end of the name with the given string, which peft carries out
#   at the dots only; modules_to_save is a list of modules.
# Cause: _set_trainable in peft/utils/other.py uses key.endswith(target_key) without a dot; check_target_module_exists in
#   peft/tuners/tuners_utils.py uses key.endswith("." + target_key).
# Checked: huggingface/peft issue 3755 (open since September 2026) is about a TypeError when a name is the end of a name inside a LoRA
#   layer; it mentions that some classifiers are found by their end only. That more weights are trained is not mentioned.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 peft==0.21.2 transformers==5.24.0 accelerate==1.15.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import logging
import sys
import warnings
from importlib.metadata import version

import torch

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
from peft import LNTuningConfig, LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

torch.set_num_threads(1)
MODELS = {"Llama": (LlamaConfig, LlamaForCausalLM), "Qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def build(kind):
    """Return a small model of 2 layers with random weights."""
    torch.manual_seed(0)
    config_class, model_class = MODELS[kind]
    return model_class(config_class(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                    num_attention_heads=4, num_key_value_heads=4, head_dim=8, pad_token_id=0))


def moved(kind, config):
    """Take two training steps with AdamW and return the names of the base model's weights that have another value when merged."""
    before = {name: value.clone() for name, value in build(kind).state_dict().items()}
    model = get_peft_model(build(kind), config)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    tokens = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    after = model.merge_and_unload().state_dict()
    assert after.keys() == before.keys()
    return [name.removesuffix(".weight") for name in before if not torch.equal(before[name], after[name])]


print("peft", version("peft"), "transformers", version("transformers"), "torch", torch.__version__)
print("belief: with modules_to_save=['norm'] or ['model.norm'], training moves q_proj (by LoRA) and model.norm")
holds = True
for kind, count in (("Llama", 5), ("Qwen3", 9)):
    seen = {}
    for name in ("model.norm", "norm"):
        config = LoraConfig(target_modules=["q_proj"], r=4, modules_to_save=[name], task_type="CAUSAL_LM")
        seen[name] = [weight for weight in moved(kind, config) if not weight.endswith("q_proj")]
        print(f"{kind}: modules_to_save={[name]} moves {len(seen[name])} of the weights without LoRA: {', '.join(seen[name])}")
    tuned = moved(kind, LNTuningConfig(target_modules=["norm"], task_type="CAUSAL_LM"))
    print(f"{kind}: target_modules=['norm'] of LNTuningConfig moves {tuned}")
    holds = holds and seen["model.norm"] == tuned == ["model.norm"] and len(seen["norm"]) == count
print("HOLDS: modules_to_save trains every module whose name ends with the given letters" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
