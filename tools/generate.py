"""Continue a text with a trained GPT-2. Loads a checkpoint of any layout into one process."""

import argparse
import json
from pathlib import Path

import torch
from _cli import Parser, run
from torch import Tensor

from megatron.arguments import HOME, with_values
from megatron.checkpointing import CheckpointError, CheckpointReader, latest_checkpoint, load_weights
from megatron.config import Config
from megatron.model import GPT2Model
from megatron.tokenizer import load_tokenizer

EXAMPLES = """\
  python tools/generate.py --load runs/gpt2 --prompt "春天的早晨"
  python tools/generate.py --load runs/gpt2 --prompt "Once upon" --num-samples 3 --temperature 0.8 --top-p 0.9"""


def choose(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> Tensor:
    """[b, v] logits -> [b] tokens. temperature 0 takes the likeliest.

    top_k keeps the k likeliest, top_p the fewest whose probabilities reach p (Holtzman et al. 2020).
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter(
            -1, order, ordered.masked_fill(before >= top_p, -torch.inf)
        )
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(-1)


@torch.no_grad()
def generate(
    model: GPT2Model,
    prompt: list[int],
    samples: int,
    max_new_tokens: int,
    window: int,
    eod: int,
    sampling: tuple[float, int, float],
    seed: int,
) -> list[list[int]]:
    """Continuations of `prompt`, each ended by end-of-document or after `max_new_tokens`.

    window: how many of the last tokens the model looks at.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([prompt] * samples)  # [b, s]
    ended = torch.zeros(samples, dtype=torch.bool)
    for _ in range(max_new_tokens):
        logits = model(tokens[:, -window:])[:, -1]  # [b, v]
        new = choose(logits.float(), *sampling, generator).masked_fill(ended, eod)
        tokens = torch.cat([tokens, new.unsqueeze(1)], dim=1)
        ended |= new == eod
        if ended.all():
            break
    return [row[len(prompt) :] for row in tokens.tolist()]


def find_checkpoint(load: str) -> Path:
    """The newest checkpoint of a run directory, of a folder of checkpoints, or `load` itself."""
    for folder in (Path(load) / "checkpoints", Path(load)):
        if (folder / "checkpoint.json").is_file():
            return folder
        path = latest_checkpoint(str(folder))
        if path:
            return path
    raise CheckpointError(f"{load} holds no checkpoint")


def config_of(reader: CheckpointReader) -> Config:
    """The settings that a checkpoint was saved with, in one process."""
    saved = {name: value for section in reader.config.values() for name, value in section.items() if name in HOME}
    alone = {"model_parallel_size": 1, "pipe_parallel_size": 0}
    return with_values(Config(), {**saved, **alone})


def main(args: argparse.Namespace) -> None:
    path = find_checkpoint(args.load)
    config = config_of(CheckpointReader(path))
    vocab_file = args.vocab_file or config.data.vocab_file
    if vocab_file is None:
        raise ValueError("no tokenizer: give --vocab-file")
    tokenizer = load_tokenizer(vocab_file)
    model = GPT2Model(config, parallel_output=False).eval()
    load_weights(path, model).check_same_model(config, tokenizer.fingerprint)
    prompt = tokenizer.encode(args.prompt) or [tokenizer.eod]
    sampling = (args.temperature, args.top_k, args.top_p)
    found = generate(
        model, prompt, args.num_samples, args.max_new_tokens, config.positions, tokenizer.eod, sampling, args.seed
    )
    for ids in found:
        text = args.prompt + tokenizer.decode(ids)
        print(json.dumps({"text": text}, ensure_ascii=False) if args.json else text, flush=True)


def build_parser() -> Parser:
    parser = Parser(__doc__ or "", EXAMPLES)
    parser.add_argument("--load", required=True, help="a run directory, a folder of checkpoints, or one checkpoint")
    parser.add_argument("--prompt", default="", help="the text to continue")
    parser.add_argument("--vocab-file", help="the tokenizer; by default the one that the model was trained with")
    parser.add_argument("--num-samples", type=int, default=1, help="continuations (default: 1)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="longest continuation (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k likeliest; 0 for all (default: 0)")
    parser.add_argument("--top-p", type=float, default=0.9, help="draw from the likeliest p of all (default: 0.9)")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the draws (default: 1234)")
    parser.add_argument("--json", action="store_true", help="one JSON line per continuation")
    return parser


if __name__ == "__main__":
    run(main, build_parser())
