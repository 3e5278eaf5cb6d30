"""Continue a text with a trained GPT-2, or fill the gaps of one with a trained T5. Loads a checkpoint of any layout."""

import argparse
import json
from pathlib import Path

import torch.distributed as dist
from _cli import Parser, run

from megatron.checkpointing import CheckpointReader, find_checkpoint, load_weights, plain_config
from megatron.config import Config
from megatron.generation import GPT2Stepper, Sampling, Stepper, T5Stepper, beam_search, sample
from megatron.initialize import initialize_megatron
from megatron.model import GPT2Model, T5Model
from megatron.runtime import is_rank_0, leave
from megatron.tokenizer import SentinelTokenizer, Tokenizer, load_tokenizer

EXAMPLES = """\
  python tools/generate.py --load runs/gpt2 --prompt "春天的早晨"
  python tools/generate.py --load runs/gpt2 --prompt "Once upon" --num-samples 3 --temperature 0.8 --top-p 0.9
  python tools/generate.py --load runs/t5 --prompt "春天来了，<extra_id_0>都开了。" --num-beams 4
  python tools/launch.py --standalone --nproc-per-node 2 tools/generate.py --model-parallel-size 2 --load runs/gpt2"""


def fill(prompt: str, tokenizer: SentinelTokenizer, ids: list[int]) -> str:
    """The prompt with what a T5 wrote in place of its sentinels; a gap that it left out stays."""
    if tokenizer.convention == "cpm":
        ids = [tokenizer.sentinels[0], *ids]
    spans: dict[int, list[int]] = {}
    last = None
    for token in ids:
        if token in tokenizer.sentinels:
            last = token
            spans.setdefault(token, [])
        elif last is not None:
            spans[last].append(token)
    source = tokenizer.encode(prompt)
    return tokenizer.decode([t for token in source for t in (spans.get(token) or [token])])


def stepper_of(path: Path, config: Config, tokenizer: Tokenizer, prompt: str) -> tuple[Stepper, int]:
    """The model ready to write, and the token that ends what it writes."""
    if not isinstance(tokenizer, SentinelTokenizer):
        gpt2 = GPT2Model(config, parallel_output=False).eval()
        load_weights(path, gpt2).check_tokenizer(tokenizer.fingerprint)
        return GPT2Stepper(gpt2, tokenizer.encode(prompt) or [tokenizer.eod], config.positions), tokenizer.eod
    t5 = T5Model(config, parallel_output=False).eval()
    load_weights(path, t5).check_tokenizer(tokenizer.fingerprint)
    source = tokenizer.encode(prompt)
    if tokenizer.convention == "t5":
        return T5Stepper(t5, [*source, tokenizer.eod], tokenizer.pad), tokenizer.eod
    gaps = sum(token in tokenizer.sentinels for token in source)
    if gaps >= tokenizer.count:
        raise ValueError(
            f"{gaps} gaps in the prompt: the model has {tokenizer.count} sentinels, one of them to close with"
        )
    return T5Stepper(t5, source, tokenizer.sentinels[0]), tokenizer.sentinels[gaps]


def main(args: argparse.Namespace) -> None:
    path = find_checkpoint(args.load)
    config = plain_config(CheckpointReader(path), args.model_parallel_size)
    vocab_file = args.vocab_file or config.data.vocab_file
    if vocab_file is None:
        raise ValueError("no tokenizer: give --vocab-file")
    tokenizer = load_tokenizer(vocab_file, config.data.tokenizer_type)
    t5 = config.is_t5
    if t5:
        tokenizer = SentinelTokenizer(tokenizer, config.data.num_sentinels, config.data.span_convention)
    if args.model_parallel_size > 1:
        initialize_megatron(config)
    stepper, end = stepper_of(path, config, tokenizer, args.prompt)
    longest = args.max_new_tokens
    if t5 and config.model.position_embedding == "learned":
        longest = min(longest, config.positions)
    if args.num_beams:
        found = [ids for _, ids in beam_search(stepper, args.num_beams, longest, end)][: args.num_samples]
    else:
        sampling = Sampling(args.temperature, args.top_k, args.top_p)
        found = sample(stepper, args.num_samples, longest, end, sampling, args.seed)
    for ids in found if is_rank_0() else []:
        kept = ids[:-1] if ids[-1:] == [end] else ids
        text = (
            fill(args.prompt, tokenizer, kept)
            if isinstance(tokenizer, SentinelTokenizer)
            else args.prompt + tokenizer.decode(kept)
        )
        print(json.dumps({"text": text}, ensure_ascii=False) if args.json else text, flush=True)
    if args.model_parallel_size > 1:
        dist.barrier()
        leave(0)


def build_parser() -> Parser:
    parser = Parser(__doc__ or "", EXAMPLES)
    parser.add_argument("--load", required=True, help="a run directory, a folder of checkpoints, or one checkpoint")
    parser.add_argument("--prompt", default="", help="the text to continue; for T5 with <extra_id_0> or <s_0> for gaps")
    parser.add_argument("--vocab-file", help="the tokenizer; by default the one that the model was trained with")
    parser.add_argument("--num-samples", type=int, default=1, help="continuations (default: 1)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="longest continuation (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k likeliest; 0 for all (default: 0)")
    parser.add_argument("--top-p", type=float, default=0.9, help="draw from the likeliest p of all (default: 0.9)")
    parser.add_argument("--num-beams", type=int, default=0, help="beam search of this width instead of drawing")
    parser.add_argument("--model-parallel-size", type=int, default=1, help="ranks that share every layer (default: 1)")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the draws (default: 1234)")
    parser.add_argument("--json", action="store_true", help="one JSON line per continuation")
    return parser


if __name__ == "__main__":
    run(main, build_parser())
