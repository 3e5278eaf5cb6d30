#!/usr/bin/env bash
# Train a poet on 214,000 poems of the Tang and Song dynasties and let it write. Run it again to resume; flags override
# the defaults:
#   bash scripts/run_poet.sh                          about 14 minutes on 2 cores
#   POET_SIZE=gpu bash scripts/run_poet.sh                 a larger model, for one GPU
#   POET_SIZE=long RUN_DIR=runs/long bash scripts/run_poet.sh    the small model for two hours on 2 cores
#   CHARACTERS=traditional bash scripts/run_poet.sh   traditional characters, as in the source
#   CORPUS=chinese-poetry-2.0.1.tgz bash scripts/run_poet.sh    the package, or a folder of it, that is already here
# The poems come from npm's package chinese-poetry (MIT license). docs/poet.md has the rules of the task and records.
set -euo pipefail
ROOT=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
NAME=llama
PACKAGE=chinese-poetry-2.0.1.tgz
SHA256=25b549e46919c3a0569db6b68ddc96956b04a484ea4518ad2bbd4f137e307e86
RUN_DIR=${RUN_DIR:-$([ "$PWD" = "$ROOT" ] || echo "$ROOT/")runs/poet}
SOURCE=${CORPUS:-}
CORPUS=$RUN_DIR/poems/train.jsonl
usual_vocab_size=6000
# Small stages wait more than they work, so two ranks train replicas.
PP_SIZE=${PP_SIZE:-0}
source "$ROOT/scripts/_run.sh"
refuse_ignored VOCAB_SIZE

# ---- the model and its training
case "${CHARACTERS:-simplified}" in simplified | traditional) ;; *)
    echo "$ME: CHARACTERS=$CHARACTERS is not one of simplified, traditional" >&2
    exit 2 ;;
esac
POET_SIZE=${POET_SIZE:-laptop}
case "$POET_SIZE" in
    laptop) TRAIN_ITERS=${TRAIN_ITERS:-1100} ;;
    long) TRAIN_ITERS=${TRAIN_ITERS:-13000} ;;
    gpu) TRAIN_ITERS=${TRAIN_ITERS:-6000} NLAYERS=${NLAYERS:-8} NHIDDEN=${NHIDDEN:-512} NHEADS=${NHEADS:-8} ;;
    *) echo "$ME: POET_SIZE=$POET_SIZE is not one of laptop, gpu, long" >&2; exit 2 ;;
esac
BATCHSIZE=${BATCHSIZE:-$((32 / WORLD_SIZE > 0 ? 32 / WORLD_SIZE : 1))} GAS=${GAS:-1}
model=(--config "${AT}configs/models/llama_poet.json")
[ -n "${NLAYERS:-}" ] && model+=(--num-layers "$NLAYERS")
[ -n "${NHIDDEN:-}" ] && model+=(--hidden-size "$NHIDDEN" --ff-hidden-size $((NHIDDEN * 4)))
[ -n "${NHEADS:-}" ] && model+=(--num-attention-heads "$NHEADS" --num-key-value-heads "$NHEADS")
[ -n "${LR:-}" ] && model+=(--lr "$LR")
[ -n "${WARMUP:-}" ] && model+=(--warmup "$WARMUP")
[ -n "${SEQ_LENGTH:-}" ] && model+=(--seq-length "$SEQ_LENGTH")

# Print the path of the package of poems, which is downloaded if CORPUS= does not name one.
package() {
    if [ -n "$SOURCE" ]; then
        echo "$SOURCE"
        return
    fi
    local folder=$RUN_DIR/poems
    if [ ! -f "$folder/$PACKAGE" ]; then
        if ! command -v npm >/dev/null; then
            echo "$ME: the poems are a package of npm, which is not installed: install it, or get $PACKAGE elsewhere" \
                "and give CORPUS=$PACKAGE" >&2
            exit 2
        fi
        (cd "$folder" && npm pack --silent chinese-poetry@2.0.1 >/dev/null)
    fi
    if ! echo "$SHA256  $folder/$PACKAGE" | sha256sum --check --status; then
        echo "$ME: $folder/$PACKAGE is damaged or another version: delete it and start again" >&2
        exit 2
    fi
    echo "$folder/$PACKAGE"
}

# Write the poems for training and for validation, and tokenize the latter.
prepare_poems() {
    local folder=$RUN_DIR/poems source
    mkdir -p "$folder"
    user_set[CHARACTERS]=${CHARACTERS:-}
    user_set[CORPUS]=${SOURCE:+$(in_checkout "$PWD" "$SOURCE")}
    if [ -f "$CORPUS" ]; then
        refuse_changed_variables "$folder/variables"
    else
        source=$(package)
        python -c 'import opencc' 2>/dev/null || [ "${CHARACTERS:-}" = traditional ] \
            || python -m pip install --disable-pip-version-check -q "opencc>=1.4,<2"
        printf '%s\n' "CHARACTERS=${CHARACTERS:-simplified}" "CORPUS=${user_set[CORPUS]:-$PACKAGE}" >"$folder/variables"
        python "${AT}examples/poet/poems.py" --input "$source" --output "$folder" --script "${CHARACTERS:-simplified}"
    fi
    DATA_PATH='' prepare_corpus
    if [ ! -f "$folder/valid_text_document.idx" ]; then
        python "${AT}tools/preprocess_data.py" --input "$folder/valid.jsonl" --vocab-file "$VOCAB_FILE" \
            --output-prefix "$folder/valid"
    fi
}

DATA_PATH=${DATA_PATH:-$RUN_DIR/data/corpus_text_document}
settings=(
    --run-dir "$RUN_DIR" --vocab-file "$VOCAB_FILE"
    --train-data-path "$DATA_PATH" --valid-data-path "$RUN_DIR/poems/valid_text_document"
    --model-parallel-size "$MP_SIZE" --pipe-parallel-size "$PP_SIZE" "${model[@]}"
    --batch-size "$BATCHSIZE" --gas "$GAS" --train-iters "$TRAIN_ITERS"
    --eval-interval 100 --eval-iters 13 --save-interval 500 --log-interval 20
    --sample-prompt 月夜忆舍弟 --deepspeed-config "$CONFIG_JSON" "$@"
)
check_settings "$@"
if [ "$NODE_RANK" = 0 ]; then
    [ "$POET_SIZE" = laptop ] && echo "$ME: this takes about 14 minutes on two idle cores; a poem appears about every minute"
    prepare_poems
else
    until [ -f "$RUN_DIR/poems/valid_text_document.idx" ]; do sleep 1; done
fi
{ # bash reads all of this group before it trains, so this file may be edited meanwhile
    launch "${AT}pretrain_llama.py" "${settings[@]}"
    [ "$NODE_RANK" = 0 ] || exit 0
    echo
    echo "$ME: scoring each poem for validation, from its beginning to its end"
    python "${AT}examples/poet/poet.py" "$RUN_DIR"
    echo
    echo "report       ${AT}.venv/bin/python ${AT}tools/report.py --run-dir $RUN_DIR"
    echo "more poems   ${AT}.venv/bin/python ${AT}examples/poet/poet.py $RUN_DIR --title 春江花月夜 --samples 3"
    echo "on a page    ${AT}.venv/bin/python ${AT}tools/demo.py --load $RUN_DIR --poem"
    echo "             the page needs gradio: ${AT}.venv/bin/python -m pip install 'gradio>=6,<7'"
    exit
}
