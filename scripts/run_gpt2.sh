#!/usr/bin/env bash
# Train GPT-2, from raw text to generated text. Run it again to continue; more arguments win over what stands here:
#   bash scripts/run_gpt2.sh                                        the bundled corpus, about five minutes on 2 cores
#   bash scripts/run_gpt2.sh --lr 1e-3 --train-iters 1000
#   CORPUS=my.jsonl RUN_DIR=runs/mine bash scripts/run_gpt2.sh      your text: .jsonl or .txt, plain or .gz, or a folder
#   DATA_PATH=data/my_text_document VOCAB_FILE=my.model bash scripts/run_gpt2.sh
#   GPUS_PER_NODE=8 MP_SIZE=2 PP_SIZE=2 MODEL_SIZE=345M bash scripts/run_gpt2.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
# shellcheck disable=SC1091
source .venv/bin/activate

# ---- machines: ranks on each, and where rank 0 is
GPUS=$(python -c 'from megatron import device; import torch; print(torch.accelerator.device_count() if device.available() else 0)')
GPUS_PER_NODE=${GPUS_PER_NODE:-$([ "$GPUS" -gt 0 ] && echo "$GPUS" || echo 2)}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-}
HOSTFILE=${HOSTFILE:-}
WORLD_SIZE=$((GPUS_PER_NODE * NNODES))

# ---- layout: MP_SIZE ranks share a layer, PP_SIZE stages share the layers, the rest are replicas
MP_SIZE=${MP_SIZE:-1}
if [ -z "${PP_SIZE:-}" ]; then
    if [ "$GPUS" -eq 0 ] && [ $((WORLD_SIZE % 2)) -eq 0 ] && [ "$MP_SIZE" -eq 1 ]; then PP_SIZE=2; else PP_SIZE=0; fi
fi

# ---- the model: a preset of configs/models (MODEL_SIZE), single values, or the small one of these defaults
MODEL_SIZE=${MODEL_SIZE:-}
model=()
if [ -n "$MODEL_SIZE" ]; then
    model+=(--config "configs/models/gpt2_${MODEL_SIZE}.json")
    NLAYERS=${NLAYERS:-} NHIDDEN=${NHIDDEN:-} NHEADS=${NHEADS:-} SEQ_LENGTH=${SEQ_LENGTH:-}
    LR=${LR:-1.5e-4} BATCHSIZE=${BATCHSIZE:-4} GAS=${GAS:-16} TRAIN_ITERS=${TRAIN_ITERS:-100000} WARMUP=${WARMUP:-0.01}
    EVERY=1000
else
    NLAYERS=${NLAYERS:-4} NHIDDEN=${NHIDDEN:-256} NHEADS=${NHEADS:-4} SEQ_LENGTH=${SEQ_LENGTH:-128}
    LR=${LR:-1e-3} BATCHSIZE=${BATCHSIZE:-4} GAS=${GAS:-4} TRAIN_ITERS=${TRAIN_ITERS:-500} WARMUP=${WARMUP:-0.1}
    EVERY=50
    model+=(--hidden-dropout 0.2 --attention-dropout 0)  # the corpus is small, and a CPU slow at dropping attention
fi
[ -n "$NLAYERS" ] && model+=(--num-layers "$NLAYERS")
[ -n "$NHIDDEN" ] && model+=(--hidden-size "$NHIDDEN")
[ -n "$NHEADS" ] && model+=(--num-attention-heads "$NHEADS")
[ -n "$SEQ_LENGTH" ] && model+=(--seq-length "$SEQ_LENGTH")
CONFIG_JSON=${CONFIG_JSON:-configs/ds_config_gpt2.json}

# ---- files
RUN_DIR=${RUN_DIR:-runs/gpt2}
CORPUS=${CORPUS:-corpus/sample.jsonl}
VOCAB_SIZE=${VOCAB_SIZE:-4000}
VOCAB_FILE=${VOCAB_FILE:-$RUN_DIR/tokenizer.model}
PROMPT=${PROMPT:-}

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$PWD/.venv/torch_extensions}

# ---- 1. text to tokens, once
if [ -z "${DATA_PATH:-}" ]; then
    DATA_PATH=$RUN_DIR/data/corpus_text_document
    if [ -f "$RUN_DIR/data/source" ] && [ "$(cat "$RUN_DIR/data/source")" != "$CORPUS" ]; then
        echo "run_gpt2.sh: $RUN_DIR holds a run on $(cat "$RUN_DIR/data/source"), not on $CORPUS; give another RUN_DIR=" >&2
        exit 2
    fi
    if [ ! -f "$VOCAB_FILE" ]; then
        python tools/train_tokenizer.py --input "$CORPUS" --vocab-size "$VOCAB_SIZE" --output "$VOCAB_FILE"
    fi
    if [ ! -f "$DATA_PATH.idx" ]; then
        python tools/preprocess_data.py --input "$CORPUS" --vocab-file "$VOCAB_FILE" --output-prefix "${DATA_PATH%_text_document}"
        echo "$CORPUS" >"$RUN_DIR/data/source"
    fi
fi

# ---- 2. train
command=(pretrain_gpt2.py
    --run-dir "$RUN_DIR" --data-path "$DATA_PATH" --vocab-file "$VOCAB_FILE" --split 90,10,0
    --model-parallel-size "$MP_SIZE" --pipe-parallel-size "$PP_SIZE" "${model[@]}"
    --batch-size "$BATCHSIZE" --gas "$GAS" --train-iters "$TRAIN_ITERS"
    --lr "$LR" --lr-decay-style cosine --min-lr 1e-5 --warmup "$WARMUP" --weight-decay 0.1
    --eval-interval "$EVERY" --eval-iters 10 --save-interval $((2 * EVERY))
    --deepspeed-config "$CONFIG_JSON" "$@")
if [ -n "$HOSTFILE" ]; then
    deepspeed --hostfile "$HOSTFILE" ${MASTER_PORT:+--master_port "$MASTER_PORT"} "${command[@]}"
elif [ "$NNODES" -gt 1 ]; then
    python tools/launch.py --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$GPUS_PER_NODE" \
        --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" "${command[@]}"
else
    # Without MASTER_PORT a free one is found, so that several runs can share a machine.
    if [ -n "$MASTER_PORT" ]; then rendezvous=(--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"); else rendezvous=(--standalone); fi
    python tools/launch.py "${rendezvous[@]}" --nproc-per-node "$GPUS_PER_NODE" "${command[@]}"
fi

# ---- 3. look at it
if [ "$NODE_RANK" = 0 ]; then
    echo
    python tools/report.py --run-dir "$RUN_DIR"
    echo
    if [ -n "$PROMPT" ]; then prompts=("$PROMPT"); else prompts=("春天" "老人" "The river"); fi
    for prompt in "${prompts[@]}"; do
        python tools/generate.py --load "$RUN_DIR" --prompt "$prompt" --max-new-tokens 60 | tr '\n' ' '; echo
    done
    echo
    echo "settings     $RUN_DIR/config.json"
    echo "metrics      $RUN_DIR/metrics.jsonl"
    echo "loss curve   $RUN_DIR/loss.png and report.html"
    echo "checkpoints  $RUN_DIR/checkpoints"
    echo "more text    .venv/bin/python tools/generate.py --load $RUN_DIR --prompt '...'"
fi
