# Shared by the scripts run_*.sh, which source it. ROOT is the checkout; NAME is gpt2, llama or t5.
# User paths are relative to the current directory. Paths inside the checkout begin with $AT, which is set below.
# shellcheck shell=bash disable=SC2034,SC2154
# shellcheck disable=SC1091
ME=$(basename "$0")
source "$ROOT/scripts/_variables.sh"
unset PYTHONSAFEPATH  # the tools are run from this checkout
case " $* " in *" --help "* | *" -h "*) show_variables; exit 0 ;; esac
bash "$ROOT/scripts/setup.sh"
# shellcheck disable=SC1091
source "$ROOT/.venv/bin/activate"
refuse_misspelt
AT=$ROOT/
if [ "$PWD" = "$ROOT" ]; then AT=; fi

# ---- machines: ranks per machine and the address of rank 0
GPUS=$(PYTHONPATH=$ROOT python -m megatron.ranks.accelerators)
GPUS_PER_NODE=${GPUS_PER_NODE:-$([ "$GPUS" -gt 0 ] && echo "$GPUS" || echo 2)}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-}
for each in GPUS_PER_NODE NNODES NODE_RANK MP_SIZE PP_SIZE MASTER_PORT VOCAB_SIZE; do
    case $each in NODE_RANK | PP_SIZE) least=0 ;; VOCAB_SIZE) least=300 ;; *) least=1 ;; esac
    if ! [[ ${!each:-$least} =~ ^[0-9]+$ ]] || [ "${!each:-$least}" -lt $least ]; then
        echo "$ME: $each=${!each} must be a whole number of at least $least" >&2
        exit 2
    fi
done
if [ "${MASTER_PORT:-1}" -gt 65535 ]; then
    echo "$ME: MASTER_PORT=$MASTER_PORT must be at most 65535" >&2
    exit 2
fi
if [ "$NODE_RANK" -ge "$NNODES" ]; then
    echo "$ME: NODE_RANK=$NODE_RANK must be below NNODES=$NNODES: nodes are counted from 0" >&2
    exit 2
fi
HOSTFILE=${HOSTFILE:-}
WORLD_SIZE=$((GPUS_PER_NODE * NNODES))
if [ -n "$HOSTFILE" ]; then
    WORLD_SIZE=$(PYTHONPATH=$ROOT python -m megatron_tools.doctor.network "$HOSTFILE")
fi

# ---- layout: MP_SIZE tensor-parallel ranks, PP_SIZE pipeline stages (0: no pipeline); data parallelism uses the rest
MP_SIZE=${MP_SIZE:-1}
if [ -z "${PP_SIZE:-}" ]; then
    if [ "$GPUS" -eq 0 ] && [ $((WORLD_SIZE % 2)) -eq 0 ] && [ "$MP_SIZE" -eq 1 ]; then PP_SIZE=2; else PP_SIZE=0; fi
fi

# ---- files
if [ -z "${RUN_DIR:-}" ]; then
    case "$NAME ${VARIANT:-}" in gpt2* | "llama llama" | "t5 t5") kind= ;; *) kind=${VARIANT:+_$VARIANT} ;; esac
    RUN_DIR=${AT}runs/$NAME$kind${MODEL_SIZE:+_$MODEL_SIZE}
    if [ "$RUN_DIR" != "${AT}runs/$NAME" ] && [ ! -d "$RUN_DIR" ] && [ -d "${AT}runs/$NAME/checkpoints" ]; then
        echo "$ME: starting a new run in $RUN_DIR; RUN_DIR=${AT}runs/$NAME resumes the run of version 0.1"
    fi
fi
# What the user has set, without the defaults that follow
declare -A user_set=([CORPUS]=${CORPUS:-} [VOCAB_SIZE]=${VOCAB_SIZE:-} [CLEAN]=${CLEAN:-} [ENCODING]=${ENCODING:-}
    [VOCAB_FILE]=${VOCAB_FILE:-})
# The vocabulary has 30000 tokens for a preset model on a custom corpus, else 4000. The bundled corpus is too small to
# train a tokenizer with 30000 tokens.
VOCAB_SIZE=${VOCAB_SIZE:-${usual_vocab_size:-}} # run_poet.sh has a usual size of its own
if [ -z "$VOCAB_SIZE" ]; then
    VOCAB_SIZE=$([ -n "${CORPUS:-}" ] && [ -n "${MODEL_SIZE:-${model_size:-}}" ] && echo 30000 || echo 4000)
fi
if [ -z "${CORPUS:-}" ] && [ -f "$RUN_DIR/data/source" ]; then # a resumed run keeps its corpus
    CORPUS=$(cat "$RUN_DIR/data/source")
    case "$CORPUS" in /*) ;; *) CORPUS=$AT$CORPUS ;; esac
fi
CORPUS=${CORPUS:-${AT}corpus/sample.jsonl}
if [ -n "${VOCAB_FILE:-}" ] && [ ! -e "$VOCAB_FILE" ]; then
    echo "$ME: VOCAB_FILE=$VOCAB_FILE does not exist; unset it to train a tokenizer on CORPUS, or" \
        "train one with tools/train_tokenizer.py" >&2
    exit 2
fi
require_tokenizer() {
    if [ -n "${DATA_PATH:-}" ] && [ ! -e "${VOCAB_FILE:-$RUN_DIR/tokenizer.model}" ]; then
        echo "$ME: $1 needs VOCAB_FILE=, the tokenizer that it was prepared with" >&2
        exit 2
    fi
}
require_tokenizer DATA_PATH=
case "${CLEAN:-0}" in 0 | 1) ;; *)
    echo "$ME: CLEAN=$CLEAN must be 1 to clean CORPUS, or 0" >&2
    exit 2 ;;
esac
VOCAB_FILE=${VOCAB_FILE:-$RUN_DIR/tokenizer.model}
CONFIG_JSON=${CONFIG_JSON:-${AT}configs/ds_config_$NAME.json}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-FATAL}
export GLIBC_TUNABLES=${GLIBC_TUNABLES-glibc.malloc.hugetlb=1} # huge pages make training on a CPU faster
export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$ROOT/.venv/torch_extensions}

# shellcheck disable=SC1091
source "$ROOT/scripts/_prepare.sh"

# shellcheck disable=SC1091
source "$ROOT/scripts/_launch.sh"

# Set `model` to the flags that load the preset $1_$2.json. If the preset does not exist, list the sizes of $1 and exit.
preset_of() {
    if [ ! -f "$ROOT/configs/models/$1_$2.json" ]; then
        local there
        there=$(cd "$ROOT/configs/models" && ls "$1"_*.json | sed 's/.*_//; s/\.json$//' | tr '\n' ' ')
        local wrong="$1 needs a MODEL_SIZE"
        if [ -n "${MODEL_SIZE:-}" ]; then wrong="$1 has no MODEL_SIZE=$2"; fi
        echo "$ME: $wrong; choose one of ${there% }" >&2
        exit 2
    fi
    model=(--config "${AT}configs/models/$1_$2.json")
}

# Check the settings, given as flags, and the other variables before any work. The slower checks, which import torch, are
# left to the run if the corpus is prepared.
check_settings() {
    local word flag variable
    for word in "$@"; do # the user's flags
        flag=${word%%=*}
        case $flag in --run-dir | --vocab-file | --data-path)
            variable=${flag#--} variable=${variable//-/_}
            echo "$ME: set the variable ${variable^^}= instead of the flag $flag" >&2
            exit 2 ;;
        esac
    done
    local -x PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
    python -m megatron.config.check "$NAME" "$WORLD_SIZE" "${settings[@]}"
    if [ -n "${SAMPLING:-}" ]; then
        # shellcheck disable=SC2086
        python -c 'import sys
from megatron_tools.write.generate_flags import build_parser
sys.argv[0] = "SAMPLING"
build_parser().parse_args()' --load "$RUN_DIR" --prompt . $SAMPLING
    fi
    if [ ! -f "${DATA_PATH:-$RUN_DIR/data/corpus_text_document}.idx" ]; then
        python -m megatron.features.early_check "$NAME" "$WORLD_SIZE" "${settings[@]}"
    fi
}

# Exit with an error if the user has set one of the variables $@ that DATA_PATH= or VOCAB_FILE= makes useless.
refuse_ignored() {
    local name beside=${DATA_PATH:+DATA_PATH=$DATA_PATH}
    for name in "$@"; do
        if [ $name = VOCAB_SIZE ] && [ -n "${user_set[VOCAB_FILE]}" ]; then beside=VOCAB_FILE=$VOCAB_FILE; fi
        if [ -n "${user_set[$name]}" ] && [ -n "$beside" ]; then
            echo "$ME: $name=${user_set[$name]} has no effect beside $beside; unset one of them" >&2
            exit 2
        fi
    done
}

# Check all settings, prepare tokenizer and corpus, and train. Settings come from the variables and the given flags.
train() {
    refuse_ignored CORPUS CLEAN ENCODING VOCAB_SIZE
    local min_lr peak=$LR word before=
    for word in "$@"; do # --lr overrides LR
        if [ "$before" = --lr ]; then peak=$word; fi
        case "$word" in --lr=*) peak=${word#--lr=} ;; esac
        before=$word
    done
    min_lr=$(awk -v lr="$peak" 'BEGIN { print lr / 10 < 1e-5 ? lr / 10 : "1e-5" }')  # never above --lr
    local settings=(
        --run-dir "$RUN_DIR" --vocab-file "$VOCAB_FILE" --split 90,10,0
        --data-path "${DATA_PATH:-$RUN_DIR/data/corpus_text_document}"
        --model-parallel-size "$MP_SIZE" --pipe-parallel-size "$PP_SIZE" "${model[@]}"
        --batch-size "$BATCHSIZE" --gas "$GAS" --train-iters "$TRAIN_ITERS"
        --lr "$LR" --lr-decay-style cosine --min-lr "$min_lr" --warmup "$WARMUP" --weight-decay 0.1
        --eval-interval "$EVERY" --eval-iters 10 --save-interval $((2 * EVERY))
        --deepspeed-config "$CONFIG_JSON" "$@"
    )
    check_settings "$@"
    prepare_corpus
    launch "${AT}pretrain_$NAME.py" "${settings[@]}"
}

# Print the report of the run, the text that the model generates for each prompt, and the paths of the outputs.
show_results() {
    [ "$NODE_RANK" = 0 ] || return 0
    echo
    python "${AT}tools/report.py" --run-dir "$RUN_DIR"
    echo
    # shellcheck disable=SC2206
    local write=(python "${AT}tools/generate.py" --load "$RUN_DIR" --max-new-tokens 60 ${SAMPLING:-})
    if [ $# -eq 1 ]; then "${write[@]}" --prompt "$1"; else "${write[@]}" --input <(printf '%s\n' "$@"); fi
    echo
    echo "settings     $RUN_DIR/config.json"
    echo "metrics      $RUN_DIR/metrics.jsonl"
    echo "loss curve   $RUN_DIR/loss.png and report.html"
    echo "checkpoints  $RUN_DIR/checkpoints"
    local command place run
    printf -v command '%q' "${AT}.venv/bin/python"
    printf -v place '%q' "${AT}tools"
    printf -v run '%q' "$RUN_DIR"
    echo "more text    $command $place/generate.py --load $run --prompt '...'"
    echo "on a page    $command $place/demo.py --load $run"
}
