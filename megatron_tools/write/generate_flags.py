"""Continue texts with a trained GPT-2 or Llama, or fill the masked spans of texts with a trained T5.

Loads a checkpoint of any layout, and uses the GPU if there is one.
"""

import argparse

from data_utils.cli import Parser, any_path, local_path, run

EXAMPLES = """\
  python tools/generate.py --load runs/gpt2 --prompt "春天的早晨" --stream
  python tools/generate.py --load runs/gpt2 --prompt "Once upon" --num-samples 3 --temperature 0.8 --top-p 0.9
  python tools/generate.py --load runs/gpt2 --interactive
  python tools/generate.py --load runs/gpt2 --input prompts.txt --batch-size 32 --json > texts.jsonl
  python tools/generate.py --load downloaded/ --prompt "Once upon"
      a Hugging Face folder
  python tools/generate.py --load runs/chat --chat --interactive
      trained with --objective sft, or a chat model
  python tools/generate.py --load runs/code --prompt "def add(a, b):" --suffix "    return c"
      --fim-rate
  python tools/generate.py --load runs/t5 --prompt "春天来了，<extra_id_0>都开了。" --num-beams 4
  python tools/launch.py --standalone --nproc-per-node 4 tools/generate.py --load runs/gpt2 \\
      --model-parallel-size 2 --pipe-parallel-size 2 --prompt "春天" """


def add_model_flags(parser: Parser, required: bool = True) -> None:
    """Add the flags that name the model and its tokenizer."""
    add = parser.add_argument
    add("--ema", action="store_true", help="use the moving average of the weights that a run with --ema-decay keeps")
    add(
        "--load",
        type=any_path,
        required=required,
        help="run directory, checkpoint, or Hugging Face folder of a GPT-2, Llama, Qwen or Mistral",
    )
    add("--vocab-file", type=local_path, help="tokenizer file or folder (default: that of the model)")


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that give prompts and determine how they are encoded."""
    add = parser.add_argument
    add(
        "--prompt",
        default="",
        help="text to continue; for a T5, text with masked spans such as <extra_id_0> or <s_0>, or text to answer",
    )
    add(
        "--input",
        type=local_path,
        help='file with one prompt per line, or JSON lines with a "prompt"; each text is printed on one line',
    )
    add("--interactive", action="store_true", help="ask for prompts one by one")
    add(
        "--special-tokens",
        action="store_true",
        help="encode names of special tokens in prompts, such as <|im_start|>, as these tokens (default: as text)",
    )
    add(
        "--chat",
        action="store_true",
        help='treat prompts as user messages to an assistant; lines of --input may have "messages"; with '
        "--interactive, each prompt continues the conversation",
    )
    add(
        "--chat-template",
        type=local_path,
        help="template of --chat: chatml, tokenizer (the tokenizer's Jinja template) or a Jinja file (default: the "
        "template of the training data, else the tokenizer's, else chatml)",
    )
    add("--suffix", help='fill in the middle between --prompt and this text; lines of --input may have a "suffix"')
    add(
        "--fim-tokens",
        nargs=3,
        metavar=("PREFIX", "MIDDLE", "SUFFIX"),
        help="fill-in-the-middle tokens for --suffix (default: the tokens of the training run)",
    )


def add_sampling_flags(parser: Parser) -> None:
    """Add the flags of sampling."""
    add = parser.add_argument
    add("--num-samples", type=int, default=1, help="texts per prompt (default: 1)")
    add("--max-new-tokens", type=int, default=64, help="longest continuation in tokens (default: 64)")
    add("--temperature", type=float, default=0.8, help="sampling temperature; 0 for greedy decoding (default: 0.8)")
    add("--top-k", type=int, default=0, help="sample from the k likeliest tokens; 0 for all (default: 0)")
    add(
        "--top-p",
        type=float,
        default=0.9,
        help="sample from the likeliest tokens of total probability p (default: 0.9)",
    )
    add(
        "--seed",
        type=int,
        default=1234,
        help="seed of the samples; each prompt draws random numbers of its own, equal prompts the same (default: 1234)",
    )


def build_parser() -> Parser:
    parser = Parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add_model_flags(parser)
    add_prompt_flags(parser)
    add(
        "--batch-size",
        type=int,
        default=16,
        help="prompts of --input per batch; the texts and their order do not depend on it (default: 16)",
    )
    add("--stream", action="store_true", help="print the text while it is generated")
    add_sampling_flags(parser)
    add(
        "--num-beams",
        type=int,
        default=0,
        help="width of beam search, which ignores the flags of sampling; 0 for sampling (default: 0)",
    )
    add("--model-parallel-size", type=int, default=1, help="tensor-parallel ranks (default: 1)")
    add("--pipe-parallel-size", type=int, default=0, help="pipeline stages; 0 for none (default: 0)")
    add(
        "--top-lift",
        "--favoured",
        type=int,
        default=0,
        help="after the texts of each prompt, print this many candidates for the next token, ranked by how much their "
        "probability exceeds their frequency in the training text (default: 0)",
    )
    add("--json", action="store_true", help="print one JSON line per text")
    return parser


def cli() -> None:
    run("megatron_tools.write.generate:main", build_parser())
