#!/usr/bin/env bash
# Continued pretraining: import a Hugging Face model, train it on your text and export it to Hugging Face again.
#   bash examples/continue_from_hf.sh FOLDER corpus.jsonl runs/more    a downloaded Llama, Qwen or Mistral
#   bash examples/continue_from_hf.sh                                  a small random Llama, to try it
# The example shows the commands for import, training and export. At import and export, --verify runs the same tokens
# through the Hugging Face model and through ours. The example prints the largest difference between the logits of the
# two models, the training losses, and the path of the exported folder.
# RANKS=8 FLAGS="--model-parallel-size 2" trains on eight ranks.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
run=${3:-runs/more} corpus=${2:-corpus/sample.jsonl} model=${1:-}
mkdir -p "$run"
if [ -f "$run/arguments" ] && [ "$(cat "$run/arguments")" != "$model $corpus" ]; then
    echo "$run contains a run with the arguments $(cat "$run/arguments"); give another third argument" >&2
    exit 2
fi
echo "$model $corpus" >"$run/arguments"
if [ -z "$model" ]; then
    model=$run/small
    $python tools/train_tokenizer.py --input "$corpus" --vocab-size 1000 --tokenizer-type hf \
        --output "$model/tokenizer.json"
    $python - "$model" <<'PY'
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(1)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
config = LlamaConfig(vocab_size=1000, max_position_embeddings=128, bos_token_id=0, eos_token_id=0, **sizes)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
PY
fi

# Import the weights. The import also writes settings.json, which holds the model's settings for the training below.
[ -d "$run/start" ] || $python tools/convert_checkpoint.py --from-hf "$model" --output "$run/start" --verify
# Tokenize the text with the tokenizer of the model.
[ -f "$run/data_text_document.idx" ] ||
    $python tools/preprocess_data.py --input "$corpus" --vocab-file "$model/tokenizer.json" --output-prefix "$run/data"
# Train; RANKS and FLAGS choose the parallel layout. Running the script again resumes the training.
# shellcheck disable=SC2086
$python tools/launch.py --standalone --nproc-per-node "${RANKS:-1}" pretrain_llama.py \
    --config "$run/start/settings.json" --load "$run/start" --data-path "$run/data_text_document" \
    --vocab-file "$model/tokenizer.json" --run-dir "$run" --seq-length 64 --batch-size 4 --gas 2 \
    --train-iters 20 --lr 1e-4 --warmup 0.1 --split 90,10,0 --eval-iters 2 ${FLAGS:-}
# Export the trained model; an earlier export is replaced.
rm -rf "$run/exported"
$python tools/convert_checkpoint.py --load "$run" --output "$run/exported" --verify
