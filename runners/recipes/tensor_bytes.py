"""Bytes of tensors that are alive, followed operation by operation: what a GPU's allocator would count, on any device.

The process's own memory says little on a CPU, where Python and torch weigh more than a small model. Every tensor that
an operation returns is counted by its storage, once, until nothing refers to that any more; storages that are emptied
or filled again (ZeRO-3's gathered weights) count with what they have. Not seen: what one operation needs inside, and
tensors that other threads make.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves


class TensorBytes(TorchDispatchMode):
    """Counts while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.alive_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, int] = {}
        """Bytes of each storage that is alive, by its address as an object of torch."""
        self._resize: Any = torch.UntypedStorage.resize_

    def __enter__(self) -> TensorBytes:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            self._note(storage)
            return result

        # No operation of torch: it has to be caught by its name.
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" and not leaf.is_sparse:
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, n_bytes = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is None:
            weakref.finalize(storage, self._forget, key)
        self._known[key] = n_bytes
        self.alive_bytes += n_bytes - (known or 0)
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)

    def _forget(self, key: int) -> None:
        self.alive_bytes -= self._known.pop(key, 0)


def restart_peak() -> None:
    """Where tensors are followed: let the peak be that of what comes (building a model may need more than training)."""
    mode = _get_current_dispatch_mode()
    if isinstance(mode, TensorBytes):
        mode.peak_bytes = mode.alive_bytes
