# Shared by train_performance.sh and train_full.sh, which source it. ROOT is the checkout; KIND is performance or full.
# shellcheck shell=bash disable=SC1091,SC2034,SC2154
usage() {
    echo "usage: bash scripts/train_$KIND.sh [--data_path PREFIX] [--model_size 345M|345M_without_mp|1.3B|2.7B|3.7B]" \
        "[--train_iters N] [flags of pretrain_gpt2.py]" >&2
    exit 2
}

data_path="" model_size=345M train_iters=""
more=()
while [ $# -gt 0 ]; do
    case "$1" in
        --data_path=* | --model_size=* | --train_iters=*) key=${1%%=*} value=${1#*=} ;;
        --data_path | --model_size | --train_iters) [ $# -gt 1 ] || usage; key=$1 value=$2; shift ;;
        -h | --help) usage ;;
        *) more+=("$1"); shift; continue ;;
    esac
    printf -v "${key#--}" %s "$value"
    shift
done

# ---- tensor parallelism: a layer is sharded over at most $most ranks
case "$model_size" in
    345M_without_mp) preset=345M most=1 ;;
    345M | 1.3B) preset=$model_size most=2 ;;
    2.7B | 3.7B) preset=$model_size most=4 SEQ_LENGTH=${SEQ_LENGTH:-2048} ;;
    *)
        echo "train_$KIND.sh: --model_size $model_size is not one of 345M, 345M_without_mp, 1.3B, 2.7B, 3.7B" >&2
        exit 2 ;;
esac
NAME=gpt2
RUN_DIR=${RUN_DIR:-$([ "$PWD" = "$ROOT" ] || echo "$ROOT/")runs/${KIND}_$model_size}
PP_SIZE=${PP_SIZE:-0}
given=${MP_SIZE:-}
source "$ROOT/scripts/_run.sh"
if [ -z "$given" ]; then
    MP_SIZE=$most
    while [ $((WORLD_SIZE % MP_SIZE)) -ne 0 ]; do MP_SIZE=$((MP_SIZE / 2)); done
fi

# ---- the corpus: a .bin/.idx pair, text to prepare (CORPUS), or the bundled sample
if [ -n "$data_path" ]; then
    if [ -d "$data_path" ]; then
        pairs=("$data_path"/*.idx)
        [ ${#pairs[@]} -eq 1 ] && [ -f "${pairs[0]}" ] || {
            echo "train_$KIND.sh: --data_path $data_path must contain one .bin/.idx pair; pass the prefix of one" >&2
            exit 2
        }
        VOCAB_FILE=$data_path DATA_PATH=${pairs[0]%.idx}
        if [ -f "$data_path/tokenizer.model" ]; then VOCAB_FILE=$data_path/tokenizer.model; fi
    else
        DATA_PATH=$data_path
    fi
    require_tokenizer --data_path
fi

model=(--config "${AT}configs/models/gpt2_$preset.json")
[ -n "${SEQ_LENGTH:-}" ] && model+=(--seq-length "$SEQ_LENGTH")
BATCHSIZE=${BATCHSIZE:-$([ "$GPUS" -gt 0 ] && echo 4 || echo 1)} GAS=${GAS:-$([ "$GPUS" -gt 0 ] && echo 16 || echo 1)}
LR=${LR:-1.5e-4} WARMUP=${WARMUP:-0.01} EVERY=${EVERY:-1000}

# Print the run's losses and speed, and write report.html.
print_report() {
    [ "$NODE_RANK" = 0 ] || return 0
    echo
    python "${AT}tools/report.py" "$RUN_DIR"
    echo
    echo "report       $RUN_DIR/report.html"
}
