"""The device that a rank computes on, and its memory."""

from __future__ import annotations

import os
import resource

import torch
from polygon_comm.accelerator import Accelerator, CudaAccelerator

from polygon.domain.errors import InputError, require
from runners.engine.options import Options


def check_devices(device: str, ranks: int) -> None:
    """Raise `InputError` where so many ranks of this machine cannot each have the device that is asked for."""
    # `is_available` would keep ranks that are forked later from using CUDA; the count asks the driver alone.
    seen = 0 if device == "cpu" else torch.cuda.device_count()
    if device == "cuda" and not seen:
        raise InputError("--device: found 'cuda', expected cpu (torch sees no GPU here)")
    if 0 < seen < ranks:
        raise InputError(f"ranks: found {ranks} on {seen} GPUs, expected at most one a GPU (or --device cpu)")


def choose_device(options: Options, local_rank: int) -> torch.device:
    """The device to compute on: a GPU where there is one, unless told otherwise.

    Of a machine's GPUs the one of torchrun's LOCAL_RANK, else of `local_rank`; where the process sees fewer (one, say,
    by CUDA_VISIBLE_DEVICES), they are counted around.
    """
    if options.device != "cpu":
        # Streams that share one of the device's queues wait for one another as if they were one; CUDA reads this once.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    check_devices(options.device, 1)
    if options.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    number = local_number(local_rank, os.environ.get("LOCAL_RANK"))
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def local_number(planned: int, said: str | None) -> int:
    """A rank's number on its machine: what torchrun has said, which knows the machine, else that of the plan."""
    require(said is None or said.isdecimal(), "LOCAL_RANK", said, "a whole number")
    return planned if said is None else int(said)


def accelerator_of(device: torch.device) -> Accelerator:
    """How work is handed over to a device."""
    return Accelerator() if device.type == "cpu" else CudaAccelerator(device)


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
