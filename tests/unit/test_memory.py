"""The memory pool reuses a buffer only after all views of the buffer are freed."""

import torch

from tds.memory import BufferPool


def test_a_buffer_comes_back_when_its_last_view_is_gone() -> None:
    pool = BufferPool(torch.device("cpu"))
    first = pool.take(64)
    where = first.data_ptr()
    view = first[8:16].view(torch.float64)
    del first
    assert pool.take(64).data_ptr() != where  # the first buffer is in use, since `view` exists
    del view
    assert pool.take(64).data_ptr() == where
    assert pool.take(128).data_ptr() != where


def test_what_autograd_saved_is_not_overwritten() -> None:
    pool = BufferPool(torch.device("cpu"))
    x = pool.take(32).view(torch.float32).fill_(3.0).requires_grad_()
    out = x.square().sum()
    where = x.data_ptr()
    del x
    assert pool.take(32).data_ptr() != where
    out.backward()
    del out
    assert pool.take(32).data_ptr() == where


def test_sizes_that_nobody_asked_for_are_forgotten() -> None:
    pool = BufferPool(torch.device("cpu"))
    pool.take(32)
    pool.trim()
    pool.take(64)
    pool.trim()
    assert list(pool._buffers) == [64]
