"""Bytes of tensors that are alive, followed operation by operation: what a GPU's allocator would count, on any device.

The process's own memory says little on a CPU, where Python and torch weigh more than a small model. Every tensor that
an operation returns is counted by its storage, once, until nothing refers to that any more. Not seen: what one
operation needs inside, and tensors that other threads make.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorBytes(TorchDispatchMode):
    """Counts while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.alive_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, int] = {}
        """Bytes of each storage that is alive, by its address as an object of torch."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta" or tensor.is_sparse:
            return
        storage = tensor.untyped_storage()
        key, n_bytes = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is None:
            weakref.finalize(storage, self._forget, key)
        self._known[key] = n_bytes
        self.alive_bytes += n_bytes - (known or 0)
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)

    def _forget(self, key: int) -> None:
        self.alive_bytes -= self._known.pop(key, 0)
