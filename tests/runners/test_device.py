"""What a rank computes on."""

import os

import pytest
import torch

from runners.engine.device import choose_device
from runners.engine.options import Options


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_cuda_is_set_up_where_a_gpu_may_be_used_alone(device, monkeypatch):
    """A rank that is told to use a processor leaves CUDA's variables as they are; what somebody has set stays."""
    if device == "auto" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, "7")
    assert choose_device(Options(device=device), 0) == torch.device("cpu") and os.environ[name] == "7"
    monkeypatch.delenv(name)
    choose_device(Options(device=device), 0)
    assert os.environ.pop(name, None) == (None if device == "cpu" else "32")
