"""Greedy generation of tokens with a key-value cache: this project, and transformers' generate() on the same weights.

    OMP_NUM_THREADS=1 python benchmarks/generation.py --models gpt2 llama t5 --batches 1 8 --tokens 200

The weights are random. Both continue the same random prompts in turn, and their token ids are compared.
"""

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _alternate import new_parser, spread

PROMPT_LENGTH = 32
VOCAB_SIZE = 32000
# Model -> (class of transformers, arguments of its configuration)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": VOCAB_SIZE}),
    "llama": (
        "Llama",
        {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
        | {"num_key_value_heads": 4, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 1024},
    ),
    "t5": (
        "T5",
        {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "vocab_size": VOCAB_SIZE}
        | {"decoder_start_token_id": 0},
    ),
}
Generate = Callable[[list[list[int]]], list[list[int]]]


def their_model(name: str) -> Any:
    """Return a model of transformers with random weights, in evaluation mode."""
    import torch
    import transformers

    kind, values = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**values)
    torch.manual_seed(1)
    head = "ForConditionalGeneration" if kind == "T5" else "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    return getattr(transformers, f"{kind}{head}")(config).eval()


def theirs(model: Any, tokens: int) -> Generate:
    """Return transformers' greedy generation of a number of tokens."""
    import torch

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        ids = torch.tensor(prompts)
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return [row[-tokens:] for row in found.tolist()]

    return generate


def ours(folder: Path, batch: int, tokens: int) -> Generate:
    """Return this project's greedy generation with the weights in a folder of transformers."""
    import torch

    from megatron import mpu
    from megatron.features.cpu_matmul import pack_weights
    from megatron.model.gpt2 import GPT2Model
    from megatron.model.t5 import T5Model
    from megatron_tools.convert.hf_folder import HFModelFolder
    from megatron_tools.write.generation import GPT2Stepper, T5Stepper

    hf_folder = HFModelFolder(folder)
    config = hf_folder.config
    with mpu.skip_init():
        model: Any = (T5Model if config.is_t5 else GPT2Model)(config, parallel_output=False)
    hf_folder.load(model)
    pack_weights(model.eval(), batch)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        stepper = T5Stepper(model, prompts, 0) if config.is_t5 else GPT2Stepper(model, prompts, config.positions)
        with torch.inference_mode():
            next_tokens = stepper.first(1).argmax(-1)
            columns = [next_tokens]
            for _ in range(tokens - 1):
                next_tokens = stepper.next(next_tokens).argmax(-1)
                columns.append(next_tokens)
        rows: list[list[int]] = torch.stack(columns, dim=1).tolist()
        return rows

    return generate


def measure(name: str, batch: int, tokens: int, rounds: int) -> str:
    """Return a line of the table: speed of this project over transformers', and whether the ids are equal."""
    dice = random.Random(2)
    prompts = [[dice.randrange(5, VOCAB_SIZE) for _ in range(PROMPT_LENGTH)] for _ in range(batch)]
    their = their_model(name)
    with tempfile.TemporaryDirectory() as folder:
        their.save_pretrained(folder)
        contenders = {"theirs": theirs(their, tokens), "ours": ours(Path(folder), batch, tokens)}
    seconds: dict[str, list[float]] = {each: [] for each in contenders}
    ids = {}
    for round_ in range(rounds + 1):
        for each, generate in contenders.items():
            begin = time.perf_counter()
            ids[each] = generate(prompts)
            if round_:  # the first round is a warm-up
                seconds[each].append(time.perf_counter() - begin)
    ratios = [theirs_ / ours_ for theirs_, ours_ in zip(seconds["theirs"], seconds["ours"], strict=True)]
    agreement = "equal ids" if ids["ours"] == ids["theirs"] else "OTHER IDS"
    speed = batch * tokens / min(seconds["ours"])
    return f"{name}, batch {batch}: {spread(ratios, '.2f')} times as fast, {speed:,.0f} tokens/s, {agreement}"


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for name in args.models:
        for batch in args.batches:
            print(measure(name, batch, args.tokens, args.rounds), flush=True)


if __name__ == "__main__":
    main()
