"""A custom model as a list of layers: a small decoder with tensor-parallel attention and MLP.

docs/own_model.md explains this file step by step. The first command trains in one process, the second on 2 pipeline
stages of 2 model-parallel ranks each:

    python examples/pretrain_decoder.py --data-path ... --vocab-file ... --run-dir runs/decoder
    python tools/launch.py --standalone --nproc-per-node 4 examples/pretrain_decoder.py \
        --pipe-parallel-size 2 --model-parallel-size 2 --data-path ... --vocab-file ... --run-dir runs/decoder
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # import megatron and tds from this checkout

from megatron import get_args, get_tokenizer, mpu, print_rank_0
from megatron.data.gpt2_dataset import build_train_valid_test_datasets
from megatron.model.attention_kernels import select_sdpa_kernels
from megatron.training import pretrain
from megatron.utils import get_ltor_masks_and_position_ids
from tds.pipe import LayerSpec, PipelineModule, SequentialModule, TiedLayerSpec

# ------------------------------------------------------------------------------- the layers
# s tokens, b samples, h hidden size, n heads, d = h / n, t model-parallel ranks, v vocabulary


class ParallelMLP(nn.Module):
    """MLP, h -> 4h column-parallel, then 4h -> h row-parallel; a single all-reduce follows."""

    def __init__(self, hidden_size):
        super().__init__()
        self.dense_h_to_4h = mpu.ColumnParallelLinear(hidden_size, 4 * hidden_size, gather_output=False)
        self.dense_4h_to_h = mpu.RowParallelLinear(4 * hidden_size, hidden_size, input_is_parallel=True)

    def forward(self, hidden):  # [s, b, h]
        inner, _ = self.dense_h_to_4h(hidden)  # [s, b, 4h/t]
        output, _ = self.dense_4h_to_h(F.gelu(inner))
        return output  # [s, b, h]


class ParallelAttention(nn.Module):
    """Tensor-parallel attention: each of the t ranks computes n/t of the n heads."""

    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.head_size = hidden_size // num_heads
        self.query_key_value = mpu.ColumnParallelLinear(hidden_size, 3 * hidden_size, gather_output=False)
        self.dense = mpu.RowParallelLinear(hidden_size, hidden_size, input_is_parallel=True)

    def forward(self, hidden, mask):  # [s, b, h]; [1 or b, 1, s, s], True where attention is masked out
        mixed, _ = self.query_key_value(hidden)
        s, b, _ = mixed.shape
        # The weight's rows are ordered by head: query, key and value of head 0, then of head 1 and so on. A rank's
        # shard of the rows thus holds whole heads.
        query, key, value = mixed.view(s, b, -1, 3, self.head_size).permute(3, 1, 2, 0, 4)  # [b, n/t, s, d] each
        with select_sdpa_kernels(query, mask):  # not cuDNN's kernel, whose gradients with a mask may be NaN
            context = F.scaled_dot_product_attention(query, key, value, attn_mask=~mask)
        output, _ = self.dense(context.permute(2, 0, 1, 3).reshape(s, b, -1))
        return output


class TransformerBlock(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.input_layernorm = mpu.LayerNorm(hidden_size)
        self.attention = ParallelAttention(hidden_size, num_heads)
        self.post_attention_layernorm = mpu.LayerNorm(hidden_size)
        self.mlp = ParallelMLP(hidden_size)

    def forward(self, hidden, mask):
        hidden = hidden + self.attention(self.input_layernorm(hidden), mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


# ---------------------------------------------------------------------- the model as a list of layers
# Each layer receives (hidden, mask) and passes (hidden, mask) on. There are two exceptions: the first layer receives
# (tokens, position ids, mask), and the last layer returns logits.


class EmbeddingPipe(nn.Module):
    def __init__(self, vocab_size, hidden_size, positions):
        super().__init__()
        self.word_embeddings = mpu.VocabParallelEmbedding(vocab_size, hidden_size)
        positions = nn.Parameter(torch.empty(positions, hidden_size))
        self.position_embeddings = mpu.declare(positions, mpu.normal(0.02))

    def forward(self, inputs):
        tokens, position_ids, mask = inputs  # [b, s], [b, s], [1 or b, 1, s, s]
        hidden = self.word_embeddings(tokens.t()) + mpu.embedding(position_ids.t(), self.position_embeddings)
        return hidden, mask  # [s, b, h]


class TransformerBlockPipe(TransformerBlock):
    def forward(self, inputs):
        hidden, mask = inputs
        return super().forward(hidden, mask), mask


class FinalNormPipe(mpu.LayerNorm):
    def forward(self, inputs):
        hidden, mask = inputs
        return super().forward(hidden), mask


def logits_of(embedding, inputs):
    """Return the logits [s, b, v/t] of this rank's vocabulary shard, computed with the tied embedding."""
    hidden, _ = inputs
    return embedding.word_embeddings.logits(hidden)  # [s, b, v/t]


def layer_list(vocab_size, hidden_size, num_heads, num_layers, positions):
    embedding = EmbeddingPipe, vocab_size, hidden_size, positions
    tie = {"tied_weight_attr": ["word_embeddings.weight"]}
    return [
        TiedLayerSpec("embedding", *embedding, **tie),
        *(LayerSpec(TransformerBlockPipe, hidden_size, num_heads) for _ in range(num_layers)),
        LayerSpec(FinalNormPipe, hidden_size),
        TiedLayerSpec("embedding", *embedding, forward_fn=logits_of, **tie),
    ]


def loss_of(vocab_size):
    def loss(logits, targets):
        labels, loss_mask = targets  # [b, s] each
        losses = mpu.vocab_parallel_cross_entropy(logits, labels.t().contiguous(), vocab_size)  # [s, b]
        return (losses * loss_mask.t()).sum() / loss_mask.sum()

    return loss


# --------------------------------------------------------------- the functions that pretrain() calls


def train_valid_test_datasets_provider():
    args = get_args()
    datasets, notes = build_train_valid_test_datasets(
        args.data_path, args.split, args.seq_length, args.seed, get_tokenizer().vocab_size
    )
    for note in notes:
        print_rank_0(f"note: {note}")
    return datasets


def get_batch_pipe(data):
    """Return a micro-batch: ((inputs of the first layer), (targets of the loss)).

    Only one rank of a model-parallel group has data; it broadcasts the data to the others.
    """
    text = mpu.broadcast_data(["text"], data, torch.int64)["text"]  # [b, s + 1]
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    args = get_args()
    attention_mask, loss_mask, position_ids = get_ltor_masks_and_position_ids(
        tokens, get_tokenizer().eod, args.reset_position_ids, args.reset_attention_mask, args.eod_mask_loss
    )
    return (tokens, position_ids, attention_mask), (labels, loss_mask)


def get_batch(data_iterator):
    return get_batch_pipe(next(data_iterator) if data_iterator is not None else None)


def forward_step(data_iterator, model):
    """Return the mean loss of a micro-batch. Used only without a pipeline (--pipe-parallel-size 0)."""
    inputs, targets = get_batch(data_iterator)
    loss = loss_of(get_args().vocab_size)(model(inputs), targets)
    return loss, {"lm loss": loss}


def model_provider():
    args = get_args()
    layers = layer_list(args.vocab_size, args.hidden_size, args.num_attention_heads, args.num_layers, args.seq_length)
    if args.pipe_parallel_size == 0:
        return SequentialModule(layers)
    model = PipelineModule(layers, topology=mpu.get_topology(), loss_fn=loss_of(args.vocab_size))
    model._megatron_batch_fn = get_batch_pipe
    # Describe the two tensors (hidden, mask) that cross a stage boundary: whether each has a gradient, is float or
    # bool, and is sharded over the model-parallel ranks while it is sent.
    model._input_grad = [True, False]
    model._input_type = ["float", "bool"]
    model._input_pipe_partitioned = [True, False]
    return model


if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, forward_step, name="decoder")
