# How the ranks of a run are started: here, on several nodes, through DeepSpeed's launcher, or by SLURM; sourced by _run.sh.
# shellcheck shell=bash disable=SC2154

# Start all ranks of the command that is given, and wait for them.
launch() {
    if [ -n "${SLURM_START:-}" ]; then
        launch_on_slurm "$@"
    elif [ -n "$HOSTFILE" ]; then
        attended deepspeed --hostfile "$HOSTFILE" ${MASTER_PORT:+--master_port "$MASTER_PORT"} "$@"
    elif [ "$NNODES" -gt 1 ]; then
        attended python "${AT}tools/launch.py" --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$GPUS_PER_NODE" \
            --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" "$@"
    else
        # Without MASTER_PORT a free one is found, so that several runs can share a machine.
        local rendezvous=(--standalone)
        if [ -n "$MASTER_PORT" ]; then rendezvous=(--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"); fi
        attended python "${AT}tools/launch.py" "${rendezvous[@]}" --nproc-per-node "$GPUS_PER_NODE" "$@"
    fi
}

# run_slurm.sh has said how: a launcher on each node, or each rank as a task of srun's own. --kill-on-bad-exit=0 and
# --wait=0: whoever has saved first ends first, and the others must not be killed for that.
launch_on_slurm() {
    local step=(srun --nodes "$NNODES" --kill-on-bad-exit=0 --wait=0)
    export MASTER_ADDR MASTER_PORT
    # shellcheck disable=SC2016  # each task has its own numbers
    if [ "$SLURM_START" = node ]; then
        attended "${step[@]}" --ntasks "$NNODES" --ntasks-per-node 1 \
            bash -c 'node=$1; shift; exec python "$0" --nnodes "$node" --node-rank "$SLURM_NODEID" "$@"' "${AT}tools/launch.py" "$NNODES" \
            --nproc-per-node "$GPUS_PER_NODE" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"
    else
        attended "${step[@]}" --ntasks "$WORLD_SIZE" --ntasks-per-node "$GPUS_PER_NODE" \
            bash -c 'export WORLD_SIZE=$0 LOCAL_WORLD_SIZE=$1 RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; shift; exec python "$@"' \
            "$WORLD_SIZE" "$GPUS_PER_NODE" "$@"
    fi
}

# Run a command, and pass on to it what this shell is told: bash by itself dies of SIGTERM, and leaves what it waits for
# behind. In a container it is often the only process that is told. A run that was asked to end has not finished: 143.
attended() {
    local pid heard asked= status each
    # In the background bash would let it ignore Ctrl-C.
    (trap - INT QUIT; exec "$@") </dev/null &
    pid=$!
    for each in TERM INT HUP USR1; do
        # shellcheck disable=SC2064
        trap "heard=$each; pass_on $each $pid" "$each"
    done
    while :; do
        heard= status=0
        wait "$pid" || status=$?
        case "$heard" in '') break ;; USR1) ;; *) asked=1 ;; esac
    done
    trap - TERM INT HUP USR1
    if [ -n "$asked" ] && [ "$status" -eq 0 ]; then status=143; fi
    return "$status"
}

# srun would kill its tasks at SIGTERM instead of telling them.
pass_on() {
    if [ -n "${SLURM_START:-}" ]; then
        scancel --signal="$1" "$SLURM_JOB_ID" || true
    else
        kill -s "$1" "$2" 2>/dev/null || true
    fi
}
