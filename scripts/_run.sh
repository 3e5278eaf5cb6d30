# What run_gpt2.sh, run_llama.sh and run_t5.sh share; sourced by them. ROOT is the checkout, NAME says which of them runs.
# Paths that a user gives are taken from where he stands; what belongs to the checkout has $AT before it.
# shellcheck shell=bash disable=SC2034,SC2154
# shellcheck disable=SC1091
source "$ROOT/scripts/_variables.sh"
case " $* " in *" --help "* | *" -h "*) show_variables; exit 0 ;; esac
bash "$ROOT/scripts/setup.sh"
# shellcheck disable=SC1091
source "$ROOT/.venv/bin/activate"
refuse_misspelt
AT=$ROOT/
if [ "$PWD" = "$ROOT" ]; then AT=; fi

# ---- machines: ranks on each, and where rank 0 is
GPUS=$(PYTHONPATH=$ROOT python -m megatron.ranks.accelerators)
GPUS_PER_NODE=${GPUS_PER_NODE:-$([ "$GPUS" -gt 0 ] && echo "$GPUS" || echo 2)}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-}
for each in GPUS_PER_NODE NNODES NODE_RANK MP_SIZE PP_SIZE; do
    if ! [[ ${!each:-0} =~ ^[0-9]+$ ]] || [[ $each =~ ^(GPUS_PER_NODE|NNODES|MP_SIZE)$ && ${!each:-1} -lt 1 ]]; then
        echo "run_$NAME.sh: $each=${!each} must be a whole number$([[ $each =~ ^(NODE_RANK|PP_SIZE)$ ]] || echo " of at least 1")" >&2
        exit 2
    fi
done
if [ "$NODE_RANK" -ge "$NNODES" ]; then
    echo "run_$NAME.sh: NODE_RANK=$NODE_RANK must be below NNODES=$NNODES: nodes are counted from 0" >&2
    exit 2
fi
HOSTFILE=${HOSTFILE:-}
WORLD_SIZE=$((GPUS_PER_NODE * NNODES))
if [ -n "$HOSTFILE" ]; then WORLD_SIZE=$(sed -n 's/^[^#]*slots=\([0-9]*\).*/\1/p' "$HOSTFILE" | awk '{n += $1} END {print n + 0}'); fi

# ---- layout: MP_SIZE ranks share a layer, PP_SIZE stages share the layers, the rest are replicas
MP_SIZE=${MP_SIZE:-1}
if [ -z "${PP_SIZE:-}" ]; then
    if [ "$GPUS" -eq 0 ] && [ $((WORLD_SIZE % 2)) -eq 0 ] && [ "$MP_SIZE" -eq 1 ]; then PP_SIZE=2; else PP_SIZE=0; fi
fi

# ---- files
if [ -z "${RUN_DIR:-}" ]; then
    case "$NAME ${VARIANT:-}" in gpt2* | "llama llama" | "t5 t5") kind= ;; *) kind=${VARIANT:+_$VARIANT} ;; esac
    RUN_DIR=${AT}runs/$NAME$kind${MODEL_SIZE:+_$MODEL_SIZE}
    if [ "$RUN_DIR" != "${AT}runs/$NAME" ] && [ ! -d "$RUN_DIR" ] && [ -d "${AT}runs/$NAME/checkpoints" ]; then
        echo "run_$NAME.sh: a new run begins in $RUN_DIR; RUN_DIR=${AT}runs/$NAME goes on with the one there, where version 0.1 put every size"
    fi
fi
# A text of one's own for a model of a preset wants more tokens than the bundled text has.
if [ -z "${VOCAB_SIZE:-}" ]; then VOCAB_SIZE=$([ -n "${CORPUS:-}" ] && [ -n "${MODEL_SIZE:-${model_size:-}}" ] && echo 30000 || echo 4000); fi
if [ -z "${CORPUS:-}" ] && [ -f "$RUN_DIR/data/source" ]; then # a run goes on with the text that it began with
    CORPUS=$(cat "$RUN_DIR/data/source")
    case "$CORPUS" in /*) ;; *) CORPUS=$AT$CORPUS ;; esac
fi
CORPUS=${CORPUS:-${AT}corpus/sample.jsonl}
if [ -n "${VOCAB_FILE:-}" ] && [ ! -e "$VOCAB_FILE" ]; then
    echo "run_$NAME.sh: VOCAB_FILE=$VOCAB_FILE is not there; without it a tokenizer is trained on CORPUS, and tools/train_tokenizer.py makes one anywhere" >&2
    exit 2
fi
if [ -n "${DATA_PATH:-}" ] && [ ! -e "${VOCAB_FILE:-$RUN_DIR/tokenizer.model}" ]; then
    echo "run_$NAME.sh: DATA_PATH= needs VOCAB_FILE=, the tokenizer that it was prepared with" >&2
    exit 2
fi
VOCAB_FILE=${VOCAB_FILE:-$RUN_DIR/tokenizer.model}
CONFIG_JSON=${CONFIG_JSON:-${AT}configs/ds_config_$NAME.json}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-FATAL} TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$ROOT/.venv/torch_extensions}

# shellcheck disable=SC1091
source "$ROOT/scripts/_prepare.sh"

# shellcheck disable=SC1091
source "$ROOT/scripts/_launch.sh"

# The path of the preset $1_$2.json; ends the script, and says which sizes there are, if that is not one.
preset_of() {
    if [ ! -f "$ROOT/configs/models/$1_$2.json" ]; then
        local there
        there=$(cd "$ROOT/configs/models" && ls "$1"_*.json | sed 's/.*_//; s/\.json$//' | tr '\n' ' ')
        if [ -n "${MODEL_SIZE:-}" ]; then there="there is no MODEL_SIZE=$2 of $1; there are: $there"; else there="$1 needs a MODEL_SIZE of these: $there"; fi
        echo "run_$NAME.sh: ${there% }" >&2
        exit 2
    fi
    model=(--config "${AT}configs/models/$1_$2.json")
}

# Train with these settings. A wrong flag is found before a tokenizer is trained and a corpus prepared.
train() {
    local min_lr peak=$LR word before=
    for word in "$@"; do # a flag wins
        if [ "$before" = --lr ]; then peak=$word; fi
        case "$word" in --lr=*) peak=${word#--lr=} ;; esac
        before=$word
    done
    min_lr=$(awk -v lr="$peak" 'BEGIN { print lr / 10 < 1e-5 ? lr / 10 : "1e-5" }')  # never above the peak
    local settings=(
        --run-dir "$RUN_DIR" --vocab-file "$VOCAB_FILE" --split 90,10,0
        --model-parallel-size "$MP_SIZE" --pipe-parallel-size "$PP_SIZE" "${model[@]}"
        --batch-size "$BATCHSIZE" --gas "$GAS" --train-iters "$TRAIN_ITERS"
        --lr "$LR" --lr-decay-style cosine --min-lr "$min_lr" --warmup "$WARMUP" --weight-decay 0.1
        --eval-interval "$EVERY" --eval-iters 10 --save-interval $((2 * EVERY))
        --deepspeed-config "$CONFIG_JSON" "$@"
    )
    PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} python -m megatron.config.check "$NAME" "$WORLD_SIZE" "${settings[@]}"
    prepare_corpus
    launch "${AT}pretrain_$NAME.py" --data-path "$DATA_PATH" "${settings[@]}"
}

# The report, what the model writes for each prompt that is given, and where everything is.
look() {
    [ "$NODE_RANK" = 0 ] || return 0
    echo
    python "${AT}tools/report.py" --run-dir "$RUN_DIR"
    echo
    local write=(python "${AT}tools/generate.py" --load "$RUN_DIR" --max-new-tokens 60)
    # shellcheck disable=SC2086
    if [ $# -eq 1 ]; then "${write[@]}" --prompt "$1" ${SAMPLING:-}; else "${write[@]}" --input <(printf '%s\n' "$@") ${SAMPLING:-}; fi
    echo
    echo "settings     $RUN_DIR/config.json"
    echo "metrics      $RUN_DIR/metrics.jsonl"
    echo "loss curve   $RUN_DIR/loss.png and report.html"
    echo "checkpoints  $RUN_DIR/checkpoints"
    echo "more text    ${AT}.venv/bin/python ${AT}tools/generate.py --load $RUN_DIR --prompt '...'"
}
