"""The results of a run of scripts/run_poet.sh, and four poems that its model writes.

    .venv/bin/python examples/poet/poet.py runs/poet
    .venv/bin/python examples/poet/poet.py runs/poet --title 春江花月夜 --samples 3

Bits per character and per byte are those of all poems for validation, each scored separately with the end of the poem.
PRICE_PER_HOUR=2.5 in the environment adds the price of the training. With --title, only poems are written.
"""

import argparse
import json
import math
import os
import secrets
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from poems import BREAKS, LENGTHS

from data_utils.documents import read_texts
from megatron.checkpointing import find_checkpoint, load_weights
from megatron.features.sampling import Sampling
from megatron.model.gpt2 import GPT2Model
from megatron.model.parameter_counts import count_parameters
from megatron.model.work import flops_per_token
from megatron.mpu import derive_seed
from megatron.tokenizer import load_tokenizer
from megatron_tools.report.runs import read_run
from megatron_tools.shapes import config_of_checkpoint
from megatron_tools.write.generation import GPT2Stepper, sample

TITLES = ("月夜忆舍弟", "江上早春", "秋山访友", "夜雨寄远")
TRADITIONAL = ("月夜憶舍弟", "江上早春", "秋山訪友", "夜雨寄遠")
MOST_TOKENS = 110  # of a poem
BASELINE = 7.49  # bits per character of nanoGPT's model and recipe after ten minutes on two cores, see docs/poet.md


class Poet:
    """The model of a run, which writes and scores poems."""

    def __init__(self, folder):
        path = find_checkpoint(folder)
        self.config = config_of_checkpoint(path)
        self.tokenizer = load_tokenizer(self.config.data.vocab_file, self.config.data.tokenizer_type)
        self.model = GPT2Model(self.config, parallel_output=False).eval()
        load_weights(path, self.model).check_tokenizer(self.tokenizer.fingerprint)

    def poem(self, title, seed):
        """Return a poem with this title. Equal seeds give other poems for other titles."""
        known = [self.tokenizer.eod, *self.tokenizer.encode(f"{title}\n")]
        stepper = GPT2Stepper(self.model, [known], self.config.positions)
        (ids,) = sample(
            stepper, 1, MOST_TOKENS, self.tokenizer.eod, Sampling(temperature=0.7), derive_seed(seed, title)
        )
        return self.tokenizer.decode(ids).strip()

    @torch.no_grad()
    def nats(self, poems, at_once=64):
        """Return the loss of all tokens of the poems and of their ends, summed, in nats."""
        eod = self.tokenizer.eod
        rows = sorted(([eod, *self.tokenizer.encode(poem), eod] for poem in poems), key=len)
        total = 0.0
        for at in range(0, len(rows), at_once):
            batch = [torch.tensor(row[: self.config.positions + 1]) for row in rows[at : at + at_once]]
            text = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row) - 1) for row in batch], batch_first=True)
            total += float(self.model(text[:, :-1], labels=text[:, 1:], loss_mask=mask))
        return total


def scans(poem):
    """Return whether a poem has four or eight lines of equally five or seven characters."""
    lines = [line for line in BREAKS.split(poem.replace("\n", "")) if line]
    lengths = {len(line) for line in lines}
    return len(lines) in (4, 8) and len(lengths) == 1 and lengths <= set(LENGTHS)


def results(folder, poems, poet):
    """Return what the training took and what it reached."""
    run = read_run(Path(folder))
    bits = poet.nats(poems) / math.log(2)
    flops = flops_per_token(count_parameters(poet.model), poet.config, poet.config.data.seq_length)
    tokens = run.rows_of("train")[-1]["consumed_tokens"]
    return {
        "poems": len(poems),
        "bits": bits / sum(map(len, poems)),
        "bits_per_byte": bits / sum(len(poem.encode()) for poem in poems),
        "minutes": 60 * run.axes()["hours"][-1],
        "tokens": tokens,
        "flops": flops * tokens,
    }


def print_results(found):
    print(f"bits per character   {found['bits']:.4f} ({found['poems']:,} poems that it was not trained on)")
    print(f"                     nanoGPT's recipe has {BASELINE} after ten minutes on two cores (docs/poet.md)")
    print(f"bits per byte        {found['bits_per_byte']:.4f}")
    print(
        f"training             {found['minutes']:.1f} minutes, {found['tokens']:,} tokens, {found['flops']:.2g} FLOPs"
    )
    price = os.environ.get("PRICE_PER_HOUR")
    if price:
        print(f"price                {float(price) * found['minutes'] / 60:.4g} at {price} an hour")


def write(poet, titles, samples, seed):
    """Write poems for each title, and say how many of them have the form of a poem."""
    count = 0
    for title in titles:
        for number in range(samples):
            poem = poet.poem(title, seed + number)
            count += scans(poem)
            print(f"\n《{title}》\n{poem}", flush=True)
    print(f"\n{count} of {len(titles) * samples} poems have lines of equal length, as they should")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", help="directory of the run")
    parser.add_argument("--title", nargs="+", help="titles of the poems (default: four titles)")
    parser.add_argument("--samples", type=int, default=1, help="poems of each title (default: 1)")
    parser.add_argument("--seed", type=int, help="seed of the poems (default: another one each time with --title)")
    parser.add_argument("--poems", help="file of poems to score (default: poems/valid.jsonl in the directory)")
    parser.add_argument("--json", action="store_true", help="print only the results, as JSON")
    args = parser.parse_args()
    poet = Poet(args.folder)
    if args.title:
        first = secrets.randbelow(2**31) if args.seed is None else args.seed
        write(poet, args.title, args.samples, first)
        return
    known = list(read_texts([args.poems or str(Path(args.folder) / "poems" / "valid.jsonl")]))
    found = results(args.folder, known, poet)
    if args.json:
        print(json.dumps(found))
        return
    print_results(found)
    titles = TRADITIONAL if "來" in "".join(known) else TITLES
    write(poet, titles, args.samples, args.seed or 0)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"{sys.argv[0]}: {error}")
