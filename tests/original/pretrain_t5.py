"""Train T5 by an entry script in CPM-Pretrain's form."""

import torch
from megatron.data.T5_dataset import build_train_valid_test_datasets
from megatron.fp16 import fp32_to_fp16

from megatron import get_args, get_timers, get_tokenizer, mpu, print_rank_0
from megatron.model import T5Model, T5ModelPipe
from megatron.training import pretrain
from megatron.utils import get_masks_and_position_ids_for_t5, reduce_losses


def get_batch_pipe(data):
    args, tokenizer = get_args(), get_tokenizer()
    keys = ["contexts", "targets", "labels", "ctx_eod_mask"]
    found = mpu.broadcast_data(keys, data, torch.int64)
    contexts, targets, labels, ctx_eod_mask = (found[key].long() for key in keys)
    enc_mask, enc_positions, dec_mask, dec_positions, cross_mask, loss_mask = get_masks_and_position_ids_for_t5(
        args, tokenizer, contexts, targets, labels, ctx_eod_mask, args.reset_position_ids, args.reset_attention_mask
    )
    inputs = (contexts, enc_positions, enc_mask, targets, dec_positions, dec_mask, cross_mask)
    if args.fp16:
        return fp32_to_fp16(inputs), fp32_to_fp16((labels, loss_mask))
    return inputs, (labels, loss_mask)


def model_provider():
    args = get_args()
    print_rank_0("building a T5")
    if args.pipe_parallel_size in (0, 1):
        return T5Model(num_tokentypes=0, parallel_output=True)
    model = T5ModelPipe(num_tokentypes=0, parallel_output=True, topology=mpu.get_topology())
    model._megatron_batch_fn = get_batch_pipe
    model._input_grad = [True, False, True, False, False]
    model._input_type = ["float", "int", "float", "int", "int"]
    model._input_pipe_partitioned = [True, False, True, False, False]
    return model


def forward_step(data_iterator, model):
    timers = get_timers()
    timers("batch generator").start()
    inputs, (labels, loss_mask) = get_batch_pipe(next(data_iterator) if data_iterator is not None else None)
    timers("batch generator").stop()
    losses = model(*inputs, labels=labels)
    loss_mask = loss_mask.view(-1)
    loss = torch.sum(losses.view(-1) * loss_mask) / loss_mask.sum()
    return loss, {"lm loss": reduce_losses([loss])[0]}


def train_valid_test_datasets_provider(train_val_test_num_samples):
    args, tokenizer = get_args(), get_tokenizer()
    train_ds, valid_ds, test_ds = build_train_valid_test_datasets(
        tokenizer=tokenizer,
        data_prefix=args.data_path,
        data_impl=args.data_impl,
        splits_string=args.split,
        train_valid_test_num_samples=train_val_test_num_samples,
        enc_seq_length=args.enc_seq_length,
        dec_seq_length=args.dec_seq_length,
        seed=args.seed,
        skip_warmup=(not args.mmap_warmup),
    )
    return train_ds, valid_ds, test_ds


if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        forward_step,
        args_defaults={"tokenizer_type": "T5Tokenizer"},
    )
