"""Samples of any data set, with random numbers that depend on the sample's number alone."""

import io
import pickle
import traceback
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

from ..seeds import derive_seed, keep_random_state, seed_generators


@dataclass
class Endless(Dataset[Any]):
    """Wrapper of a dataset that replaces an IndexError by a ValueError, which says where the IndexError was raised.

    A dataset must have a sample for any n >= 0, but the IndexError may also come from a bug in the dataset.
    A dataset may draw random numbers for a sample from the generators of torch, NumPy and Python. The generators are
    seeded by `seed` and the sample's number, so all ranks and processes that read the sample draw the same.
    """

    dataset: Any
    seed: int

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        """Return the samples of a micro-batch. torch's loader calls this instead of `__getitem__`."""
        samples = []
        with keep_random_state():
            for n in numbers:
                seed_generators(derive_seed(self.seed, "sample", n), accelerators=False)
                samples.append(self[n])
        return samples

    def __getitem__(self, n: int) -> Any:
        try:
            return self.dataset[n]
        except IndexError as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise ValueError(
                f"sample {n} of the dataset {type(self.dataset).__name__} raised an IndexError ({error}) in "
                f"{place.filename}, line {place.lineno}, in {place.name}; if {n} is beyond its last sample: a dataset "
                "must return a sample for any n >= 0, as training continues after an epoch"
            ) from error


def collate(samples: list[Any]) -> Any:
    """Return the micro-batch of samples. Raises ValueError if they cannot be stacked, such as for other lengths."""
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"the samples of a micro-batch cannot be stacked ({error}); dataset[n] must return a dict of tensors, with "
            "the same shapes for any n"
        ) from error


class CachesEpochs:
    """Base of orders of samples, which cache epochs in `_epochs`, and perhaps parts of them in `_shuffled`."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle for worker processes; it omits the cached epochs, which workers recompute."""
        return {**self.__dict__, "_epochs": OrderedDict(), "_shuffled": {}}


# Data workers send samples through pipes. torch would send tensors through shared memory and open files, of which
# containers have little, and a run waits for ever for a tensor that cannot be sent.
class _Pickler(pickle.Pickler):
    """Pickler that copies the elements of tensors. For a slice, torch would copy all that its storage holds."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        elements = value.detach().resolve_conj().contiguous().view(-1)
        return _tensor_of, (elements.view(torch.uint8).numpy(), value.dtype, value.shape)


def _tensor_of(data: Any, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).view(shape)


def pack(samples: list[Any]) -> bytes:
    """Return the samples of a micro-batch as bytes, which a worker sends. Raises ValueError for other objects."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(samples)
    except (AttributeError, TypeError, RuntimeError, pickle.PicklingError) as error:
        raise ValueError(f"a data worker cannot send a sample ({error}); dataset[n] must return tensors") from error
    return buffer.getvalue()


def unpack(packed: bytes) -> Any:
    """Return the micro-batch of samples that a worker has sent."""
    return collate(pickle.loads(packed))
