"""Bytes of live tensors, by cases worked out by hand."""

import torch

from runners.recipes.tensor_bytes import TensorBytes, restart_peak


def test_storages_count_once_while_they_live():
    """Views share, dropped tensors leave, the peak stays until it is started anew."""
    with TensorBytes() as tensors:
        whole = torch.zeros(1000)
        part = whole.view(10, 100)[3:]
        assert tensors.alive_bytes == 4000
        other = whole + 1
        assert tensors.alive_bytes == 8000
        del other, whole
        assert (tensors.alive_bytes, tensors.peak_bytes) == (4000, 8000)
        restart_peak()
        assert tensors.peak_bytes == 4000
        del part
        assert tensors.alive_bytes == 0
    restart_peak()


def test_saved_activations_and_gradients_count():
    """Between forward and backward the activations live, after it the gradients."""
    weight = torch.ones(100, 100, requires_grad=True)
    with TensorBytes() as tensors:
        loss = (torch.ones(50, 100) @ weight).relu().sum()
        assert tensors.alive_bytes == 2 * 50 * 100 * 4 + 4  # input and relu's output, and the loss
        loss.backward()
        assert tensors.peak_bytes >= 2 * 50 * 100 * 4 + 100 * 100 * 4
        assert weight.grad is not None and tensors.alive_bytes >= 100 * 100 * 4


def test_emptied_storages_count_with_what_they_have():
    """A storage that is emptied counts nothing, filled again its size; torch's own method is back afterwards."""
    before = torch.UntypedStorage.resize_
    with TensorBytes() as tensors:
        gathered = torch.zeros(1000)
        gathered.untyped_storage().resize_(0)
        assert tensors.alive_bytes == 0
        gathered.untyped_storage().resize_(4000)
        assert (tensors.alive_bytes, tensors.peak_bytes) == (4000, 4000)
    assert torch.UntypedStorage.resize_ is before
