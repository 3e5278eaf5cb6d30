#!/usr/bin/env bash
# Draw the figures of README and docs (schedules, a traced step, memory) into docs/images or the given folder:
#
#     bash scripts/draw_pictures.sh
#
# For the traced step, the script trains GPT-2 on two pipeline stages, which needs two idle cores. The figure shows the
# step of median duration beside the ideal schedule.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
into=${1:-docs/images}
there=$(mktemp -d)
trap 'rm -rf "$there"' EXIT
for schedule in 1f1b interleaved zb-h1; do
    chunks=1
    [ $schedule = interleaved ] && chunks=2
    $python tools/draw_schedule.py --schedule $schedule --chunks $chunks --stages 4 --micros 8 \
        --svg "$into/schedule_$schedule.svg" >"$there/text"
    tail -n 1 "$there/text"
done
$python tools/plan.py --model configs/models/llama_70b.json --cluster h100 --devices 256 --global-batch-size 1024 \
    --model-parallel-size 8 --pipe-parallel-size 4 --virtual-pipeline-size 1 --checkpoint-activations --zero-stage 1 \
    --micro-batch-size 2 --chart "$into/plan_memory.png" | tail -n 1
$python tools/train_tokenizer.py --input corpus/sample.jsonl --vocab-size 3000 --output "$there/tokenizer.model"
$python tools/preprocess_data.py --input corpus/sample.jsonl --vocab-file "$there/tokenizer.model" \
    --output-prefix "$there/data"
OMP_NUM_THREADS=1 $python tools/launch.py --standalone --nproc-per-node 2 pretrain_gpt2.py \
    --data-path "$there/data_text_document" --vocab-file "$there/tokenizer.model" --run-dir "$there/run" \
    --num-layers 8 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --batch-size 2 --gas 8 \
    --pipe-parallel-size 2 --train-iters 12 --eval-iters 0 --save-interval 0 --no-save-at-end --no-tensorboard \
    --trace --trace-iterations 3-12
$python tools/draw_schedule.py --run "$there/run" --png "$into/timeline.png"
