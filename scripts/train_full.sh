#!/usr/bin/env bash
# Train GPT-2 of one size with saves and evaluations, and print the run's results. The same command resumes.
#   VOCAB_FILE=my.model bash scripts/train_full.sh --data_path=data/my_text_document --model_size=345M --train_iters=500000
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 bash scripts/train_full.sh --model_size 2.7B --checkpoint-activations
# Sizes: 345M, 345M_without_mp (no tensor parallelism), 1.3B, 2.7B, 3.7B. Further arguments go to pretrain_gpt2.py.
set -euo pipefail
ROOT=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
KIND=full
source "$ROOT/scripts/_sized.sh"
TRAIN_ITERS=${train_iters:-500000}
{ # bash reads all of this group before it trains, so this file may be edited meanwhile
    train "${more[@]}"
    print_report
    exit
}
