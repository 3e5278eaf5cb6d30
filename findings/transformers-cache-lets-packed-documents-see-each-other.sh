#!/usr/bin/env bash
# Surprise: transformers separates documents that are packed into one row by the restarts in position_ids, but only if the model
#   makes no cache and gets no attention mask. use_cache is true by default, in training mode too. So in a training loop
#   that passes input_ids, position_ids and labels, every document attends to those before it, and nothing says so.
#   use_cache=False and gradient_checkpointing_enable() separate the documents, so a switch that saves memory changes the loss
#   and its gradient. A mask of ones joins the documents again. Llama, Mistral, Qwen 3 and GPT-2 behave alike,
#   with eager attention and sdpa. The Trainer sets use_cache to false, so the same batch has another loss there.
# Versions: transformers 5.24.0 (the newest release), torch 2.13.0. Date: 2026-11-29.
# Belief: the loss of a packed row is that of its documents one by one. A cache that nobody reads, checkpointing and a mask of
#   ones do not change a result.
# Source: the docstrings of use_cache (key value states are returned and can speed up decoding), of attention_mask (1 for tokens
#   that are not masked) and of gradient_checkpointing in TrainingArguments (saves memory at the expense of a slower
#   backward pass); DataCollatorWithFlattening returns input_ids, labels and position_ids, and no mask.
# Cause: _preprocess_mask_arguments in transformers/masking_utils.py looks at position_ids only if attention_mask and
#   past_key_values are None. The model's forward makes an empty cache before it calls this function.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import sys

import torch
import torch.nn.functional as F
import transformers
from transformers import DataCollatorWithFlattening, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
VOCABULARY = 100
common = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
         "max_position_embeddings": 64, **common}
MODELS = {
    LlamaForCausalLM: LlamaConfig(**sizes),
    MistralForCausalLM: MistralConfig(**sizes),
    Qwen3ForCausalLM: Qwen3Config(head_dim=8, **sizes),
    GPT2LMHeadModel: GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0, **common),
}
generator = torch.Generator().manual_seed(0)
documents = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in (10, 6, 8)]
batch = DataCollatorWithFlattening()([{"input_ids": document} for document in documents])
print("torch", torch.__version__, "transformers", transformers.__version__)
print("the collator returns", ", ".join(batch), "with position_ids", batch["position_ids"][0].tolist())


def run(model, **arguments):
    """Return the loss and the gradient of the packed row in training mode."""
    model.train()
    model.zero_grad()
    loss = model(**batch, **arguments).loss
    loss.backward()
    return loss.item(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


holds = True
for model_class, config in MODELS.items():
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    name = model_class.__name__
    total = 0
    for document in documents:
        ids = torch.tensor([document])
        total = total + F.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum")
    right = total / sum(len(document) - 1 for document in documents)
    right.backward()
    right_gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    print(f"{name}, documents one by one: loss {right.item():.4f}")
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        results = {"as the collator returns it": run(model), "use_cache=False": run(model, use_cache=False)}
        results["use_cache=False and a mask of ones"] = run(model, use_cache=False, attention_mask=torch.ones_like(batch["input_ids"]))
        model.gradient_checkpointing_enable()
        results["gradient checkpointing"] = run(model)
        model.gradient_checkpointing_disable()
        for setting, (loss, gradient) in results.items():
            error = ((gradient - right_gradient).norm() / right_gradient.norm()).item()
            print(f"{name}, {attention}, {setting}: loss {loss:.4f}, relative error of the gradient {error:.4f}")
            if setting in ("use_cache=False", "gradient checkpointing"):
                holds = holds and abs(loss - right.item()) < 1e-4 and error < 1e-3
            else:
                holds = holds and abs(loss - right.item()) > 1e-2 and error > 0.1
print("belief: all losses of a model are equal")
print("HOLDS: a cache or a mask of ones lets packed documents attend to each other" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$work/venv/bin/python" program.py
