#!/usr/bin/env bash
# Measure the training speed of GPT-2 of one size, without saves and evaluations, and print the results:
#   VOCAB_FILE=my.model bash scripts/train_performance.sh --data_path=data/my_text_document --model_size=345M --train_iters=100
#   GPUS_PER_NODE=8 bash scripts/train_performance.sh --model_size 1.3B --checkpoint-activations
# Sizes: 345M, 345M_without_mp (no tensor parallelism), 1.3B, 2.7B, 3.7B. Further arguments go to pretrain_gpt2.py.
set -euo pipefail
ROOT=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
KIND=performance
source "$ROOT/scripts/_sized.sh"
TRAIN_ITERS=${train_iters:-100}
# A measurement must start from new weights, so it neither resumes nor overwrites a run in the same folder.
if [ -e "$RUN_DIR/measured" ]; then
    echo "train_performance.sh: $RUN_DIR/measured contains a saved measurement; delete it or set another RUN_DIR=" >&2
    exit 2
fi
train --save "$RUN_DIR/measured" --eval-iters 0 --save-interval 0 --no-save-at-end --log-interval 1 "${more[@]}"
print_report
