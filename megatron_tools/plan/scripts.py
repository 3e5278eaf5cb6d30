"""Output of the chosen layout as runnable files: settings, a ds_config and a shell script."""

import json
import shlex
from pathlib import Path

from megatron.atomic import write_text
from megatron.config import Config
from megatron.config.command_line import with_values
from megatron.config.data import DataConfig
from megatron.config.defaults import DEFAULTS
from megatron.config.ds_config import batch_sizes, read_file

from .layouts import Layout

CHECKOUT = Path(__file__).resolve().parents[2]


def write_files(layout: Layout, folder: str, tokens: float | None) -> list[Path]:
    """Write config.json, ds_config.json and run.sh to `folder`; return their paths.

    Raises ValueError for a model family without an entry script.
    """
    if layout.config.model.family not in DEFAULTS:  # the families with an entry script
        raise ValueError("there is no entry script for a model without --family gpt2, llama or t5; omit --write")
    target_dir = Path(folder)
    target_dir.mkdir(parents=True, exist_ok=True)
    # layout.cost.tokens is the number of tokens of one step.
    steps = max(round(tokens / layout.cost.tokens), 1) if tokens else None
    texts = {
        target_dir / "config.json": _config_json(layout.config, steps, layout.config.train_batch_size(layout.devices)),
        target_dir / "ds_config.json": _ds_config(layout),
        target_dir / "run.sh": _run_script(layout),
    }
    for path, text in texts.items():
        write_text(path, text)
    (target_dir / "run.sh").chmod(0o755)
    return list(texts)


def doctor_command(layout: Layout, cluster: str, folder: str) -> str:
    """Return the command that checks the files in `folder` before a launch. cluster: value of --cluster."""
    # A package that pip installed has no folder tools, but commands on PATH.
    command = "python tools/doctor.py" if (CHECKOUT / "tools/launch.py").is_file() else "megatron-doctor"
    script = f"pretrain_{layout.config.model.family}.py"
    settings = shlex.quote(f"{folder}/config.json")
    ds_config = shlex.quote(f"{folder}/ds_config.json")
    hardware = f"--ranks {layout.devices} --cluster {shlex.quote(cluster)}"
    return f"{command} {script} --config {settings} --deepspeed-config {ds_config} {hardware}"


def _config_json(config: Config, steps: int | None, step_samples: int = 1) -> str:
    """Return the content of config.json: the settings that differ from the defaults of the family's entry script.

    Layout and batch sizes are always included. steps: number of iterations to train, None for the default.
    step_samples: global batch size.
    """
    family = config.model.family or "gpt2"
    defaults = with_values(Config(), DEFAULTS[family]).to_dict()
    always_written = {
        "family",
        "model_parallel_size",
        "pipe_parallel_size",
        "zero_stage",
        "checkpoint_activations",
        "batch_size",
        "gas",
        "precision",
    }
    content = {}
    for section, values in config.to_dict().items():
        changed = {}
        for name, value in values.items():
            if name in always_written or value != defaults[section][name]:
                changed[name] = value
        if steps and section == "train":
            changed["train_iters"] = steps
            if config.train.train_samples is not None:  # it would win over `train_iters`
                changed["train_samples"] = steps * step_samples
        if changed:
            content[section] = changed
    return json.dumps(content, indent=2) + "\n"


def _ds_config(layout: Layout) -> str:
    """Return the content of ds_config.json: the settings of the user's file, with the batch sizes of the layout."""
    # The second argument checks a section of the file. `resolve` has already done so, so here it finds no problem.
    content = read_file(layout.config, lambda key, section: None)
    content |= batch_sizes(layout.config, layout.devices)
    content.setdefault("steps_per_print", "auto")
    content.setdefault("gradient_clipping", "auto")
    content.setdefault("zero_optimization", {})["stage"] = layout.resolved.zero_stage
    precision = layout.resolved.precision
    if precision in ("bf16", "fp16"):
        content.setdefault(precision, {})["enabled"] = True
    return json.dumps(content, indent=2) + "\n"


def _run_script(layout: Layout) -> str:
    """Return the run script: its launch command, with the data and addresses from the environment."""
    per_node = min(layout.devices, layout.cluster.devices_per_node)
    nodes = layout.devices // per_node
    model = layout.config.model
    assert model.family and model.vocab_size
    launch_flags = f"--standalone --nproc-per-node {per_node}"
    if nodes > 1:
        launch_flags = (
            f'--nnodes {nodes} --node-rank "${{NODE_RANK:?the number of this node, from 0}}" '
            f'--nproc-per-node {per_node} --master-addr "${{MASTER_ADDR:?the address of node 0}}" '
            f'--master-port "${{MASTER_PORT:-29500}}"'
        )
    data_commands = REQUIRE_USER_DATA
    if (CHECKOUT / "tools/launch.py").is_file():
        variables = f"\nROOT=${{ROOT:-{shlex.quote(str(CHECKOUT))}}}\nPYTHON=${{PYTHON:-python}}"
        start_command = f'"$PYTHON" "$ROOT/tools/launch.py" {launch_flags} "$ROOT/pretrain_{model.family}.py"'
        if model.vocab_size >= MIN_SAMPLE_VOCABULARY:
            data_commands = _prepare_sample_data(model.vocab_size)
    else:  # this project is installed as a package: its commands are on PATH, and there is no sample corpus
        variables = ""
        start_command = f"megatron-launch {launch_flags} -m pretrain_{model.family}"
    data = layout.config.data
    split = data.split
    if split == DataConfig.split:  # not given; of the small sample corpus, a tenth is held out
        split = "90,10,0"
    corpus_flags = f'--data-path "$DATA_PATH" --split {shlex.quote(split)}'
    if data.names_corpora:  # config.json names them
        corpus_flags = '${DATA_PATH:+--data-path "$DATA_PATH"}'
        data_commands = REQUIRE_TOKENIZER
    if data.vocab_file:
        data_commands = f"VOCAB_FILE=${{VOCAB_FILE:-{shlex.quote(data.vocab_file)}}}\n{data_commands}"
    # {{ and }} are the braces of shell variables.
    return f"""#!/usr/bin/env bash
# Written by tools/plan.py: {layout.name} on {layout.devices} devices of {layout.cluster.name}.
# Flags given to this script are passed to the run.
set -euo pipefail
HERE=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd){variables}
{data_commands}
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}
{start_command} \\
    --config "$HERE/config.json" --deepspeed-config "$HERE/ds_config.json" \\
    {corpus_flags} --vocab-file "$VOCAB_FILE" --run-dir "${{RUN_DIR:-$HERE/run}}" "$@"
"""


MIN_SAMPLE_VOCABULARY = 2000  # smallest vocabulary with room for all characters of the sample corpus and T5's sentinels
REQUIRE_TOKENIZER = ': "${VOCAB_FILE:?the tokenizer; train-tokenizer (tools/train_tokenizer.py) makes one}"'
REQUIRE_USER_DATA = f"""{REQUIRE_TOKENIZER}
: "${{DATA_PATH:?a corpus, without .bin; preprocess-data (tools/preprocess_data.py) makes one}}\""""


def _prepare_sample_data(vocab_size: int) -> str:
    """Return shell code that prepares the sample corpus or a tokenizer if the user gives none.

    vocab_size: vocabulary size of the model, at least MIN_SAMPLE_VOCABULARY.
    """
    # A small model vocabulary leaves room for special tokens, such as a T5's sentinels.
    trained_size = 4000 if vocab_size > 5000 else vocab_size - 200
    return f"""# Without DATA_PATH and VOCAB_FILE, train on the sample corpus of the checkout with a new tokenizer.
CORPUS=${{CORPUS:-$ROOT/corpus/sample.jsonl}}
if [ -z "${{VOCAB_FILE:-}}" ] || [ -z "${{DATA_PATH:-}}" ]; then
    mkdir -p "$HERE/data"
    exec 9>"$HERE/data/lock" # nodes that share this folder prepare the data one after the other
    flock 9 || echo "note: without a lock on $HERE/data, let one node prepare the data before the others start" >&2
fi
if [ -z "${{VOCAB_FILE:-}}" ]; then
    VOCAB_FILE=$HERE/data/tokenizer.model
    [ -f "$VOCAB_FILE" ] || "$PYTHON" "$ROOT/tools/train_tokenizer.py" --input "$CORPUS" --vocab-size {trained_size} \\
        --output "$VOCAB_FILE"
fi
if [ -z "${{DATA_PATH:-}}" ]; then
    DATA_PATH=$HERE/data/corpus_text_document
    [ -f "$DATA_PATH.idx" ] || "$PYTHON" "$ROOT/tools/preprocess_data.py" --input "$CORPUS" \\
        --vocab-file "$VOCAB_FILE" --output-prefix "$HERE/data/corpus"
fi
exec 9>&- # release the lock"""
