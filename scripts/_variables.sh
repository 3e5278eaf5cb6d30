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

# Exit with an error if an environment variable has no effect: its name resembles one in variables.txt, or variables.txt
# names the scripts that read it, and this one is not among them.
refuse_misspelt() {
    python - "$ROOT/scripts/variables.txt" "$ME" <<'EOF'
import difflib, os, re, sys

# Names of Megatron-LM's scripts
MEGATRON = {"HIDDEN_SIZE": "NHIDDEN", "NUM_ATTN_HEADS": "NHEADS", "NUM_HEADS": "NHEADS", "MICRO_BATCH_SIZE": "BATCHSIZE"}
lines = open(sys.argv[1], encoding="utf-8").read().splitlines()
known = [line.split()[0] for line in lines]
remedy = "if another program needs it, run env -u {} bash scripts/" + sys.argv[2]
for line in lines:
    name = line.split()[0]
    scripts = re.findall(r"run_\w+\.sh", line)
    if os.environ.get(name) and scripts and sys.argv[2] not in scripts:
        print(f"{sys.argv[2]}: {name} is for {' and '.join(scripts)} ({remedy.format(name)})", file=sys.stderr)
        sys.exit(2)
for common in ("OMP_NUM_THREADS", "PYTHON"):  # other programs use similar names
    known.remove(common)
for name in sorted(set(os.environ) - {*known, "OMP_NUM_THREADS", "PYTHON"}):
    if any(name.endswith(f"_{each}") or name.startswith(f"{each}_") for each in known):
        continue  # e.g. a launcher's PET_MASTER_ADDR
    near = MEGATRON.get(name) or next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.82)), None)
    if near:
        advice = f"did you mean {near}? (--help lists all; {remedy.format(name)})"
        print(f"{sys.argv[2]}: unknown variable {name}; {advice}", file=sys.stderr)
        sys.exit(2)
EOF
}
