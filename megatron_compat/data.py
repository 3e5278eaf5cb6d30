"""Data-set builders with CPM-Pretrain's arguments; samples of T5 also have CPM-Pretrain's keys."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from megatron.training.global_vars import get_args, get_tokenizer


def _datasets(task: Any, tokenizer: Any, data_prefix: Any, **values: Any) -> tuple[Any, ...]:
    """Return the data sets of a task. Its settings are those of the run, with `values` of a data-set builder."""
    from megatron.config.command_line import with_values
    from megatron.ranks.rank_0 import print_notes

    prefixes = (data_prefix,) if isinstance(data_prefix, str) else tuple(data_prefix)
    config = with_values(get_args().config, {"data_path": prefixes, **values})
    datasets, notes = task.datasets(config, tokenizer)
    print_notes(notes)
    return tuple(datasets)


def gpt2_datasets(
    data_prefix: Any,
    splits_string: str,
    seq_length: int,
    seed: int,
    data_impl: str = "mmap",
    train_valid_test_num_samples: Sequence[int] = (),
    skip_warmup: bool = True,
) -> tuple[Any, ...]:
    """Return the training, validation and test data sets of GPT-2; a sample is {"text": token ids [seq_length + 1]}.

    An empty data set is returned as None.
    """
    from megatron.tasks.gpt2 import GPT2

    return _datasets(GPT2(), get_tokenizer(), data_prefix, split=splits_string, seed=seed, seq_length=seq_length)


def build_train_valid_test_datasets(
    tokenizer: Any,
    data_prefix: Any,
    splits_string: str,
    enc_seq_length: int,
    dec_seq_length: int,
    seed: int,
    data_impl: str = "mmap",
    train_valid_test_num_samples: Sequence[int] = (),
    skip_warmup: bool = True,
) -> tuple[Any, ...]:
    """Return the training, validation and test data sets of a T5; samples are those of `T5Samples`.

    An empty data set is returned as None.
    data_prefix: path of a corpus of unmasked documents, without .bin and .idx; or PREFIX, if the corpus was masked by
    CPM-Pretrain and consists of PREFIX_context, PREFIX_target and PREFIX_target_offset.
    The last three arguments are ignored: any number of samples can be read, and files are always memory-mapped.
    """
    from megatron.tasks.t5 import T5

    datasets = _datasets(
        T5(),
        tokenizer,
        data_prefix,
        split=splits_string,
        seed=seed,
        enc_seq_length=enc_seq_length,
        dec_seq_length=dec_seq_length,
    )
    return tuple(None if dataset is None else T5Samples(dataset) for dataset in datasets)


class T5Samples(Dataset[dict[str, Tensor]]):
    """Samples of `dataset` with the keys of CPM-Pretrain, as int64 tensors.

    contexts [k] are the encoder's input ids, targets [q] the decoder's input ids, and labels [q] the ids that the
    decoder predicts. ctx_eod_mask [k] is 1 at the last token of each document of the encoder.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.plan = dataset.plan
        self.samples_per_epoch = dataset.samples_per_epoch
        self.sample_ids = dataset.sample_ids

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        sample = self.dataset[n]
        ids = sample["encoder_document_ids"]
        # Ids 1 1 2 2 roll to 1 2 2 1, so they differ at the last 1 and the last 2.
        ends = (ids != ids.roll(-1)).long()
        ends[-1] = 0  # not known to be an end: the last document may continue in the next sample
        return {
            "contexts": sample["encoder"],
            "targets": sample["decoder"],
            "labels": sample["labels"],
            "ctx_eod_mask": ends,
        }
