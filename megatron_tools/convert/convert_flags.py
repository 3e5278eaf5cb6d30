"""Convert checkpoints to and from Hugging Face, from CPM-1 and Megatron-LM, and from dense models to mixtures.

The models of Hugging Face are GPT-2, T5, Llama, Qwen, Mistral, Mixtral and the mixtures of Qwen.
"""

from data_utils.cli import Parser, any_path, local_path, run

EXAMPLES = """\
  python tools/convert_checkpoint.py --load runs/gpt2 --output exported --verify
      then: transformers.AutoModelForCausalLM.from_pretrained("exported")
  python tools/convert_checkpoint.py --load runs/t5 --output exported --dtype bf16 --max-shard-size 2
  python tools/convert_checkpoint.py --from-hf downloaded/ --output runs/mine/checkpoints
      then: the command that it prints: python pretrain_gpt2.py --config runs/mine/checkpoints/settings.json ...
  python tools/convert_checkpoint.py --from-megatron CPM-large --num-attention-heads 32 --output runs/cpm/checkpoints \\
      --vocab-file bpe_3w_new/
  python tools/convert_checkpoint.py --load runs/llama --upcycle 8 --output runs/experts/checkpoints --verify"""
QKV_ORDERS = (
    "0 (all queries, all keys, all values), 1 (for each head and feature: query, key, value) "
    "or 2 or 3 (for each head: query, key, value)"
)


def build_parser() -> Parser:
    parser = Parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--load", type=any_path, help="run directory or checkpoint to export or upcycle")
    add("--from-hf", type=local_path, help="folder with config.json and safetensors to import as a checkpoint")
    add(
        "--from-megatron",
        type=local_path,
        help="folder with mp_rank_* or layer_* files of CPM-1, CPM-Pretrain, Megatron-LM (GPT) or DeepSpeed to import",
    )
    add(
        "--num-attention-heads",
        type=int,
        help="number of attention heads of the --from-megatron model, if its files do not record it; CPM-1-large: 32",
    )
    add(
        "--num-layers",
        type=int,
        help="number of layers of the --from-megatron model, if there is one file per layer and no file records it",
    )
    add(
        "--checkpoint-version",
        type=int,
        choices=range(4),
        help="order of query, key and value in the --from-megatron files, if they do not record it: "
        f"{QKV_ORDERS}; for CPM-Pretrain, 2 if the run was never resumed, else 0",
    )
    add(
        "--upcycle",
        type=int,
        help="number of experts of a new checkpoint, each a copy of the MLP of --load; without optimizer state",
    )
    add("--experts-per-token", type=int, help="number of experts of a token with --upcycle (default: 2)")
    add("--moe-layer-frequency", nargs="+", help="layers that get experts with --upcycle (default: 1, all layers)")
    add("--output", type=local_path, required=True, help="new folder for the exported model or the new checkpoint")
    add("--ema", action="store_true", help="use the moving average of the weights that a run with --ema-decay keeps")
    add(
        "--vocab-file",
        type=local_path,
        help="tokenizer file or folder (default: the tokenizer of the run or of the imported folder)",
    )
    add("--dtype", choices=("fp32", "bf16", "fp16"), help="dtype of the exported weights (default: fp32)")
    add("--max-shard-size", type=float, help="largest exported file in GB (default: 5)")
    add(
        "--verify",
        action="store_true",
        help="compare the logits of this project's model and of the Hugging Face model (needs transformers)",
    )
    return parser


def cli() -> None:
    run("megatron_tools.convert.convert_checkpoint:main", build_parser())
