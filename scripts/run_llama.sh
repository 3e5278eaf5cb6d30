#!/usr/bin/env bash
# Train Llama, Qwen3, Mistral or a mixture of experts, from raw text to generated text. Run it again to resume; flags override the defaults:
#   bash scripts/run_llama.sh                                       the bundled corpus, about five minutes on 2 cores
#   bash scripts/run_llama.sh --train-iters 1000 --override-lr-schedule then train for longer
#   CORPUS=my.jsonl RUN_DIR=runs/mine bash scripts/run_llama.sh     your text (.jsonl, .csv, .parquet, .txt) or a folder
#   GPUS_PER_NODE=8 MP_SIZE=2 PP_SIZE=2 MODEL_SIZE=8b bash scripts/run_llama.sh
#   GPUS_PER_NODE=8 VARIANT=qwen3 MODEL_SIZE=0.6b SEQ_LENGTH=2048 bash scripts/run_llama.sh
#   GPUS_PER_NODE=8 MP_SIZE=4 VARIANT=mistral MODEL_SIZE=7b bash scripts/run_llama.sh
#   VARIANT=qwen3-moe bash scripts/run_llama.sh                     a small mixture of experts on the bundled corpus
set -euo pipefail
ROOT=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
NAME=llama
source "$ROOT/scripts/_run.sh"

# ---- the model: a small default model or a preset of configs/models (VARIANT, MODEL_SIZE); NLAYERS etc. override both
VARIANT=${VARIANT:-llama}
MODEL_SIZE=${MODEL_SIZE:-}
case "$VARIANT" in
    llama | qwen3 | mistral | mixtral | qwen3-moe) ;;
    *) echo "run_llama.sh: VARIANT=$VARIANT is not one of llama, qwen3, mistral, mixtral, qwen3-moe" >&2; exit 2 ;;
esac
preset_of "$VARIANT" "${MODEL_SIZE:-tiny}"
NLAYERS=${NLAYERS:-} NHIDDEN=${NHIDDEN:-} NHEADS=${NHEADS:-} NKVHEADS=${NKVHEADS:-} SEQ_LENGTH=${SEQ_LENGTH:-}
if [ -n "$MODEL_SIZE" ]; then
    LR=${LR:-3e-4} BATCHSIZE=${BATCHSIZE:-1} GAS=${GAS:-16} TRAIN_ITERS=${TRAIN_ITERS:-100000} WARMUP=${WARMUP:-0.01}
    EVERY=1000
else
    LR=${LR:-1e-3} BATCHSIZE=${BATCHSIZE:-4} GAS=${GAS:-4} TRAIN_ITERS=${TRAIN_ITERS:-300} WARMUP=${WARMUP:-0.1}
    EVERY=50
fi
[ -n "$NLAYERS" ] && model+=(--num-layers "$NLAYERS")
[ -n "$NHIDDEN" ] && model+=(--hidden-size "$NHIDDEN" --ff-hidden-size $((NHIDDEN * 8 / 3 / 16 * 16)))
[ -n "$NHEADS" ] && model+=(--num-attention-heads "$NHEADS")
[ -n "$NKVHEADS" ] && model+=(--num-key-value-heads "$NKVHEADS")
[ -n "$SEQ_LENGTH" ] && model+=(--seq-length "$SEQ_LENGTH")

{ # bash reads all of this group before it trains, so this file may be edited meanwhile
    train "$@"
    if [ -n "${PROMPT:-}" ]; then show_results "$PROMPT"; else show_results "春天" "老人" "The river"; fi
    exit
}
