"""The model of the tutorial in CPM-Pretrain's README, with the code that the tutorial leaves out as `...`."""

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule
from megatron.model.transformer import MegatronModule

from megatron import get_args, get_tokenizer, mpu
from megatron.data.gpt2_dataset import build_train_valid_test_datasets
from megatron.training import pretrain


class ParallelMLP(MegatronModule):
    def __init__(self):
        super().__init__()
        args = get_args()
        self.dense_h_to_4h = mpu.ColumnParallelLinear(args.hidden_size, args.hidden_size * 4, gather_output=False)
        self.dense_4h_to_h = mpu.RowParallelLinear(args.args.hidden_size * 4, args.hidden_size, input_is_parallel=True)

    def forward(self, hidden_states):
        intermediate_parallel, bias_parallel = self.dense_h_to_4h(hidden_states)
        output, output_bias = self.dense_4h_to_h(F.gelu(intermediate_parallel))
        return output, output_bias


class TransformerBlock(MegatronModule):
    def __init__(self):
        super().__init__()
        args = get_args()
        self.heads = mpu.divide(args.num_attention_heads, mpu.get_model_parallel_world_size())
        self.norm_1 = mpu.LayerNorm(args.hidden_size)
        self.qkv = mpu.ColumnParallelLinear(args.hidden_size, 3 * args.hidden_size, gather_output=False)
        self.dense = mpu.RowParallelLinear(args.hidden_size, args.hidden_size, input_is_parallel=True)
        self.norm_2 = mpu.LayerNorm(args.hidden_size)
        self.mlp = ParallelMLP()

    def forward(self, hidden, mask):
        b, s, _ = hidden.shape
        qkv, _ = self.qkv(self.norm_1(hidden))
        query, key, value = qkv.view(b, s, self.heads, -1).transpose(1, 2).chunk(3, dim=-1)
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        context = scores.masked_fill(mask, -10000.0).softmax(-1) @ value
        hidden = hidden + self.dense(context.transpose(1, 2).reshape(b, s, -1))[0]
        return hidden + self.mlp(self.norm_2(hidden))[0]


class TransformerBlockPipe(TransformerBlock):
    def forward(self, inputs):
        hidden, mask = inputs
        output = super().forward(hidden, mask)
        return (output, mask)


class Embedding(MegatronModule):
    def __init__(self):
        super().__init__()
        args = get_args()
        self.words = mpu.VocabParallelEmbedding(args.padded_vocab_size, args.hidden_size)
        self.positions = torch.nn.Embedding(args.max_position_embeddings, args.hidden_size)

    def forward(self, inputs):
        tokens, position_ids, mask = inputs
        return self.words(tokens) + self.positions(position_ids), mask


class Head(MegatronModule):
    def __init__(self):
        super().__init__()
        args = get_args()
        self.norm = mpu.LayerNorm(args.hidden_size)
        self.dense = mpu.ColumnParallelLinear(args.hidden_size, args.padded_vocab_size, gather_output=False)

    def forward(self, inputs):
        return self.dense(self.norm(inputs[0]))[0]


def loss_fn(logits, targets):
    labels, loss_mask = targets
    losses = mpu.vocab_parallel_cross_entropy(logits.contiguous().float(), labels)
    return torch.sum(losses * loss_mask) / loss_mask.sum()


class GPT2Model(MegatronModule):
    def __init__(self, num_layers):
        super().__init__()
        self.embedding, self.head = Embedding(), Head()
        self.blocks = torch.nn.ModuleList([TransformerBlock() for _ in range(num_layers)])

    def forward(self, tokens, position_ids, attention_mask, labels):
        hidden, mask = self.embedding((tokens, position_ids, attention_mask))
        for block in self.blocks:
            hidden = block(hidden, mask)
        return mpu.vocab_parallel_cross_entropy(self.head((hidden, mask)).float(), labels)


class GPT2ModelPipe(PipelineModule):
    def __init__(self, num_layers):
        specs = [LayerSpec(Embedding)]
        specs += [TransformerBlockPipe() for _ in range(num_layers)]
        specs += [LayerSpec(Head)]
        super().__init__(layers=specs, loss_fn=loss_fn, topology=mpu.get_topology())


def get_batch_pipe(data):
    keys, datatype = ["text"], torch.int64
    data_b = mpu.broadcast_data(keys, data, datatype)
    tokens_ = data_b["text"].long()
    labels, tokens = tokens_[:, 1:].contiguous(), tokens_[:, :-1].contiguous()
    s = tokens.size(1)
    attention_mask = torch.ones(1, 1, s, s).triu(1).bool()
    position_ids = torch.arange(s).unsqueeze(0).expand_as(tokens)
    loss_mask = (tokens != get_tokenizer().eod).float()
    return (tokens, position_ids, attention_mask), (labels, loss_mask)


def get_batch(data_iterator):
    data = next(data_iterator) if data_iterator is not None else None
    (tokens, position_ids, attention_mask), (labels, loss_mask) = get_batch_pipe(data)
    return tokens, labels, loss_mask, attention_mask, position_ids


def model_provider():
    args = get_args()
    if args.pipe_parallel_size == 0:
        model = GPT2Model(args.num_layers)
    else:
        model = GPT2ModelPipe(args.num_layers)
        model._megatron_batch_fn = get_batch_pipe
        model._input_grad = [True, False]
        model._input_type = ["float", "bool"]
        model._input_pipe_partitioned = [True, False]
    return model


def forward_step(data_iterator, model):
    tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator)
    losses = model(tokens, position_ids, attention_mask, labels)
    return torch.sum(losses * loss_mask) / loss_mask.sum(), {}


def train_valid_test_datasets_provider(train_val_test_num_samples):
    args = get_args()
    train_ds, valid_ds, test_ds = build_train_valid_test_datasets(
        data_prefix=args.data_path,
        data_impl=args.data_impl,
        splits_string=args.split,
        train_valid_test_num_samples=train_val_test_num_samples,
        seq_length=args.seq_length,
        seed=args.seed,
        skip_warmup=True,
    )
    return train_ds, valid_ds, test_ds


if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, forward_step)
