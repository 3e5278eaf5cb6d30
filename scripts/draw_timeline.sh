#!/usr/bin/env bash
# The picture of docs/planning.md: four stages of GPT-2 train a few steps with --trace; the median one is drawn beside the ideal.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
there=$(mktemp -d)
trap 'rm -rf "$there"' EXIT
$python tools/train_tokenizer.py --input corpus/sample.jsonl --vocab-size 3000 --output "$there/tokenizer.model"
$python tools/preprocess_data.py --input corpus/sample.jsonl --vocab-file "$there/tokenizer.model" --output-prefix "$there/data"
OMP_NUM_THREADS=1 $python tools/launch.py --standalone --nproc-per-node 4 pretrain_gpt2.py \
    --data-path "$there/data_text_document" --vocab-file "$there/tokenizer.model" --run-dir "$there/run" \
    --num-layers 8 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --batch-size 2 --gas 8 --pipe-parallel-size 4 \
    --train-iters 12 --eval-iters 0 --save-interval 0 --no-save-at-end --no-tensorboard --trace --trace-iterations 3-12
$python tools/draw_schedule.py --run "$there/run" --svg "${1:-docs/images/timeline.svg}"
