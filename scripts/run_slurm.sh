#!/usr/bin/env bash
# Train on a SLURM cluster, from a checkout on a file system that all nodes share. Accepts the variables and flags of
# run_gpt2.sh, run_llama.sh and run_t5.sh:
#   sbatch --nodes 4 --gpus-per-node 8 --cpus-per-task 64 --time 24:00:00 scripts/run_slurm.sh gpt2 --lr 1e-4
#   RUN_DIR=/shared/runs/8b MP_SIZE=2 MODEL_SIZE=8b sbatch --nodes 4 --gpus-per-node 8 --cpus-per-task 64 \
#       scripts/run_slurm.sh llama
#   sbatch --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 scripts/run_slurm.sh t5    one task per rank, no launcher
# Five minutes before the time limit (ten with --signal=B:USR1@600) the run saves, is requeued and resumes.
#SBATCH --job-name=pretrain
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
set -euo pipefail
refuse() { echo "run_slurm.sh: $1" >&2; exit 2; }

name=${1:-}
case "$name" in
    gpt2 | llama | t5) shift ;;
    -h | --help)
        sed -n '2,/^#SBATCH/{/^#SBATCH/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
        echo
        exec bash "$(dirname "${BASH_SOURCE[0]}")/run_gpt2.sh" --help ;;
    *) refuse "the first argument must be gpt2, llama or t5, not '$name'" ;;
esac
[ -n "${SLURM_JOB_ID:-}" ] ||
    refuse "start it as sbatch --nodes 2 scripts/run_slurm.sh $name ...; without SLURM as bash scripts/run_$name.sh"
# SLURM runs a copy of this script, so its path does not show where the checkout is. The checkout must be the current
# folder of the job: the folder in which sbatch was called, or the folder given with --chdir.
[ -f "scripts/run_$name.sh" ] ||
    refuse "$PWD is not the checkout; submit from the checkout or with sbatch --chdir CHECKOUT"

# ---- the allocation
nodes=${SLURM_JOB_NUM_NODES:-1} tasks=${SLURM_NTASKS_PER_NODE:-1}
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
[ "${#hosts[@]}" -eq "$nodes" ] ||
    refuse "SLURM_JOB_NODELIST=$SLURM_JOB_NODELIST lists ${#hosts[@]} hosts, but the job has $nodes nodes"
if [ "$tasks" -gt 1 ]; then
    [ "${GPUS_PER_NODE:-$tasks}" -eq "$tasks" ] ||
        refuse "GPUS_PER_NODE=$GPUS_PER_NODE differs from --ntasks-per-node $tasks; both are the ranks per node"
    export SLURM_START=rank GPUS_PER_NODE=$tasks
else
    export SLURM_START=node
    if [ -z "${GPUS_PER_NODE:-}" ] && [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then
        export GPUS_PER_NODE=$SLURM_GPUS_ON_NODE
    fi
fi
export NNODES=$nodes NODE_RANK=0 MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}}
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))} # different for jobs that share a node
# sbatch sets SLURM_CPUS_PER_TASK, but srun since Slurm 22.05 reads only SRUN_CPUS_PER_TASK.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
echo "run_slurm.sh: job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}: $nodes nodes (${hosts[*]}), rank 0 at" \
    "$MASTER_ADDR:$MASTER_PORT"

# ---- this shell, on the first node, checks the flags and prepares the text; then srun starts the ranks
bash "scripts/run_$name.sh" "$@" &
run=$! limit=
trap 'received=1 limit=1; kill -TERM "$run" 2>/dev/null || true' USR1
trap 'received=1; kill -TERM "$run" 2>/dev/null || true' TERM
while :; do
    received= status=0
    wait "$run" || status=$?
    [ -n "$received" ] || break
done
if [ -n "$limit" ] && [ "$status" -gt 128 ]; then
    echo "run_slurm.sh: job $SLURM_JOB_ID reached its time limit; it is requeued and resumes from its last checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
