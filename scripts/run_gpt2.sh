#!/usr/bin/env bash
# Train GPT-2, from raw text to generated text. Run it again to resume; flags override the defaults:
#   bash scripts/run_gpt2.sh                                        the bundled corpus, about five minutes on 2 cores
#   bash scripts/run_gpt2.sh --train-iters 1000 --override-lr-schedule  then train for longer
#   CORPUS=my.jsonl RUN_DIR=runs/mine bash scripts/run_gpt2.sh      your text (.jsonl, .csv, .parquet, .txt) or a folder
#   DATA_PATH=data/my_text_document VOCAB_FILE=my.model bash scripts/run_gpt2.sh
#   GPUS_PER_NODE=8 MP_SIZE=2 PP_SIZE=2 MODEL_SIZE=345M bash scripts/run_gpt2.sh
set -euo pipefail
ROOT=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
NAME=gpt2
source "$ROOT/scripts/_run.sh"

# ---- the model: a small default model or the preset MODEL_SIZE of configs/models; NLAYERS, NHIDDEN etc. override both
MODEL_SIZE=${MODEL_SIZE:-}
model=()
if [ -n "$MODEL_SIZE" ]; then
    preset_of gpt2 "$MODEL_SIZE"
    NLAYERS=${NLAYERS:-} NHIDDEN=${NHIDDEN:-} NHEADS=${NHEADS:-} SEQ_LENGTH=${SEQ_LENGTH:-}
    LR=${LR:-1.5e-4} BATCHSIZE=${BATCHSIZE:-4} GAS=${GAS:-16} TRAIN_ITERS=${TRAIN_ITERS:-100000} WARMUP=${WARMUP:-0.01}
    EVERY=1000
else
    NLAYERS=${NLAYERS:-4} NHIDDEN=${NHIDDEN:-256} NHEADS=${NHEADS:-4} SEQ_LENGTH=${SEQ_LENGTH:-128}
    LR=${LR:-1e-3} BATCHSIZE=${BATCHSIZE:-4} GAS=${GAS:-4} TRAIN_ITERS=${TRAIN_ITERS:-500} WARMUP=${WARMUP:-0.1}
    EVERY=50
    model+=(--hidden-dropout 0.2 --attention-dropout 0)  # small corpus; attention dropout is slow on CPUs
fi
[ -n "$NLAYERS" ] && model+=(--num-layers "$NLAYERS")
[ -n "$NHIDDEN" ] && model+=(--hidden-size "$NHIDDEN")
[ -n "$NHEADS" ] && model+=(--num-attention-heads "$NHEADS")
[ -n "$SEQ_LENGTH" ] && model+=(--seq-length "$SEQ_LENGTH")

{ # bash reads all of this group before it trains, so this file may be edited meanwhile
    train "$@"
    if [ -n "${PROMPT:-}" ]; then show_results "$PROMPT"; else show_results "春天" "老人" "The river"; fi
    exit
}
