# Text to tokens, once for all nodes that share a disk; sourced by _run.sh.
# shellcheck shell=bash disable=SC2034,SC2154
# The path $2, as seen from the folder $1: short inside of the checkout, absolute elsewhere.
in_checkout() {
    local path
    path=$(cd "$1" && realpath -m -- "$2")
    echo "${path#"$ROOT"/}"
}

is_prepared() {
    [ -e "$VOCAB_FILE" ] && [ -f "$DATA_PATH.idx" ] && [ -f "$RUN_DIR/data/source" ]
}

# The boot of this machine and the PID namespace: containers on one host may share its name, and each counts processes from 1.
process_table() {
    echo "$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)-$(readlink /proc/self/ns/pid 2>/dev/null)"
}

# Wait for whoever prepares, here or on another node, as long as he does.
wait_for_turn() {
    local turn=$1 host pid table job said=
    while [ -d "$turn" ]; do
        host="" pid="" table="" job=""
        read -r host pid table job 2>/dev/null <"$turn/by" || true
        # Of a SLURM job that was started again the start before has ended, wherever it ran.
        if [ "$host" = "$(uname -n)" ] && [ "$table" = "$(process_table)" ] && ! kill -0 "$pid" 2>/dev/null || [ -n "$job" ] && [ "$job" = "${SLURM_JOB_ID:-}" ]; then
            echo "run_$NAME.sh: process $pid, which prepared $RUN_DIR/data, has ended; it is prepared again"
            rm -rf "$turn"
            return
        fi
        if [ -z "$said" ] && [ -n "$host" ]; then
            echo "run_$NAME.sh: waits while process $pid on $host prepares $RUN_DIR/data (if it has ended, delete $turn)"
            said=1
        fi
        sleep 0.5
    done
}

# Sets DATA_PATH. Of several nodes on one disk the first that comes prepares, the others wait; each disk is prepared once.
prepare_corpus() {
    [ -n "${DATA_PATH:-}" ] && return
    DATA_PATH=$RUN_DIR/data/corpus_text_document
    local corpus before turn=$RUN_DIR/data/preparing
    corpus=$(in_checkout "$PWD" "$CORPUS")
    if [ -f "$RUN_DIR/data/source" ]; then before=$(in_checkout "$ROOT" "$(cat "$RUN_DIR/data/source")"); else before=$corpus; fi
    if [ "$before" != "$corpus" ]; then
        echo "run_$NAME.sh: $RUN_DIR holds a run on $before, not on $corpus; give another RUN_DIR=" >&2
        exit 2
    fi
    mkdir -p "$RUN_DIR/data"
    is_prepared && return
    until mkdir "$turn" 2>/dev/null; do wait_for_turn "$turn"; done
    trap 'rm -rf "$RUN_DIR/data/preparing"' EXIT
    echo "$(uname -n) $$ $(process_table) ${SLURM_START:+${SLURM_JOB_ID:-}}" >"$turn/by"
    if [ ! -e "$VOCAB_FILE" ]; then
        python "${AT}tools/train_tokenizer.py" --input "$CORPUS" --vocab-size "$VOCAB_SIZE" --output "$VOCAB_FILE"
    fi
    if [ ! -f "$DATA_PATH.idx" ]; then
        python "${AT}tools/preprocess_data.py" --input "$CORPUS" --vocab-file "$VOCAB_FILE" --output-prefix "${DATA_PATH%_text_document}"
    fi
    echo "$corpus" >"$RUN_DIR/data/source"
    rm -rf "$turn"
    trap - EXIT
}
