"""Evaluate a GPT-2 or Llama: perplexity and bits per byte of a text, cloze accuracy, or tasks of lm-eval.

The model is a run of this project or a Hugging Face folder. The tool uses the GPU if there is one.
"""

from data_utils.cli import Parser, add_text_flags, local_path, output_file, positive_int, run

from .generate_flags import add_model_flags

EXAMPLES = """\
  python tools/evaluate.py --load runs/gpt2 --input held_out.jsonl --stride 64
  python tools/evaluate.py --load runs/gpt2 --cloze questions.jsonl
      each line {"context": "...", "target": "..."}: is the target the greedy continuation?
  python tools/evaluate.py --hf exported/ --input held_out.jsonl
  python tools/evaluate.py --load runs/gpt2 --tasks lambada_openai,hellaswag
      pip install lm-eval"""


def build_parser() -> Parser:
    parser = Parser(__doc__, EXAMPLES)
    add_model_flags(parser, required=False)
    add = parser.add_argument
    add("--hf", type=local_path, help="Hugging Face folder to evaluate with transformers")
    add("--input", type=local_path, nargs="+", help="text files to score, in the formats of tools/preprocess_data.py")
    add("--cloze", type=local_path, help="file of JSON lines, each with a context and a target")
    add("--tasks", help="comma-separated lm-eval tasks")
    add("--task-folder", type=local_path, help="folder with custom tasks for --tasks, in lm-eval's format")
    add(
        "--limit",
        type=positive_int,
        help="maximum number of questions in --cloze, or in each task of --tasks (default: all)",
    )
    add("--json-key", default="text", help="key of the text in each record of --input (default: text)")
    add(
        "--window",
        type=positive_int,
        help="context window in tokens (default: --seq-length of a run, or max_position_embeddings of a Hugging Face "
        "folder, else 2048)",
    )
    add(
        "--stride",
        type=positive_int,
        help="tokens to score per window; a smaller stride gives each token more context (default: half the window)",
    )
    add(
        "--json",
        type=output_file,
        help="JSON file to write the results to; NaN is written as NaN, which strict readers refuse",
    )
    add_text_flags(parser)
    return parser


def cli() -> None:
    run("megatron_tools.write.evaluate:main", build_parser())
