"""Training sample n of a corpus: its position, a pure function of the document lengths, the seed and n; its tokens.

Each epoch shuffles the documents, concatenates them, cuts the text into samples and shuffles the samples. A sample is
located on demand by binary search. The order does not depend on the length of a run, the number of ranks or the number
of data workers. (Megatron shuffles the documents of all epochs together, so its order changes with --train-iters.)

An epoch covers each document once, except the last tokens, which do not fill a sample. Its order is computed on first
use. The order of a large epoch is stored in a file that all processes of a node share (order_file.py).
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .endless import CachesEpochs
from .indexed_dataset import DatasetError, IndexedDataset
from .pages import Arrays, release_pages, slices_of

Numbers = NDArray[np.integer]
Piece = tuple[int, int, int]  # document, first token, last token + 1
SMALL_EPOCH = 1 << 20  # the order of an epoch is kept in memory if documents + samples <= SMALL_EPOCH, else in a file
RELEASE_INTERVAL = 256  # number of documents after whose reading memory-mapped pages and files are released


class Epoch(NamedTuple):
    """Order of one pass over the documents."""

    order: Numbers  # [documents] shuffled document indices
    ends: Numbers  # [documents] entry i: number of tokens in the documents order[0] to order[i]
    samples: Numbers  # [samples] shuffled sample indices


class SampleOrder(CachesEpochs):
    """Order of samples of `length` + `overlap` tokens, which start every `length` tokens in the shuffled text.

    sizes: returns the number of tokens of each document, int [documents]; called when needed, so a process keeps no
    copy. stream: any string, used as part of the random seed; different strings give independent orders.
    folder: folder for the files with the order of large epochs; None keeps all epochs in memory.
    Raises ValueError if all documents together do not fill one sample.
    """

    def __init__(
        self,
        sizes: Callable[[], Numbers],
        length: int,
        seed: int,
        stream: str,
        overlap: int = 1,
        folder: str | None = None,
    ) -> None:
        self.sizes = sizes
        self._folder = folder
        self.length = length
        self.overlap = overlap
        self.seed = [seed, *stream.encode()]  # numpy seeds a generator with a list of integers
        document_sizes = sizes()
        self.documents = len(document_sizes)
        num_tokens = self._count_and_hash(document_sizes)
        # With length 4 and overlap 1, 10 tokens give (10 - 1) // 4 = 2 samples: tokens 0 to 4 and 4 to 8.
        self.per_epoch = max((num_tokens - overlap) // length, 0)
        if not self.per_epoch:
            raise ValueError(
                f"{num_tokens} tokens do not fill one sample of {length} + {overlap} tokens; "
                f"use a larger corpus or a smaller --seq-length"
            )
        self._epochs: OrderedDict[int, Epoch] = OrderedDict()  # the epoch that was used last is at the end
        self._shuffled: dict[int, Numbers] = {}  # the samples of one large epoch, without the rest of its order

    def _count_and_hash(self, sizes: Numbers) -> int:
        """Return the number of tokens of all documents; set `_sizes_digest`, a hash of their lengths for order files.

        One pass does both, because the lengths of a billion documents are read from disk.
        """
        tokens = 0
        digest = hashlib.blake2b(digest_size=16)
        for part in slices_of(len(sizes)):
            tokens += int(sizes[part].sum(dtype=np.int64))
            if self._folder:  # only the names of order files need the hash
                digest.update(sizes[part].astype(np.int64).tobytes())
            if len(sizes) > SMALL_EPOCH:  # the pages of a long memory map would fill the memory
                release_pages(sizes)
        self._sizes_digest = digest.hexdigest()
        return tokens

    @property
    def is_small(self) -> bool:
        """True if the order of an epoch is kept in memory, not in a file."""
        return self.documents + self.per_epoch <= SMALL_EPOCH

    def epoch(self, number: int) -> Epoch:
        """Return the order of epoch `number`, computed on first use."""
        if number not in self._epochs:
            self._epochs[number] = self._build_epoch(number)
        self._epochs.move_to_end(number)
        return self._epochs[number]

    def _build_epoch(self, number: int) -> Epoch:
        """Compute the order of epoch `number`, or map the file in which it is stored."""
        # A micro-batch may cross the end of an epoch, so two small orders are kept, but one large one.
        max_epochs = 2 if self.is_small else 1
        while len(self._epochs) >= max_epochs:  # before the new order is allocated
            self._epochs.popitem(last=False)  # the least recently used
        arrays = None
        if self._folder and not self.is_small:
            from .order_file import map_epoch

            arrays = map_epoch(self, number, self._folder)
        if arrays is None:  # no file is needed, or none can be written
            arrays = {name: np.empty(count, dtype) for name, (count, dtype) in self._array_specs().items()}
            self._fill_arrays(number, arrays)
        return Epoch(**arrays)

    def release_pages(self) -> None:
        """Release the resident pages of the epochs' orders in this process, if they are memory-mapped."""
        for epoch in self._epochs.values():
            for array in epoch:
                release_pages(array)

    def _array_specs(self) -> Arrays:
        """Return length and dtype of the arrays of an epoch; dtype is int32 where it suffices, else int64."""
        order_dtype = np.int32 if self.documents < 2**31 else np.int64
        samples_dtype = np.int32 if self.per_epoch < 2**31 else np.int64
        # An order file stores the arrays in this order. With another one, `map_epoch` would misread existing files.
        return {
            "ends": (self.documents, np.int64),
            "order": (self.documents, order_dtype),
            "samples": (self.per_epoch, samples_dtype),
        }

    def _fill_arrays(self, number: int, arrays: dict[str, NDArray[Any]]) -> None:
        """Fill the arrays of an epoch without large temporary arrays.

        Documents of 5, 2 and 3 tokens in the order 2, 0, 1 have the ends 3, 8 and 10.
        """
        sizes = self.sizes()
        order = arrays["order"]
        ends = arrays["ends"]
        self._permute(order, number, stream=0)  # another stream draws other random numbers
        self._permute(arrays["samples"], number, stream=1)
        total = 0  # tokens in the documents before the part
        for part in slices_of(len(order)):
            ends[part] = total + np.cumsum(sizes[order[part]], dtype=np.int64)
            total = int(ends[part][-1])
        release_pages(sizes)  # if they are memory-mapped

    def _permute(self, array: NDArray[Any], epoch: int, stream: int) -> None:
        """Fill `array` [n] with the numbers 0 to n - 1 in random order."""
        for piece in slices_of(len(array)):  # an arange of all numbers would be a large temporary array
            array[piece] = np.arange(piece.start, piece.stop)
        np.random.default_rng([*self.seed, epoch, stream]).shuffle(array)

    def sample_ids(self, first: int, count: int) -> NDArray[np.int64]:
        """Return a unique id for each sample from `first` to `first + count` - 1.

        The id is the number of samples that precede the sample in the concatenated text of all epochs.
        """
        ids = np.empty(count, dtype=np.int64)
        filled = 0  # number of ids so far
        while filled < count:
            epoch, begin = divmod(first + filled, self.per_epoch)  # begin: place of the sample in its epoch
            samples = self._shuffled_samples(epoch)[begin : begin + count - filled]  # fewer at the end of the epoch
            # The addition is in int64: `samples` may be int32, which ids of late epochs exceed.
            ids[filled : filled + len(samples)] = samples + np.int64(epoch * self.per_epoch)
            filled += len(samples)
        return ids

    def _shuffled_samples(self, epoch: int) -> Numbers:
        """Return the samples of an epoch, int [samples]; its whole order, if it is not in use, would need a file."""
        if self.is_small or epoch in self._epochs:
            return self.epoch(epoch).samples
        if epoch not in self._shuffled:
            self._shuffled = {epoch: np.empty(*self._array_specs()["samples"])}
            self._permute(self._shuffled[epoch], epoch, stream=1)
        return self._shuffled[epoch]

    def containing(self, documents: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Return the numbers of the samples of an epoch that contain tokens of `documents`, in ascending order."""
        from .containing import samples_containing

        return samples_containing(self, documents, epoch)

    def pieces(self, n: int) -> list[Piece]:
        """Return (document, first token, last token + 1) of each document in sample n, in order.

        n may be any number >= 0: sample `per_epoch` is the first sample of the second epoch.
        """
        if n < 0:
            raise IndexError(f"sample {n} is negative")
        epoch, place = divmod(n, self.per_epoch)  # place of the sample among the shuffled samples of its epoch
        order, ends, samples = self.epoch(epoch)
        # Begins and ends are positions in the concatenated text of the epoch.
        begin = samples.item(place) * self.length
        end = begin + self.length + self.overlap
        # With ends 3, 8 and 10, token 3 is in document 1, whose end 8 is the first one after 3.
        index = int(ends.searchsorted(begin, side="right"))
        document_begin = ends.item(index - 1) if index else 0
        pieces = []
        while document_begin < end:
            document_end = ends.item(index)
            start = max(begin - document_begin, 0)  # position in the document, like `stop`
            stop = min(document_end, end) - document_begin
            if stop > start:  # the document is not empty
                pieces.append((order.item(index), start, stop))
            document_begin = document_end
            index += 1
        return pieces


class Windows:
    """Windows of `length` + `overlap` tokens of the concatenated, shuffled documents.

    vocab_size: if given, reading a window with a token id outside the vocabulary raises DatasetError.
    Raises ValueError if the documents do not fill one window.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        length: int,
        seed: int,
        stream: str,
        overlap: int = 1,
        vocab_size: int | None = None,
    ) -> None:
        self._indexed = indexed
        self._first_document = documents.start  # `order` numbers the documents of the range from 0
        limits = np.iinfo(indexed.dtype)  # the smallest and the largest id that the file can hold
        self._is_signed = limits.min < 0  # then a damaged corpus may have negative ids
        # uint16 ids are at most 65,535, so with a vocabulary of 65,536 tokens or more they need no check.
        self._checks_ids = vocab_size is not None and (self._is_signed or vocab_size <= limits.max)
        self._vocab_size = vocab_size or 0  # 0 is never read, as nothing is checked without a vocabulary
        self._documents_read = 0  # documents read since the last release of pages
        sizes = partial(indexed.document_sizes, documents)  # a function: `SampleOrder` calls it when it needs sizes
        self.order = SampleOrder(sizes, length, seed, stream, overlap, folder=indexed.orders_folder)

    def read(self, n: int) -> tuple[NDArray[np.int64], list[int]]:
        """Return (tokens of window n, number of tokens of each document in the window)."""
        self._indexed.check_not_shrunk()  # a read beyond the end of a mapped file would kill the process
        tokens = self._indexed.tokens
        pieces = self.order.pieces(n)
        self._documents_read += len(pieces)
        if self._documents_read > RELEASE_INTERVAL:
            self._documents_read = 0
            self._release_mapped()  # pages that earlier calls have mapped
        texts = []
        sizes = []
        for document, start, stop in pieces:  # tokens `start` to `stop` - 1 of a document
            document_begin = self._indexed.document_start(self._first_document + document)  # index in `tokens`
            texts.append(tokens[document_begin + start : document_begin + stop])
            sizes.append(stop - start)
        ids = np.concatenate(texts)
        if self._checks_ids:
            is_above = np.maximum.reduce(ids) >= self._vocab_size  # faster than ids.max() for short arrays
            if is_above or (self._is_signed and ids.min() < 0):
                self._raise_bad_id(n, ids)
        return ids.astype(np.int64), sizes

    def _release_mapped(self) -> None:
        """Release what reading has mapped: reading one place of a large file keeps 64 kB or more of it in memory."""
        self._indexed.refresh()  # the files of a corpus in object storage
        if self.order.is_small:  # such a corpus takes little memory, and its pages are soon needed again
            return
        self.order.release_pages()
        release_pages(self._indexed.tokens)
        release_pages(self._indexed.sizes)  # with it the whole .idx, of which all arrays share one memory map

    def _raise_bad_id(self, n: int, ids: Numbers) -> None:
        bad_id = ids.max() if ids.max() >= self._vocab_size else ids.min()
        numbers = [self._first_document + document for document, _, _ in self.order.pieces(n)]
        raise DatasetError(
            f"{self._indexed.prefix}.bin contains token id {bad_id} in one of the documents {numbers}, which is outside"
            f" the vocabulary of {self._vocab_size} tokens: the file is damaged or was made with another tokenizer"
        )
