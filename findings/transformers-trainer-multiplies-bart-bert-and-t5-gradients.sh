#!/usr/bin/env bash
# Surprise: the Trainer multiplies the gradient and the logged loss of T5, BART, BERT and other models by the number of
#   gradient accumulation steps. GPT-2, Llama and ModernBERT are right in the same program. Adam hides the
#   factor in the update; gradient clipping, SGD and the logged curves do not.
# Versions: transformers 5.24.0 (the newest release), accelerate 1.15.0, torch 2.13.0. Date: 2026-11-28. The same factor was
#   seen with mT5, UMT5, mBART, Switch Transformers, ELECTRA and DeBERTa-v2.
# Belief: 3 micro-batches of 4 rows give the loss and the gradient of one batch of 12 rows.
# Source: the documentation of gradient_accumulation_steps in TrainingArguments.
# Cause: the forward method of these models accepts **kwargs. The Trainer concludes that the model divides its loss by
#   num_items_in_batch, so the Trainer does not divide by the number of steps. These models ignore num_items_in_batch.
# Depends on: nothing of the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy==2.4.6
cat > "$work/program.py" <<'PY'
import os
import sys
import warnings

warnings.filterwarnings("ignore")
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import accelerate
import torch
import transformers
from transformers import Trainer, TrainingArguments

transformers.utils.logging.set_verbosity_error()
VOCABULARY = 50
ROWS = torch.randint(5, VOCABULARY, (12, 20), generator=torch.Generator().manual_seed(31))


def build(name):
    """Return a tiny model without dropout."""
    torch.manual_seed(32)
    if name == "T5":
        config = transformers.T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
        return transformers.T5ForConditionalGeneration(config)
    if name == "BART":
        config = transformers.BartConfig(
            vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32, dropout=0.0,
        )
        return transformers.BartForConditionalGeneration(config)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 32,
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    if name == "BERT":
        config = transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return transformers.BertForMaskedLM(config)
    if name == "ModernBERT":
        return transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**sizes, **tokens))
    if name == "Llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config)


def first_step(name, accumulation):
    """Return the logged loss and gradient norm of one step over all rows."""
    arguments = TrainingArguments(
        output_dir="out", per_device_train_batch_size=len(ROWS) // accumulation,
        gradient_accumulation_steps=accumulation, max_steps=1, learning_rate=0.0, optim="sgd", max_grad_norm=1e9,
        logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, log_level="error",
    )
    rows = [{"input_ids": row, "labels": row.clone()} for row in ROWS]
    trainer = Trainer(model=build(name), args=arguments, train_dataset=rows)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer.state.log_history[0]


print("torch", torch.__version__, "transformers", transformers.__version__, "accelerate", accelerate.__version__)
wrong = ("T5", "BART", "BERT")
holds = True
for name in (*wrong, "GPT-2", "Llama", "ModernBERT"):
    whole = first_step(name, 1)
    for accumulation in (3, 6):
        parts = first_step(name, accumulation)
        loss_ratio = parts["loss"] / whole["loss"]
        norm_ratio = parts["grad_norm"] / whole["grad_norm"]
        print(f"{name}: loss {whole['loss']:.3f}, gradient norm {whole['grad_norm']:.3f} in one batch of 12 rows; "
              f"in {accumulation} micro-batches {loss_ratio:.3f} and {norm_ratio:.3f} times as much")
        expected = accumulation if name in wrong else 1
        holds = holds and abs(loss_ratio / expected - 1) < 1e-3 and abs(norm_ratio / expected - 1) < 1e-2
print("belief: 1.000 in every row")
print("HOLDS: T5, BART and BERT have 3 and 6 times the gradient" if holds else "no longer so")
sys.exit(not holds)
PY
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" program.py
