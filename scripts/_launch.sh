# Start the ranks of a run: on this machine, on several nodes, with DeepSpeed's launcher or with SLURM. Sourced by
# _run.sh.
# shellcheck shell=bash disable=SC2154

# Start the given command on all ranks and wait until it ends.
launch() {
    if [ -n "${SLURM_START:-}" ]; then
        launch_on_slurm "$@"
    elif [ -n "$HOSTFILE" ]; then
        run_with_signals deepspeed --hostfile "$HOSTFILE" ${MASTER_PORT:+--master_port "$MASTER_PORT"} "$@"
    elif [ "$NNODES" -gt 1 ]; then
        run_with_signals python "${AT}tools/launch.py" --nnodes "$NNODES" --node-rank "$NODE_RANK" \
            --nproc-per-node "$GPUS_PER_NODE" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" "$@"
    else
        # If MASTER_PORT is not set, the launcher finds a free port, so that several runs can share a machine.
        local rendezvous=(--standalone)
        if [ -n "$MASTER_PORT" ]; then rendezvous=(--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"); fi
        run_with_signals python "${AT}tools/launch.py" "${rendezvous[@]}" --nproc-per-node "$GPUS_PER_NODE" "$@"
    fi
}

# Start all ranks with srun. run_slurm.sh sets SLURM_START: `node` starts tools/launch.py on each node, `rank` starts
# each rank as a task of srun. With --kill-on-bad-exit=0 and --wait=0, srun does not kill ranks that are still saving
# when other ranks have exited.
launch_on_slurm() {
    local step=(srun --nodes "$NNODES" --kill-on-bad-exit=0 --wait=0)
    export MASTER_ADDR MASTER_PORT
    # shellcheck disable=SC2016  # each srun task expands the variables in single quotes, such as SLURM_PROCID
    if [ "$SLURM_START" = node ]; then
        run_with_signals "${step[@]}" --ntasks "$NNODES" --ntasks-per-node 1 \
            bash -c 'node=$1; shift; exec python "$0" --nnodes "$node" --node-rank "$SLURM_NODEID" "$@"' \
            "${AT}tools/launch.py" "$NNODES" --nproc-per-node "$GPUS_PER_NODE" --master-addr "$MASTER_ADDR" \
            --master-port "$MASTER_PORT" "$@"
    else
        run_with_signals "${step[@]}" --ntasks "$WORLD_SIZE" --ntasks-per-node "$GPUS_PER_NODE" \
            bash -c 'export WORLD_SIZE=$0 LOCAL_WORLD_SIZE=$1 RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; shift
                exec python "$@"' \
            "$WORLD_SIZE" "$GPUS_PER_NODE" "$@"
    fi
}

# Run a command and forward signals to it. Without the forwarding, SIGTERM would end bash and leave the command running;
# in a container, bash is often the only process that gets the signal. If the command gets a signal other than USR1 and
# then exits with 0, return 143 (128 + SIGTERM).
run_with_signals() {
    local pid received stopping= status each
    # bash makes background commands ignore SIGINT and SIGQUIT; the inner trap makes this command obey them again.
    (trap - INT QUIT; exec "$@") </dev/null &
    pid=$!
    for each in TERM INT HUP USR1; do
        # shellcheck disable=SC2064
        trap "received=$each; forward $each $pid" "$each"
    done
    while :; do
        received= status=0
        wait "$pid" || status=$?
        case "$received" in '') break ;; USR1) ;; *) stopping=1 ;; esac
    done
    trap - TERM INT HUP USR1
    if [ -n "$stopping" ] && [ "$status" -eq 0 ]; then status=143; fi
    return "$status"
}

# Send signal $1 to the command with process id $2. Under SLURM, scancel sends the signal to the tasks, because srun
# does not forward SIGTERM but kills its tasks.
forward() {
    if [ -n "${SLURM_START:-}" ]; then
        scancel --signal="$1" "$SLURM_JOB_ID" || true
    else
        kill -s "$1" "$2" 2>/dev/null || true
    fi
}
