#!/usr/bin/env bash
# Measure how fast GPT-2 of a size trains, without saving or evaluating, and print the table of the run:
#   bash scripts/train_performance.sh --data_path=data/my_text_document --model_size=345M --train_iters=100
#   GPUS_PER_NODE=8 bash scripts/train_performance.sh --model_size 1.3B --checkpoint-activations
# Sizes: 345M, 345M_without_mp (no layer is shared), 1.3B, 2.7B, 3.7B. More arguments go to pretrain_gpt2.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
KIND=performance
source scripts/_sized.sh
TRAIN_ITERS=${train_iters:-100}
rm -rf "$RUN_DIR/metrics.jsonl" "$RUN_DIR/checkpoints"  # a measurement begins anew
train --eval-iters 0 --save-interval 0 --no-save-at-end --log-interval 1 "${more[@]}"
table
