"""The device that a rank computes on, and its memory."""

from __future__ import annotations

import resource

import torch

from polygon.domain.errors import InputError
from runners.engine.options import Options


def choose_device(options: Options, local_rank: int) -> torch.device:
    """The device to compute on: a GPU where there is one, unless told otherwise."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device: found 'cuda', expected cpu (torch sees no GPU here)")
    if options.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def memory_bytes(device: torch.device) -> int:
    """Most memory used so far: of the GPU by torch, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_memory(device: torch.device) -> dict[str, int]:
    """Bytes of a GPU's memory that torch has given to tensors, and has taken from the GPU; nothing of a CPU."""
    if device.type != "cuda":
        return {}
    return {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device)}
