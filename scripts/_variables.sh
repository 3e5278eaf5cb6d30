# Help text and spelling check for the variables of run_*.sh; sourced by _run.sh.
# shellcheck shell=bash disable=SC2154

# Print the help text (--help): the comment at the head of $ME, then the variables. Needs no Python.
show_variables() {
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$ROOT/scripts/$ME"
    printf '\nVariables:\n'
    sed 's/^/  /' "$ROOT/scripts/variables.txt"
    printf '\nFlags override variables, but not RUN_DIR, VOCAB_FILE and DATA_PATH.\n'
    printf 'python pretrain_%s.py --help lists the usual flags, --help all lists all.\n' "$NAME"
}

# Exit with an error if an environment variable's name resembles one in variables.txt: it is probably a misspelling,
# which would have no effect.
refuse_misspelt() {
    python - "$ROOT/scripts/variables.txt" "$ME" <<'EOF'
import difflib, os, sys

known = [line.split()[0] for line in open(sys.argv[1], encoding="utf-8")]
for common in ("OMP_NUM_THREADS", "PYTHON"):  # other programs use similar names
    known.remove(common)
for name in sorted(set(os.environ) - {*known, "OMP_NUM_THREADS", "PYTHON"}):
    if any(name.endswith(f"_{each}") or name.startswith(f"{each}_") for each in known):
        continue  # e.g. a launcher's PET_MASTER_ADDR
    for near in difflib.get_close_matches(name, known, n=1, cutoff=0.82):
        remedy = f"--help lists all; if another program needs it, run env -u {name} bash scripts/{sys.argv[2]}"
        print(f"{sys.argv[2]}: unknown variable {name}; did you mean {near}? ({remedy})", file=sys.stderr)
        sys.exit(2)
EOF
}
