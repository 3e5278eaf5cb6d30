# Train the tokenizer and tokenize the corpus, once for all nodes that share a file system; sourced by _run.sh.
# shellcheck shell=bash disable=SC2034,SC2154

# Print the path $2, which is relative to the folder $1, as a path relative to the checkout. Print an absolute path if
# $2 is outside the checkout.
in_checkout() {
    local path
    path=$(cd "$1" && realpath -m -- "$2")
    echo "${path#"$ROOT"/}"
}

is_prepared() {
    [ -e "$VOCAB_FILE" ] && [ -f "$DATA_PATH.idx" ] && [ -f "$RUN_DIR/data/source" ]
}

# Exit with an error if a variable has another value than in the file $1, which was written when data was prepared.
refuse_changed_variables() {
    local name value
    [ -f "$1" ] || return 0 # data of an earlier version
    while IFS='=' read -r name value; do
        if [ "${user_set[$name]:-$value}" != "$value" ]; then
            echo "$ME: ${1%/*} was prepared with $name=$value, not ${user_set[$name]}; set another RUN_DIR=" >&2
            exit 2
        fi
    done <"$1"
}

# Print the boot id and the PID namespace, which show whether two process ids belong to one process table. Host name and
# process id alone do not identify a process: containers may share a host name, and each counts processes from 1.
process_table() {
    echo "$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)-$(readlink /proc/self/ns/pid 2>/dev/null)"
}

# Wait while another process prepares the data, on this node or another one.
wait_for_turn() {
    local turn=$1 host pid table job noted=
    while [ -d "$turn" ]; do
        host="" pid="" table="" job=""
        read -r host pid table job 2>/dev/null <"$turn/by" || true
        # The other process has ended if it ran on this machine and its id no longer exists. It has also ended if it
        # belongs to this SLURM job: the job was then requeued, which ended all its earlier processes on all nodes.
        if { [ "$host" = "$(uname -n)" ] && [ "$table" = "$(process_table)" ] && ! kill -0 "$pid" 2>/dev/null; } \
            || { [ -n "$job" ] && [ "$job" = "${SLURM_JOB_ID:-}" ]; }; then
            echo "$ME: process $pid ended while it prepared $RUN_DIR/data; preparing it again"
            rm -rf "$turn"
            return
        fi
        if [ -z "$noted" ] && [ -n "$host" ]; then
            echo "$ME: waiting for process $pid on $host to prepare $RUN_DIR/data (if it ended, delete $turn)"
            noted=1
        fi
        sleep 0.5
    done
}

# Return whether the data is prepared. Exit with an error if it was prepared from another text than $1.
uses_prepared_data() {
    local corpus=$1 before=$1
    if [ -f "$RUN_DIR/data/source" ]; then before=$(in_checkout "$ROOT" "$(cat "$RUN_DIR/data/source")"); fi
    if [ "$before" != "$corpus" ]; then
        echo "$ME: $RUN_DIR contains a run on $before, not on $corpus; set another RUN_DIR=" >&2
        exit 2
    fi
    is_prepared || return 1
    refuse_changed_variables "$RUN_DIR/data/variables"
    if [ -n "$(find "$CORPUS" -newer "$DATA_PATH.idx" -print -quit 2>/dev/null)" ]; then
        echo "$ME: note: $CORPUS has changed since its tokens were written to $RUN_DIR/data, which this run goes on" \
            "using; set another RUN_DIR= to train on the new text"
    fi
}

# Delete what an unfinished preparation left, if it had other settings than $1 or the text has changed since.
delete_outdated() {
    local begun=$RUN_DIR/data/begun
    if [ -f "$begun" ]; then
        if [ "$(cat "$begun")" = "$1" ] && [ -z "$(find "$CORPUS" -newer "$begun" -print -quit 2>/dev/null)" ]; then return; fi
        # A tokenizer that was there before is the user's.
        if [ "$RUN_DIR/tokenizer.model" -nt "$begun" ]; then
            mv "$RUN_DIR/tokenizer.model" "$RUN_DIR/tokenizer.model.outdated"
        fi
        [ "$CORPUS" -ef "$RUN_DIR/data/clean.jsonl" ] || rm -f "$RUN_DIR"/data/clean.jsonl*
        rm -f "$RUN_DIR"/data/corpus_text_document* "$RUN_DIR/data/corpus.part.json"
    fi
    echo "$1" >"$begun"
}

# Set DATA_PATH. If nodes share a file system, the first one prepares the data and the others wait.
prepare_corpus() {
    [ -n "${DATA_PATH:-}" ] && return
    DATA_PATH=$RUN_DIR/data/corpus_text_document
    local corpus text=$CORPUS encoding=${ENCODING:-auto} variables turn=$RUN_DIR/data/preparing
    corpus=$(in_checkout "$PWD" "$CORPUS")
    mkdir -p "$RUN_DIR/data"
    if uses_prepared_data "$corpus"; then return; fi
    until mkdir "$turn" 2>/dev/null; do wait_for_turn "$turn"; done
    trap 'rm -rf "$RUN_DIR/data/preparing"' EXIT
    echo "$(uname -n) $$ $(process_table) ${SLURM_START:+${SLURM_JOB_ID:-}}" >"$turn/by"
    if ! uses_prepared_data "$corpus"; then # another process may have prepared the data meanwhile
        variables=$(printf '%s\n' "VOCAB_SIZE=$VOCAB_SIZE" "CLEAN=${CLEAN:-0}" "ENCODING=$encoding")
        delete_outdated "$corpus $VOCAB_FILE $variables"
        if [ "${CLEAN:-0}" = 1 ]; then
            text=$RUN_DIR/data/clean.jsonl
            [ -f "$text" ] || python "${AT}tools/clean_corpus.py" --input "$CORPUS" --encoding "$encoding" --output "$text"
            encoding=utf-8
        fi
        if [ ! -e "$VOCAB_FILE" ]; then
            python "${AT}tools/train_tokenizer.py" --input "$text" --encoding "$encoding" --vocab-size "$VOCAB_SIZE" \
                --output "$VOCAB_FILE"
        fi
        if [ ! -f "$DATA_PATH.idx" ]; then
            python "${AT}tools/preprocess_data.py" --input "$text" --encoding "$encoding" --vocab-file "$VOCAB_FILE" \
                --output-prefix "${DATA_PATH%_text_document}"
        fi
        echo "$variables" >"$RUN_DIR/data/variables"
        echo "$corpus" >"$RUN_DIR/data/source"
        rm "$RUN_DIR/data/begun"
    fi
    rm -rf "$turn"
    trap - EXIT
}
