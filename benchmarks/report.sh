#!/usr/bin/env bash
# Train three small models on the bundled corpus and write a page that compares them, as in docs/images/report.png.
# Takes a few minutes on two cores. FOLDER is runs/report by default.
#   bash benchmarks/report.sh [FOLDER]      then open FOLDER/report.html
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-runs/report} PATH=$PWD/.venv/bin:$PATH
export OMP_NUM_THREADS=1

python tools/train_tokenizer.py --quiet --input corpus/sample.jsonl --vocab-size 4000 --output "$folder/tokenizer.model"
python tools/preprocess_data.py --quiet --input corpus/sample.jsonl --vocab-file "$folder/tokenizer.model" --output-prefix "$folder/data"

train() { # SCRIPT NAME FLAGS...
    local script=$1 name=$2
    shift 2
    python tools/launch.py --standalone --nproc-per-node 2 "$script" --run-dir "$folder/$name" --data-path "$folder/data_text_document" \
        --vocab-file "$folder/tokenizer.model" --split 90,10,0 --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
        --hidden-dropout 0.1 --attention-dropout 0 --batch-size 4 --train-iters 400 --lr-decay-style cosine --min-lr 1e-5 --warmup 0.1 \
        --weight-decay 0.1 --eval-interval 40 --eval-iters 10 --save-interval 80 --log-interval 5 "$@"
}

train pretrain_gpt2.py gpt2 --lr 2e-3 --pipe-parallel-size 2 --gas 4 --trace
train pretrain_gpt2.py gpt2-careful --lr 5e-4 --pipe-parallel-size 0 --gas 2
train pretrain_llama.py llama --lr 2e-3 --pipe-parallel-size 2 --gas 4 --pipeline-schedule zb-h1 --trace

python tools/report.py "$folder/gpt2" "$folder/gpt2-careful" "$folder/llama" --output "$folder/report.html"
