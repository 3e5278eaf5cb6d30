# What the variables of run_*.sh are, and whether one is misspelt; sourced by _run.sh.
# shellcheck shell=bash disable=SC2154

# The head of the script and the list, for --help: at once, before anything is installed.
show_variables() {
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$ROOT/scripts/run_$NAME.sh"
    printf '\nVariables:\n'
    sed 's/^/  /' "$ROOT/scripts/variables.txt"
    printf '\nFlags win over variables; python pretrain_%s.py --help lists them.\n' "$NAME"
}

# A variable that nobody reads, with a name like one of ours, would be a run of other settings than its user thinks.
refuse_misspelt() {
    python - "$ROOT/scripts/variables.txt" "run_$NAME.sh" <<'EOF'
import difflib, os, sys

known = [line.split()[0] for line in open(sys.argv[1], encoding="utf-8")]
for common in ("OMP_NUM_THREADS", "PYTHON"):  # others have names like these
    known.remove(common)
for name in sorted(set(os.environ) - {*known, "OMP_NUM_THREADS", "PYTHON"}):
    if any(name.endswith(f"_{each}") or name.startswith(f"{each}_") for each in known):
        continue  # PET_MASTER_ADDR of a launcher, and the like
    for near in difflib.get_close_matches(name, known, n=1, cutoff=0.82):
        print(f"{sys.argv[2]}: the variable {name} is read by nobody; did you mean {near}? (--help lists them; unset it if it is another program's)", file=sys.stderr)
        sys.exit(2)
EOF
}
