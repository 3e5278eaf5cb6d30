"""Generate text in one process with a model that pretrain_decoder.py trained in any parallel layout.

python examples/write_with_decoder.py runs/decoder "春天"
"""

import sys

import torch
from pretrain_decoder import layer_list  # this import also puts the checkout on the module path

from megatron import mpu
from megatron.checkpointing import CheckpointReader, find_checkpoint, load_weights, plain_config
from megatron.features.sampling import Sampling
from megatron.tokenizer import load_tokenizer
from megatron_tools.write.generation import ModelStepper, sample
from tds.pipe import SequentialModule


def main(folder, prompt):
    checkpoint = find_checkpoint(folder)
    config = plain_config(CheckpointReader(checkpoint))  # the settings of the training run
    m, length = config.model, config.data.seq_length
    model = SequentialModule(
        layer_list(m.vocab_size, m.hidden_size, m.num_attention_heads, m.num_layers, length)
    ).eval()
    tokenizer = load_tokenizer(config.data.vocab_file, config.data.tokenizer_type)
    load_weights(checkpoint, model).check_tokenizer(tokenizer.fingerprint)

    known = tokenizer.encode(prompt) or [tokenizer.eod]
    if len(known) >= length:
        sys.exit(f"the prompt has {len(known)} tokens, but the model reads at most {length - 1}; shorten the prompt")

    def logits(tokens):  # [b, s] -> [b, s, v]
        s = tokens.shape[1]
        mask = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1)
        found = model((tokens, torch.arange(s).expand_as(tokens), mask))  # [s, b, padded vocabulary]
        return mpu.gather_from_model_parallel_region(found).transpose(0, 1)[..., : m.vocab_size]

    stepper = ModelStepper(logits, known, length)
    for ids in sample(stepper, 2, 40, tokenizer.eod, Sampling(temperature=0.8, top_p=0.9), seed=1):
        print(prompt + tokenizer.decode(ids))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} RUN_DIR PROMPT")
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        sys.exit(f"{sys.argv[0]}: {error}")
