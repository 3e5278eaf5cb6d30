"""Train GPT-2 by an entry script in CPM-Pretrain's form."""

import torch
from megatron.fp16 import fp32_to_fp16

from megatron import get_args, get_timers, get_tokenizer, mpu, print_rank_0
from megatron.data.gpt2_dataset import build_train_valid_test_datasets
from megatron.model import GPT2Model, GPT2ModelPipe
from megatron.training import pretrain
from megatron.utils import get_ltor_masks_and_position_ids, reduce_losses


def unpack(data):
    args = get_args()
    text = mpu.broadcast_data(["text"], data, torch.int64)["text"].long()
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    attention_mask, loss_mask, position_ids = get_ltor_masks_and_position_ids(
        tokens, get_tokenizer().eod, args.reset_position_ids, args.reset_attention_mask, args.eod_mask_loss
    )
    return tokens, labels, loss_mask, attention_mask, position_ids


def get_batch_pipe(data):
    tokens, labels, loss_mask, attention_mask, position_ids = unpack(data)
    inputs, targets = (tokens, position_ids, attention_mask), (labels, loss_mask)
    if get_args().fp16:
        return fp32_to_fp16(inputs), fp32_to_fp16(targets)
    return inputs, targets


def model_provider():
    args = get_args()
    print_rank_0("building a GPT-2")
    if args.pipe_parallel_size == 0:
        return GPT2Model(num_tokentypes=0, parallel_output=True)
    model = GPT2ModelPipe(num_tokentypes=0, parallel_output=True, topology=mpu.get_topology())
    model._megatron_batch_fn = get_batch_pipe
    model._input_grad = [True, False]
    model._input_type = ["float", "bool"]
    model._input_pipe_partitioned = [True, False]
    return model


def forward_step(data_iterator, model):
    timers = get_timers()
    timers("batch generator").start()
    data = next(data_iterator) if data_iterator is not None else None
    tokens, labels, loss_mask, attention_mask, position_ids = unpack(data)
    timers("batch generator").stop()
    losses = model(tokens, position_ids, attention_mask, labels=labels)
    loss_mask = loss_mask.view(-1)
    loss = torch.sum(losses.view(-1) * loss_mask) / loss_mask.sum()
    return loss, {"lm loss": reduce_losses([loss])[0]}


def train_valid_test_datasets_provider(train_val_test_num_samples):
    args = get_args()
    train_ds, valid_ds, test_ds = build_train_valid_test_datasets(
        data_prefix=args.data_path,
        data_impl=args.data_impl,
        splits_string=args.split,
        train_valid_test_num_samples=train_val_test_num_samples,
        seq_length=args.seq_length,
        seed=args.seed,
        skip_warmup=(not args.mmap_warmup),
    )
    return train_ds, valid_ds, test_ds


if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
