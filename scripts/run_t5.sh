#!/usr/bin/env bash
# Train T5, from raw text to filled-in spans. Run it again to resume; flags override the defaults:
#   bash scripts/run_t5.sh                                          the bundled corpus, about five minutes on 2 cores
#   bash scripts/run_t5.sh --train-iters 1000 --override-lr-schedule    then train for longer
#   CORPUS=my.jsonl RUN_DIR=runs/mine bash scripts/run_t5.sh        your text (.jsonl, .csv, .parquet, .txt) or a folder
#   VARIANT=cpm RUN_DIR=runs/t5_cpm bash scripts/run_t5.sh          absolute positions and CPM's sentinels
#   GPUS_PER_NODE=8 MP_SIZE=2 PP_SIZE=2 MODEL_SIZE=base bash scripts/run_t5.sh
#   GPUS_PER_NODE=8 MP_SIZE=8 VARIANT=cpm MODEL_SIZE=11b bash scripts/run_t5.sh
set -euo pipefail
ROOT=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
NAME=t5
source "$ROOT/scripts/_run.sh"

# ---- the model: a small default model or a preset of configs/models (VARIANT, MODEL_SIZE); NLAYERS etc. override both
VARIANT=${VARIANT:-t5}
MODEL_SIZE=${MODEL_SIZE:-}
case "$VARIANT" in
    t5) preset=t5 sentinel="<extra_id_0>" ;;
    cpm) preset=cpm2 sentinel="<s_0>" ;;
    *) echo "run_t5.sh: VARIANT=$VARIANT is neither t5 nor cpm" >&2; exit 2 ;;
esac
preset_of "$preset" "${MODEL_SIZE:-tiny}"
NLAYERS=${NLAYERS:-} NHIDDEN=${NHIDDEN:-} NHEADS=${NHEADS:-} ENC_SEQ_LENGTH=${ENC_SEQ_LENGTH:-}
BATCHSIZE=${BATCHSIZE:-4}
if [ -n "$MODEL_SIZE" ]; then
    LR=${LR:-1e-4} GAS=${GAS:-16} TRAIN_ITERS=${TRAIN_ITERS:-100000} WARMUP=${WARMUP:-0.01} EVERY=1000
else
    LR=${LR:-2e-3} GAS=${GAS:-4} TRAIN_ITERS=${TRAIN_ITERS:-500} WARMUP=${WARMUP:-0.1} EVERY=50
fi
[ -n "$NLAYERS" ] && model+=(--num-layers "$NLAYERS")
[ -n "$NHIDDEN" ] && model+=(--hidden-size "$NHIDDEN" --ff-hidden-size $((2 * NHIDDEN)))
[ -n "$NHEADS" ] && model+=(--num-attention-heads "$NHEADS")
[ -n "$ENC_SEQ_LENGTH" ] && model+=(--enc-seq-length "$ENC_SEQ_LENGTH")

{ # bash reads all of this group before it trains, so this file may be edited meanwhile
    train "$@"
    # A span may begin with any of thousands of tokens, but only one token ends a span. At a lower temperature, a barely
    # trained model would therefore end most spans at once. --top-lift 5 prints the five tokens whose probability at the
    # start of a span most exceeds their frequency in the training text.
    SAMPLING=${SAMPLING:---temperature 1 --top-p 0.8 --top-lift 5}
    prompts=("春天来了，${sentinel}都开了。" "他说：\"你去哪里${sentinel}\"" "The river runs ${sentinel} the sea.")
    if [ -n "${PROMPT:-}" ]; then prompts=("$PROMPT"); fi
    show_results "${prompts[@]}"
    exit
}
